"""Inference for clients that keep latents of their groups.

A chain moves position and latents in turn, on likelihood times cavity. The gradient of the site's
logarithm is the linear regression of the client's gradients on the chain's positions. By Stein's
identity, the product of this site and the cavity has the tilted mean and covariance. For a Gaussian
likelihood, only the latents add noise to this site. The inverse of a sample covariance would have
the noise of the whole posterior.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import expect, positive_integer
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_gaussian, minus_hessian
from fedmcmc.hierarchy import (
    Groups,
    LatentState,
    Refresh,
    RefreshInput,
    find_modes,
    groups_of,
    independence,
    initial_latent_state,
    marginal,
)
from fedmcmc.inference._tilted import TiltedDensity
from fedmcmc.inference._types import Inference, LatentInference, Tilted
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import ArrayTree, Client, Federation, Posterior, register_dataclass

NUM_NEWTON_STEPS = 6
"""Number of Newton steps from the server's mean to the tilted mode."""
NUM_LEAPFROG_STEPS, TRAJECTORY_LENGTH = 3, 1.57
"""Number of steps and length of a trajectory. A quarter of the period of a standard normal makes
the end independent of the start."""
JITTER = 0.2
"""Relative variation of the length, so that it is no period of any direction."""
MIN_SAMPLES_PER_DIMENSION = 10


class _ChainState(NamedTuple):
    shift: Array  # [d], from the tilted mode, in units of the metric
    values: Array  # [G], log densities of groups
    slope: Array  # [d], gradient of the sum of the values
    latents: Array  # [G, k]
    refresh: ArrayTree
    accepted: Array  # [G], sums of acceptance rates


@register_dataclass
@dataclass(frozen=True, eq=False)
class McmcLocal(LatentInference):
    """Chain on position and latents; see `mcmc_local`."""

    refresh: Refresh
    num_samples: int = field(metadata={"static": True})
    num_burnin: int = field(metadata={"static": True})
    thinning: int = field(metadata={"static": True})

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        assert posterior.local is not None
        self.refresh.check(posterior.local, position, federation.rows)
        size = trees.num_elements(position)
        if self.num_samples < MIN_SAMPLES_PER_DIMENSION * size:
            raise ValueError(
                f"mcmc_local needs at least {MIN_SAMPLES_PER_DIMENSION} samples per dimension, got "
                f"num_samples={self.num_samples} for {size} dimensions."
            )

    def initial_latent_state(
        self, posterior: Posterior, position: ArrayTree, client: Client
    ) -> LatentState:
        assert posterior.local is not None
        return initial_latent_state(groups_of(posterior.local, client), self.refresh, position)

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> Array:
        return jax.random.split(rng_key, self.num_burnin + self.num_samples)

    @in_single_precision
    def fit_latents(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        latents: LatentState,
    ) -> tuple[Tilted, LatentState]:
        assert posterior.local is not None
        flat, unravel = ravel_pytree(position)
        groups = groups_of(posterior.local, client)
        integrated = TiltedDensity.of(marginal(posterior, nodes=1), cavity, client, unravel)
        mode = integrated.climb(flat, NUM_NEWTON_STEPS)
        modes = find_modes(groups, unravel(mode)).flat
        curvature = minus_hessian(lambda x: groups.total(unravel(x), modes), mode)
        metric = _RootMetric.of(curvature + integrated.precision)
        chain = _Chain(self.refresh, groups, integrated, mode, metric, round_, self.thinning)
        state = chain.start(groups.as_flat(latents.latents), latents.refresh)
        keys: Array = draws
        state, _ = jax.lax.scan(chain.sample, state, keys[: self.num_burnin])
        state, (shifts, slopes) = jax.lax.scan(chain.sample, state, keys[self.num_burnin :])
        num_moves = self.thinning * (self.num_burnin + self.num_samples)
        moved = LatentState(
            groups.as_latents(state.latents),
            state.refresh,
            latents.accepted.update(state.accepted / num_moves, groups.present),
        )
        site = _fit_site(shifts, slopes, mode, metric, cavity.structure, unravel)
        ascents = slopes + integrated.linear - (mode + shifts @ metric.root) @ integrated.precision
        return Tilted(cavity * site, jnp.sqrt(jnp.mean(jnp.sum(ascents**2, axis=1)))), moved


class _RootMetric(NamedTuple):
    """Symmetric roots of a precision and of its inverse, ``[d, d]``."""

    root: Array  # of the inverse
    inverse: Array  # of the root

    @classmethod
    def of(cls, precision: Array) -> "_RootMetric":
        values, vectors = jnp.linalg.eigh((precision + precision.T) / 2)
        # The chain is exact for any metric, so negative curvatures may count as positive.
        sizes = jnp.abs(values)
        sizes = jnp.sqrt(jnp.maximum(sizes, 1e-6 * jnp.max(sizes)))
        return cls((vectors / sizes) @ vectors.T, (vectors * sizes) @ vectors.T)


class _Chain(NamedTuple):
    """Moves of the position given latents, and of the latents given the position."""

    refresh: Refresh
    groups: Groups
    tilted: TiltedDensity
    mode: Array
    metric: _RootMetric
    round: Array
    thinning: int

    def position(self, shift: Array) -> ArrayTree:
        """Return the position at a shift ``[d]``."""
        unravel = self.tilted.likelihood.unravel
        return unravel(self.mode + self.metric.root @ shift)

    def density(self, shift: Array, latents: Array) -> tuple[Array, Array]:
        """Return log densities of groups ``[G]``, and the gradient ``[d]`` of their sum."""

        def total(flat: Array) -> tuple[Array, Array]:
            position = self.tilted.likelihood.unravel(flat)
            values = self.groups.log_density(position, latents)
            values = jnp.where(self.groups.present, values, 0)
            return jnp.sum(values), values

        flat = self.mode + self.metric.root @ shift
        (_, values), slope = jax.value_and_grad(total, has_aux=True)(flat)
        return values, slope

    def start(self, latents: Array, refresh: ArrayTree) -> _ChainState:
        shift = jnp.zeros_like(self.mode)
        values, slope = self.density(shift, latents)
        return _ChainState(shift, values, slope, latents, refresh, jnp.zeros_like(latents[:, 0]))

    def sample(self, state: _ChainState, rng_key: Array) -> tuple[_ChainState, tuple[Array, Array]]:
        """Return the chain after `thinning` moves, and its shift and slope there."""
        keys = jax.random.split(rng_key, self.thinning)
        state, _ = jax.lax.scan(lambda x, key: (self.move(x, key), None), state, keys)
        return state, (state.shift, state.slope)

    def move(self, state: _ChainState, rng_key: Array) -> _ChainState:
        """Return the chain after a trajectory of the position and a refresh of the latents."""
        path_key, refresh_key = jax.random.split(rng_key)
        state = self.trajectory(state, path_key)
        groups = self.groups
        draws = self.refresh.prepare(refresh_key, groups.num, groups.size)
        here = RefreshInput(self.position(state.shift), state.latents, state.refresh, self.round)
        moved = self.refresh.move(groups, draws, here)
        values, slope = self.density(state.shift, moved.flat)
        accepted = state.accepted + moved.acceptance
        return _ChainState(state.shift, values, slope, moved.flat, moved.kept, accepted)

    def trajectory(self, state: _ChainState, rng_key: Array) -> _ChainState:
        """Return the chain after a leapfrog trajectory that is accepted or rejected."""
        momentum_key, length_key, uniform_key = jax.random.split(rng_key, 3)
        dtype, root = state.shift.dtype, self.metric.root
        momentum = jax.random.normal(momentum_key, state.shift.shape, dtype)
        jitter = jax.random.uniform(length_key, (), dtype, 1 - JITTER, 1 + JITTER)
        step = TRAJECTORY_LENGTH / NUM_LEAPFROG_STEPS * jitter

        def ascent(shift: Array, slope: Array) -> Array:
            flat = self.mode + root @ shift
            return root @ (slope + self.tilted.linear - self.tilted.precision @ flat)

        def leap(path: tuple, _: None) -> tuple[tuple, None]:
            shift, momentum, _, slope = path
            momentum = momentum + 0.5 * step * ascent(shift, slope)
            shift = shift + step * momentum
            values, slope = self.density(shift, state.latents)
            return (shift, momentum + 0.5 * step * ascent(shift, slope), values, slope), None

        path = (state.shift, momentum, state.values, state.slope)
        (shift, end_momentum, values, slope), _ = jax.lax.scan(
            leap, path, None, length=NUM_LEAPFROG_STEPS
        )
        moved = root @ (shift - state.shift)
        middle = self.mode + root @ ((shift + state.shift) / 2)
        cavity_gain = moved @ (self.tilted.linear - self.tilted.precision @ middle)
        kinetic = 0.5 * jnp.sum(momentum**2 - end_momentum**2)
        # Differences per group: values that both ends share leave no rounding.
        gain = jnp.sum(values - state.values) + cavity_gain + kinetic
        uniform = jax.random.uniform(uniform_key, (), dtype)
        accepted = jnp.log(uniform) < gain  # false if the gain is NaN
        before = (state.shift, state.values, state.slope)
        shift, values, slope = trees.select(accepted, (shift, values, slope), before)
        return state._replace(shift=shift, values=values, slope=slope)


def _fit_site(
    shifts: Array,
    slopes: Array,
    mode: Array,
    metric: _RootMetric,
    structure: str,
    unravel: Callable[[Array], ArrayTree],
) -> Gaussian:
    """Return the Gaussian whose gradient is the regression of slopes on positions."""
    center, slope = jnp.mean(shifts, axis=0), jnp.mean(slopes, axis=0)
    away, change = shifts - center, slopes - slope
    position = mode + metric.root @ center
    if structure == "dense":
        square = jnp.matmul(away.T, away, precision="highest")
        cross = jnp.matmul(away.T, change @ metric.root, precision="highest")
        scaled = -jnp.linalg.solve(square, cross)
        precision = metric.inverse @ ((scaled + scaled.T) / 2) @ metric.inverse
        return as_gaussian(slope, precision, position, unravel)
    # One regression per coordinate matches variances; a scaled identity matches their sum.
    away = away @ metric.root
    products, squares = jnp.sum(away * change, axis=0), jnp.sum(away**2, axis=0)
    if structure == "diagonal":
        return as_gaussian(slope, -products / squares, position, unravel)
    number = -jnp.sum(products) / jnp.sum(squares)
    return Gaussian(unravel(slope + number * position), number, structure)


def mcmc_local(
    refresh: Refresh | None = None,
    *,
    num_samples: int = 400,
    num_burnin: int = 20,
    thinning: int = 1,
) -> Inference:
    """Sample position and latents of the client's groups together, and fit a Gaussian to positions.

    This inference is for `fedmcmc.fed_ep` on posteriors with ``local``. On likelihood times cavity,
    a client moves the shared position along trajectories given its latents, and the latents by
    `refresh` given the position. It keeps its latents for the next round. The fit has the mean and
    covariance of the tilted distribution (variances for diagonal sites), from a linear regression
    of gradients on positions (Stein's identity); see docs/guides/fed_ep.md.

    Parameters
    ----------
    refresh
        How latents move, by default `fedmcmc.hierarchy.independence`. ``num_adapt`` of `hmc` counts
        rounds, which have many moves each: a few are enough.
    num_samples
        Number of samples per round, at least ten per dimension of the position.
    num_burnin
        Number of discarded samples at the start of a round.
    thinning
        Number of moves per sample.

    Raises
    ------
    ValueError
        If a number is out of range; from `init` if the model does not fit the refresh or there are
        too few samples.

    Notes
    -----
    The chain starts at the tilted mode with latents integrated out by Laplace's approximation; the
    curvature there is the metric. Trajectories are accepted or rejected, so both only affect the
    speed. The fit has a relative bias of about one over `num_samples`.

    References
    ----------
    Stein (1981), Estimation of the mean of a multivariate normal distribution, The Annals of
    Statistics 9.

    Examples
    --------
    >>> import fedmcmc, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> clinics = [{"y": np.array([1.0, 2.0, 1.5])}, {"y": np.array([4.0, 5.0])}]
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> posterior = fedmcmc.from_numpyro(model, example=data)
    >>> kernel = fedmcmc.fed_ep(posterior, inference=mcmc_local(num_samples=1000))
    """
    refresh = independence() if refresh is None else refresh
    expect(refresh, Refresh, "refresh")
    if num_burnin != 0:
        num_burnin = positive_integer(num_burnin, "num_burnin")
    return McmcLocal(
        refresh,
        positive_integer(num_samples, "num_samples"),
        num_burnin,
        positive_integer(thinning, "thinning"),
    )
