"""Moments of latents that their clients keep, in place of draws that would fill their memory."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import ArrayTree, Local, register_dataclass
from fedmcmc.hierarchy._latents import Groups, locals_in
from fedmcmc.hierarchy._refresh import Here, Moved, Refresh


class Running(NamedTuple):
    """Moments so far: of each group `num` ``[G]``, of its values the mean and `squares` around it.

    The latter two have leaves ``[G, *event]``.
    """

    num: Array
    mean: ArrayTree
    squares: ArrayTree


class _Kept(NamedTuple):
    refresh: ArrayTree
    moments: Running


def _values(groups: Groups, position: ArrayTree, flat: Array) -> ArrayTree:
    """Return latents in the user's space, leaves ``[G, *event]``."""
    fn = groups.local.constrain_fn
    if fn is None:
        return jax.vmap(groups.unravel)(flat)
    return jax.vmap(lambda one: fn(position, groups.unravel(one)))(flat)


@register_dataclass
@dataclass(frozen=True, eq=False)
class WithMoments(Refresh):
    """A refresh that keeps moments; see `with_moments`."""

    refresh: Refresh
    num_burnin: Array

    @property
    def exact(self) -> bool:
        return self.refresh.exact

    def check(self, local: Local, position: ArrayTree, rows: ArrayTree) -> None:
        self.refresh.check(local, position, rows)

    def begin(self, groups: Groups, position: ArrayTree) -> Array:
        return self.refresh.begin(groups, position)

    def init(self, groups: Groups, position: ArrayTree) -> _Kept:
        like = jax.eval_shape(lambda: _values(groups, position, self.begin(groups, position)))
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
        none = Running(jnp.zeros(groups.num, jnp.int32), zeros, zeros)
        return _Kept(self.refresh.init(groups, position), none)

    def prepare(self, rng_key: Array, num_groups: int, size: int) -> ArrayTree:
        return self.refresh.prepare(rng_key, num_groups, size)

    def move(self, groups: Groups, draws: ArrayTree, here: Here) -> Moved:
        kept: Any = here.kept
        moved = self.refresh.move(groups, draws, here._replace(kept=kept.refresh))
        counts = groups.present & (jnp.asarray(here.round) >= self.num_burnin)
        num = kept.moments.num + counts

        def column(numbers: Array, like: Array) -> Array:
            return numbers.reshape(-1, *(1,) * (like.ndim - 1))

        values = _values(groups, here.position, moved.flat)
        share = counts / jnp.maximum(num, 1)
        mean = jax.tree.map(
            lambda m, x: m + column(share, x).astype(m.dtype) * (x - m), kept.moments.mean, values
        )
        squares = jax.tree.map(
            lambda s, x, old, new: s + jnp.where(column(counts, x), (x - old) * (x - new), 0),
            kept.moments.squares,
            values,
            kept.moments.mean,
            mean,
        )
        return moved._replace(kept=_Kept(moved.kept, Running(num, mean, squares)))


def with_moments(refresh: Refresh, *, num_burnin: int) -> Refresh:
    """Let clients keep the mean and the sd of their groups' latents while these move.

    They are numbers in a client's state, of which nobody else hears: instead of draws, which
    ``Record(local=True)`` keeps of a simulation alone, and which take memory for each of them.

    Parameters
    ----------
    refresh
        How latents move, as `independence`.
    num_burnin
        Rounds from the chain's start whose latents do not count.

    Returns
    -------
    Refresh
        That moves latents as the given one does. Rounds in which a client takes no part do not
        count, which changes no mean in the long run, as who takes part depends on no draw.

    Raises
    ------
    TypeError, ValueError
        If `refresh` is none, or `num_burnin` below zero.

    Examples
    --------
    >>> import fedmcmc, jax, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> clinics = [{"y": np.array([1.0, 2.0, 1.5])}, {"y": np.array([4.0, 5.0])}]
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> posterior = fedmcmc.from_numpyro(model, example=data, centered=1.0)
    >>> refresh = with_moments(fedmcmc.hierarchy.conjugate(), num_burnin=50)
    >>> kernel = fedmcmc.fed_gibbs(posterior, refresh=refresh)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, {"mu": 0.0}, num_rounds=2000, progress=False
    ... )
    >>> found = local_moments(samples.state.clients)
    >>> found.num.ravel(), found.mean["effect"].shape
    (array([1950, 1950]), (2, 1))
    """
    expect(refresh, Refresh, "refresh")
    if not num_burnin >= 0:
        raise ValueError(f"num_burnin must not be negative, got {num_burnin!r}.")
    return WithMoments(refresh, jnp.asarray(num_burnin, jnp.int32))


class LocalMoments(NamedTuple):
    """Moments of latents, over all chains.

    Attributes
    ----------
    num
        ``[num_clients, max_groups]``, moves that were counted; zero of groups that a client has
        not.
    mean, sd
        Site to values in the user's space, ``[num_clients, max_groups, *event]``; latents as they
        are where the model has no names. Not a number where nothing was counted.
    """

    num: np.ndarray
    mean: ArrayTree
    sd: ArrayTree


def local_moments(states: ArrayTree) -> LocalMoments:
    """Return the moments that clients have kept; see `with_moments`.

    Parameters
    ----------
    states
        Of a run's clients, ``samples.state.clients``; at a real site ``site.state``.

    Raises
    ------
    ValueError
        If they have kept none.
    """
    found = locals_in(states)
    nodes = jax.tree.leaves(
        () if found is None else found.refresh, is_leaf=lambda node: isinstance(node, Running)
    )
    kept = next((node for node in nodes if isinstance(node, Running)), None)
    if kept is None:
        raise ValueError(
            "These states hold no moments of latents: give the kernel "
            "refresh=hierarchy.with_moments(..., num_burnin=...). Of a run at real sites each site "
            "has its own: give its deploy.Site's state."
        )
    num = np.asarray(kept.num)  # [chains, clients, groups]
    total = num.sum(0, dtype=np.int64)

    def column(numbers: np.ndarray, like: np.ndarray) -> np.ndarray:
        return numbers.reshape(*numbers.shape, *(1,) * (like.ndim - numbers.ndim))

    with np.errstate(invalid="ignore", divide="ignore"):
        means = jax.tree.map(
            lambda m: (column(num, m) * m).sum(0) / column(total, np.asarray(m)[0]),
            jax.tree.map(np.asarray, kept.mean),
        )
        sds = jax.tree.map(
            lambda s, m, mean: np.sqrt(
                (s + column(num, m) * (m - mean) ** 2).sum(0) / column(total, mean)
            ),
            jax.tree.map(np.asarray, kept.squares),
            jax.tree.map(np.asarray, kept.mean),
            means,
        )
    return LocalMoments(total, means, sds)
