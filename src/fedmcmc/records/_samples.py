"""What a run returns."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from fedmcmc._checks import not_installed
from fedmcmc._types import Absent, ArrayTree, FederatedState, WithFunctions, as_functions, mapped
from fedmcmc.diagnostics import Diagnosis
from fedmcmc.placement import Placement
from fedmcmc.pytrees import named_leaves, trees, variables
from fedmcmc.reports import Page, RunFacts, run_page, table_of

ONE_DEVICE = Placement()
FEW = 10
"""Parameters that a notebook shows."""
MOST_REPORTED = 2**30
"""Bytes of draws that a report reads."""


@dataclass(frozen=True, repr=False)
class Samples(WithFunctions):
    """Draws of a run, and what is needed to go on from them.

    Attributes
    ----------
    draws
        Pytree of NumPy arrays, leaves ``[num_chains, num_draws, *event]``, unconstrained; with
        ``Record(draws_to=...)`` arrays of the Zarr store, which are read as they are sliced.
    info
        Per kept round, arrays ``[num_chains, num_draws]``: ``bits_up`` and ``bits_down`` (of that
        round), ``num_active``, ``gradient_norm``, ``round``; of kernels whose clients may find
        nothing of use also ``num_lost``, the clients of that round which did not; of kernels with
        faults also ``num_excluded``, the clients whose messages were left out as not finite; of
        kernels that refine an approximation also ``shift``, how far the round moved it in sds; of
        kernels that accept or reject proposals also ``acceptance``, the probability with which the
        last one that came to its end was accepted.
    state
        `FederatedState` of every chain, leaves ``[num_chains, ...]``; pass it to
        ``sample(..., state=samples.state)`` with the same key to go on.
    totals
        Sums over all rounds of this run, kept or not, ``[num_chains]`` int64: ``bits_up``,
        ``bits_down``, ``rounds``.
    constrain_fn
        Unconstrained position to the user's parameters, ``None`` for the identity.
    stopped
        What the rule of ``sample(..., until=...)`` said when it was asked last: ``rule``,
        ``reached``, ``rounds`` and the rule's own figures (``rhat``, ``ess``); empty without one.
        Of `fedmcmc.fit` its ``verdict``, and where it had several stages the ``cost`` of all.
    streams
        What the accumulators of ``Record(streams=...)`` found, by their names.
    placement
        Where the run was, with what it chose by itself; ``print(samples.placement)`` says it in
        words.
    final_draws
        Of a kernel that refines an approximation: draws of the last one, where `draws` holds one of
        each round's; else ``None``. They are what `constrained` and `to_datatree` return.
    local
        With ``Record(local=True)``: the latents of all clients' groups, unconstrained, leaves
        ``[num_chains, num_draws, num_clients, max_groups, *event]``; zeros of groups that a client
        has not. `constrained_local` has them in the user's parameters.
    local_mask
        ``[num_clients, max_groups]`` bool, which groups there are.
    constrain_local_fn
        ``(position, latents)`` to the user's parameters of one client's groups.
    diagnosis
        What the draws say of themselves, a `fedmcmc.diagnostics.Diagnosis`; ``None`` if the run did
        not judge them. ``print(samples)`` shows it, or `not_judged`.
    not_judged
        Reason why the run did not judge its draws: fewer than 400, or than four per chain; a kernel
        without a `target`; a `collect` that kept something else; no draws, or more than 2 GiB; or
        ignored warnings. Empty if it did.
    warnings
        What the run warned of, in its words.
    settings, versions
        What was run, in words and numbers, and with which software. Keys of random numbers are not
        there: whoever has a run's key can take its noise out of the draws.
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
    not_judged: str = ""
    warnings: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    FUNCTIONS: ClassVar[dict[str, str]] = {
        "constrain_fn": "constrained",
        "constrain_local_fn": "constrained_local",
    }

    def __repr__(self) -> str:
        """Say how many draws of what there are, and what they say of themselves."""
        # What is judged and what `constrained` returns.
        last = self.final_draws is not None
        leaves = named_leaves(self.final_draws if last else self.draws)
        num = next(iter(leaves.values())).shape[1] if last else self.num_draws
        shapes = ", ".join(f"{name} {leaf.shape[2:]}" for name, leaf in leaves.items())
        of = f" from the last approximation; {self.num_draws:,} rounds were kept" if last else ""
        judgment = self._judgment()
        return (
            f"Samples: {self.num_chains} x {num:,} draws of {shapes or 'nothing'}{of}\n{judgment}"
        )

    def _judgment(self) -> str:
        """Return what is known of how good the draws are, or why nothing is."""
        if self.diagnosis is not None:
            return str(self.diagnosis)
        return str(self.stopped.get("verdict", "")) or self.not_judged or "not judged"

    def _repr_html_(self) -> str:
        """Return the same for notebooks, with a table of the first parameters."""
        page = Page("")
        page.verdict("Samples", str(self))
        if self.num_draws:
            page.table(*table_of(self._reported()[0], FEW))
        return page.body

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the mesh, whose devices no other process has."""
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
        """The draws in the user's parameters, leaves ``[num_chains, num_draws, ...]``.

        Those of the last approximation, where the kernel refines one.

        Raises
        ------
        ValueError
            If what was collected are not positions.
        """
        draws = self.draws if self.final_draws is None else self.final_draws
        if self.constrain_fn is None:
            return draws
        if isinstance(self.constrain_fn, Absent):
            return self.computed("constrained", self.constrain_fn)
        given = jax.tree.map(np.asarray, draws)
        found = mapped(as_functions(self.constrain_fn), given, num_axes=self._num_axes())
        return jax.tree.map(np.asarray, found)

    @property
    def constrained_local(self) -> ArrayTree:
        """The latents in the user's parameters, each given the draw of its round.

        NaN for groups that do not exist (`local_mask`).

        Raises
        ------
        ValueError
            If no latents were kept.
        """
        if self.local is None:
            raise ValueError("No latents were kept: give sample record=Record(local=True).")
        local = self._with_nan(self.local)
        if self.constrain_local_fn is None:
            return local
        if isinstance(self.constrain_local_fn, Absent):
            return self.computed("constrained_local", self.constrain_local_fn)
        # Of clients at one draw, then of draws and chains.
        of_all: Any = self.constrain_local_fn
        for axes in ((None, 0), 0, 0):
            of_all = jax.vmap(of_all, in_axes=axes)
        given = jax.tree.map(np.asarray, (self.draws, local))
        return jax.tree.map(np.asarray, jax.jit(of_all)(*given))

    def _with_nan(self, local: ArrayTree) -> ArrayTree:
        """Return latents that are NaN for groups that do not exist."""
        if self.local_mask is None or self.local_mask.all():
            return local
        if isinstance(local, dict) and isinstance(local.get("group"), dict):  # of two levels
            return {**local, "group": self._with_nan(local["group"])}
        mask = self.local_mask

        def of_site(leaf: np.ndarray) -> np.ndarray:
            return np.where(mask.reshape(*mask.shape, *(1,) * (np.ndim(leaf) - 4)), leaf, np.nan)

        return jax.tree.map(of_site, local)

    def _num_axes(self) -> int:
        # Chain and draw, and one more where local positions were collected.
        position = self.state.broadcast.position
        lead: set[int | None] = set()
        if trees.same_structure(position, self.draws):
            for draw, place in zip(
                jax.tree.leaves(self.draws), jax.tree.leaves(position), strict=True
            ):
                num = draw.ndim - place.ndim + 1
                lead.add(num if draw.shape[num:] == place.shape[1:] else None)
        if len(lead) == 1 and None not in lead:
            return int(lead.pop() or 0)
        raise ValueError(
            "What was collected are not positions, so they cannot be constrained: use .draws, or "
            "to_datatree(constrained=False)."
        )

    def to_datatree(self, *, constrained: bool = True, **kwargs: Any) -> Any:
        """Return the draws as an ArviZ ``DataTree`` with dimensions ``chain`` and ``draw``.

        Variables are named as parameters are, with "." for "/", which a ``DataTree`` does not take
        (``"hospital/effect"`` in NumPyro's `scope` is ``"hospital.effect"``).

        Parameters
        ----------
        constrained
            Whether to convert draws to the user's parameters.
        **kwargs
            Passed to ``arviz_base.from_dict`` (`coords`, `dims`, ...).

        Raises
        ------
        ImportError
            If arviz-base is not installed (the extra ``arviz``).
        """
        try:
            from arviz_base import from_dict
        except ImportError as error:
            raise not_installed("to_datatree needs arviz-base", "arviz") from error
        last = self.final_draws is not None
        draws = self.final_draws if last else jax.tree.map(np.asarray, self.draws)
        info = {name: np.asarray(values) for name, values in self.info.items()}
        # Draws of the last approximation belong to no round.
        stats = "rounds" if last else "sample_stats"
        posterior = named_leaves(self.constrained if constrained else draws)
        if self.local is not None:
            latents = self.constrained_local if constrained else self.local
            posterior |= named_leaves(jax.tree.map(np.asarray, latents), "latent")
        return from_dict({"posterior": variables(posterior), stats: info}, **kwargs)

    def report(self, path: str | Path) -> Path:
        """Write one self-contained HTML page, for readers who have not seen the code.

        It has the warnings, the clients, what codes stand for, a table of parameters with R-hat and
        effective draws, those marked that are not as wanted, a forest plot, traces, ranks, rounds
        and bits, what was run with which versions, and what each word means. Of more than 40
        parameters some are shown, small groups of them whole. Latents of clients' groups are not
        shown; of up to 100 clients names and numbers of rows are.

        Parameters
        ----------
        path
            Where; folders are made.

        Returns
        -------
        Path
            The same.

        Raises
        ------
        ImportError
            If what draws figures is not installed (the extra ``plots``).

        Examples
        --------
        >>> import tempfile
        >>> import fedmcmc
        >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
        >>> data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
        >>> kernel = fedmcmc.lsd(posterior, step_size=0.02)
        >>> samples = fedmcmc.sample(
        ...     jax.random.key(0), kernel, data, 0.0, num_rounds=50, progress=False
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = samples.report(folder + "/report.html").read_text()
        >>> "<h1>Report of a run</h1>" in page
        True
        """
        draws, notes = self._reported()
        facts = RunFacts(
            draws,
            {name: np.asarray(values) for name, values in self.info.items()},
            self.totals,
            warnings=self.warnings,
            diagnosis=self.diagnosis,
            not_judged=_sentence(self._judgment()),
            verdict=self.stopped.get("verdict", ""),
            stopped=self.stopped,
            settings=self.settings,
            versions=self.versions,
            notes=notes,
        )
        return run_page(facts).save(path)

    def _reported(self) -> tuple[ArrayTree, tuple[str, ...]]:
        """Return the draws of a report, in the user's parameters, and what it says of them."""
        last = self.final_draws is not None
        whole = self.final_draws if last else self.draws
        notes = ["Draws are of the last approximation."] if last else []
        every = max(1, -(-trees.num_bytes(whole) // MOST_REPORTED))
        if every > 1:
            notes.append(f"One draw in {every} was read, as all take much memory.")
        if self.local is not None:
            notes.append("The clients' own parameters (latents) were kept, and are not shown.")
        part = replace(
            self, draws=jax.tree.map(lambda leaf: leaf[:, ::every], whole), final_draws=None
        )
        if isinstance(self.constrain_fn, Absent):
            thinned = jax.tree.map(lambda leaf: leaf[:, ::every], self.constrained)
            return thinned, tuple(notes)
        try:
            return part.constrained, tuple(notes)
        except ValueError:  # what was collected are not positions
            return part.draws, (*notes, "What is shown was collected by a function of the user's.")


def _sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
