"""`sweep`: one kernel at every point of a grid, for several seeds, in as few programs as can be."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax import Array
from tqdm import tqdm

from fedmcmc._types import ArrayTree, FederatedKernel
from fedmcmc.data import FederatedData
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key
from fedmcmc.rounds import Collect
from fedmcmc.runs import check_counts, check_data
from fedmcmc.sweeps._grids import Grid, group, make_kernels, read_grid
from fedmcmc.sweeps._parts import Group, group_of, run_group
from fedmcmc.sweeps._results import Results, Settings, xarray
from fedmcmc.sweeps._tables import Statistics, default_statistics, draw_table, tabulate_seeds

__all__ = ["Sweep", "sweep"]

MODES = ("auto", "sequential", "vmapped")


def sweep(
    rng_key: Array,
    kernel_fn: Callable[..., FederatedKernel],
    grid: Mapping[str, Sequence[Any] | Mapping[str, Any]],
    data: FederatedData,
    position: ArrayTree | Callable[[Array], ArrayTree],
    *,
    num_seeds: int = 1,
    num_rounds: int,
    num_burnin: int = 0,
    thinning: int = 1,
    num_chains: int = 1,
    collect: Collect | None = None,
    mode: Literal["auto", "sequential", "vmapped"] = "auto",
    max_bytes: int = 2**30,
    progress: bool = True,
) -> "Sweep":
    """Run a kernel at every point of a grid of settings, for several seeds.

    Points whose kernels differ by numbers alone (step sizes, probabilities, damping) share one
    compiled program; each other structure (a cohort's size, a number of local steps) takes one
    more. A chain that turns non-finite stops no other.

    Parameters
    ----------
    rng_key
        Key of the sweep. Seed ``s`` uses ``fold_in(rng_key, s)`` at every point: its draws are
        those of ``sample(fold_in(rng_key, s), kernel_fn(**point), ...)``, to the last bit if
        `mode` is ``"sequential"``, else up to rounding (but with keys other than ``threefry2x32``,
        which draw other numbers where they are mapped).
    kernel_fn
        Settings of a point, by name, to a kernel. Functions are the same to a compiler only if
        they are the same object: define log densities outside of it.
    grid
        Name to values; all combinations are run. A value that is neither a number nor a string
        (a participation, a schedule) needs a label: give a mapping of labels to values.
    data, position, num_rounds, num_burnin, thinning, num_chains, collect
        As those of `fedmcmc.sample`, the same at every point.
    num_seeds
        Seeds a point.
    mode
        ``"sequential"`` runs point after point and seed after seed. ``"vmapped"`` runs many at a
        time in one program, which draws what is random in a round once for all points wherever it
        does not depend on what differs between them. ``"auto"`` is ``"vmapped"``, but
        ``"sequential"`` for large models and for convolutions on a CPU, where it is faster.
    max_bytes
        Memory for the states, the kept draws and the prepared randomness of runs that are run at
        the same time; what a round computes in between comes on top. A smaller number makes more,
        smaller parts; one point of one seed is run in any case. The draws of the whole sweep lie in
        the host's memory.
    progress
        Whether to show a progress bar.

    Returns
    -------
    Sweep

    Raises
    ------
    ValueError, TypeError
        On settings or data that do not fit, before anything is compiled, with the point where one
        does not; also if points do not keep draws of the same shapes.
    ImportError
        If xarray is not installed (``pip install "fedmcmc[arviz]"``).

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2, lambda theta, x: -0.5 * (x - theta) ** 2
    ... )
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> swept = sweep(
    ...     jax.random.key(0),
    ...     lambda step_size: fedmcmc.lsd(posterior, step_size=step_size),
    ...     {"step_size": [0.01, 0.02, 0.04]},
    ...     data,
    ...     0.0,
    ...     num_seeds=4,
    ...     num_rounds=500,
    ...     num_burnin=100,
    ...     progress=False,
    ... )
    >>> dict(swept.dataset.theta.sizes)
    {'step_size': 3, 'seed': 4, 'chain': 1, 'draw': 400}
    >>> table = swept.summary(lambda theta: {"variance": theta.var()})
    >>> [row["step_size"] for row in table], list(table[0])
    ([0.01, 0.02, 0.04], ['step_size', 'statistic', 'mean', 'sd', 'seeds'])
    """
    xarray()
    check_data(data)
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}.")
    num_rounds, num_burnin, thinning, num_seeds, num_chains, max_bytes = check_counts(
        "num_rounds",
        num_rounds,
        num_burnin=num_burnin,
        thinning=thinning,
        num_seeds=num_seeds,
        num_chains=num_chains,
        max_bytes=max_bytes,
    )
    points = read_grid(grid)
    kernels = make_kernels(kernel_fn, points, num_rounds)
    settings = Settings(
        as_key(rng_key),
        position,
        num_seeds,
        num_chains,
        num_rounds,
        num_burnin,
        thinning,
        collect,
        max_bytes,
    )
    groups = [group_of(indices, kernels, data, settings) for indices in group(kernels)]
    _check_same_draws(points, groups)
    results = Results(len(kernels), settings, [some.shapes for some in groups])
    results.check_names(points)
    modes = []
    total = num_rounds * num_seeds * len(kernels)
    with tqdm(total=total, unit="round", disable=not progress) as bar:
        try:
            for some in groups:
                vmapped = mode == "vmapped" or (mode == "auto" and some.faster_together)
                modes.append("vmapped" if vmapped else "sequential")
                run_group(some, settings, results, bar, vmapped=vmapped)
        except KeyboardInterrupt:
            warnings.warn(
                "Interrupted; returning what was kept before. Sweep.dataset.num_rounds says how "
                "far each run came, and draws that are missing are NaN.",
                RuntimeWarning,
                stacklevel=2,
            )
    constrain_fn = kernels[0].constrain_fn if collect is None else None
    return Sweep(results, points, tuple(modes), constrain_fn)


def _check_same_draws(grid: Grid, groups: Sequence[Group]) -> None:
    for other in groups[1:]:
        difference = trees.first_difference(groups[0].shapes.draw, other.shapes.draw)
        if difference:
            places = [grid.describe(g.indices[0]) for g in (other, groups[0])]
            raise ValueError(
                f"All points must keep draws of the same shapes: at {places[0]}, {difference} as "
                f"at {places[1]}."
            )


@dataclass(frozen=True)
class Sweep:
    """What a sweep kept; made by `sweep`.

    Attributes
    ----------
    modes
        One entry a program, ``"sequential"`` or ``"vmapped"``.
    """

    _results: Results = field(repr=False)
    _grid: Grid = field(repr=False)
    modes: tuple[str, ...]
    _constrain_fn: Callable[[ArrayTree], ArrayTree] | None = field(default=None, repr=False)

    @cached_property
    def dataset(self) -> Any:
        """Everything that was kept, an `xarray.Dataset`.

        Draws, one variable a leaf (``theta`` where a position is one array), and what is in
        `Samples.info` have dimensions the names of the grid, ``seed``, ``chain`` and ``draw``,
        draws then those of the leaf. `diverged`, `num_rounds`, `total_bits_up` and
        `total_bits_down` have one number a chain (a part of a sweep ends where all its chains
        diverged). Draws are unconstrained. From the round on in
        which a chain turned non-finite, and where a run was interrupted, all is NaN.
        """
        return self._results.dataset(self._grid, self._results.draws)

    @property
    def diverged(self) -> Any:
        """The first round in which a chain was not finite, -1 where none; an `xarray.DataArray`.

        Dimensions are the names of the grid, ``seed`` and ``chain``.
        """
        return self.dataset["diverged"]

    @cached_property
    def constrained(self) -> Any:
        """`dataset` with draws in the user's parameters."""
        if self._constrain_fn is None:
            return self.dataset
        draws = self._results.draws
        num_axes = self._results.there.ndim
        flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[num_axes:]), draws)
        flat = jax.jit(jax.vmap(self._constrain_fn))(flat)
        lead = self._results.there.shape
        draws = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(*lead, *leaf.shape[1:]), flat)
        return self._results.dataset(self._grid, draws)

    def summary(self, fn: Statistics | None = None) -> list[dict[str, Any]]:
        """Return statistics of the draws at every point: their mean and sd over seeds.

        Parameters
        ----------
        fn
            ``draws -> {name: number}``, of one seed's draws, leaves
            ``[num_chains, num_draws, *event]``, unconstrained. By default the mean and the sd of
            every coordinate, and with several chains the largest R-hat and the smallest bulk
            effective sample size (which need ArviZ).

        Returns
        -------
        One row (a dict) a point and statistic: the point's settings, ``statistic``, ``mean``,
        ``sd`` (over seeds, NaN for one) and ``seeds``, how many of them it is of: those without a
        chain that diverged or was interrupted. ``pandas.DataFrame(rows)`` makes it a table.
        """
        results = self._results
        complete = np.asarray(results.there.all(axis=(2, 3)))
        rows = []
        for i, point in enumerate(self._grid.labelled_points()):
            found = [
                dict(
                    (fn or default_statistics)(
                        jax.tree.map(lambda x, i=i, s=s: x[i, s], results.draws)
                    )
                )
                for s in np.flatnonzero(complete[i])
            ]
            rows.append((point, found))
        return tabulate_seeds(rows)

    def plot(self, fn: Statistics | None = None, *, x: str | None = None) -> Any:
        """Draw `summary` as one figure: a panel a statistic, error bars of one sd over seeds.

        Parameters
        ----------
        fn
            As of `summary`.
        x
            The name of the grid along the horizontal axis, by default the first whose values are
            numbers; there is one line for each combination of the others.

        Returns
        -------
        A ``matplotlib.figure.Figure``; ``figure.savefig(path)`` writes it.

        Raises
        ------
        ValueError
            If `x` is no name of the grid.
        ImportError
            If matplotlib is not installed (``pip install "fedmcmc[plots]"``).
        """
        return draw_table(self.summary(fn), list(self._grid.names), x)
