"""`sweep`: one kernel at every point of a grid, for several seeds, in as few programs as can be."""

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from fedmcmc._checks import missing_extra_error
from fedmcmc._types import ArrayTree, FederatedKernel, as_functions, constrain_fn_of
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import Diagnosis, DiagnosisWarning
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import as_key
from fedmcmc.rounds import Collect
from fedmcmc.runs import check_counts, check_data, judge, missing_target, reason_not_judged
from fedmcmc.sweeps._runs import SweepGroup, SweepResults, SweepSettings, alike, run_group
from fedmcmc.sweeps._tables import Statistics, default_statistics, draw_table, tabulate_seeds

MODES = ("auto", "sequential", "vmapped")
RESERVED = ("seed", "chain", "draw", "round")
"""Names of other dimensions and coordinates of a sweep's results."""


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
    more. A chain that turns non-finite stops no other. Draws are judged as those of
    `fedmcmc.sample`, but for those of a kernel that refines an approximation: per point, where its
    seeds kept 400 draws or more together. One warning says how many points are off.

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
        Seeds per point.
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
        If xarray is not installed (the extra ``arviz``).

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
    ...     {"step_size": [0.01, 0.02, 0.03]},
    ...     data,
    ...     0.0,
    ...     num_seeds=4,
    ...     num_rounds=4000,
    ...     num_burnin=100,
    ...     progress=False,
    ... )
    >>> dict(swept.dataset.theta.sizes)
    {'step_size': 3, 'seed': 4, 'chain': 1, 'draw': 3900}
    >>> table = swept.summary(lambda theta: {"variance": theta.var()})
    >>> [row["step_size"] for row in table], list(table[0])
    ([0.01, 0.02, 0.03], ['step_size', 'statistic', 'mean', 'sd', 'seeds', 'warning'])
    """
    try:
        import xarray  # noqa: F401
    except ImportError as error:
        raise missing_extra_error("sweep needs xarray", "arviz") from error
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
    if not isinstance(grid, Mapping):
        raise TypeError(f"grid must be a mapping of names to values, got {type(grid).__name__}.")
    by_label = {name: _by_label(name, values) for name, values in grid.items()}
    points = _product(by_label)
    arguments = _product({name: values.values() for name, values in by_label.items()})
    kernels = [
        _kernel_at(point, kernel_fn, own, num_rounds)
        for point, own in zip(points, arguments, strict=True)
    ]
    # The keys of every seed's chains as `sample` makes them.
    seed_keys = [jax.random.fold_in(as_key(rng_key), seed) for seed in range(num_seeds)]
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jnp.stack([fold_in(key, jnp.arange(num_chains)) for key in seed_keys])
    settings = SweepSettings(keys, position, num_rounds, num_burnin, thinning, collect, max_bytes)
    groups = []
    for indices in alike(kernels):
        with _named(points[indices[0]]):
            groups.append(SweepGroup(indices, [kernels[i] for i in indices], data, settings))
    for other in groups[1:]:
        difference = trees.first_difference(groups[0].shapes.draw, other.shapes.draw)
        if difference:
            raise ValueError(
                f"All points must keep draws of the same shapes: at "
                f"{_describe(points[other.points[0]])}, {difference} as at {_describe(points[0])}."
            )
    results = SweepResults(by_label, groups, settings)
    modes = []
    total = num_rounds * num_seeds * len(kernels)
    with tqdm(total=total, unit="round", disable=not progress) as bar:
        try:
            for some in groups:
                vmapped = mode == "vmapped" or (mode == "auto" and some.faster_together)
                modes.append("vmapped" if vmapped else "sequential")
                run_group(some, results, bar, vmapped=vmapped)
        except KeyboardInterrupt:
            warnings.warn(
                "Interrupted; returning what was kept before. Sweep.dataset.num_rounds says how "
                "far each run came, and draws that are missing are NaN.",
                RuntimeWarning,
                stacklevel=2,
            )
    constrain_fn = constrain_fn_of(kernels[0]) if collect is None else None
    diagnoses = _diagnoses(results, kernels, data)
    off = [
        (point, judged.findings[0])
        for point, judged in zip(points, diagnoses, strict=True)
        if judged is not None and judged.findings
    ]
    if off:
        warnings.warn(
            f"The draws of {len(off)} of {len(points)} points are wrong or too few, first at "
            f"{_describe(off[0][0])}: {off[0][1]} Sweep.summary says it of each point, and "
            f"Sweep.diagnoses with its figures.",
            DiagnosisWarning,
            stacklevel=2,
        )
    return Sweep(results, tuple(modes), constrain_fn, diagnoses)


def _diagnoses(
    results: SweepResults, kernels: Sequence[FederatedKernel], data: FederatedData
) -> tuple[Diagnosis | None, ...]:
    """Judge every point by the draws of all its seeds: once per point, as the judge takes time."""
    found: list[Diagnosis | None] = [None] * len(kernels)
    if results.settings.collect is not None:
        return tuple(found)
    try:
        for i, (kernel, seeds) in enumerate(zip(kernels, results.complete, strict=True)):
            if seeds.any() and not kernel.traits.approximates:
                draws = results.draws_of(i, seeds)
                found[i], missing = judge(draws, kernel, data), missing_target(draws, kernel)
                if missing:
                    warnings.warn(missing, DiagnosisWarning, stacklevel=3)
                    break  # the same for all points
    except Warning:
        raise  # as the user's filters ask for
    except (Exception, KeyboardInterrupt) as error:
        warnings.warn(reason_not_judged(error), DiagnosisWarning, stacklevel=3)
    return tuple(found)


def _by_label(name: Any, values: Any) -> dict[Any, Any]:
    """Return the values of a name of the grid by their labels, which name them in results."""
    if not (isinstance(name, str) and name.isidentifier()) or name in RESERVED:
        raise ValueError(
            f"A name of the grid must be an argument of kernel_fn, and none of "
            f"{', '.join(RESERVED)}; got {name!r}."
        )
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise TypeError(f"The values of {name} must be a sequence or a mapping, got {values!r}.")
    if len(values) == 0:
        raise ValueError(f"There must be at least one value of {name}.")
    labels = [np.asarray(x).item() if np.ndim(x) == 0 else x for x in values]
    for x in labels:
        if not isinstance(x, bool | int | float | str):
            raise TypeError(
                f"A value of {name} is neither a number nor a string ({x!r}): give a mapping of "
                f"labels to values."
            )
    if len({isinstance(x, str) for x in labels}) > 1:
        labels = [str(x) for x in labels]
    labels = np.asarray(labels).tolist()
    if len(set(labels)) < len(labels):
        raise ValueError(f"The values of {name} must differ, got {labels}.")
    all_values = values.values() if isinstance(values, Mapping) else values
    return dict(zip(labels, all_values, strict=True))


def _product(grid: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Return all points, in the order of nested loops, last name fastest."""
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]


def _describe(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={label}" for name, label in point.items()) or "the only point"


def _kernel_at(
    point: Mapping[str, Any],
    kernel_fn: Callable[..., FederatedKernel],
    arguments: Mapping[str, Any],
    num_rounds: int,
) -> FederatedKernel:
    """Build a point's kernel with the values of its schedules."""
    with _named(point):
        kernel = kernel_fn(**arguments)
        if not isinstance(kernel, FederatedKernel):
            raise TypeError(
                f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}."
            )
        # A power of two, so that another number of rounds runs the same program.
        num_tabulated = 2 ** (num_rounds - 1).bit_length()
        return schedules.tabulate(as_functions(kernel), 0, num_tabulated, num_rounds)


@contextmanager
def _named(point: Mapping[str, Any]) -> Iterator[None]:
    """Have errors name the point."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"At {_describe(point)}: {error}") from error


@dataclass(frozen=True, repr=False)
class Sweep:
    """What a sweep kept; made by `sweep`.

    Attributes
    ----------
    modes
        One entry per program, ``"sequential"`` or ``"vmapped"``.
    diagnoses
        One entry per point, in the order of nested loops over the grid, the last name fastest: what
        the draws of its seeds say of themselves, or ``None`` where they were not judged.
    """

    _results: SweepResults = field(repr=False)
    modes: tuple[str, ...]
    _constrain_fn: Callable[[ArrayTree], ArrayTree] | None = field(default=None, repr=False)
    diagnoses: tuple[Diagnosis | None, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        """Say which settings were run, how often, and how."""
        results = self._results
        grid = ", ".join(f"{name} of {len(values)}" for name, values in results.grid.items())
        _, num_seeds, num_chains = results.first_bad.shape
        return (
            f"Sweep({grid or 'one setting'}; {num_seeds} seeds, {num_chains} chains, "
            f"{len(results.kept_rounds):,} draws each; {', '.join(self.modes)})"
        )

    @cached_property
    def dataset(self) -> Any:
        """Everything that was kept, an `xarray.Dataset`.

        Draws, one variable per leaf (``theta`` where a position is one array), and what is in
        `Samples.info` have dimensions the names of the grid, ``seed``, ``chain`` and ``draw``,
        draws then those of the leaf. `diverged`, `num_rounds`, `total_bits_up` and
        `total_bits_down` have one number per chain (a part of a sweep ends where all its chains
        diverged). Draws are unconstrained. From the round on in
        which a chain turned non-finite, and where a run was interrupted, all is NaN.
        """
        return self._results.dataset(self._results.draws)

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
        constrain = self._constrain_fn
        for _ in range(4):  # points, seeds, chains, draws
            constrain = jax.vmap(constrain)
        draws = jax.tree.map(np.asarray, jax.jit(constrain)(self._results.draws))
        return self._results.dataset(draws)

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
        One row (a dict) per point and statistic: the point's settings, ``statistic``, ``mean``,
        ``sd`` (over seeds, NaN for one), ``seeds``, how many of them it is of (those without a
        chain that diverged or was interrupted), and ``warning``, what is wrong with the point's
        draws, if anything. ``pandas.DataFrame(rows)`` makes it a table.
        """
        results = self._results
        points, warned = [], {}
        for i, point in enumerate(_product(results.grid)):
            of_seeds = []
            for s in np.flatnonzero(results.complete[i]):
                draws = jax.tree.map(lambda leaf, i=i, s=s: leaf[i, s], results.draws)
                of_seeds.append(dict((fn or default_statistics)(draws)))
            points.append((point, of_seeds))
            judged = self.diagnoses[i]
            warned[tuple(point.values())] = "" if judged is None else " ".join(judged.findings)
        rows = tabulate_seeds(points)
        return [row | {"warning": warned[tuple(row[n] for n in results.grid)]} for row in rows]

    def plot(self, fn: Statistics | None = None, *, x: str | None = None) -> Any:
        """Draw `summary` as one figure: a panel per statistic, error bars of one sd over seeds.

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
            If matplotlib is not installed (the extra ``plots``).
        """
        return draw_table(self.summary(fn), list(self._results.grid), x)
