"""Marginal posteriors: clients integrate out their latents by adaptive Gauss-Hermite quadrature."""

import itertools
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._checks import expect, positive_integer
from fedmcmc.data import FederatedData
from fedmcmc.hierarchy._latents import (
    cholesky,
    find_modes,
    groups_of,
    log_diagonal,
    solve,
    solve_upper,
)
from fedmcmc.pytrees import in_single_precision, trees
from fedmcmc.types import (
    ArrayTree,
    Client,
    ClientTerms,
    Local,
    Posterior,
    as_functions,
    compiled,
    register_dataclass,
)

MAX_DIMENSIONS = 3
"""Maximum number of elements of a latent for quadrature, with ``nodes**3`` points per group."""
MORE_NODES = 4
"""Number of additional nodes per dimension in the finer quadrature of `quadrature_error`."""
MAX_GAIN = 1e-3
"""Largest predicted increase by the next Newton step, in nats, at a point that counts as a mode."""


@register_dataclass
@dataclass(frozen=True, eq=False)
class MarginalTerms(ClientTerms):
    """Log likelihood of each group with its latent integrated out; see `marginal`."""

    local: Local
    nodes: int = field(metadata={"static": True})

    @property
    def size(self) -> int:
        """Number of elements of a latent."""
        return trees.num_elements(self.local.like.tree)

    @property
    def passes(self) -> int:
        return self.nodes**self.size + 2 + self.size

    def present(self, client: Client) -> Array:
        return groups_of(self.local, client).present

    @in_single_precision
    def terms(self, position: ArrayTree, client: Client) -> Array:
        groups = groups_of(self.local, client)
        mode = jax.lax.stop_gradient(find_modes(groups, jax.lax.stop_gradient(position)).flat)
        # The search is not differentiated. One more Newton step from the mode has the derivative of
        # the mode (implicit function theorem), so the gradient is the gradient of the quadrature.
        gradient, curvature = groups.gradient_and_curvature(position, mode)
        center = mode + solve(cholesky(curvature), gradient)
        factor = cholesky(groups.gradient_and_curvature(position, center)[1])
        points, log_weights = _nodes(self.nodes, self.size)

        def log_density(point: Array) -> Array:
            flat = center + solve_upper(factor, jnp.broadcast_to(point, center.shape))
            return groups.log_density(position, flat)

        values = jax.vmap(log_density)(jnp.asarray(points, center.dtype))  # [num, G]
        values = values + jnp.asarray(log_weights, values.dtype)[:, None]
        total = jax.nn.logsumexp(values, axis=0) - log_diagonal(factor).astype(values.dtype)
        return jnp.where(groups.present, total, 0)


def quadrature_error(
    posterior: Posterior, data: FederatedData, draws: ArrayTree, *, num_draws: int = 20
) -> float:
    """Return the largest error of the log density of a draw because of quadrature, in nats.

    The reference is a quadrature with four more nodes per dimension. An error that is the same for
    all draws does not change the posterior, so the mean error is subtracted. A run that ends with
    an error above 0.1 warns.

    Parameters
    ----------
    posterior
        Posterior from `marginal`.
    data
        Rows of the clients.
    draws
        Draws of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``.
    num_draws
        Number of draws that are checked, evenly spread.

    Raises
    ------
    ValueError
        If the posterior is not from `marginal`.

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
    >>> posterior = marginal(fedmcmc.from_numpyro(model, example=data), nodes=1)
    >>> draws = {"mu": np.linspace(0, 3, 50)[None]}
    >>> quadrature_error(posterior, data, draws) < 1e-4  # exact for normal outcomes
    True
    """
    expect(posterior, Posterior, "posterior")
    terms = posterior.loglikelihood_fn
    if not isinstance(terms, MarginalTerms):
        raise ValueError("This posterior integrates no latents: pass the result of marginal().")
    differences = np.asarray(_differences(terms, data, thin_draws(draws, num_draws)), np.float64)
    return float(np.abs(differences - differences.mean()).max())


def failed_searches(
    local: Local, data: FederatedData, draws: ArrayTree, *, num_draws: int = 20
) -> tuple[int, int]:
    """Return the number of failed searches for a latent's mode, and the number of searches.

    A search by Newton's method fails if its next step predicts an increase of more than a
    thousandth of a nat or is not finite, or if the log density is not curved downwards at its end.
    Quadrature and `independence` rely on the mode. A run whose searches fail warns.

    Parameters
    ----------
    local
        Part of the model that belongs to a group.
    data
        Rows of the clients.
    draws
        Draws of the shared parameters, unconstrained, leaves ``[chains, draws, *event]``.
    num_draws
        Number of draws that are checked, evenly spread, with one search per group and draw.
    """
    failed, total = _failures(as_functions(local), data, thin_draws(draws, num_draws))
    return int(failed.sum()), int(total.sum())


@compiled
@in_single_precision
def _failures(local: Local, data: FederatedData, draws: ArrayTree) -> tuple[Array, Array]:
    def of_client(client: Client, position: ArrayTree) -> tuple[Array, Array]:
        groups = groups_of(local, client)
        mode = find_modes(groups, position)
        factor = cholesky(groups.gradient_and_curvature(position, mode.flat)[1])
        peaked = jnp.all(jnp.diagonal(factor, axis1=-2, axis2=-1) > 0, -1)
        is_mode = (mode.gain < MAX_GAIN) & peaked  # false if the gain is NaN
        return jnp.sum(groups.present & ~is_mode), jnp.sum(groups.present)

    def of_draw(position: ArrayTree) -> tuple[Array, Array]:
        counts: tuple[Array, Array] = data.map_clients(lambda client: of_client(client, position))
        return counts

    totals: tuple[Array, Array] = jax.lax.map(of_draw, draws)
    return totals


def thin_draws(draws: ArrayTree, num: int) -> ArrayTree:
    """Return at most `num` draws of all chains, evenly spread, leaves ``[num, *event]``."""
    total = int(np.prod(np.shape(jax.tree.leaves(draws)[0])[:2]))
    indices = np.linspace(0, total - 1, min(num, total)).astype(int)
    return jax.tree.map(
        lambda leaf: jnp.asarray(np.reshape(leaf, (total, *np.shape(leaf)[2:]))[indices]), draws
    )


@compiled
def _differences(terms: MarginalTerms, data: FederatedData, draws: ArrayTree) -> Array:
    finer = replace(terms, nodes=terms.nodes + MORE_NODES)

    def of_client(client: Client, position: ArrayTree) -> Array:
        # Differences per group, so that rounding errors of large common terms cancel.
        return jnp.sum(finer.terms(position, client) - terms.terms(position, client))

    def of_draw(position: ArrayTree) -> Array:
        return jnp.sum(data.map_clients(lambda client: of_client(client, position)))

    return jax.lax.map(of_draw, draws)


def _nodes(num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points ``[num**size, size]`` and log weights for integrals over the whole space.

    The weights are divided by ``exp(-x'x / 2)``, so that ``sum(exp(log_weights) * f(points))``
    approximates the integral of ``f``.
    """
    places, weights = np.polynomial.hermite_e.hermegauss(num)
    log_weights = np.log(weights) + places**2 / 2
    points = np.array(list(itertools.product(places, repeat=size)))
    return points, np.array([sum(x) for x in itertools.product(log_weights, repeat=size)])


def marginal(posterior: Posterior, nodes: int = 5) -> Posterior:
    """Integrate out the latents of groups, each at the client that owns the group's rows.

    The result is a posterior of the shared parameters alone. Use it with `fedmcmc.fit`,
    `fedmcmc.correct` or any kernel that uses all rows of a client. Messages contain no latents.

    Each group's integral is computed by Gauss-Hermite quadrature around the mode of its latent,
    scaled by the curvature there (Liu and Pierce 1994). The mode is computed at each position, and
    derivatives with respect to the position are exact for the quadrature. Do not use it for latents
    with several modes: it finds only one.

    Parameters
    ----------
    posterior
        Posterior with ``local``, such as `fedmcmc.from_numpyro` of a model with local sites.
    nodes
        Number of points per dimension of a latent, odd; 1 is the Laplace approximation. Any number
        is exact for a latent that is normal given position and rows. For logistic models 5 are
        enough; counts of rare events may need 9. A run warns if more nodes change log densities of
        draws, see `fedmcmc.hierarchy.quadrature_error`.

    Returns
    -------
    Posterior
        Posterior whose log likelihood has one term per group, without ``resample_fn``.

    Raises
    ------
    ValueError
        If the posterior has no latents of groups, a latent has more than three elements and `nodes`
        is not one, or `nodes` is even.

    References
    ----------
    Liu and Pierce (1994), A note on Gauss-Hermite quadrature, Biometrika 81,
    doi:10.1093/biomet/81.3.624.

    Examples
    --------
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
    if nodes % 2 == 0:
        raise ValueError(f"nodes must be odd, so that the mode is one of them; got {nodes}.")
    size = trees.num_elements(local.like.tree)
    if size > MAX_DIMENSIONS and nodes > 1:
        raise ValueError(
            f"marginal integrates over at most {MAX_DIMENSIONS} numbers per group, and this model "
            f"has {size}: quadrature would take {nodes}**{size} points per group. Use "
            f"fedmcmc.fed_gibbs, fedmcmc.lsd(posterior, refresh=...) or fedmcmc.fed_ep, or the "
            f"Laplace approximation, nodes=1."
        )
    return posterior._replace(
        loglikelihood_fn=as_functions(MarginalTerms(local, nodes)), local=None, resample_fn=None
    )
