"""Result of a run."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from fedmcmc._checks import missing_extra_error
from fedmcmc.diagnostics import Diagnosis
from fedmcmc.placement import Placement
from fedmcmc.pytrees import named_leaves, trees, variables
from fedmcmc.records._netcdf import write_netcdf
from fedmcmc.records._saving import store_samples
from fedmcmc.reports import Page, RunFacts, run_page, table_of
from fedmcmc.types import (
    ArrayTree,
    FederatedState,
    MissingFunction,
    WithFunctions,
    as_functions,
    compiled,
    vmap_axes,
)

ONE_DEVICE = Placement()
NUM_NOTEBOOK_PARAMETERS = 10
MAX_REPORT_BYTES = 2**30
"""Bytes of draws above which a report reads fewer draws."""


@dataclass(frozen=True, repr=False)
class Samples(WithFunctions):
    """Draws of a run, with the state from which it can continue.

    Attributes
    ----------
    draws
        Pytree of NumPy arrays, leaves ``[num_chains, num_draws, *event]``, unconstrained; with
        ``Record(draws_to=...)`` arrays of the Zarr store, which are read when sliced.
    info
        Arrays ``[num_chains, num_draws]`` with the values of each kept round: ``bits_up``,
        ``bits_down``, ``num_active``, ``gradient_norm`` and ``round``. Some kernels add
        ``num_lost`` (clients without a usable result), ``num_excluded`` (clients whose messages
        were not finite), ``shift`` (move of an approximation in sds), or ``acceptance`` (acceptance
        probability).
    state
        `FederatedState` of all chains, leaves ``[num_chains, ...]``. To continue, call
        ``sample(..., state=samples.state)`` with the same key.
    totals
        Sums ``bits_up``, ``bits_down`` and ``rounds`` over all rounds, ``[num_chains]`` int64.
    constrain_fn
        Function from the unconstrained position to the user's parameters, or ``None``.
    stopped
        Latest check of ``sample(..., until=...)``: ``rule``, ``reached``, ``rounds`` and the rule's
        figures. `fedmcmc.fit` stores its ``verdict`` there, and the total ``cost``.
    streams, placement
        Results of ``Record(streams=...)`` by name, and devices of the run.
    final_draws
        Draws of the final approximation, for a kernel that refines one, which `constrained` and
        `to_datatree` return; `draws` then holds one draw per round.
    local, constrain_local_fn
        With ``Record(local=True)``: unconstrained latents of all clients' groups, leaves
        ``[num_chains, num_draws, num_clients, max_groups, *event]``, and a function from
        ``(position, latents)`` to the user's parameters of one client's groups; see
        `constrained_local`.
    local_mask
        ``[num_clients, max_groups]`` bool, true for groups that exist.
    diagnosis, reason_not_judged
        Convergence diagnostics, a `fedmcmc.diagnostics.Diagnosis`, or ``None`` and the reason.
    warnings, settings, versions
        Texts of warnings, settings without random keys, and versions of the software.
    """

    draws: ArrayTree
    info: dict[str, np.ndarray]
    state: FederatedState
    totals: dict[str, np.ndarray]
    constrain_fn: Callable[[ArrayTree], ArrayTree] | None = field(default=None, repr=False)
    stopped: dict[str, Any] = field(default_factory=dict)
    streams: dict[str, Any] = field(default_factory=dict)
    placement: Placement = ONE_DEVICE
    diagnosis: Diagnosis | None = None
    final_draws: ArrayTree = None
    local: ArrayTree = None
    local_mask: np.ndarray | None = None
    constrain_local_fn: Callable[[ArrayTree, ArrayTree], ArrayTree] | None = field(
        default=None, repr=False
    )
    reason_not_judged: str = ""
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    FUNCTIONS: ClassVar[dict[str, str]] = {
        "constrain_fn": "constrained",
        "constrain_local_fn": "constrained_local",
    }

    def __repr__(self) -> str:
        """Return the numbers and shapes of the draws, and their diagnosis."""
        is_final = self.final_draws is not None
        leaves = named_leaves(self.final_draws if is_final else self.draws)
        num = next(iter(leaves.values())).shape[1] if is_final else self.num_draws
        shapes = ", ".join(f"{name} {leaf.shape[2:]}" for name, leaf in leaves.items()) or "nothing"
        source = f" from the last approximation; {self.num_draws:,} rounds were kept" * is_final
        return f"Samples: {self.num_chains} x {num:,} draws of {shapes}{source}\n{self._judgment()}"

    def _judgment(self) -> str:
        """Return the diagnosis or verdict, or the reason why there is none."""
        if self.diagnosis is not None:
            return str(self.diagnosis)
        return str(self.stopped.get("verdict", "")) or self.reason_not_judged or "not judged"

    def _repr_html_(self) -> str:
        """Return the text of `repr` and a table of parameters for notebooks."""
        page = Page("")
        page.verdict("Samples", str(self))
        if self.num_draws:
            page.table(*table_of(self._reported()[0], NUM_NOTEBOOK_PARAMETERS))
        return page.body

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the mesh, whose devices exist only in this process."""
        return super().__getstate__() | {"placement": replace(self.placement, mesh=None)}

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return next(iter(self.info.values())).shape[0]

    @property
    def num_draws(self) -> int:
        """Number of kept draws per chain."""
        return next(iter(self.info.values())).shape[1]

    @property
    def constrained(self) -> ArrayTree:
        """Draws in the user's parameters, leaves ``[num_chains, num_draws, ...]``.

        If the kernel refines an approximation, they are the draws of the final approximation.

        Raises
        ------
        ValueError
            If the collected values are not positions.
        """
        draws = self.draws if self.final_draws is None else self.final_draws
        if self.constrain_fn is None:
            return draws
        if isinstance(self.constrain_fn, MissingFunction):
            return self.computed("constrained", self.constrain_fn)
        arrays = jax.tree.map(np.asarray, draws)
        values = vmap_axes(as_functions(self.constrain_fn), arrays, num_axes=self._num_axes())
        return jax.tree.map(np.asarray, values)

    @property
    def constrained_local(self) -> ArrayTree:
        """Latents in the user's parameters; NaN for groups that do not exist (`local_mask`).

        Raises
        ------
        ValueError
            If no latents were kept.
        """
        if self.local is None:
            raise ValueError("No latents were kept: pass record=Record(local=True) to sample.")
        local = self._with_nan(self.local)
        if self.constrain_local_fn is None:
            return local
        if isinstance(self.constrain_local_fn, MissingFunction):
            return self.computed("constrained_local", self.constrain_local_fn)
        arrays = jax.tree.map(np.asarray, (self.draws, local))
        values = _constrain_latents(as_functions(self.constrain_local_fn), *arrays)
        return jax.tree.map(np.asarray, values)

    def _with_nan(self, local: ArrayTree) -> ArrayTree:
        """Return latents that are NaN for groups that do not exist."""
        if self.local_mask is None or self.local_mask.all():
            return local
        mask = self.local_mask

        def masked(leaf: np.ndarray) -> np.ndarray:
            return np.where(mask.reshape(*mask.shape, *(1,) * (np.ndim(leaf) - 4)), leaf, np.nan)

        return jax.tree.map(masked, local)

    def _num_axes(self) -> int:
        """Return the number of leading axes: chain, draw, and step if positions are local."""
        position = self.state.broadcast.position
        nums: set[int | None] = set()
        if trees.same_structure(position, self.draws):
            for draw, place in zip(
                jax.tree.leaves(self.draws), jax.tree.leaves(position), strict=True
            ):
                num = draw.ndim - place.ndim + 1
                nums.add(num if draw.shape[num:] == place.shape[1:] else None)
        if len(nums) == 1 and None not in nums:
            return int(nums.pop() or 0)
        raise ValueError(
            "The collected values are not positions and cannot be constrained: use .draws, or "
            "to_datatree(constrained=False)."
        )

    def to_datatree(self, *, constrained: bool = True, **kwargs: Any) -> Any:
        """Return the draws as an ArviZ ``DataTree`` with dimensions ``chain`` and ``draw``.

        Variables have the names of the parameters, with "." instead of "/", which a ``DataTree``
        cannot store (``"hospital/effect"`` in NumPyro's `scope` becomes ``"hospital.effect"``).

        Parameters
        ----------
        constrained
            If true, draws are converted to the user's parameters.
        **kwargs
            Arguments of ``arviz_base.from_dict`` (`coords`, `dims`, ...).

        Raises
        ------
        ImportError
            If arviz-base is not installed (the extra ``arviz``).
        """
        try:
            from arviz_base import from_dict
        except ImportError as error:
            raise missing_extra_error("to_datatree needs arviz-base", "arviz") from error
        is_final = self.final_draws is not None
        draws = self.final_draws if is_final else jax.tree.map(np.asarray, self.draws)
        info = {name: np.asarray(values) for name, values in self.info.items()}
        # Draws of the final approximation belong to no round.
        stats = "rounds" if is_final else "sample_stats"
        posterior = named_leaves(self.constrained if constrained else draws)
        if self.local is not None:
            latents = self.constrained_local if constrained else self.local
            posterior |= named_leaves(jax.tree.map(np.asarray, latents), "latent")
        return from_dict({"posterior": variables(posterior), stats: info}, **kwargs)

    def save(self, path: str | Path) -> Path:
        """Write draws, names, verdict, settings and versions to a NetCDF file, for `fedmcmc.load`.

        ArviZ reads the file, too. It contains no rows, no functions, and not the state from which
        the run could continue: use checkpoints for that.

        Parameters
        ----------
        path
            Path of the file, such as ``"trial.nc"``; missing folders are created.

        Raises
        ------
        ImportError
            If the extra ``arviz`` is not installed.
        ValueError
            If draws have containers other than dictionaries, lists and tuples.

        Examples
        --------
        >>> import fedmcmc, tempfile
        >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
        >>> data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
        >>> kernel, settings = fedmcmc.lsd(posterior, step_size=0.02), dict(progress=False)
        >>> samples = fedmcmc.sample(
        ...     jax.random.key(0), kernel, data, 0.0, num_rounds=20, **settings
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = fedmcmc.load(samples.save(folder + "/run.nc"))
        >>> bool((loaded.draws == samples.draws).all())
        True
        """
        return write_netcdf(path, store_samples(self), self._saved_tree())

    def _saved_tree(self) -> Any:
        """Return the `DataTree` of `save`; unconstrained if the values are not positions."""
        try:
            return self.to_datatree()
        except ValueError:
            return self.to_datatree(constrained=False)

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page, for readers who have not seen the code.

        The page shows the warnings, the clients, the meaning of codes, a table of parameters with
        marked R-hat and effective draws, a forest plot, traces, ranks, communication, settings,
        versions and a glossary. It shows at most 40 parameters, no latents of clients' groups, and
        the names and sizes of up to 100 clients.

        Parameters
        ----------
        path
            Path of the page; missing folders are created.

        Returns
        -------
        Path
            Path of the page.

        Raises
        ------
        ImportError
            If the extra ``plots`` is not installed.

        Examples
        --------
        >>> import fedmcmc, tempfile
        >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
        >>> data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
        >>> kernel = fedmcmc.lsd(posterior, step_size=0.02)
        >>> key, settings = jax.random.key(0), dict(num_rounds=50, progress=False)
        >>> samples = fedmcmc.sample(key, kernel, data, 0.0, **settings)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = samples.report(folder + "/report.html").read_text()
        >>> "<h1>Report of a run</h1>" in page
        True
        """
        draws, notes = self._reported()
        judgment = self._judgment()
        facts = RunFacts(
            draws,
            {name: np.asarray(values) for name, values in self.info.items()},
            self.totals,
            warnings=self.warnings,
            diagnosis=self.diagnosis,
            reason_not_judged=f"{judgment[:1].upper()}{judgment[1:].rstrip('.')}.",
            verdict=self.stopped.get("verdict", ""),
            stopped=self.stopped,
            settings=self.settings,
            versions=self.versions,
            notes=notes,
        )
        return run_page(facts).save(path)

    def _reported(self) -> tuple[ArrayTree, tuple[str, ...]]:
        """Return the draws of a report, in the user's parameters, and notes on them."""
        is_final = self.final_draws is not None
        draws = self.final_draws if is_final else self.draws
        notes = ["The draws come from the last approximation."] * is_final
        thinning = max(1, -(-trees.num_bytes(draws) // MAX_REPORT_BYTES))

        def thinned(tree: ArrayTree) -> ArrayTree:
            return jax.tree.map(lambda leaf: leaf[:, ::thinning], tree)

        if thinning > 1:
            notes.append(f"One draw in {thinning} was read, to save memory.")
        if self.local is not None:
            notes.append("The clients' own parameters (latents) were kept but are not shown.")
        if isinstance(self.constrain_fn, MissingFunction):
            return thinned(self.constrained), tuple(notes)
        part = replace(self, draws=thinned(draws), final_draws=None)
        try:
            return part.constrained, tuple(notes)
        except ValueError:  # the collected values are not positions
            return part.draws, (*notes, "The values were collected by the user's function.")


@compiled
def _constrain_latents(
    constrain_fn: Callable[..., ArrayTree], draws: ArrayTree, local: ArrayTree
) -> ArrayTree:
    """Return latents in the user's parameters, for each chain, draw and client."""
    for axes in ((None, 0), 0, 0):  # clients at one draw, draws, chains
        constrain_fn = jax.vmap(constrain_fn, in_axes=axes)
    return constrain_fn(draws, local)
