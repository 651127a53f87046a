"""Federated kernels under `numpyro.infer.MCMC`, with one round of communication per MCMC step."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.infer.util
from jax import Array
from numpyro.infer.mcmc import MCMCKernel

from fedmcmc.data import FederatedData
from fedmcmc.diagnostics import Diagnosis, SamplingWarning, diagnose
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import has_augmented_data
from fedmcmc.interop._numpyro_model import from_numpyro
from fedmcmc.interop._numpyro_trace import call_model
from fedmcmc.pytrees import trees
from fedmcmc.random import as_key, as_keys, draw_key
from fedmcmc.rounds import RoundInfo, simulate
from fedmcmc.tuning import predict_bias
from fedmcmc.types import (
    ArrayTree,
    FederatedKernel,
    FederatedState,
    Posterior,
    as_functions,
)


class FederatedMCMCState(NamedTuple):
    """State of one chain; with vectorized chains each leaf has a leading chain axis.

    Attributes
    ----------
    i
        ``[]`` int32, number of rounds that have run.
    z
        Draw, a dict of unconstrained latent sites.
    federated
        `FederatedState` of the kernel.
    num_active, bits_up, bits_down, gradient_norm
        ``[]``, fields of the last round's `fedmcmc.rounds.RoundInfo`.
    diverging
        ``[]`` bool, true if the draw is not finite. Later draws are not finite either: the step
        size is too large (`fedmcmc.sample` stops there).
    rng_key
        Key of the chain. It does not change, since the random numbers of a round are a function of
        the key and the round.
    """

    i: Array
    z: ArrayTree
    federated: FederatedState
    num_active: Array
    bits_up: Array
    bits_down: Array
    gradient_norm: Array
    diverging: Array
    rng_key: Array


def _federated_data(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> FederatedData:
    """Return the argument of ``MCMC.run``, or raise if it is not a single `FederatedData`."""
    if len(args) != 1 or kwargs or not isinstance(args[0], FederatedData):
        arguments = [type(arg).__name__ for arg in args] + [f"{name}=" for name in kwargs or {}]
        raise ValueError(
            f"run(rng_key, data) takes one FederatedData and nothing else, got {arguments}. "
            f"Bind other arguments of the model with functools.partial."
        )
    return args[0]


def _extra_fields(info: RoundInfo) -> tuple[Array, Array, Array, Array]:
    return info.num_active, info.bits_up, info.bits_down, info.gradient_norm


def _warn_diverged(num_rounds: Array) -> None:
    warnings.warn(
        f"A chain turned non-finite in round {int(num_rounds) - 1}: the step size is too large, "
        "or a log density is not finite there. All later draws of the chain are useless (extra "
        "field 'diverging').",
        RuntimeWarning,
        stacklevel=2,
    )


class FederatedMCMCKernel(MCMCKernel):
    """Federated kernel on a NumPyro model for `numpyro.infer.MCMC`.

    ``MCMC(FederatedMCMCKernel(...), ...).run(rng_key, data)`` takes one `FederatedData`. Draws,
    extra fields, `print_summary`, resumption and `numpyro.infer.Predictive` work as for NumPyro's
    kernels. Chains are ``"vectorized"`` or ``"sequential"``, with the draws of `fedmcmc.sample`.
    Warm-up rounds adapt nothing. ``diverging`` marks draws that are not finite. Call `diagnose` to
    check the draws.

    Parameters
    ----------
    model, example, init_radius, check_rows
        See `fedmcmc.from_numpyro`; by default, `example` is the rows of client 0.
    kernel_fn
        ``Posterior -> FederatedKernel``.
    surrogates
        One Gaussian per client over the unconstrained sites, to predict the bias of the run.

    Raises
    ------
    ValueError
        From `init`, if `fedmcmc.from_numpyro` or the kernel raises, or arguments do not fit.

    Examples
    --------
    >>> import fedmcmc, jax, numpy as np, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     mean = numpyro.sample("mean", dist.Normal(0, 10))
    ...     with numpyro.plate("rows", x.shape[0]):
    ...         numpyro.sample("x", dist.Normal(mean, 1), obs=x)
    >>> kernel = FederatedMCMCKernel(model, lambda p: fedmcmc.lsd(p, step_size=0.01))
    >>> mcmc = numpyro.infer.MCMC(kernel, num_warmup=10, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(5)]))
    >>> mcmc.get_samples()["mean"].shape
    (20,)
    """

    sample_field = "z"
    default_fields = ("z", "num_active", "bits_up", "bits_down", "gradient_norm", "diverging")

    def __init__(
        self,
        model: Callable[..., Any],
        kernel_fn: Callable[[Posterior], FederatedKernel],
        *,
        example: ArrayTree | FederatedData | None = None,
        init_radius: float = 2.0,
        check_rows: bool = True,
        surrogates: Gaussian | None = None,
    ) -> None:
        self._surrogates = surrogates
        self._model = model
        self._kernel_fn = kernel_fn
        self._example = example
        self._options: dict[str, Any] = dict(init_radius=init_radius, check_rows=check_rows)
        self._structure: Any = None
        self._posterior: Posterior | None = None
        self._kernel: FederatedKernel | None = None
        self._sample_fn: Callable[..., FederatedMCMCState] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the functions built from the model, which cannot be pickled."""
        built = dict.fromkeys(("_structure", "_posterior", "_kernel", "_sample_fn"))
        return {**self.__dict__, **built}

    def model(self, *args: ArrayTree, **kwargs: ArrayTree) -> Any:
        """Run the model on the pooled rows of a `FederatedData`, or on plain arguments.

        ArviZ and `numpyro.infer.Predictive` trace it with the arguments of ``run``.
        """
        if len(args) == 1 and not kwargs and isinstance(args[0], FederatedData):
            return call_model(self._model, args[0].rows)
        return self._model(*args, **kwargs)

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: ArrayTree | None,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> FederatedMCMCState:
        """Return the state of a chain, or of a batch of chains for a batch of keys."""
        del num_warmup
        data = _federated_data(model_args, model_kwargs)
        self._prepare(data)
        if self._surrogates is not None and not isinstance(rng_key, jax.core.Tracer):
            predicted = predict_bias(self._built()[1], data, self._surrogates)
            if predicted.is_biased:
                warnings.warn(str(predicted), SamplingWarning, stacklevel=2)
        if as_keys(rng_key).ndim == 0:
            return self._start(rng_key, init_params, data)
        start = jax.vmap(self._start, in_axes=(0, None if init_params is None else 0, None))
        return start(rng_key, init_params, data)

    def _prepare(self, data: FederatedData) -> None:
        """Build the posterior and the kernel if the structure of the rows has changed."""
        structure = (
            jax.tree.structure(data.rows),
            [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(data.rows)],
        )
        if self._posterior is None or structure != self._structure:
            example = data if self._example is None else self._example
            self._posterior = from_numpyro(self._model, example=example, **self._options)
            self._kernel = as_functions(self._kernel_fn(self._posterior))
            if self._posterior.position_fn is not None:
                raise ValueError(
                    "numpyro.infer.MCMC needs positions of the model, so it cannot run a kernel "
                    "on a whitened posterior: use fedmcmc.sample."
                )
            self._structure = structure
        self._sample_fn = self._step  # NumPyro initializes a kernel again if this is None

    def _start(
        self, rng_key: Array, init_params: ArrayTree | None, data: FederatedData
    ) -> FederatedMCMCState:
        posterior, kernel = self._built()
        # The same random streams as in `fedmcmc.sample`.
        place_key, init_key = (
            draw_key(as_key(rng_key), jnp.uint32(2**32 - 1 - i)) for i in range(2)
        )
        init_fn = posterior.init_fn
        assert init_fn is not None
        if init_params is None:
            position = init_fn(place_key)
        else:
            like = jax.eval_shape(init_fn, place_key)
            shapes, expected = (jax.tree.map(jnp.shape, tree) for tree in (init_params, like))
            if shapes != expected:
                raise ValueError(
                    f"init_params must hold the unconstrained latent sites of a chain, with shapes "
                    f"{expected}; got {shapes}."
                )
            position = jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), init_params, like)
        state = simulate(kernel, data).init(position, init_key)
        # No round has run yet: the fields are zeros with the dtypes of the next round.
        info = jax.eval_shape(simulate(kernel, data).step, as_key(rng_key), state)[1]
        num_active, bits_up, bits_down, gradient_norm = (
            jnp.zeros((), field.dtype) for field in _extra_fields(info)
        )
        return FederatedMCMCState(
            jnp.zeros((), jnp.int32),
            position,
            state,
            num_active,
            bits_up,
            bits_down,
            gradient_norm,
            diverging=~trees.all_finite(position),
            rng_key=rng_key,
        )

    def sample(
        self,
        state: FederatedMCMCState,
        model_args: tuple[Any, ...],
        model_kwargs: dict[str, Any] | None,
    ) -> FederatedMCMCState:
        """Run one round of communication."""
        return self._step(state, _federated_data(model_args, model_kwargs))

    def _step(self, state: FederatedMCMCState, data: FederatedData) -> FederatedMCMCState:
        if state.i.ndim == 0:
            moved = self._round(state.i, state, data)
        else:
            # All chains are in the same round. A round without a chain axis keeps conditions on the
            # round unbatched, so that only one branch runs.
            moved = jax.vmap(lambda chain: self._round(state.i[0], chain, data))(state)
        # One condition for all chains, so that rounds without a warning have no callback.
        has_diverged = jnp.any(moved.diverging & ~state.diverging)
        num_rounds = jnp.max(moved.i)
        jax.lax.cond(
            has_diverged,
            lambda i: jax.debug.callback(_warn_diverged, i),
            lambda i: None,
            num_rounds,
        )
        return moved

    def _round(
        self, round_: Array, state: FederatedMCMCState, data: FederatedData
    ) -> FederatedMCMCState:
        kernel = self._built()[1]
        key = as_key(state.rng_key)
        broadcast = state.federated.broadcast._replace(round=round_)
        federated, info = simulate(kernel, data).step(
            key, state.federated._replace(broadcast=broadcast)
        )
        draw = kernel.draw(draw_key(key, round_), federated)
        return FederatedMCMCState(
            round_ + 1,
            draw,
            federated,
            *_extra_fields(info),
            diverging=~trees.all_finite(draw),
            rng_key=state.rng_key,
        )

    def _built(self) -> tuple[Posterior, FederatedKernel]:
        if self._posterior is None or self._kernel is None:
            raise RuntimeError("FederatedMCMCKernel.init must be called before this method.")
        return self._posterior, self._kernel

    def diagnose(self, samples: dict[str, Any], data: FederatedData) -> Diagnosis:
        """Check the draws of a run with the checks of `fedmcmc.sample`.

        Parameters
        ----------
        samples
            Draws ``mcmc.get_samples(group_by_chain=True)``.
        data
            Data of the run.

        Returns
        -------
        fedmcmc.diagnostics.Diagnosis
            Diagnosis in unconstrained coordinates; ``print`` shows it.

        Raises
        ------
        ValueError
            If draws are not grouped by chain.
        """
        self._prepare(data)
        posterior, kernel = self._built()
        assert posterior.init_fn is not None
        like = jax.eval_shape(posterior.init_fn, jax.random.key(0))
        latent = {name: jnp.asarray(samples[name]) for name in like}
        any_row = jax.tree.map(lambda leaf: leaf[:1], data.rows)

        def unconstrained(sites: dict[str, Array]) -> ArrayTree:
            model = partial(call_model, self._model)
            return numpyro.infer.util.unconstrain_fn(model, (any_row,), {}, sites)

        site = next(iter(like))
        if latent[site].ndim != like[site].ndim + 2:
            raise ValueError(
                f"samples must have axes for chains and draws, got shape {latent[site].shape} for "
                f"{site!r}: pass mcmc.get_samples(group_by_chain=True)."
            )
        draws = jax.tree.map(np.asarray, jax.jit(jax.vmap(jax.vmap(unconstrained)))(latent))
        return diagnose(
            draws,
            kernel.target,
            data,
            approximates=kernel.traits.approximates,
            transforms=has_augmented_data(kernel),
        )

    def postprocess_fn(
        self, model_args: tuple[Any, ...], model_kwargs: dict[str, Any] | None
    ) -> Callable[[ArrayTree], ArrayTree]:
        """Return the map from unconstrained draws to latent and row-free deterministic sites."""
        del model_args, model_kwargs
        return self._built()[0].constrain_fn  # type: ignore[return-value]

    def get_diagnostics_str(self, state: FederatedMCMCState) -> str:
        """Describe the last round for the progress bar."""
        return (
            f"|gradient| {float(state.gradient_norm):.2e}, {int(state.num_active)} active, "
            f"{int(state.bits_up)} bits up"
        )
