"""`sweep`: a kernel at all points of a grid, for several seeds, in as few programs as possible."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from fedmcmc._checks import missing_extra_error
from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import Diagnosis, DiagnosisWarning
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import as_key
from fedmcmc.rounds import Collect
from fedmcmc.runs import check_counts, check_data, judge, missing_target, reason_not_judged
from fedmcmc.sweeps._runs import SweepGroup, SweepResults, SweepSettings, group_kernels, run_group
from fedmcmc.sweeps._tables import Statistics, default_statistics, draw_table, tabulate_seeds
from fedmcmc.types import ArrayTree, FederatedKernel, as_functions, constrain_fn_of, vmap_axes

if TYPE_CHECKING:
    import matplotlib.figure
    import xarray

MODES = ("auto", "sequential", "vmapped")
RESERVED = ("seed", "chain", "draw", "round")
"""Dimensions and coordinates of results next to the grid."""


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
    """Run a kernel at all points of a grid of settings, for several seeds.

    Points whose kernels differ only by numbers (step sizes, probabilities, damping) share one
    compiled program. Draws are judged per point, as in `fedmcmc.sample`, and one warning counts the
    points with findings.

    Parameters
    ----------
    rng_key, num_seeds
        Key and number of seeds. Seed ``s`` has the draws of ``sample(fold_in(rng_key, s), ...)``,
        to the last bit in the mode ``"sequential"``, else up to rounding.
    kernel_fn
        Function from a point's settings, by name, to a kernel. Define log densities outside of it.
    grid
        Mapping of names to values; all combinations are run. Values that are neither numbers nor
        strings need labels: pass a mapping of labels to values.
    data, position, num_rounds, num_burnin, thinning, num_chains, collect, progress
        See `fedmcmc.sample`.
    mode
        ``"sequential"`` computes one run after the other, ``"vmapped"`` many together. ``"auto"``
        is ``"sequential"`` for large models and for convolutions on a CPU, else ``"vmapped"``.
    max_bytes
        Memory for the states, draws and prepared random numbers of runs computed together.

    Raises
    ------
    ValueError, TypeError, ImportError
        If settings, data or shapes of draws do not fit, or xarray is not installed.

    Examples
    --------
    >>> import jax, jax.numpy as jnp, fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> data = fedmcmc.FederatedData.from_clients([jnp.ones(3), jnp.zeros(5)])
    >>> kernel_fn, grid = lambda h: fedmcmc.lsd(posterior, step_size=h), {"h": [0.01, 0.02]}
    >>> settings = dict(num_rounds=90, num_seeds=4, progress=False)
    >>> swept = sweep(jax.random.key(0), kernel_fn, grid, data, 0.0, **settings)
    >>> dict(swept.dataset.theta.sizes)
    {'h': 2, 'seed': 4, 'chain': 1, 'draw': 90}
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
    labeled = {name: _label_values(name, values) for name, values in grid.items()}
    points = _list_points(labeled)
    arguments = _list_points({name: values.values() for name, values in labeled.items()})
    kernels = [
        _build_kernel(point, kernel_fn, values, num_rounds)
        for point, values in zip(points, arguments, strict=True)
    ]
    # Each seed's chains have the same keys as in `sample`.
    seed_keys = [jax.random.fold_in(as_key(rng_key), seed) for seed in range(num_seeds)]
    fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = jnp.stack([fold_in(key, jnp.arange(num_chains)) for key in seed_keys])
    settings = SweepSettings(keys, position, num_rounds, num_burnin, thinning, collect, max_bytes)
    groups = []
    for indices in group_kernels(kernels):
        with _name_point(points[indices[0]]):
            groups.append(SweepGroup(indices, [kernels[i] for i in indices], data, settings))
    for group in groups[1:]:
        difference = trees.first_difference(groups[0].shapes.draw, group.shapes.draw)
        if difference:
            raise ValueError(
                f"All points must keep draws of the same shapes: at "
                f"{_describe(points[group.points[0]])}, {difference} as at {_describe(points[0])}."
            )
    results = SweepResults(labeled, groups, settings)
    modes = []
    total = num_rounds * num_seeds * len(kernels)
    with tqdm(total=total, unit="round", disable=not progress) as bar:
        try:
            for group in groups:
                vmapped = mode == "vmapped" or (mode == "auto" and group.is_faster_vmapped)
                modes.append("vmapped" if vmapped else "sequential")
                run_group(group, results, bar, vmapped=vmapped)
        except KeyboardInterrupt:
            warnings.warn(
                "Interrupted; returning the draws kept before. Sweep.dataset.num_rounds has the "
                "number of rounds of each run, and missing draws are NaN.",
                RuntimeWarning,
                stacklevel=2,
            )
    constrain_fn = constrain_fn_of(kernels[0]) if collect is None else None
    diagnoses = _judge_points(results, kernels, data)
    findings = [
        (point, diagnosis.findings[0])
        for point, diagnosis in zip(points, diagnoses, strict=True)
        if diagnosis is not None and diagnosis.findings
    ]
    if findings:
        point, finding = findings[0]
        warnings.warn(
            f"The draws of {len(findings)} of {len(points)} points are wrong or too few, first at "
            f"{_describe(point)}: {finding} Sweep.summary() names the findings of all points, and "
            f"Sweep.diagnoses has their text and figures.",
            DiagnosisWarning,
            stacklevel=2,
        )
    return Sweep(results, tuple(modes), constrain_fn, diagnoses)


def _judge_points(
    results: SweepResults, kernels: Sequence[FederatedKernel], data: FederatedData
) -> tuple[Diagnosis | None, ...]:
    """Judge each point by the draws of all its seeds."""
    diagnoses: list[Diagnosis | None] = [None] * len(kernels)
    if results.settings.collect is not None:
        return tuple(diagnoses)
    try:
        for i, (kernel, seeds) in enumerate(zip(kernels, results.is_complete, strict=True)):
            if seeds.any() and not kernel.traits.approximates:
                draws = results.select_draws(i, seeds)
                diagnoses[i], missing = judge(draws, kernel, data), missing_target(draws, kernel)
                if missing:
                    warnings.warn(missing, DiagnosisWarning, stacklevel=3)
                    break  # the same for all points
    except Warning:
        raise  # the user's filters turn warnings into errors
    except (Exception, KeyboardInterrupt) as error:
        warnings.warn(reason_not_judged(error), DiagnosisWarning, stacklevel=3)
    return tuple(diagnoses)


def _name_of_finding(finding: str) -> str:
    """Return the first words of a finding, up to a colon or the end of its first sentence."""
    return re.split(r": |\. ", finding, maxsplit=1)[0].removesuffix(".")


def _label_values(name: Any, values: Any) -> dict[Any, Any]:
    """Return the values of a setting by their labels, which name them in results."""
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
                f"A value of {name} is neither a number nor a string ({x!r}): pass a mapping of "
                f"labels to values."
            )
    if len({isinstance(x, str) for x in labels}) > 1:
        labels = [str(x) for x in labels]
    labels = np.asarray(labels).tolist()
    if len(set(labels)) < len(labels):
        raise ValueError(f"The values of {name} must differ, got {labels}.")
    return dict(
        zip(labels, values.values() if isinstance(values, Mapping) else values, strict=True)
    )


def _list_points(grid: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """Return all points, in the order of nested loops, last name fastest."""
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]


def _describe(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={label}" for name, label in point.items()) or "the only point"


def _build_kernel(
    point: Mapping[str, Any],
    kernel_fn: Callable[..., FederatedKernel],
    arguments: Mapping[str, Any],
    num_rounds: int,
) -> FederatedKernel:
    """Build a point's kernel with the values of its schedules."""
    with _name_point(point):
        kernel = kernel_fn(**arguments)
        if not isinstance(kernel, FederatedKernel):
            raise TypeError(
                f"kernel_fn must return a FederatedKernel, got {type(kernel).__name__}."
            )
        # With a power of two, runs with similar numbers of rounds share a program.
        num_tabulated = 2 ** (num_rounds - 1).bit_length()
        return schedules.tabulate(as_functions(kernel), 0, num_tabulated, num_rounds)


@contextmanager
def _name_point(point: Mapping[str, Any]) -> Iterator[None]:
    """Add the point to the messages of errors."""
    try:
        yield
    except (ValueError, TypeError) as error:
        kind = ValueError if isinstance(error, ValueError) else TypeError
        raise kind(f"At {_describe(point)}: {error}") from error


@dataclass(frozen=True, repr=False)
class Sweep:
    """Results of `sweep`.

    Attributes
    ----------
    modes
        ``"sequential"`` or ``"vmapped"``, one per program.
    diagnoses
        Diagnosis of the draws of each point, or ``None`` if they were not judged, in the order of
        nested loops over the grid, the last name fastest.
    """

    _results: SweepResults = field(repr=False)
    modes: tuple[str, ...]
    _constrain_fn: Callable[[ArrayTree], ArrayTree] | None = field(default=None, repr=False)
    diagnoses: tuple[Diagnosis | None, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        """Return the settings, the numbers of seeds, chains and draws, and the modes."""
        results = self._results
        grid = ", ".join(f"{name} of {len(values)}" for name, values in results.grid.items())
        _, num_seeds, num_chains = results.first_bad.shape
        return (
            f"Sweep({grid or 'one setting'}; {num_seeds} seeds, {num_chains} chains, "
            f"{len(results.kept_rounds):,} draws each; {', '.join(self.modes)})"
        )

    @cached_property
    def dataset(self) -> "xarray.Dataset":
        """Draws and other values of all runs.

        Unconstrained draws (one variable per leaf; ``theta`` if a position is one array) and the
        values of `Samples.info` have the names of the grid, ``seed``, ``chain`` and ``draw`` as
        dimensions, and draws those of the leaf. `diverged`, `num_rounds`, `total_bits_up` and
        `total_bits_down` have one number per chain. Values are NaN from the round in which a chain
        turned non-finite, and after an interrupt.
        """
        return self._results.dataset(self._results.draws)

    @property
    def diverged(self) -> "xarray.DataArray":
        """First round in which a chain was not finite, or -1.

        Dimensions are the names of the grid, ``seed`` and ``chain``.
        """
        return self.dataset["diverged"]

    @cached_property
    def constrained(self) -> "xarray.Dataset":
        """`dataset` with draws in the user's parameters."""
        if self._constrain_fn is None:
            return self.dataset
        # Axes of points, seeds, chains and draws
        draws = vmap_axes(as_functions(self._constrain_fn), self._results.draws, num_axes=4)
        draws = jax.tree.map(np.asarray, draws)
        return self._results.dataset(draws)

    def summary(self, fn: Statistics | None = None) -> list[dict[str, Any]]:
        """Return means and sds over seeds of statistics of the draws at each point.

        Parameters
        ----------
        fn
            Function ``draws -> {name: number}`` of one seed's unconstrained draws, leaves
            ``[num_chains, num_draws, *event]``. By default the mean and the sd of each coordinate,
            and for several chains the largest R-hat and the smallest bulk effective sample size
            (which need ArviZ).

        Returns
        -------
        list
            One dict per point and statistic: the point's settings, ``statistic``, ``mean``, ``sd``
            (NaN for one seed), ``seeds`` (number of seeds whose chains all ran to the end and
            stayed finite), and ``warning`` (names of the findings on the point's
            draws; the complete text is in `diagnoses`).
            ``pandas.DataFrame(rows)`` converts it to a table.
        """
        results = self._results
        rows = []
        for i, point in enumerate(_list_points(results.grid)):
            statistics = []
            for s in np.flatnonzero(results.is_complete[i]):
                draws = jax.tree.map(lambda leaf, i=i, s=s: leaf[i, s], results.draws)
                statistics.append(dict((fn or default_statistics)(draws)))
            diagnosis = self.diagnoses[i]
            findings = () if diagnosis is None else diagnosis.findings
            rows.append((point, statistics, "; ".join(map(_name_of_finding, findings))))
        return tabulate_seeds(rows)

    def plot(
        self, fn: Statistics | None = None, *, x: str | None = None
    ) -> "matplotlib.figure.Figure":
        """Draw `summary` as one figure: a panel per statistic, error bars of one sd over seeds.

        Parameters
        ----------
        fn
            Statistics, see `summary`.
        x
            Name of the grid along the horizontal axis, by default the first whose values are
            numbers. Each combination of the other settings has a line.

        Raises
        ------
        ValueError
            If `x` is no name of the grid.
        ImportError
            If matplotlib is not installed (the extra ``plots``).
        """
        return draw_table(self.summary(fn), list(self._results.grid), x)
