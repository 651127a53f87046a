"""Predicted stationary distribution of a kernel, from Gaussian approximations of its clients.

With Gaussian clients, a round of many kernels is an affine map of the position and of its normals.
The map comes from differentiating the kernel's own round, so the prediction covers all parts of the
kernel. All other kernels are simulated on the Gaussian clients.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc.diagnostics import MAX_BIAS, MAX_SPREAD, SamplingWarning
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.tuning._gaussian_clients import build_gaussian_clients, unknown_estimators
from fedmcmc.tuning._linearized import affine_map
from fedmcmc.tuning._random_maps import RandomMap, rounds_along, rounds_per_draw
from fedmcmc.tuning._simulation import simulate_chains
from fedmcmc.types import ArrayTree, FederatedKernel, Federation, user_position

NUM_STANDARD_ERRORS = 2
"""Number of standard errors by which a simulated error must exceed its limit."""


class Prediction(NamedTuple):
    """Predicted stationary distribution of a kernel on Gaussian clients, and its target.

    Attributes
    ----------
    mean, covariance
        ``[d]`` and ``[d, d]``, stationary moments of the raveled position after a round; NaN if the
        kernel diverges.
    target_mean, target_covariance
        Moments of the product of the Gaussian approximations and the prior.
    spectral_radius
        Factor by which a round shrinks the distance between the mean of a chain and its stationary
        mean. The kernel diverges if it is one or more.
    names
        Names of the coordinates of the raveled position.
    on_position
        ``[d, d]``, mean linear map of a round; for a simulated kernel, the regression of a position
        on the previous position.
    bits
        Mean number of bits per round, up and down, over all clients.
    rounds_per_draw
        Rounds per effective draw of each coordinate, ``[d]``: autocorrelation times.
    slowest
        Rounds per effective draw of the slowest direction.
    gradients
        Description of the clients' gradients, in words.
    mean_error, sd_error
        ``[d]``, standard errors of the mean and of the standard deviations: zero if the prediction
        is exact.
    simulated
        Reason why the kernel was simulated; empty if the prediction is exact.
    num_simulated
        Number of rounds of all simulated chains.
    functional_rounds
        Rounds per effective draw of `functional`; NaN without a functional.
    """

    mean: np.ndarray
    covariance: np.ndarray
    target_mean: np.ndarray
    target_covariance: np.ndarray
    spectral_radius: float
    names: tuple[str, ...]
    on_position: np.ndarray
    bits: float
    rounds_per_draw: np.ndarray
    slowest: float
    gradients: str
    mean_error: np.ndarray
    sd_error: np.ndarray
    simulated: str = ""
    num_simulated: int = 0
    functional_rounds: float = float("nan")

    @property
    def bias(self) -> np.ndarray:
        """Error of the mean in posterior standard deviations, ``[d]``."""
        return (self.mean - self.target_mean) / np.sqrt(np.diag(self.target_covariance))

    @property
    def bias_error(self) -> np.ndarray:
        """Standard error of `bias`, ``[d]``."""
        return self.mean_error / np.sqrt(np.diag(self.target_covariance))

    @property
    def spread(self) -> np.ndarray:
        """Standard deviations divided by the posterior's, ``[d]``."""
        return np.sqrt(np.diag(self.covariance) / np.diag(self.target_covariance))

    @property
    def spread_error(self) -> np.ndarray:
        """Standard error of `spread`, ``[d]``."""
        return self.sd_error / np.sqrt(np.diag(self.target_covariance))

    @property
    def is_biased(self) -> bool:
        """True if the kernel diverges, if a mean is off by 0.1 sd, or if an sd is off by a tenth.

        The errors of a simulated kernel must exceed these limits by two standard errors.
        """
        if not self.spectral_radius < 1:
            return True
        bias = np.abs(self.bias) - NUM_STANDARD_ERRORS * self.bias_error
        with np.errstate(divide="ignore", invalid="ignore"):  # of a chain that stands still
            log_error = NUM_STANDARD_ERRORS * self.spread_error / self.spread
            stretch = np.abs(np.log(self.spread)) - log_error
        return bool(bias.max() > MAX_BIAS or not stretch.max() <= np.log(MAX_SPREAD))

    def __str__(self) -> str:
        """Return a summary with the largest errors."""
        source = f"Predicted from Gaussian approximations and {self.gradients}"
        if not self.spectral_radius < 1:
            reason = f"spectral radius {self.spectral_radius:.4g} per round"
            if self.simulated:
                reason = "its simulated chains run away"
            return f"{source}: the kernel diverges ({reason}); take a smaller step size."
        worst = np.abs(self.bias).argmax()
        text = (
            f"{source}: means off by up to {abs(self.bias[worst]):.3g} posterior sd "
            f"({self.names[worst]}), sds {self.spread.min():.3g} to {self.spread.max():.3g} of the "
            f"posterior's; a distance from the stationary mean shrinks to "
            f"{self.spectral_radius:.3g} of it per round."
        )
        if self.simulated and not np.isfinite(self.mean_error).all():
            text += (
                f" The kernel was simulated because {self.simulated}, but its chains forget their "
                f"start too slowly for a prediction. Take a larger step size."
            )
        elif self.simulated:
            text += (
                f" Simulated over {self.num_simulated:,} rounds because {self.simulated}; standard "
                f"errors are {self.bias_error.max():.2g} sd for means and "
                f"{self.spread_error.max():.2g} for ratios of sds."
            )
        return text


def predict_bias(
    kernel: FederatedKernel,
    data: object,
    surrogates: Gaussian,
    *,
    scores: Array | None = None,
    round_: int = 0,
    functional: Callable[[ArrayTree], Array] | None = None,
) -> Prediction:
    """Predict the stationary distribution of a kernel from Gaussian approximations of its clients.

    The prediction is exact if likelihoods and prior are Gaussian and a round is an affine map of
    the position and of normals, for any participation rule. Kernels that compress messages, reject
    steps or store more than the position between rounds (memories, snapshots, late messages) are
    simulated on the approximations, at the server and without communication. The simulation ends
    when standard errors are about 0.01 posterior sd for means and one percent for sds.

    Noise is unknown for classes of estimators that are not of this package: the prediction applies
    their `estimate` to one row per client, and a `SamplingWarning` names them.

    Parameters
    ----------
    kernel
        Federated kernel that samples.
    data
        `FederatedData`, or a consortium of remote clients, of which only numbers of rows are read.
        Kernels that move latents need the rows. An exact refresh of latents counts as an
        independent draw.
    surrogates
        One `Gaussian` per client for its likelihood, such as from `fedmcmc.surrogates.laplace`; for
        a model with latents, for the likelihood of `fedmcmc.marginal`.
    scores
        ``[num_clients, d, d]``, from `fedmcmc.surrogates.score_covariance` at the mode: covariance
        of minibatch noise, which counts as normal and independent of the position, so that it
        cancels in differences of gradients. By default minibatches have no noise.
    round_
        Round at which schedules of step sizes are evaluated.
    functional
        Function that maps an unconstrained position, in the user's coordinates, to a number. Its
        rounds per effective draw are computed from its gradient at the mode.

    Raises
    ------
    ValueError
        If the kernel uses pooled rows or does not sample, if arguments do not fit together, or if
        the dimension is above 512.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(
    ...     lambda theta: -0.5 * theta**2,
    ...     lambda theta, rows: -0.5 * rows["p"] * (rows["x"] - theta) ** 2,
    ... )
    >>> data = fedmcmc.FederatedData.from_clients(
    ...     [{"x": jnp.ones(1), "p": jnp.ones(1)}, {"x": jnp.zeros(1), "p": 4 * jnp.ones(1)}]
    ... )
    >>> q = fedmcmc.Gaussian.from_moments(jnp.array([1.0, 0.0]), variance=jnp.array([1.0, 0.25]))
    >>> kernel = fedmcmc.fa_ld(posterior, step_size=0.02, num_local_steps=10)
    >>> predict_bias(kernel, data, q).bias.round(2)
    array([0.16])
    """
    prediction = predict_silently(kernel, data, surrogates, scores, round_, functional)
    warn_of_unknown_noise(kernel)
    return prediction


def predict_silently(
    kernel: FederatedKernel,
    data: object,
    surrogates: Gaussian,
    scores: Array | None,
    round_: int,
    functional: Callable[[ArrayTree], Array] | None,
) -> Prediction:
    """Return the result of `predict_bias` without a warning of unknown noise."""
    federation = getattr(data, "federation", None)
    if not isinstance(kernel, FederatedKernel) or not isinstance(federation, Federation):
        raise TypeError(
            "predict_bias takes a FederatedKernel, a FederatedData (or a consortium) and "
            "surrogates, got "
            f"{type(kernel).__name__}, {type(data).__name__} and {type(surrogates).__name__}."
        )
    clients = build_gaussian_clients(kernel, data, surrogates, scores)
    direction = None if functional is None else _gradient(functional, kernel, clients.mode)
    linearized = affine_map(clients.kernel, clients.data, clients.mode, round_)
    if isinstance(linearized, str):
        moments = simulate_chains(clients, round_, direction)._asdict() | {"simulated": linearized}
    else:
        moments = _exact_moments(*linearized, direction)
    return Prediction(
        target_mean=clients.target_mean,
        target_covariance=clients.target_covariance,
        names=tuple(trees.element_names(clients.mode)),
        gradients=clients.gradients,
        **moments,
    )


def warn_of_unknown_noise(kernel: FederatedKernel) -> None:
    """Warn if the kernel contains estimators that the user wrote."""
    names = unknown_estimators(kernel)
    if names:
        warnings.warn(
            f"The noise of {' and '.join(names)}, a gradient estimator that is not of fedmcmc, is "
            "unknown and left out of the prediction, which replaces the rows of each client by "
            "one. Compare draws with the exact distribution instead (docs/guides/extend.md).",
            SamplingWarning,
            stacklevel=3,
        )


def _gradient(
    functional: Callable[[ArrayTree], Array], kernel: FederatedKernel, mode: ArrayTree
) -> np.ndarray:
    """Return the gradient ``[d]`` at the mode of a functional of the user's position."""

    def value(position: ArrayTree) -> Array:
        return jnp.asarray(functional(user_position(kernel, position)))

    shape = jax.eval_shape(value, mode).shape
    if shape != ():
        raise ValueError(f"functional must return a number, got an array of shape {shape}.")
    gradient = np.asarray(trees.ravel(jax.grad(value)(mode)), np.float64)
    if not np.isfinite(gradient).all() or not gradient.any():
        raise ValueError(
            f"The gradient of functional at the mode must be finite and not zero, got {gradient}."
        )
    return gradient


def is_simulated(
    kernel: FederatedKernel, data: object, surrogates: Gaussian, scores: Array | None
) -> bool:
    """Return true if `predict_bias` simulates `kernel`."""
    clients = build_gaussian_clients(kernel, data, surrogates, scores)
    return isinstance(affine_map(clients.kernel, clients.data, clients.mode, 0), str)


def _exact_moments(
    random_map: RandomMap, bits: float, direction: np.ndarray | None
) -> dict[str, Any]:
    """Return the fields of a `Prediction` that follow from the map of a round."""
    mean, covariance, radius = random_map.stationary()
    times, slowest = np.full(len(mean), np.nan), float("nan")
    functional_rounds = float("nan")
    if radius < 1:
        times, slowest, _ = rounds_per_draw(random_map.on_position, covariance)
        if direction is not None:
            functional_rounds = rounds_along(direction, random_map.on_position, covariance)
    return dict(
        mean=mean,
        covariance=covariance,
        spectral_radius=radius,
        on_position=random_map.on_position,
        bits=bits,
        rounds_per_draw=times,
        slowest=slowest,
        mean_error=np.zeros(len(mean)),
        sd_error=np.zeros(len(mean)),
        functional_rounds=functional_rounds,
    )
