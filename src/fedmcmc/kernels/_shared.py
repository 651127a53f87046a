"""Base classes and checks of several kernel families."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from fedmcmc._checks import expect
from fedmcmc.dynamics import (
    IDENTITY,
    Metric,
    Trained,
    Training,
    Visitor,
    overdamped_langevin,
    train,
)
from fedmcmc.gradients import (
    FullGradient,
    Minibatch,
    first_reference,
    has_augmented_data,
    next_broadcast,
    over,
    prior_share,
    refuse_latents,
    without_augmented,
)
from fedmcmc.pytrees import schedules, trees
from fedmcmc.random import normals, realize_normals
from fedmcmc.types import (
    ArrayTree,
    Broadcast,
    Client,
    ClientTerms,
    FederatedKernel,
    Federation,
    GradientEstimator,
    Number,
    Participation,
    Phase,
    Posterior,
    StepInfo,
    Traits,
    as_functions,
    compiled,
    register_dataclass,
)

PROBE_ROWS = 11
"""Number of rows in the check of a model's shapes; unlikely to equal an axis of a position."""
PROBE_CALLS = 7
"""Number of calls in the check of an estimator's draws."""

Kernel = TypeVar("Kernel", bound=FederatedKernel)
Gradient = Callable[[ArrayTree, ArrayTree], ArrayTree]
"""``(draws of a call, position) -> gradient``."""


def name_of(kernel: Kernel, rule: Callable[[Kernel], str]) -> str:
    """Return `rule` of the kernel, as ``augment(...)`` if its minibatches are transformed."""
    if not has_augmented_data(kernel):
        return rule(kernel)
    return f"augment({rule(without_augmented(kernel))})"


def is_plain(estimator: GradientEstimator) -> bool:
    """Return whether an estimator uses all rows or minibatches, without a correction."""
    return isinstance(estimator, FullGradient | Minibatch)


@dataclass(frozen=True, eq=False, repr=False)
class EstimatorKernel(FederatedKernel):
    """Base class of kernels whose clients estimate gradients of their log likelihoods.

    It checks the model, initializes the estimator of every client, and broadcasts the estimator's
    reference. A subclass defines `step`, `aggregate` and, if it samples, `target`;
    ``docs/guides/extend.md`` has a complete example.

    Attributes
    ----------
    posterior
        The model.
    estimator
        Gradient estimator for a client's log likelihood.
    participation
        Rule that chooses who takes part in a round.
    """

    posterior: Posterior
    estimator: GradientEstimator
    participation: Participation

    @property
    def name(self) -> str:
        return name_of(self, lambda kernel: kernel.base_name)

    @property
    def base_name(self) -> str:
        """Name of the kernel without transforms of its minibatches."""
        return type(self).__name__

    @property
    def averages_local_moves(self) -> bool:
        """If true, the kernel averages local moves of clients, as `scaffold` needs."""
        return False

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Phases of a round: a sum over clients if the estimator needs it, and the kernel."""
        estimator = self.estimator
        if not estimator.needs_sum:
            return (self,)
        return SumOverClients(self.posterior, estimator), self

    def server_init(
        self,
        rng_key: Array,
        position: ArrayTree,
        federation: Federation,
        totals: tuple[ArrayTree, ...],
    ) -> tuple[Broadcast, ArrayTree]:
        estimator = self.estimator
        if estimator.needs_sum and not self.averages_local_moves:
            raise ValueError(
                "This estimator needs the sum of all clients' gradients before each round "
                "(scaffold): use a kernel that averages local moves of clients, such as "
                "fedmcmc.averaging."
            )
        if estimator.needs_sum and (self.participation.cohort_size or self.participation.may_drop):
            # The sum of gradients and the weights depend on the same random cohort, so the mean of
            # their product is not the product of their means.
            raise ValueError(
                "Control variates (scaffold) need the gradients of all clients, or they bias the "
                "mean: use full participation."
            )
        self.participation.check(federation.num_clients)
        position = trees.as_floats(position, "position")
        check_model(self.posterior, position, federation)
        estimator.check(position, federation)
        _check_prepare(estimator, position, federation)
        reference = first_reference(estimator, position)
        broadcast = Broadcast(jnp.zeros((), jnp.int32), position, reference)
        return broadcast, self.init_server_state(position, federation, totals)

    def init_server_state(
        self, position: ArrayTree, federation: Federation, totals: tuple[ArrayTree, ...]
    ) -> ArrayTree:
        """Return the server's first state after the checks of the family."""
        return ()

    def client_init(self, broadcast: Broadcast, client: Client) -> ArrayTree:
        return self.estimator.init(self.posterior.loglikelihood_fn, broadcast.position, client)

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        """Return the random numbers of one call of the estimator."""
        draws = self.estimator.prepare(rng_key, like.position, client, 1)
        return jax.tree.map(lambda leaf: leaf[0], draws)

    def begin(
        self, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[Gradient, ArrayTree, Array]:
        """Start the estimator in a client's round.

        Returns
        -------
        estimate
            ``(draws, position) -> gradient`` of the client's log likelihood.
        client_state
            The estimator's new state.
        bits_down
            ``[]`` int32, bits sent to the client: position, sums, and reference if it is new.
        """
        estimator, loglikelihood_fn = self.estimator, self.posterior.loglikelihood_fn
        sent = trees.num_bits(broadcast.position) + trees.num_bits(broadcast.summed)
        down = jnp.asarray(sent, jnp.int32)
        if estimator.reference is not None:
            missing = estimator.reference.missing(broadcast, client_state)
            reference_bits = jnp.where(missing, trees.num_bits(broadcast.extra), 0)
            down = (down + reference_bits).astype(jnp.int32)
        context, client_state = estimator.start(loglikelihood_fn, broadcast, client_state, client)

        def estimate(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
            gradient = estimator.estimate(loglikelihood_fn, drawn, position, context, client)
            if not trees.same_shapes(gradient, position):
                raise ValueError(
                    f"{type(estimator).__name__}.estimate must return a gradient with the shapes "
                    f"of the position, {jax.tree.map(jnp.shape, position)}, got "
                    f"{jax.tree.map(jnp.shape, gradient)} (docs/guides/extend.md)."
                )
            return gradient

        return estimate, client_state, down

    def next_broadcast(self, broadcast: Broadcast, position: ArrayTree) -> Broadcast:
        """Return the broadcast of the next round at the server's new position."""
        return next_broadcast(self.estimator.reference, broadcast, position)


class TemperedKernel(EstimatorKernel):
    """Sampler at a `temperature`, a field of every subclass."""

    temperature: Number

    traits = Traits(
        no_target_reason="its temperature is a schedule or zero, so its draws follow no single "
        "posterior"
    )

    @property
    def target(self) -> Posterior | None:
        return tempered(self.posterior, self.temperature)


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class SumOverClients(Phase):
    """Phase that computes the estimator's sum over clients, `Broadcast.summed`."""

    posterior: Posterior
    estimator: GradientEstimator

    def step(
        self, draws: ArrayTree, broadcast: Broadcast, client_state: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree, StepInfo]:
        message = self.estimator.summed(self.posterior.loglikelihood_fn, broadcast, client)
        # The bits of the position are counted in the phase of the kernel.
        info = report(message, trees.squared_norm(message), bits_down=jnp.zeros((), jnp.int32))
        return message, client_state, info

    def aggregate(
        self, rng_key: ArrayTree, broadcast: Broadcast, server_state: ArrayTree, total: ArrayTree
    ) -> tuple[Broadcast, ArrayTree, ArrayTree]:
        return broadcast._replace(summed=total), server_state, ()


class ClientDraws(NamedTuple):
    """Random numbers of a client's local Langevin steps."""

    noise: ArrayTree  # leaves [num_local_steps, *event], or keys [num_local_steps]
    gradient: ArrayTree  # leaves [num_local_steps, ...]


class LocalLangevin(TemperedKernel):
    """Kernel whose clients take `num_local_steps` Langevin steps, a field of every subclass."""

    num_local_steps: int

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ClientDraws:
        noise_key, gradient_key = jax.random.split(rng_key)
        num = self.num_local_steps
        return ClientDraws(
            normals(noise_key, like.position, num),
            self.estimator.prepare(gradient_key, like.position, client, num),
        )

    def move(
        self,
        gradient_fn: Gradient,
        draws: ClientDraws,
        position: ArrayTree,
        step_size: Array,
        temperature: Array,
        metric: Metric = IDENTITY,
        count: Array | None = None,
        noise_fn: Callable[[ArrayTree, ArrayTree], ArrayTree] = realize_normals,
    ) -> tuple[ArrayTree, Array, ArrayTree]:
        """Return the end of a client's steps, the mean square of its gradients, and all iterates.

        ``noise_fn(noise, position)`` returns the standard normals of a step from its entry of
        ``draws.noise``. With `count` the client takes only this number of steps.
        """

        def local_step(
            carry: tuple[ArrayTree, Array], drawn: ClientDraws
        ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
            position, squared_norm = carry
            gradient = gradient_fn(drawn.gradient, position)
            noise = noise_fn(drawn.noise, position)
            position = overdamped_langevin(
                position, gradient, noise, step_size, temperature, metric
            )
            return (position, squared_norm + trees.squared_norm(gradient)), position

        num_active = 0 if count is None else count

        def step_if_active(
            carry: tuple[ArrayTree, Array], drawn: tuple[Array, ClientDraws]
        ) -> tuple[tuple[ArrayTree, Array], ArrayTree]:
            moved = jax.lax.cond(
                drawn[0] < num_active, lambda c: local_step(c, drawn[1])[0], lambda c: c, carry
            )
            return moved, moved[0]

        num, start = self.num_local_steps, (position, jnp.zeros((), jnp.float32))
        if count is None:
            (end, squared_norm), iterates = jax.lax.scan(local_step, start, draws, length=num)
            return end, squared_norm / num, iterates
        numbered = (jnp.arange(num), draws)
        (end, squared_norm), iterates = jax.lax.scan(step_if_active, start, numbered, length=num)
        return end, squared_norm / count, iterates


class LocalTraining(EstimatorKernel):
    """Kernel whose clients train models by `training`, a field of every subclass.

    The loss is minus the mean over the client's rows of the log likelihood and of its share of the
    log prior (``log prior / num_rows``, the same for all).
    """

    training: Training

    traits = Traits(
        has_local_steps=True,
        no_target_reason="it trains models and does not sample from the posterior",
    )

    def prepare(self, rng_key: Array, like: Broadcast, client: Client) -> ArrayTree:
        num = self.training.length.max_steps(client)
        return self.estimator.prepare(rng_key, like.position, client, num)

    def train(
        self,
        draws: ArrayTree,
        broadcast: Broadcast,
        client_state: ArrayTree,
        client: Client,
        visitor: Visitor | None = None,
    ) -> tuple[Trained, ArrayTree, Array]:
        """Return the result of training, the estimator's new state and the bits sent down."""
        estimate, client_state, down = self.begin(broadcast, client_state, client)
        per_row = -1 / client.size.astype(client.share.dtype)

        def gradient_fn(drawn: ArrayTree, position: ArrayTree) -> ArrayTree:
            gradient = estimate(drawn, position)
            prior = prior_share(client, jax.grad(self.posterior.logprior_fn)(position))
            return trees.scale(per_row, trees.add(gradient, prior))

        position, round_ = broadcast.position, broadcast.round
        trained = train(self.training, gradient_fn, draws, position, client, round_, visitor)
        return trained, client_state, down


def tempered(posterior: Posterior, temperature: Number) -> Posterior | None:
    """Return the posterior at a temperature; ``None`` if the temperature is a schedule or zero."""
    if not isinstance(temperature, Array) or isinstance(temperature, jax.core.Tracer):
        return None  # a schedule, or traced
    if temperature == 1 or temperature <= 0:
        return posterior if temperature == 1 else None
    return as_functions(
        posterior._replace(
            logprior_fn=over(posterior.logprior_fn, temperature),
            loglikelihood_fn=over(posterior.loglikelihood_fn, temperature),
        )
    )


def as_constant(value: Number, name: str, *, strict: bool = True) -> Array:
    """Return a positive number (from zero if not `strict`) as an array, and reject schedules."""
    number: Array = schedules.number(value, name, minimum=0.0, strict=strict)
    if isinstance(number, schedules.Scheduled):
        raise TypeError(f"{name} must be a number, not a schedule.")
    return number


def report(message: ArrayTree, mean_square: Array, **fields: ArrayTree) -> StepInfo:
    """Return the report of a step with this mean square of its gradients."""
    return StepInfo(
        bits=jnp.asarray(trees.num_bits(message), jnp.int32),
        gradient_norm=jnp.sqrt(mean_square),
        **fields,
    )


def expect_blocks(
    posterior: Posterior, estimator: GradientEstimator, participation: Participation
) -> None:
    """Raise unless posterior, estimator and participation fit a kernel family."""
    expect(posterior, Posterior, "posterior")
    refuse_latents(posterior)
    expect(estimator, GradientEstimator, "estimator")
    expect(participation, Participation, "participation")
    if participation.pooled and isinstance(posterior.loglikelihood_fn, ClientTerms):
        raise ValueError("Pooled rows have no groups: run a federated kernel on all clients.")


def check_model(posterior: Posterior, position: ArrayTree, federation: Federation) -> None:
    """Raise `ValueError` unless the log densities accept this position and these rows."""
    refuse_latents(posterior)
    like, rows = trees.shapes_of(position), _probe_rows(federation)
    shape = shape_of("logprior_fn", posterior.logprior_fn, like)
    if shape != ():
        raise ValueError(f"logprior_fn must return a scalar, got shape {shape}.")
    if isinstance(posterior.loglikelihood_fn, ClientTerms):
        shape_of("loglikelihood_fn", _Probe(posterior.loglikelihood_fn), like, rows)
        return
    shape = shape_of("loglikelihood_fn", posterior.loglikelihood_fn, like, rows)
    if shape != (PROBE_ROWS,):
        raise ValueError(
            f"loglikelihood_fn must return one term per row, shape ({PROBE_ROWS},) for "
            f"{PROBE_ROWS} rows, got {shape}."
        )


@register_dataclass
@dataclass(frozen=True, eq=False)
class _Probe:
    """Terms of a client as a function of position and rows."""

    loglikelihood_fn: ClientTerms

    def __call__(self, position: ArrayTree, rows: ArrayTree) -> Array:
        return self.loglikelihood_fn.terms(position, _probe_client(rows))


def _probe_rows(federation: Federation) -> ArrayTree:
    """Return the shapes of `PROBE_ROWS` rows."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((PROBE_ROWS, *leaf.shape[1:]), leaf.dtype),
        federation.rows,
    )


def _probe_client(rows: ArrayTree) -> Client:
    zero, unit = jnp.zeros((), jnp.int32), jnp.ones((), jnp.result_type(float))
    return Client(rows, zero, zero + PROBE_ROWS, zero, unit, unit, PROBE_ROWS)


def _check_prepare(
    estimator: GradientEstimator, position: ArrayTree, federation: Federation
) -> None:
    """Raise `ValueError` unless the draws of an estimator have an axis of calls."""
    like = trees.shapes_of(position)

    def prepare(rows: ArrayTree) -> ArrayTree:
        return estimator.prepare(jax.random.key(0), like, _probe_client(rows), PROBE_CALLS)

    shapes = [
        leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(prepare, _probe_rows(federation)))
    ]
    if any(shape[:1] != (PROBE_CALLS,) for shape in shapes):
        raise ValueError(
            f"{type(estimator).__name__}.prepare must return draws with a first axis of length "
            f"num_calls: for num_calls={PROBE_CALLS}, got the shapes {shapes} "
            "(docs/guides/extend.md)."
        )


@compiled
def _call(fn: Callable[..., ArrayTree], *arguments: ArrayTree) -> Any:
    return fn(*arguments)


def shape_of(name: str, fn: Callable[..., ArrayTree], position: ArrayTree, *rows: ArrayTree) -> Any:
    """Return the shape of ``fn(position, *rows)``, or raise `ValueError` with the cause."""
    try:
        # `as_functions` makes the trace reusable by other kernels of the same model.
        return _call.trace(as_functions(fn), position, *rows).out_info.shape
    except Exception as error:
        description = f"a position of shapes {jax.tree.map(lambda x: x.shape, position)}"
        for leaves in rows:
            description += f" and rows of shapes {jax.tree.map(lambda x: x.shape, leaves)}"
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{name} does not take {description}: {reason}") from error
