"""How much of local sites' conditional spread their own rows tell, and so how to write them."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect
from fedmcmc._types import (
    ArrayTree,
    Client,
    Federation,
    Posterior,
    as_functions,
    register_dataclass,
)
from fedmcmc.hierarchy import conditional_variances
from fedmcmc.interop._numpyro_locals import DECENTERED
from fedmcmc.kernels import Question, check_latent_model
from fedmcmc.pytrees import trees
from fedmcmc.runs import as_consortium


def centering(posterior: Posterior, data: Any, position: ArrayTree) -> dict[str, float]:
    """Return how local sites are best written, for ``from_numpyro(..., centered=)``.

    A site is near one, written as it is, where groups' rows tell their effects well beside the
    population, and near zero, a standard variable that is shifted and scaled, where they tell
    little. The population's location and the latents that a kernel moves then depend on one another
    least, as is good for `fedmcmc.lsd` with ``refresh=``, whose error grows with that. To
    `fedmcmc.marginal` and `fedmcmc.fit` it makes no difference; `fedmcmc.fed_gibbs` needs
    ``centered=1.0``.

    Parameters
    ----------
    posterior
        From `from_numpyro` with ``centered=0.0``, its default.
    data
        A `FederatedData`, or a consortium of clients elsewhere, who answer in one exchange: a sum
        of one number per number of a latent, and how many groups there are.
    position
        Shared parameters, best the mode of `fedmcmc.marginal`, as from `fedmcmc.surrogates.mode`.

    Returns
    -------
    dict
        Site to a number from 0 to 1.

    Raises
    ------
    ValueError
        If no local site is a standard variable that is shifted and scaled.

    Notes
    -----
    With ``tau`` the population's spread and ``s`` the share of its variance that rows take off an
    effect's, given shared parameters (the mean over groups), NumPyro's `LocScaleReparam` leaves a
    normal effect independent of the location where ``c = s tau**(c - 1)``: at ``c = s`` if ``tau``
    is one.

    References
    ----------
    Papaspiliopoulos, Roberts, Skold (2007), A general framework for the parametrization of
    hierarchical models, Statistical Science 22.

    Examples
    --------
    One row of a group, and sixteen, whose noise is as wide as the population:

    >>> import fedmcmc, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> for size in (1, 16):
    ...     data = fedmcmc.FederatedData.from_clients([{"y": np.ones(size)} for _ in range(3)])
    ...     posterior = fedmcmc.from_numpyro(model, example=data)
    ...     print(round(centering(posterior, data, {"mu": 0.0})["effect"], 3))
    0.5
    0.941
    """
    expect(posterior, Posterior, "posterior")
    local = posterior.local
    sites: Any = {} if local is None else local.like.tree
    named = isinstance(sites, dict)
    shifted = [name for name in sites if name.endswith(DECENTERED)] if named else []
    position = trees.as_floats(position, "position")
    if not shifted or (len(shifted) == len(sites) and not _is_standard(local, position)):
        raise ValueError(
            "centering looks at local sites of a location and a scale, written as standard "
            "variables: give the posterior of from_numpyro(model, centered=0.0)."
        )
    question = as_functions(Spreads(posterior))
    total, num = as_consortium(data).ask(question, position).value
    # Of a standard variable the population's variance is one.
    shares = trees.unravel(1 - total / num, sites)
    names = {name: name.removesuffix(DECENTERED) for name in shifted}
    low, high = (
        _shown(posterior, position, jnp.full(len(total), x, total.dtype)) for x in (0.0, 1.0)
    )
    return {
        site: float(np.mean(_least_dependent(shares[name], high[site] - low[site])))
        for name, site in names.items()
    }


def _is_standard(local: Any, position: ArrayTree) -> bool:
    """Return whether the latents' prior is the same wherever shared parameters are."""
    latent = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), local.like.tree)
    slope = jax.grad(lambda at: local.logprior_fn(at, latent))(position)
    return not any(np.any(leaf) for leaf in jax.tree.leaves(slope))


def _shown(posterior: Posterior, position: ArrayTree, flat: Array) -> ArrayTree:
    """Return the sites of a group in the user's space."""
    local: Any = posterior.local
    return local.constrain_fn(position, trees.unravel(flat, local.like.tree))


def _least_dependent(share: Any, spread: Any) -> np.ndarray:
    """Return the root of ``c = share spread**(c - 1)`` between zero and one, by bisection."""
    share, spread = np.clip(np.asarray(share, float), 0, 1), np.asarray(spread, float)
    low, high = np.zeros_like(share), np.ones_like(share)
    for _ in range(40):
        middle = (low + high) / 2
        above = share * spread ** (middle - 1) < middle
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return (low + high) / 2


@register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Spreads(Question):
    """Variances of latents given rows and a shared position, and the number of groups."""

    def answer(self, content: ArrayTree, client: Client) -> tuple[Array, Array]:
        local: Any = self.posterior.local
        return conditional_variances(local, client, content)

    def answer_like(self, content: ArrayTree) -> Any:
        local: Any = self.posterior.local
        latent = jax.eval_shape(trees.ravel, local.like.tree)
        return latent, jax.ShapeDtypeStruct((), latent.dtype)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_latent_model(self.posterior, content, federation)
