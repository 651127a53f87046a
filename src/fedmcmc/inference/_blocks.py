"""Ways of client inference: exact, a scaled identity, moments of samples, Laplace."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import Partial

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import ArrayTree, Client, Number, Posterior, Static
from fedmcmc.data import FederatedData
from fedmcmc.gaussian import Gaussian, project
from fedmcmc.inference._fisher import check_resample, fisher
from fedmcmc.inference._means import check_quadratic, exact_tilted
from fedmcmc.inference._shapes import clipped, flat_precision, from_flat, in_structure
from fedmcmc.inference._types import Inference, Mean, Tilted, with_decay
from fedmcmc.pytrees import schedules, trees

__all__ = ["exact_gaussian", "laplace", "mcmc", "scaled_identity"]


def exact_gaussian() -> Inference:
    """Multiply likelihood and cavity exactly, for quadratic log likelihoods; match the moments.

    With dense sites nothing is approximated, and one round of all clients gives the posterior. With
    diagonal sites or a scaled identity the tilted distribution is projected: its mean is kept, and
    its variances, or their mean.

    References
    ----------
    Guo et al. (2023), section 3.2 and Figure 1.
    """
    return Inference(Partial(_prepare_nothing), Partial(_fit_exact), Partial(check_quadratic))


def _prepare_nothing(rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    del rng_key, like, client
    return ()


def _fit_exact(
    posterior: Posterior,
    draws: ArrayTree,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
) -> Tilted:
    del draws, round_
    tilted, gradient_norm = exact_tilted(posterior, position, cavity, client)
    return Tilted(project(tilted, cavity.structure), gradient_norm)


class _Scaled(NamedTuple):
    mean: Mean
    number: Any
    kind: Static[str]


def scaled_identity(
    mean: Mean,
    *,
    variance: Number | None = None,
    precision: Number | None = None,
    precision_per_row: Number | None = None,
) -> Inference:
    """Take a scaled identity for the covariance that the likelihood brings (variant I).

    Parameters
    ----------
    mean
        How the tilted mean is found: `sgd_mean` or `exact_mean`.
    variance
        The tilted covariance is this times the identity, whatever the cavity: the paper's
        ``alpha_cov``.
    precision
        The tilted precision is the cavity's plus this: the authors' toy problem, with one.
    precision_per_row
        The tilted precision is the cavity's plus this times the client's number of rows: the
        authors' released code for networks (their ``alpha_cov`` is this number).

    References
    ----------
    Guo et al. (2023), section 4.2.
    """
    expect(mean, Mean, "mean")
    given = {"variance": variance, "precision": precision, "precision_per_row": precision_per_row}
    named = {name: number for name, number in given.items() if number is not None}
    if len(named) != 1:
        raise ValueError(
            "scaled_identity takes one of variance=, precision= and precision_per_row=, got "
            f"{sorted(named) or 'none'}."
        )
    ((kind, number),) = named.items()
    value = schedules.number(number, kind, minimum=0.0, strict=True)
    settings = _Scaled(mean, value, Static(kind))
    return Inference(
        Partial(_prepare_mean, mean),
        Partial(_fit_scaled, settings),
        Partial(_check_mean, mean, None),
    )


def _prepare_mean(mean: Mean, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
    return mean.prepare(rng_key, like, client)


def _check_mean(
    mean: Mean,
    second: Any,
    posterior: Posterior,
    position: ArrayTree,
    data: FederatedData,
    structure: str,
) -> None:
    del structure
    mean.check(posterior, position, data, second)


def _fit_scaled(
    settings: _Scaled,
    posterior: Posterior,
    draws: ArrayTree,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
) -> Tilted:
    mean = settings.mean
    found = mean.find(
        posterior, draws, position, with_decay(mean, cavity, client, round_), client, round_, None
    )
    number, before = schedules.value(settings.number, round_), flat_precision(cavity)
    kind = settings.kind.value
    if kind == "variance":
        before, number = jnp.zeros_like(before), 1 / number
    elif kind == "precision_per_row":
        number = number * client.size.astype(client.share.dtype)
    added = trees.cast(number, before)
    if before.ndim == 2:
        added = added * jnp.eye(before.shape[0], dtype=before.dtype)
    return Tilted(from_flat(found.mean, before + added, cavity.structure), found.gradient_norm)


class _Mcmc(NamedTuple):
    mean: Mean
    shrinkage: Any
    match: Any
    clip: Static[float | None]


def mcmc(
    mean: Mean,
    *,
    shrinkage: Number = 0.0,
    clip: float | None = None,
    match_precision_per_row: Number | None = None,
) -> Inference:
    """Take mean and covariance of the tilted samples (variant M).

    The covariance is ``shrinkage * I + (1 - shrinkage) * S`` with the sample variances ``S``
    (divisor one less than the number of samples), or their covariance matrix where sites are
    dense, or their mean for a scaled identity.

    Parameters
    ----------
    mean
        How the samples are drawn: `sgd_mean`, or `exact_mean` for their exact moments.
    shrinkage
        Between zero and one.
    clip
        Clip precisions to their mean plus and minus so many standard deviations over coordinates;
        2 in the released code, no clipping in the paper.
    match_precision_per_row
        Rescale precisions to the Euclidean norm of those of
        ``scaled_identity(precision_per_row=...)`` with this number, as the released code does: then
        samples give the shape of the covariance alone.

    References
    ----------
    Guo et al. (2023), section 4.2.
    """
    expect(mean, Mean, "mean")
    rate = schedules.number(shrinkage, "shrinkage", minimum=0.0, maximum=1.0)
    match: Any = ()
    if match_precision_per_row is not None:
        match = schedules.number(
            match_precision_per_row, "match_precision_per_row", minimum=0.0, strict=True
        )
    settings = _Mcmc(mean, rate, match, Static(_clip(clip)))
    return Inference(
        Partial(_prepare_mean, mean), Partial(_fit_mcmc, settings), Partial(_check_moments, mean)
    )


def _clip(clip: float | None) -> float | None:
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise ValueError(f"clip must be a positive number of standard deviations, got {clip!r}.")
    return None if clip is None else float(clip)


def _second(structure: str) -> str:
    return "dense" if structure == "dense" else "diagonal"


def _check_moments(
    mean: Mean, posterior: Posterior, position: ArrayTree, data: FederatedData, structure: str
) -> None:
    mean.check(posterior, position, data, _second(structure))


def _fit_mcmc(
    settings: _Mcmc,
    posterior: Posterior,
    draws: ArrayTree,
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
) -> Tilted:
    mean, structure = settings.mean, cavity.structure
    target = with_decay(mean, cavity, client, round_)
    found = mean.find(posterior, draws, position, target, client, round_, _second(structure))
    variance = trees.ravel(found.variance) if structure != "dense" else found.variance
    variance = in_structure(variance, structure)
    rate = trees.cast(schedules.value(settings.shrinkage, round_), variance)
    one = jnp.eye(variance.shape[0], dtype=variance.dtype) if variance.ndim == 2 else 1.0
    variance = rate * one + (1 - rate) * variance
    precision = jnp.linalg.inv(variance) if variance.ndim == 2 else 1 / variance
    precision = clipped(precision, settings.clip.value)
    if not trees.is_empty(settings.match):
        per_row = schedules.value(settings.match, round_) * client.size.astype(client.share.dtype)
        like = flat_precision(cavity)
        eye = jnp.eye(like.shape[0], dtype=like.dtype) if like.ndim == 2 else 1.0
        wanted = jnp.linalg.norm(jnp.ravel(like + trees.cast(per_row, like) * eye))
        precision = precision * wanted / jnp.linalg.norm(jnp.ravel(precision))
    return Tilted(from_flat(found.mean, precision, structure), found.gradient_norm)


class _Laplace(NamedTuple):
    mean: Mean
    scale: Any
    num_passes: Static[int]
    clip: Static[float | None]


def laplace(
    mean: Mean, *, num_passes: int = 1, clip: float | None = None, scale: Number = 1.0
) -> Inference:
    """Add the Fisher information at the tilted mean to the cavity's precision (variant L).

    The sum over rows of squared gradients, with outcomes that the model draws, once a row and pass;
    products of gradients where sites are dense. An estimate of minus the expected second
    derivatives that needs no curvature and is never negative.

    Parameters
    ----------
    mean
        How the tilted mean is found: `sgd_mean`, `langevin_mean` or `exact_mean`.
    num_passes
        Passes over the rows, each with new outcomes; 5 or 10 in the paper.
    clip
        Clip the information to its mean plus and minus so many standard deviations over
        coordinates; 2 in the released code, no clipping in the paper.
    scale
        Multiplies all that is added to the cavity, the weight decay of `mean` included; one in the
        paper.

    Notes
    -----
    The posterior needs a ``resample_fn``, which draws outcomes (`fedmcmc.from_numpyro` and
    `fedmcmc.from_flax` make one).

    References
    ----------
    Guo et al. (2023), section 4.2.

    Examples
    --------
    >>> import optax
    >>> from fedmcmc.inference import sgd_mean
    >>> mean = sgd_mean(optax.sgd(0.01, momentum=0.9), num_samples=10, batch_size=20)
    >>> block = laplace(mean, num_passes=5)  # fedmcmc.fed_ep(posterior, inference=block, ...)
    """
    expect(mean, Mean, "mean")
    settings = _Laplace(
        mean,
        schedules.number(scale, "scale", minimum=0.0, strict=True),
        Static(positive_integer(num_passes, "num_passes")),
        Static(_clip(clip)),
    )
    return Inference(
        Partial(_prepare_laplace, settings),
        Partial(_fit_laplace, settings),
        Partial(_check_fisher, mean),
    )


def _check_fisher(
    mean: Mean, posterior: Posterior, position: ArrayTree, data: FederatedData, structure: str
) -> None:
    del structure
    check_resample(posterior, position, data)
    mean.check(posterior, position, data, None)


def _prepare_laplace(
    settings: _Laplace, rng_key: Array, like: ArrayTree, client: Client
) -> tuple[ArrayTree, Array]:
    mean_key, pass_key = jax.random.split(rng_key)
    keys = jax.random.split(pass_key, settings.num_passes.value)
    return settings.mean.prepare(mean_key, like, client), keys


def _fit_laplace(
    settings: _Laplace,
    posterior: Posterior,
    draws: tuple[ArrayTree, Array],
    position: ArrayTree,
    cavity: Gaussian,
    client: Client,
    round_: Array,
) -> Tilted:
    mean, (mean_draws, keys), structure = settings.mean, draws, cavity.structure
    target = with_decay(mean, cavity, client, round_)
    found = mean.find(posterior, mean_draws, position, target, client, round_, None)
    dense = structure == "dense"
    passes = jax.lax.map(lambda key: fisher(posterior, key, found.mean, client, dense=dense), keys)
    information = clipped(jnp.mean(passes, axis=0), settings.clip.value)
    information = in_structure(client.size.astype(information.dtype) * information, structure)
    return Tilted(
        scaled_addition(
            found.mean, information, target, cavity, schedules.value(settings.scale, round_)
        ),
        found.gradient_norm,
    )


def scaled_addition(
    mean: ArrayTree, information: Array, target: Gaussian, cavity: Gaussian, scale: Array
) -> Gaussian:
    """Return the cavity plus `scale` times what the client adds, its weight decay included."""
    before = flat_precision(cavity)
    added = information + flat_precision(target) - before
    return from_flat(mean, before + trees.cast(scale, before) * added, cavity.structure)
