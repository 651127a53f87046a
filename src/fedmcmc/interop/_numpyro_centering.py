"""Recommended parametrization of local sites, from their conditional variances."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from fedmcmc._checks import expect
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy import sum_conditional_variances
from fedmcmc.interop._numpyro_structure import DECENTERED
from fedmcmc.kernels import Question, check_latent_model
from fedmcmc.pytrees import trees
from fedmcmc.runs import Consortium, as_consortium
from fedmcmc.types import (
    ArrayTree,
    Client,
    Federation,
    Posterior,
    as_functions,
    register_dataclass,
)


def centering(
    posterior: Posterior, data: FederatedData | Consortium, position: ArrayTree
) -> dict[str, float]:
    """Return the best parametrization of local sites, for ``from_numpyro(..., centered=)``.

    A site's number, from 0 to 1, is near one (no reparametrization) if the rows of its groups
    determine their effects well compared with the population, otherwise near zero (a standard
    variable that is shifted and scaled). It minimizes the dependence between the population's
    location and the latents that a kernel moves, and with it the error of `fedmcmc.lsd` with
    ``refresh=``: the root of ``c = s tau**(c - 1)`` for a population of standard deviation ``tau``
    and rows that reduce an effect's variance by the share ``s`` (Papaspiliopoulos et al. 2007).

    Parameters
    ----------
    posterior, data
        Result of `from_numpyro` with ``centered=0.0``, and `FederatedData` or a consortium.
    position
        Shared parameters, preferably the mode of `fedmcmc.marginal` (`fedmcmc.surrogates.mode`).

    Raises
    ------
    ValueError
        If no local site is a standard variable that is shifted and scaled.

    Examples
    --------
    >>> import fedmcmc, numpy as np, numpyro, numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> data = fedmcmc.FederatedData.from_clients([{"y": np.ones(16)} for _ in range(3)])
    >>> posterior = fedmcmc.from_numpyro(model, example=data)
    >>> round(centering(posterior, data, {"mu": 0.0})["effect"], 3)
    0.941
    """
    expect(posterior, Posterior, "posterior")
    local = posterior.local
    sites: Any = {} if local is None else local.like.tree
    has_names = isinstance(sites, dict)
    shifted = [name for name in sites if name.endswith(DECENTERED)] if has_names else []
    position = trees.as_floats(position, "position")
    if not shifted or (len(shifted) == len(sites) and not _is_standard(local, position)):
        raise ValueError(
            "centering needs local sites with a location and a scale, written as standard "
            "variables: pass the posterior of from_numpyro(model, centered=0.0)."
        )
    question = as_functions(ConditionalVariances(posterior))
    total, num = as_consortium(data).ask(question, position).value
    # The population's variance of a standard variable is one.
    shares = trees.unravel(1 - total / num, sites)
    names = {name: name.removesuffix(DECENTERED) for name in shifted}

    def constrained(number: float) -> Any:
        latent = trees.unravel(jnp.full(len(total), number, total.dtype), sites)
        return local.constrain_fn(position, latent)  # type: ignore[union-attr, misc]

    low, high = constrained(0.0), constrained(1.0)
    return {
        site: float(np.mean(_least_dependent(shares[name], high[site] - low[site])))
        for name, site in names.items()
    }


def _is_standard(local: Any, position: ArrayTree) -> bool:
    """Return whether the latents' prior does not depend on the shared parameters."""
    latent = jax.tree.map(lambda like: jnp.ones(like.shape, like.dtype), local.like.tree)
    slope = jax.grad(local.logprior_fn)(position, latent)
    return not any(np.any(leaf) for leaf in jax.tree.leaves(slope))


def _least_dependent(share: ArrayLike, spread: ArrayLike) -> np.ndarray:
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
class ConditionalVariances(Question):
    """Question for the latents' variances given rows and shared position, and number of groups."""

    def answer(self, content: ArrayTree, client: Client) -> tuple[Array, Array]:
        local: Any = self.posterior.local
        return sum_conditional_variances(local, client, content)

    def answer_like(self, content: ArrayTree) -> Any:
        local: Any = self.posterior.local
        latent = jax.eval_shape(trees.ravel, local.like.tree)
        return latent, jax.ShapeDtypeStruct((), latent.dtype)

    def check_content(self, content: ArrayTree, federation: Federation) -> None:
        check_latent_model(self.posterior, content, federation)
