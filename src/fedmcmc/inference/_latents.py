"""Inference for clients that keep latents of their groups: a chain on both, a Gaussian for one.

A chain moves position and latents in turn, on likelihood times cavity. The site is read off the
gradients along it: by Stein's identity ``E[(theta - mean) gradient']`` of the client's log density
is what the tilted covariance has beyond the cavity's, so that the site whose product with the
cavity has the tilted mean and covariance is the linear regression of gradients on positions. It has
the noise of what latents leave open alone, where the inverse of a sample covariance has that of the
whole posterior, once per client.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Client, Federation, Posterior, register_dataclass
from fedmcmc.gaussian import Gaussian
from fedmcmc.gradients import as_gaussian, minus_hessian
from fedmcmc.hierarchy import (
    Groups,
    Here,
    Locals,
    Refresh,
    find_modes,
    first_locals,
    groups_of,
    independence,
    marginal,
)
from fedmcmc.inference._tilted import TiltedDensity
from fedmcmc.inference._types import Inference, LatentInference, Tilted
from fedmcmc.pytrees import in_single_precision, trees

NEWTON_STEPS = 6
"""To the tilted mode, from the server's mean."""
LEAPS, REACH = 3, 1.57
"""Leapfrog steps per trajectory and its length: a quarter of a period of a normal distribution in
units of its sds, after which a position has forgotten where it was."""
JITTER = 0.2
"""Share by which the length varies, so that no period of any direction fits it."""
PER_DIMENSION = 10
"""Samples at least."""


class _Now(NamedTuple):
    shift: Array  # [d], from the tilted mode, in units of the metric
    values: Array  # [G], log densities of groups
    slope: Array  # [d], of the groups' log density
    latents: Array  # [G, k]
    refresh: ArrayTree
    accepted: Array  # [G], sums of shares


@register_dataclass
@dataclass(frozen=True, eq=False)
class McmcLocal(LatentInference):
    """A chain on position and latents; see `mcmc_local`."""

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
        if self.num_samples < PER_DIMENSION * size:
            raise ValueError(
                f"mcmc_local takes {PER_DIMENSION} samples per dimension at least, got "
                f"num_samples={self.num_samples} for {size} dimensions."
            )

    def first_locals(self, posterior: Posterior, position: ArrayTree, client: Client) -> Locals:
        assert posterior.local is not None
        return first_locals(groups_of(posterior.local, client), self.refresh, position)

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
        kept: Locals,
    ) -> tuple[Tilted, Locals]:
        assert posterior.local is not None
        flat, unravel = ravel_pytree(position)
        groups = groups_of(posterior.local, client)
        without = TiltedDensity.of(marginal(posterior, nodes=1), cavity, client, unravel)
        mode = without.climb(flat, NEWTON_STEPS)
        modes = find_modes(groups, unravel(mode)).flat
        curvature = minus_hessian(lambda at: groups.total(unravel(at), modes), mode)
        metric = _Metric.of(curvature + without.precision)
        chain = _Chain(self.refresh, groups, without, mode, metric, round_, self.thinning)
        begin = chain.begin(groups.as_flat(kept.latents), kept.refresh)
        keys: Array = draws
        begin, _ = jax.lax.scan(chain.sample, begin, keys[: self.num_burnin])
        end, (shifts, slopes) = jax.lax.scan(chain.sample, begin, keys[self.num_burnin :])
        num_moves = self.thinning * (self.num_burnin + self.num_samples)
        latents = Locals(
            groups.as_latents(end.latents),
            end.refresh,
            kept.accepted.with_round(end.accepted / num_moves, groups.present),
        )
        site = _site(shifts, slopes, mode, metric, cavity.structure, unravel)
        ascents = slopes + without.linear - (mode + shifts @ metric.root) @ without.precision
        return Tilted(cavity * site, jnp.sqrt(jnp.mean(jnp.sum(ascents**2, axis=1)))), latents


class _Metric(NamedTuple):
    """Symmetric roots of a precision and of its inverse, ``[d, d]``."""

    root: Array  # of the inverse
    inverse: Array

    @classmethod
    def of(cls, precision: Array) -> "_Metric":
        values, vectors = jnp.linalg.eigh((precision + precision.T) / 2)
        # Any metric is right: where the density is not curved down, as if it were.
        sizes = jnp.abs(values)
        sizes = jnp.sqrt(jnp.maximum(sizes, 1e-6 * jnp.max(sizes)))
        return cls((vectors / sizes) @ vectors.T, (vectors * sizes) @ vectors.T)


class _Chain(NamedTuple):
    """Trajectories of the position given latents, and moves of the latents given the position."""

    refresh: Refresh
    groups: Groups
    tilted: TiltedDensity
    mode: Array
    metric: _Metric
    round: Array
    thinning: int

    def position(self, shift: Array) -> ArrayTree:
        """Return the position at a shift ``[d]``."""
        unravel = self.tilted.likelihood.unravel
        return unravel(self.mode + self.metric.root @ shift)

    def density(self, shift: Array, latents: Array) -> tuple[Array, Array]:
        """Return log densities of groups ``[G]``, and the slope of their sum, ``[d]``."""

        def total(flat: Array) -> tuple[Array, Array]:
            position = self.tilted.likelihood.unravel(flat)
            values = self.groups.log_density(position, latents)
            values = jnp.where(self.groups.present, values, 0)
            return jnp.sum(values), values

        flat = self.mode + self.metric.root @ shift
        (_, values), slope = jax.value_and_grad(total, has_aux=True)(flat)
        return values, slope

    def begin(self, latents: Array, kept: ArrayTree) -> _Now:
        shift = jnp.zeros_like(self.mode)
        values, slope = self.density(shift, latents)
        return _Now(shift, values, slope, latents, kept, jnp.zeros_like(latents[:, 0]))

    def sample(self, now: _Now, rng_key: Array) -> tuple[_Now, tuple[Array, Array]]:
        """Return the chain some moves later, and its position and slope there."""
        keys = jax.random.split(rng_key, self.thinning)
        now, _ = jax.lax.scan(lambda at, key: (self.move(at, key), None), now, keys)
        return now, (now.shift, now.slope)

    def move(self, now: _Now, rng_key: Array) -> _Now:
        """Return the chain after a trajectory of the position and a refresh of the latents."""
        path_key, refresh_key = jax.random.split(rng_key)
        now = self.trajectory(now, path_key)
        groups = self.groups
        drawn = self.refresh.prepare(refresh_key, groups.num, groups.size)
        here = Here(self.position(now.shift), now.latents, now.refresh, self.round)
        moved = self.refresh.move(groups, drawn, here)
        values, slope = self.density(now.shift, moved.flat)
        accepted = now.accepted + moved.acceptance
        return _Now(now.shift, values, slope, moved.flat, moved.kept, accepted)

    def trajectory(self, now: _Now, rng_key: Array) -> _Now:
        """Return the chain after a leapfrog trajectory that is accepted or rejected."""
        momentum_key, length_key, uniform_key = jax.random.split(rng_key, 3)
        dtype, root = now.shift.dtype, self.metric.root
        momentum = jax.random.normal(momentum_key, now.shift.shape, dtype)
        jitter = jax.random.uniform(length_key, (), dtype, 1 - JITTER, 1 + JITTER)
        step = REACH / LEAPS * jitter

        def ascent(shift: Array, slope: Array) -> Array:
            flat = self.mode + root @ shift
            return root @ (slope + self.tilted.linear - self.tilted.precision @ flat)

        def leap(state: tuple, _: None) -> tuple[tuple, None]:
            at, momentum, _, slope = state
            momentum = momentum + 0.5 * step * ascent(at, slope)
            at = at + step * momentum
            values, slope = self.density(at, now.latents)
            return (at, momentum + 0.5 * step * ascent(at, slope), values, slope), None

        begin = (now.shift, momentum, now.values, now.slope)
        (shift, last, values, slope), _ = jax.lax.scan(leap, begin, None, length=LEAPS)
        moved = root @ (shift - now.shift)
        middle = self.mode + root @ ((shift + now.shift) / 2)
        of_cavity = moved @ (self.tilted.linear - self.tilted.precision @ middle)
        kinetic = 0.5 * jnp.sum(momentum**2 - last**2)
        # Per group, so that what both ends share leaves no rounding.
        gain = jnp.sum(values - now.values) + of_cavity + kinetic
        uniform = jax.random.uniform(uniform_key, (), dtype)
        taken = jnp.log(uniform) < gain  # false where it is not a number
        chosen = trees.select(taken, (shift, values, slope), (now.shift, now.values, now.slope))
        return now._replace(shift=chosen[0], values=chosen[1], slope=chosen[2])


def _site(
    shifts: Array,
    slopes: Array,
    mode: Array,
    metric: _Metric,
    structure: str,
    unravel: Callable[[Array], ArrayTree],
) -> Gaussian:
    """Return the Gaussian whose gradient is the regression of slopes on positions."""
    center, slope = jnp.mean(shifts, axis=0), jnp.mean(slopes, axis=0)
    away, change = shifts - center, slopes - slope
    place = mode + metric.root @ center
    if structure == "dense":
        square = jnp.matmul(away.T, away, precision="highest")
        cross = jnp.matmul(away.T, change @ metric.root, precision="highest")
        scaled = -jnp.linalg.solve(square, cross)
        precision = metric.inverse @ ((scaled + scaled.T) / 2) @ metric.inverse
        return as_gaussian(slope, precision, place, unravel)
    # Each coordinate by itself, so that variances are matched; of a scaled identity their sum.
    away = away @ metric.root
    products, squares = jnp.sum(away * change, axis=0), jnp.sum(away**2, axis=0)
    if structure == "diagonal":
        return as_gaussian(slope, -products / squares, place, unravel)
    number = -jnp.sum(products) / jnp.sum(squares)
    return Gaussian(unravel(slope + number * place), number, structure)


def mcmc_local(
    refresh: Refresh | None = None,
    *,
    num_samples: int = 400,
    num_burnin: int = 20,
    thinning: int = 1,
) -> Inference:
    """Sample position and latents of the client's groups together; fit the position's Gaussian.

    For posteriors with ``local``, in `fedmcmc.fed_ep`. A client moves the shared position along
    trajectories given its latents, and these by `refresh` given the position, on its likelihood
    times its cavity. It keeps its latents for the next round; its message is in terms of the
    position alone, as ever.

    Mean and covariance of the fit are the tilted distribution's, of variances where sites are
    diagonal. They come from the gradients along the chain: the site is their linear regression on
    the positions (Stein's identity). For a Gaussian likelihood all its noise is what latents leave
    open, so that the noise of the sum of all sites does not grow with the number of clients.

    Parameters
    ----------
    refresh
        How latents move, by default `fedmcmc.hierarchy.independence`. ``num_adapt`` of `hmc` counts
        rounds, which have many moves each: a few are enough.
    num_samples
        Per round, at least ten per dimension of the position.
    num_burnin
        Samples at the start of a round that are left out.
    thinning
        Moves from sample to sample.

    Raises
    ------
    ValueError
        If a number is out of range, and from `init` if the model does not fit the refresh or there
        are too few samples.

    Notes
    -----
    Trajectories begin at the tilted mode, which Newton steps find with the latents integrated out
    by Laplace's approximation; the curvature there, given the latents, is their metric. They are
    accepted or rejected, so that neither matters for what is sampled. The fit has a bias of one
    part in `num_samples`, about, as latents of one sample move the position of the next.

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
