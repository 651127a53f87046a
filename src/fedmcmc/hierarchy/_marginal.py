"""Latents integrated out where their rows are, by adaptive Gauss-Hermite quadrature."""

import itertools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import (
    ArrayTree,
    Client,
    ClientTerms,
    Local,
    Posterior,
    as_functions,
    compiled,
    register_dataclass,
)
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy._latents import (
    cholesky,
    find_modes,
    groups_of,
    log_diagonal,
    refuse_two_levels,
    solve,
    solve_upper,
)
from fedmcmc.pytrees import in_single_precision, trees

MAX_DIMENSIONS = 3
"""Numbers per latent; ``nodes**3`` points per group are the most that pays."""
MORE_NODES = 4
"""Per dimension, of the quadrature that one is held against."""
UNSETTLED = 1e-3
"""Nats that a step promises from where it is called no mode."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class MarginalTerms(ClientTerms):
    """Each group's log likelihood with its latent integrated out; see `marginal`."""

    local: Local
    nodes: int = field(metadata={"static": True})

    @property
    def size(self) -> int:
        """Numbers per latent."""
        return trees.num_elements(self.local.like.tree)

    @property
    def passes(self) -> int:
        return self.nodes**self.size + 2 + self.size

    def present(self, client: Client) -> Array:
        return groups_of(self.local, client).present

    @in_single_precision
    def terms(self, position: ArrayTree, client: Client) -> Array:
        groups = groups_of(self.local, client)
        found = find_modes(groups, jax.lax.stop_gradient(position))
        at_mode = jax.lax.stop_gradient(found.flat)
        # One step that is differentiated: its derivative is that of the mode, by the implicit
        # function theorem, so that gradients are exact with any number of nodes.
        slope, curvature = groups.slope_and_curvature(position, at_mode)
        center = at_mode + solve(cholesky(curvature), slope)
        factor = cholesky(groups.slope_and_curvature(position, center)[1])
        points, log_weights = _nodes(self.nodes, self.size)

        def at(point: Array) -> Array:
            flat = center + solve_upper(factor, jnp.broadcast_to(point, center.shape))
            return groups.log_density(position, flat)

        values = jax.vmap(at)(jnp.asarray(points, center.dtype))  # [num, G]
        values = values + jnp.asarray(log_weights, values.dtype)[:, None]
        total = jax.nn.logsumexp(values, axis=0) - log_diagonal(factor).astype(values.dtype)
        return jnp.where(groups.present, total, 0)


def quadrature_error(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, *, num_draws: int = 20
) -> float:
    """Return how much a quadrature over latents changes log densities of draws, in nats.

    Log likelihoods are computed with four more nodes, too. A difference that all draws share does
    no harm; the largest distance from its mean is by how much logarithms of draws' weights are off.
    `fedmcmc.diagnostics.diagnose`, which ends every run, warns above 0.1.

    Parameters
    ----------
    posterior
        From `marginal`.
    data
        The clients' rows.
    draws
        Of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``.
    num_draws
        How many are looked at, evenly spread.

    Raises
    ------
    ValueError
        If the posterior integrates no latents.

    Examples
    --------
    Outcomes that are normal given the rest leave nothing to approximate:

    >>> import fedmcmc, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> clinics = [{"y": np.array([1.0, 2.0, 1.5])}, {"y": np.array([4.0, 5.0])}]
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> posterior = marginal(fedmcmc.from_numpyro(model, example=data), nodes=1)
    >>> quadrature_error(posterior, data, {"mu": np.linspace(0, 4, 50)[None]}) < 1e-4
    True
    """
    expect(posterior, Posterior, "posterior")
    terms = posterior.loglikelihood_fn
    if not isinstance(terms, MarginalTerms):
        raise ValueError("This posterior integrates no latents: give what marginal() returned.")
    chosen = _evenly(draws, num_draws)
    differences = np.asarray(_differences(terms, data, chosen), np.float64)
    return float(np.abs(differences - differences.mean()).max())


def failed_searches(
    local: Local, data: FederatedData, draws: ArrayTree, *, num_draws: int = 20
) -> tuple[int, int]:
    """Return how many searches for a latent's mode end where there is none, and how many were made.

    Newton's method has failed where its next step promises more than a thousandth of a nat, or is
    not finite, and where the log density is not curved downwards: it begins at zero, which is no
    mode of an effect that enters by its square. Quadrature takes the place for the mode, and
    `independence` proposes around it.
    `fedmcmc.diagnostics.diagnose`, which ends every run, warns of it.

    Parameters
    ----------
    local
        A group's part of the model, without latents of clients.
    data
        The clients' rows.
    draws
        Of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``.
    num_draws
        How many are looked at, evenly spread: a search per group and draw.
    """
    failed, made = _failures(as_functions(local), data, _evenly(draws, num_draws))
    return int(failed.sum()), int(made.sum())


@compiled
@in_single_precision
def _failures(local: Local, data: FederatedData, draws: ArrayTree) -> tuple[Array, Array]:
    def of_client(client: Client, position: ArrayTree) -> tuple[Array, Array]:
        groups = groups_of(local, client)
        mode = find_modes(groups, position)
        factor = cholesky(groups.slope_and_curvature(position, mode.flat)[1])
        peaked = jnp.all(jnp.diagonal(factor, axis1=-2, axis2=-1) > 0, -1)
        there = (mode.gain < UNSETTLED) & peaked  # false where it is not a number
        return jnp.sum(groups.present & ~there), jnp.sum(groups.present)

    def one(position: ArrayTree) -> tuple[Array, Array]:
        counts: tuple[Array, Array] = data.map_clients(lambda client: of_client(client, position))
        return counts

    found: tuple[Array, Array] = jax.lax.map(one, draws)
    return found


def _evenly(draws: ArrayTree, num: int) -> ArrayTree:
    """Return `num` draws of all chains, evenly spread, leaves ``[num, *event]``."""
    total = int(np.prod(np.shape(jax.tree.leaves(draws)[0])[:2]))
    at = np.linspace(0, total - 1, min(num, total)).astype(int)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.reshape(leaf, (total, *np.shape(leaf)[2:]))[at]), draws
    )


@compiled
def _differences(terms: MarginalTerms, data: FederatedData, draws: ArrayTree) -> Array:
    finer = replace(terms, nodes=terms.nodes + MORE_NODES)

    def one(position: ArrayTree) -> Array:
        # Per group, so that what all nodes have in common leaves no rounding.
        return jnp.sum(
            data.map_clients(
                lambda client: jnp.sum(
                    finer.terms(position, client) - terms.terms(position, client)
                )
            )
        )

    return jax.lax.map(one, draws)


def _nodes(num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points ``[num**size, size]`` and the logarithms of their weights.

    Of the integral of a function over all space; the weights have the inverse of a standard
    normal's density in them.
    """
    places, weights = np.polynomial.hermite_e.hermegauss(num)
    log_weights = np.log(weights) + places**2 / 2
    points = np.array(list(itertools.product(places, repeat=size)))
    return points, np.array([sum(x) for x in itertools.product(log_weights, repeat=size)])


def marginal(posterior: Posterior, nodes: int = 5) -> Posterior:
    """Integrate the latents of groups out, each at the client whose rows they belong to.

    The result is a posterior of the shared parameters alone. Every kernel that uses all rows of a
    client, `fedmcmc.correct` and `fedmcmc.fit` take it, and no message holds a latent.

    Each group's integral is taken by Gauss-Hermite quadrature around the mode of its latent, scaled
    by the curvature there (Liu and Pierce 1994). The mode is found anew at every position, and
    derivatives with respect to the position are exact for the quadrature's value. A latent with
    several modes is not for it: the others are not seen.

    Parameters
    ----------
    posterior
        With ``local``, as `fedmcmc.from_numpyro` makes it of a model with local sites.
    nodes
        Points per dimension of a latent, odd; 1 is the Laplace approximation. The quadrature is
        exact for a latent whose density given the rest is Gaussian, whatever the number. For
        logistic models 5 is enough; counts with rare events may need 9: the end of a run warns
        where more nodes change log densities of draws, see `fedmcmc.hierarchy.quadrature_error`.

    Returns
    -------
    Posterior
        Whose ``loglikelihood_fn`` is a sum of one term per group. It has no ``resample_fn``.

    Raises
    ------
    ValueError
        If the posterior has no latents of groups, a latent has more than three numbers and `nodes`
        is not one, or `nodes` is even.

    References
    ----------
    Liu and Pierce (1994), A note on Gauss-Hermite quadrature, Biometrika 81.

    Examples
    --------
    Five clinics, each with an effect of its own:

    >>> import fedmcmc, jax, numpy as np, numpyro
    >>> import numpyro.distributions as dist
    >>> def model(y=None):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 5))
    ...     effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> rng = np.random.default_rng(0)
    >>> clinics = [{"y": rng.normal(rng.normal(2, 1), 1, size=n)} for n in (3, 5, 8, 2, 9)]
    >>> data = fedmcmc.FederatedData.from_clients(clinics)
    >>> posterior = marginal(fedmcmc.from_numpyro(model, example=data))
    >>> kernel = fedmcmc.lsd(posterior, step_size=0.05)
    >>> samples = fedmcmc.sample(
    ...     jax.random.key(0), kernel, data, {"mu": 0.0}, num_rounds=300, progress=False
    ... )
    >>> samples.draws["mu"].shape
    (1, 300)
    """
    expect(posterior, Posterior, "posterior")
    positive_integer(nodes, "nodes")
    local = posterior.local
    if local is None:
        raise ValueError(
            "This posterior has no latents of groups to integrate out: mark sites of the model "
            "with infer={'local': True}, or name them in from_numpyro(model, local=[...])."
        )
    refuse_two_levels(local)
    if nodes % 2 == 0:
        raise ValueError(f"nodes must be odd, so that the mode is one of them; got {nodes}.")
    size = trees.num_elements(local.like.tree)
    if size > MAX_DIMENSIONS and nodes > 1:
        raise ValueError(
            f"marginal integrates over at most {MAX_DIMENSIONS} numbers per group, and this model "
            f"has {size}: quadrature would take {nodes}**{size} points per group. "
            f"fedmcmc.fed_gibbs, fedmcmc.lsd(posterior, refresh=...) and fedmcmc.fed_ep take any "
            f"number, as does Laplace's approximation, nodes=1."
        )
    return posterior._replace(
        loglikelihood_fn=as_functions(MarginalTerms(local, nodes)), local=None, resample_fn=None
    )
