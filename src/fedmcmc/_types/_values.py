"""What clients, servers and rounds hold and hand on: named fields, and almost no methods."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax import Array
from jax.tree_util import Partial, register_static

from fedmcmc._types._compiled import compiled
from fedmcmc._types._html import html_table
from fedmcmc._types._pickling import refuse_unstorable
from fedmcmc._types._register import register_dataclass

ArrayTree = Any
"""Any pytree of arrays."""

LogDensity = Callable[..., Array]
"""A log density of a position, or one of each row given a position."""

Number = float | Array | Callable[[Array], Array]
"""A float, a traced scalar, or an optax schedule of the communication round."""


T = TypeVar("T", bound=Hashable)


@register_static
@dataclass(frozen=True)
class Static(Generic[T]):
    """A hashable value that is part of a kernel's structure, not of its numbers."""

    value: T


@register_dataclass
@dataclass(frozen=True)
class PerClient:
    """One entry per client: leaves ``[num_clients, ...]``; a step reads its own with `of`."""

    values: ArrayTree

    def of(self, client: "Client | Sender") -> ArrayTree:
        """Return the entry of `client`, leaves ``[...]``."""
        return jax.tree.map(lambda leaf: leaf[client.index], self.values)


@register_dataclass
@dataclass(frozen=True)
class Client:
    """One client's rows, as a step sees them.

    Attributes
    ----------
    rows
        The store of all rows, leaves ``[num_rows_in_store, ...]``; the client owns
        ``[start, start + size)`` and reaches them through `fedmcmc.data.fold` and
        `fedmcmc.data.gather` only.
    start, size
        ``[]`` int32.
    index
        ``[]`` int32, the client's id.
    share
        ``[]``, size over the total size; sums to one over all clients.
    weight
        ``[]``, one over the probability of taking part in a round; one where all take part.
    max_size
        Static bound on `size`, the size of the largest client in the store.
    """

    rows: ArrayTree
    start: Array
    size: Array
    index: Array
    share: Array
    weight: Array
    max_size: int = field(metadata={"static": True})


@register_dataclass
@dataclass(frozen=True)
class Sender:
    """What a server knows of the client whose code it decodes.

    Attributes
    ----------
    index
        ``[]`` int32, the client's id.
    weight
        ``[]``, one over the probability of taking part in a round.
    """

    index: Array
    weight: Array


class Federation(NamedTuple):
    """What a server knows of its clients before the first round.

    Attributes
    ----------
    num_clients, num_rows
        Numbers of clients and of all their rows.
    sizes
        ``[num_clients]`` int32, rows of each client.
    rows
        Shapes and types of rows, leaves ``[anything, ...]``: their first axis means nothing.
    """

    num_clients: int
    num_rows: int
    sizes: Array
    rows: ArrayTree


@register_static
@dataclass(frozen=True, eq=False)
class Shapes:
    """Shapes and types of a tree, as part of a kernel's structure."""

    tree: ArrayTree

    def _key(self) -> Hashable:
        leaves, treedef = jax.tree.flatten(self.tree)
        return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shapes) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class LatentSums(NamedTuple):
    """What is known of many latents by sums of their statistics.

    Attributes
    ----------
    num_latents
        ``[]``, how many there are.
    total
        The sum of their statistics around the origin.
    origin
        Near the latents: around zero, squares of what lies far from it would lose all digits.
    rounding
        Shaped as `total`, up to which size its numbers may be wrong by rounding. A spread is no
        smaller than that: parameters that follow one of zero never leave it again.
    """

    num_latents: Array
    total: ArrayTree
    origin: ArrayTree
    rounding: ArrayTree


class Population(NamedTuple):
    """The distribution of groups' latents given shared parameters, by sums of statistics.

    Attributes
    ----------
    statistics_fn
        ``(latent, origin) -> statistics``, a pytree: of a normal latent its distance from the
        origin and the square of that.
    logdensity_fn
        ``(position, sums) -> []``, the sum of the log densities of all latents given the shared
        position, from what `LatentSums` say of them, up to a constant.
    draw_fn
        ``(rng_key, position, sums) -> position`` with shared parameters drawn given all latents,
        their prior included; ``None`` where a kernel is to find its own way. Parameters of rows it
        leaves as they are.
    origin_fn
        ``position -> origin``, where latents are expected given the shared position; ``None`` where
        statistics need no origin, which is ``()`` then.
    of_rows
        Of each leaf of a position, whether rows depend on it, too, given the latents (a slope, a
        residual sd); empty where they depend on none.
    transport_fn
        ``(latent, position, other) -> latent``, as far from its mean at `other`, in units of the
        spread there, as the given one is at `position`; for ``fed_gibbs(interweave=True)``.
    """

    statistics_fn: Callable[[ArrayTree, ArrayTree], ArrayTree]
    logdensity_fn: Callable[[ArrayTree, LatentSums], Array]
    draw_fn: Callable[[Array, ArrayTree, LatentSums], ArrayTree] | None = None
    origin_fn: Callable[[ArrayTree], ArrayTree] | None = None
    of_rows: Static[tuple[bool, ...]] | tuple[bool, ...] = Static(())
    transport_fn: Callable[[ArrayTree, ArrayTree, ArrayTree], ArrayTree] | None = None


class ClientLatent(NamedTuple):
    """The latent of a client itself, in a model that has latents of its groups besides.

    Attributes
    ----------
    logprior_fn
        ``(position, latent) -> []``, log density of a client's latent given the shared position.
    like
        Shapes of one client's latent, unconstrained.
    constrain_fn
        ``(position, latent)`` to the user's parameters of one client.
    prior_spread_fn
        As that of `Local`, of how much the clients' latents differ.
    """

    logprior_fn: Callable[[ArrayTree, ArrayTree], Array]
    like: Shapes
    constrain_fn: Callable[[ArrayTree, ArrayTree], ArrayTree] | None = None
    prior_spread_fn: Callable[[Array], dict[str, Array]] | None = None


class Local(NamedTuple):
    """The part of a model that belongs to one group of rows, and never leaves their owner.

    A group is a client or, where data tell groups, a part of one: a hospital's patients.

    Attributes
    ----------
    logprior_fn
        ``(position, latent) -> []``, log density of one group's latent given the shared position.
    loglikelihood_fn
        ``(position, latents, batch) -> [batch_size]``, one term per row. `latents` has one latent
        per row, that of its group, leaves ``[batch_size, *event]``.
    like
        Shapes of one group's latent, unconstrained.
    constrain_fn
        ``(position, latent)`` to the user's parameters of one group.
    population
        What `fedmcmc.fed_gibbs` needs; ``None`` where latents have no sufficient statistic.
    client
        The latent of the client itself, if there is one. The position that all functions above take
        is then a pair of the shared position and that latent.
    prior_spread_fn
        ``rng_key -> dict``, a draw from the prior of the shared parameters on which it depends how
        much latents differ, in the user's space; ``None`` where that is not known.
    """

    logprior_fn: Callable[[ArrayTree, ArrayTree], Array]
    loglikelihood_fn: Callable[[ArrayTree, ArrayTree, ArrayTree], Array]
    like: Shapes
    constrain_fn: Callable[[ArrayTree, ArrayTree], ArrayTree] | None = None
    population: Population | None = None
    client: ClientLatent | None = None
    prior_spread_fn: Callable[[Array], dict[str, Array]] | None = None


class ClientTerms:
    """A log likelihood whose terms are not those of rows but of a client's groups.

    It stands where a `Posterior` has its ``loglikelihood_fn``; what sums over rows sums over these
    terms. A subclass is a frozen dataclass registered as a pytree.
    """

    def terms(self, position: ArrayTree, client: Client) -> Array:
        """Return the log likelihood of each of the client's groups, ``[max_groups]``.

        Zero of groups that the client does not have.
        """
        raise NotImplementedError

    def present(self, client: Client) -> Array:
        """Return which groups the client has, ``[max_groups]`` bool."""
        raise NotImplementedError

    @property
    def passes(self) -> int:
        """How many times its rows one evaluation reads, about."""
        return 1

    def __call__(self, position: ArrayTree, batch: ArrayTree) -> Array:
        """Refuse: there are no terms of rows."""
        raise TypeError(
            "This posterior has one term per group of rows, none per row: minibatches and what "
            "else looks at single rows do not apply. Use all of a client's rows."
        )


class Posterior(NamedTuple):
    """A model, split so that it can be federated.

    Attributes
    ----------
    logprior_fn
        ``position -> []``, log density of the prior.
    loglikelihood_fn
        ``(position, batch) -> [batch_size]``, one term per row.
    resample_fn
        ``(rng_key, position, batch) -> batch`` with outcomes drawn from the model.
    constrain_fn
        Unconstrained position to the user's parameters.
    init_fn
        ``rng_key -> position``, a place to start from.
    position_fn
        Of a posterior in other coordinates, as from `fedmcmc.whiten`: sampled to user's position.
    local
        Latents that each group of rows has of its own. Positions are then the shared part alone,
        and `loglikelihood_fn` is ``None``: see `fedmcmc.marginal`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> posterior = Posterior(
    ...     logprior_fn=lambda theta: -0.5 * jnp.sum(theta**2),
    ...     loglikelihood_fn=lambda theta, rows: -0.5 * jnp.sum((rows - theta) ** 2, axis=-1),
    ... )
    >>> posterior.loglikelihood_fn(jnp.zeros(2), jnp.ones((3, 2))).shape
    (3,)
    """

    logprior_fn: Callable[[ArrayTree], Array]
    loglikelihood_fn: Callable[[ArrayTree, ArrayTree], Array] | Any
    resample_fn: Callable[[Array, ArrayTree, ArrayTree], ArrayTree] | None = None
    constrain_fn: Callable[[ArrayTree], ArrayTree] | None = None
    init_fn: Callable[[Array], ArrayTree] | None = None
    position_fn: Callable[[ArrayTree], ArrayTree] | None = None
    local: Local | None = None

    @property
    def observed(self) -> str:
        """Names of what is observed, of a model that has names (`from_numpyro`); else empty."""
        return str(self._fact("observed", ""))

    @property
    def improper(self) -> tuple[str, ...]:
        """Names of sites whose prior is no density, such as a flat one (`from_numpyro`)."""
        return tuple(self._fact("improper", ()))

    @property
    def is_traced(self) -> bool:
        """Whether `improper` is known, as it is of a NumPyro model."""
        return self._fact("improper", None) is not None

    @property
    def unmarked_local(self) -> tuple[str, ...]:
        """Names of shared sites whose prior is that of a group's effect (`from_numpyro`)."""
        return tuple(self._fact("unmarked_local", ()))

    def _fact(self, name: str, default: Any) -> Any:
        """Return what the model's builder noted on its prior; kernels and `whiten` wrap that."""
        fn: Any = self.logprior_fn
        while fn is not None and not hasattr(fn, name):
            fn = getattr(fn, "func", getattr(fn, "fn", None))
        return default if fn is None else getattr(fn, name)

    @property
    def why_no_resample(self) -> str:
        """Reason why `from_numpyro` made no `resample_fn`, a clause; empty if none is known."""
        return getattr(getattr(self.logprior_fn, "func", self.logprior_fn), "why_no_resample", "")

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to build it again, or raise `pickle.PicklingError` that names a function."""
        for name, fn in zip(self._fields, self, strict=True):
            refuse_unstorable(fn, f"The posterior's {name}")
        return Posterior, tuple(self)

    def __copy__(self) -> "Posterior":
        """Return the posterior itself, which nothing changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Posterior":
        """Return the posterior itself, which nothing changes."""
        return self

    def __repr__(self) -> str:
        """Return what the clients share, where the model says it, and which functions there are."""
        named = "".join(f"{whose}: {sites}; " for whose, sites in self._sites().items())
        return f"Posterior({named}{self._given()})"

    def _repr_html_(self) -> str:
        """Return the same for notebooks, as a table."""
        return html_table("Posterior", {**self._sites(), "functions": self._given()})

    def _sites(self) -> dict[str, str]:
        """Return what is shared and what is not, of a model whose sites have names."""
        functions = {
            "shared by all clients": self.logprior_fn,
            "one per client": self.local and self.local.client and self.local.client.logprior_fn,
            "one per group": self.local and self.local.logprior_fn,
        }
        # `from_numpyro` leaves them.
        named = {whose: getattr(fn, "sites", None) for whose, fn in functions.items()}
        return {whose: sites for whose, sites in named.items() if sites is not None}

    def _given(self) -> str:
        """Return which functions there are."""
        fields = zip(self._fields, self, strict=True)
        return ", ".join(name for name, fn in fields if fn is not None)


class Broadcast(NamedTuple):
    """All that goes down to a client.

    `round` is ``[]`` int32, `position` the chain's (or the approximation's) position, `extra`
    whatever else a kernel family sends (a snapshot, a cavity). Within a round only, `shared` holds
    what all clients draw alike from one common key, and `summed` what an earlier phase of the
    round summed; between rounds both are ``()``.
    """

    round: Array
    position: ArrayTree
    extra: ArrayTree = ()
    shared: ArrayTree = ()
    summed: ArrayTree = ()


class FederatedState(NamedTuple):
    """The state of one chain.

    `broadcast` goes down to every client, `server` stays on the server, `clients` has leaves
    ``[num_clients, ...]`` and is ``()`` for kernels whose clients keep nothing.
    """

    broadcast: Broadcast
    server: ArrayTree
    clients: ArrayTree


class Cohort(NamedTuple):
    """The clients computed in one round, and which of them take part.

    `ids` is ``[cohort_size]`` int32, `weight` ``[cohort_size]`` one over the probability of
    taking part, `active` ``[cohort_size]`` bool; the entries that are not active are computed
    (shapes are static) but never summed. `late` ``[cohort_size]`` bool marks the clients whose
    message of the kernel's own phase arrives one round late. `garbage` ``[cohort_size]`` is the
    number that replaces all numbers of a message on its way, or zero for a message that arrives
    unchanged. Both are ``()`` where no message can be late or broken.
    """

    ids: Array
    weight: Array
    active: Array
    late: ArrayTree = ()
    garbage: ArrayTree = ()


class Arrivals(NamedTuple):
    """The two sums that a server makes of a cohort's messages where some arrive a round late.

    Each has the structure of a message; the sum of the late ones waits for the next round.
    """

    now: ArrayTree
    late: ArrayTree


class Cached(NamedTuple):
    """A part of a client's state that follows from what the server broadcast and the client's rows.

    A simulation that computes silent clients too keeps it for them, so that it is computed once;
    a client that was really absent computes the same when it comes back.
    """

    value: ArrayTree


class Exact(NamedTuple):
    """A part of a message that compressors leave alone.

    For a number that the server divides by: a code is unbiased for a sum, not for a quotient.
    """

    value: ArrayTree


class StepInfo(NamedTuple):
    """What a client's step reports.

    `bits` is ``[]`` int32, the size of the code; `gradient_norm` ``[]``, the root mean square
    over the round's gradient calls; `local_positions` the client's iterates, leaves
    ``[num_local_steps, ...]`` (or ``()``); `extra` anything else; `bits_down` ``[]`` int32, what
    had to be sent to the client, where that is not the whole broadcast; `usable` ``[]`` bool, false
    where what the client found was of no use and its message changes nothing (``()`` where that
    cannot be).
    """

    bits: Array
    gradient_norm: Array
    local_positions: ArrayTree = ()
    extra: ArrayTree = ()
    bits_down: ArrayTree = ()
    usable: ArrayTree = ()


class Refined(NamedTuple):
    """What a kernel that refines an approximation reports of a round.

    Attributes
    ----------
    proper
        ``[]`` bool, whether the approximation is a proper density.
    shift
        ``[]``, how far the round moved it: the largest change of a mean in its sds, or of the
        logarithm of an sd; infinite where it is not proper, or was not.
    """

    proper: Array
    shift: Array


class Adjusted(NamedTuple):
    """What a kernel that accepts or rejects proposals (Metropolis-Hastings) reports of a round.

    Attributes
    ----------
    acceptance
        ``[]``, the probability with which the last proposal that came to its end was accepted; one
        before there was any. A round in which none does repeats it.
    whole
        ``[]`` bool, whether every client's message came. If not, nothing changes, and the same is
        asked again.
    adapting
        ``[]`` bool, whether settings still change, so that draws are not yet exact.
    """

    acceptance: Array
    whole: Array
    adapting: Array


class Counts(NamedTuple):
    """How often clients take part in a round: mean and covariance, in closed form.

    A client's message is multiplied by `weight` times its count. The counts' covariance is
    ``diag(own) + sign * outer(common, common)``.

    Attributes
    ----------
    weight, mean, own, common
        ``[num_clients]`` float64.
    sign
        1 or -1.
    active
        ``[num_clients]`` float64, how many messages it sends in a round on average.
    """

    weight: Any
    mean: Any
    own: Any
    common: Any
    sign: float
    active: Any


def as_functions(tree: ArrayTree) -> ArrayTree:
    """Wrap every plain function in `tree` as a `Partial`, so that the tree can enter `jax.jit`.

    A wrapped function is compared by identity: pass the same function object to share a
    compilation.

    Raises
    ------
    TypeError
        If a part of the tree is a dataclass that is not registered.
    """

    def wrap(leaf: Any) -> Any:
        if callable(leaf) and not isinstance(leaf, Array):
            return Partial(leaf)
        if is_dataclass(leaf):
            raise TypeError(
                f"The class {type(leaf).__name__} is not registered with JAX: write "
                f"@fedmcmc.register_dataclass above its @dataclass."
            )
        return leaf

    return jax.tree.map(wrap, tree)


@compiled(static_argnames=("num_axes",))
def mapped(fn: Any, tree: ArrayTree, *, num_axes: int) -> ArrayTree:
    """Return `fn` of every element along the first `num_axes` axes of a tree's leaves.

    Pass what `as_functions` returns, so that calls with one function share a compilation.
    """
    for _ in range(num_axes):
        fn = jax.vmap(fn)
    return fn(tree)
