"""Values that clients, servers and rounds store and exchange: named fields and few methods."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from jax import Array
from jax.tree_util import Partial, register_static

from fedmcmc.types._html import html_table
from fedmcmc.types._pickling import check_picklable
from fedmcmc.types._register import register_dataclass

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
    """Hashable value in the structure of a kernel, not among its numbers."""

    value: T


@register_dataclass
@dataclass(frozen=True)
class PerClient:
    """One entry per client, leaves ``[num_clients, ...]``; `of` returns the entry of a client."""

    values: ArrayTree

    def of(self, client: "Client | Sender") -> ArrayTree:
        """Return the entry of `client`, leaves ``[...]``."""
        return jax.tree.map(lambda leaf: leaf[client.index], self.values)


@register_dataclass
@dataclass(frozen=True)
class Client:
    """Rows of one client, as a step sees them.

    Attributes
    ----------
    rows
        Store of all rows, leaves ``[num_rows_in_store, ...]``. The client owns rows
        ``[start, start + size)`` and reads them only through `fedmcmc.data.fold` and
        `fedmcmc.data.gather`.
    start, size
        ``[]`` int32, first row and number of rows.
    index
        ``[]`` int32, id of the client.
    share
        ``[]``, size divided by the total size; shares sum to one over all clients.
    weight
        ``[]``, one over the probability of taking part in a round; one if all clients take part.
    max_size
        Static bound on `size`: the size of the largest client in the store.
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
    """Client whose code a server decodes; `index` and `weight` are the same as in `Client`."""

    index: Array
    weight: Array


class Federation(NamedTuple):
    """Facts about the clients that a server has before the first round.

    Attributes
    ----------
    num_clients, num_rows
        Number of clients, and number of all their rows.
    sizes
        ``[num_clients]`` int32, number of rows per client.
    rows
        Shapes and types of rows, leaves ``[anything, ...]``; the length of the first axis is
        arbitrary.
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

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Shapes) and self._key() == value._key()

    def __hash__(self) -> int:
        return hash(self._key())


@register_dataclass
@dataclass(frozen=True)
class FederationArgument:
    """`Federation` that a compiled function can take as an argument.

    The sizes of the clients are numbers, and everything else belongs to the structure.
    """

    sizes: Array
    num_clients: int = field(metadata={"static": True})
    num_rows: int = field(metadata={"static": True})
    rows: Shapes = field(metadata={"static": True})

    @classmethod
    def of(cls, federation: Federation) -> "FederationArgument":
        """Return the argument for a federation."""
        num_clients, num_rows, sizes, rows = federation
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), rows)
        return cls(sizes, num_clients, num_rows, Shapes(shapes))

    @property
    def federation(self) -> Federation:
        """The federation."""
        return Federation(self.num_clients, self.num_rows, self.sizes, self.rows.tree)


class LatentSums(NamedTuple):
    """Sums of statistics of many latents.

    Attributes
    ----------
    num_latents
        ``[]``, number of latents.
    total
        Sum of their statistics around the origin.
    origin
        Point near the latents. If latents are far from zero, squares around zero would lose all
        digits.
    rounding
        Bound on the rounding error of each number in `total`. A spread is never set below this
        bound: parameters that depend on a spread of zero could never leave it again.
    """

    num_latents: Array
    total: ArrayTree
    origin: ArrayTree
    rounding: ArrayTree


class Population(NamedTuple):
    """Distribution of groups' latents given shared parameters, as a function of sums of statistics.

    Attributes
    ----------
    statistics_fn
        ``(latent, origin) -> statistics``, a pytree. For a normal latent: its difference from the
        origin, and the square of the difference.
    logdensity_fn
        ``(position, sums) -> []``, sum of the log densities of all latents given the shared
        position, up to a constant, from `LatentSums`.
    draw_fn
        ``(rng_key, position, sums) -> position`` with shared parameters drawn given all latents and
        their prior; ``None`` if a kernel must sample them in another way. Parameters of the rows do
        not change.
    origin_fn
        ``position -> origin``, the expected place of latents given the shared position; ``None`` if
        statistics need no origin, which is then ``()``.
    row_parameters
        For each leaf of a position, true if rows also depend on it given the latents (a slope, a
        residual sd); empty if rows depend on no leaf.
    """

    statistics_fn: Callable[[ArrayTree, ArrayTree], ArrayTree]
    logdensity_fn: Callable[[ArrayTree, LatentSums], Array]
    draw_fn: Callable[[Array, ArrayTree, LatentSums], ArrayTree] | None = None
    origin_fn: Callable[[ArrayTree], ArrayTree] | None = None
    row_parameters: Static[tuple[bool, ...]] | tuple[bool, ...] = Static(())


class Local(NamedTuple):
    """Part of a model that belongs to one group of rows and never leaves the owner of the rows.

    A group is a client, or a part of one if the data define groups, such as a hospital's patients.

    Attributes
    ----------
    logprior_fn
        ``(position, latent) -> []``, log density of one group's latent given the shared position.
    loglikelihood_fn
        ``(position, latents, batch) -> [batch_size]``, one term per row. `latents` has leaves
        ``[batch_size, *event]``, for each row the latent of its group.
    like
        Shapes of one group's latent, unconstrained.
    constrain_fn
        ``(position, latent)`` to the user's parameters of one group.
    population
        `Population` for `fedmcmc.fed_gibbs`; ``None`` if latents have no sufficient statistic.
    prior_spread_fn
        ``rng_key -> dict``, a prior draw of the shared parameters that determine the spread of the
        latents, in the user's space; ``None`` if these parameters are unknown.
    """

    logprior_fn: Callable[[ArrayTree, ArrayTree], Array]
    loglikelihood_fn: Callable[[ArrayTree, ArrayTree, ArrayTree], Array]
    like: Shapes
    constrain_fn: Callable[[ArrayTree, ArrayTree], ArrayTree] | None = None
    population: Population | None = None
    prior_spread_fn: Callable[[Array], dict[str, Array]] | None = None


class ClientTerms:
    """Log likelihood with one term per group of a client instead of one term per row.

    It replaces the ``loglikelihood_fn`` of a `Posterior`; sums over rows become sums over these
    terms. A subclass is a frozen dataclass registered as a pytree.
    """

    def terms(self, position: ArrayTree, client: Client) -> Array:
        """Return the log likelihood of each of the client's groups, ``[max_groups]``.

        Groups that the client does not have are zero.
        """
        raise NotImplementedError

    def present(self, client: Client) -> Array:
        """Return a mask of the groups that the client has, ``[max_groups]`` bool."""
        raise NotImplementedError

    @property
    def passes(self) -> int:
        """Approximate number of passes over the client's rows per evaluation."""
        return 1

    def __call__(self, position: ArrayTree, batch: ArrayTree) -> Array:
        """Raise, because rows have no terms."""
        raise TypeError(
            "This posterior has one term per group of rows and none per row, so minibatches and "
            "other methods that read single rows are impossible. Use all of a client's rows."
        )


class Posterior(NamedTuple):
    """Model with separate log prior and log likelihood, so that it can be federated.

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
        ``rng_key -> position``, a starting position.
    position_fn
        Sampled position to the user's position, for a posterior in other coordinates
        (`fedmcmc.whiten`).
    local
        Latents of each group of rows. Positions are then the shared part only, and
        `loglikelihood_fn` is ``None``; see `fedmcmc.marginal`.

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
        """Names of observed sites, if the model has names (`from_numpyro`); otherwise empty."""
        return str(self._fact("observed", ""))

    @property
    def improper(self) -> tuple[str, ...]:
        """Names of sites with an improper prior, such as a flat one (`from_numpyro`)."""
        return tuple(self._fact("improper", ()))

    @property
    def is_traced(self) -> bool:
        """True if `improper` is known, as for a NumPyro model."""
        return self._fact("improper", None) is not None

    @property
    def model_path(self) -> str:
        """Module and name of the model (`from_numpyro`): ``"study.models:two_arms"``."""
        return str(self._fact("model_path", ""))

    @property
    def unmarked_local(self) -> tuple[str, ...]:
        """Names of shared sites that have the prior of a group's effect (`from_numpyro`)."""
        return tuple(self._fact("unmarked_local", ()))

    def _fact(self, name: str, default: object) -> Any:
        """Return an attribute that the model's builder set on the prior, also inside wrappers."""
        fn: Any = self.logprior_fn
        while fn is not None and not hasattr(fn, name):
            fn = getattr(fn, "func", getattr(fn, "fn", None))
        return default if fn is None else getattr(fn, name)

    @property
    def no_resample_reason(self) -> str:
        """Clause with the reason why `from_numpyro` made no `resample_fn`; empty if unknown."""
        return getattr(
            getattr(self.logprior_fn, "func", self.logprior_fn), "no_resample_reason", ""
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Return constructor and fields, or raise `pickle.PicklingError` that names a function."""
        for name, fn in zip(self._fields, self, strict=True):
            check_picklable(fn, f"The posterior's {name}")
        return Posterior, tuple(self)

    def __copy__(self) -> "Posterior":
        """Return the posterior itself, which is immutable."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Posterior":
        """Return the posterior itself, which is immutable."""
        return self

    def __repr__(self) -> str:
        """Return the names of sites, if the model has names, and the names of its functions."""
        sites = "".join(f"{scope}: {names}; " for scope, names in self._sites().items())
        return f"Posterior({sites}{self._field_names()})"

    def _repr_html_(self) -> str:
        """Return the representation for notebooks, as a table."""
        return html_table("Posterior", {**self._sites(), "functions": self._field_names()})

    def _sites(self) -> dict[str, str]:
        """Return descriptions of shared and local sites, if the model's sites have names."""
        functions = {
            "shared by all clients": self.logprior_fn,
            "one per group": self.local and self.local.logprior_fn,
        }
        # `from_numpyro` sets the attribute.
        sites = {scope: getattr(fn, "sites", None) for scope, fn in functions.items()}
        return {scope: names for scope, names in sites.items() if names is not None}

    def _field_names(self) -> str:
        """Return the names of the fields that are set."""
        fields = zip(self._fields, self, strict=True)
        return ", ".join(name for name, fn in fields if fn is not None)


class Broadcast(NamedTuple):
    """Values that a server sends to a client.

    Attributes
    ----------
    round
        ``[]`` int32, number of the round.
    position
        Position of the chain or of the approximation.
    extra
        Other values of a kernel family, such as a snapshot or a cavity.
    shared
        Draws that all clients share, from one common key; ``()`` between rounds.
    summed
        Sum of an earlier phase of the round; ``()`` between rounds.
    """

    round: Array
    position: ArrayTree
    extra: ArrayTree = ()
    shared: ArrayTree = ()
    summed: ArrayTree = ()


class FederatedState(NamedTuple):
    """State of one chain.

    `broadcast` is sent to every client, `server` stays at the server, and `clients` has leaves
    ``[num_clients, ...]``, or is ``()`` for kernels whose clients have no state.
    """

    broadcast: Broadcast
    server: ArrayTree
    clients: ArrayTree


class Cohort(NamedTuple):
    """Clients that are computed in one round, and whether they take part.

    Attributes
    ----------
    ids
        ``[cohort_size]`` int32, ids of the clients.
    weight
        ``[cohort_size]``, one over the probability of taking part.
    active
        ``[cohort_size]`` bool; inactive entries are computed (shapes are static) but never summed.
    late
        ``[cohort_size]`` bool, true for clients whose message of the kernel's own phase arrives one
        round late; ``()`` if no message can be late.
    garbage
        ``[cohort_size]``, number that replaces all numbers of a message on its way, or zero for an
        intact message; ``()`` if no message can break.
    """

    ids: Array
    weight: Array
    active: Array
    late: ArrayTree = ()
    garbage: ArrayTree = ()


class Arrivals(NamedTuple):
    """Sums of a cohort's messages that arrive now and of messages that arrive one round late.

    Each has the structure of a message; the late sum waits for the next round.
    """

    now: ArrayTree
    late: ArrayTree


class RecomputableState(NamedTuple):
    """Part of a client's state that the broadcast and the client's rows determine.

    A simulation keeps it for clients that do not take part in a round, to compute it only once. A
    real client computes the same value when it takes part again.
    """

    value: ArrayTree


class Uncompressed(NamedTuple):
    """Part of a message that is sent without compression.

    It is for numbers by which the server divides: a code is unbiased for a sum, not for a quotient.
    """

    value: ArrayTree


class StepInfo(NamedTuple):
    """Report of a client's step.

    Attributes
    ----------
    bits
        ``[]`` int32, size of the code.
    gradient_norm
        ``[]``, root mean square over the round's gradient calls.
    local_positions
        Iterates of the client, leaves ``[num_local_steps, ...]``, or ``()``.
    extra
        Any other values.
    bits_down
        ``[]`` int32, size of the values sent to the client, if not the complete broadcast.
    usable
        ``[]`` bool, false if the client's result is unusable and its message changes nothing;
        ``()`` if this cannot happen.
    """

    bits: Array
    gradient_norm: Array
    local_positions: ArrayTree = ()
    extra: ArrayTree = ()
    bits_down: ArrayTree = ()
    usable: ArrayTree = ()


class ApproximationReport(NamedTuple):
    """Round report of a kernel that refines an approximation.

    Attributes
    ----------
    proper
        ``[]`` bool, true if the approximation is a proper density.
    shift
        ``[]``, size of the round's change: the largest change of a mean in its sds, or of the
        logarithm of an sd; infinite if the approximation is or was not proper.
    """

    proper: Array
    shift: Array


class MetropolisReport(NamedTuple):
    """Round report of a kernel that accepts or rejects proposals (Metropolis-Hastings).

    Attributes
    ----------
    acceptance
        ``[]``, acceptance probability of the last complete proposal; one before the first. A round
        without a complete proposal repeats it.
    whole
        ``[]`` bool, true if the messages of all clients arrived. If false, nothing changes, and the
        next round repeats the question.
    adapting
        ``[]`` bool, true while settings still change, so that draws are not yet exact.
    """

    acceptance: Array
    whole: Array
    adapting: Array


class ParticipationMoments(NamedTuple):
    """Participation counts of the clients in a round: mean and covariance, in closed form.

    A client's message is multiplied by `weight` times its count. The covariance of the counts is
    ``diag(own) + sign * outer(common, common)``.

    Attributes
    ----------
    weight, mean, own, common
        ``[num_clients]`` float64.
    sign
        1 or -1.
    active
        ``[num_clients]`` float64, mean number of messages per round.
    """

    weight: ArrayTree
    mean: ArrayTree
    own: ArrayTree
    common: ArrayTree
    sign: float
    active: ArrayTree


def as_functions(tree: ArrayTree) -> ArrayTree:
    """Wrap every plain function in `tree` as a `Partial`, so that the tree can enter `jax.jit`.

    Wrapped functions are compared by identity: pass the same function object to share a
    compilation.

    Raises
    ------
    TypeError
        If a part of the tree is a dataclass that is not registered.
    """

    def wrap(leaf: Array) -> Any:
        if callable(leaf) and not isinstance(leaf, Array):
            return Partial(leaf)
        if is_dataclass(leaf):
            raise TypeError(
                f"The class {type(leaf).__name__} is not registered with JAX: write "
                f"@fedmcmc.types.register_dataclass above its @dataclass."
            )
        return leaf

    return jax.tree.map(wrap, tree)


def bound(fn: Callable[..., Any]) -> Any:
    """Return a function as a `Partial` whose arrays are arguments of a compiled program.

    A program contains arrays in a function's closure as constants, so that it serves these arrays
    only. A function with the attribute `as_partial` provides the `Partial` itself.
    """
    inner = fn.func if isinstance(fn, Partial) else fn
    return as_functions(getattr(inner, "as_partial", fn))
