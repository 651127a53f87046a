"""What a kernel does to Gaussian clients: its stationary law, before any run.

With Gaussian surrogates in place of the clients' likelihoods a round is, for many kernels, an
affine map of the position and of the normals that it draws. The map is read off the kernel's own
round, by differentiating it, so whatever the kernel is made of is part of the prediction. Other
kernels are simulated on the surrogates.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc._types import ArrayTree, FederatedKernel, Federation, user_position
from fedmcmc.diagnostics import MAX_BIAS, MAX_SPREAD
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.tuning._gaussian_clients import GaussianClients, on_gaussian_clients
from fedmcmc.tuning._laws import RandomMap, rounds_along, rounds_per_draw
from fedmcmc.tuning._linearized import affine_map
from fedmcmc.tuning._twin import simulated

SURE = 2
"""Standard errors by which a simulated error must lie above what is accepted."""


class Prediction(NamedTuple):
    """The law of a kernel on Gaussian approximations of the clients, beside its target.

    Attributes
    ----------
    mean, covariance
        ``[d]`` and ``[d, d]`` over the raveled position, the stationary law of the position after a
        round; NaN where there is none.
    target_mean, target_covariance
        Of the posterior that the approximations make with the prior.
    spectral_radius
        Of the map of a round: what is left of a distance from the stationary mean after a round. At
        one or above, the kernel diverges.
    names
        What the coordinates of the raveled position are called.
    on_position
        ``[d, d]``, what a round does to the position in the mean; of a simulated kernel the
        regression of a position on the one before.
    bits
        Sent up and down in a round on average, by and to all clients.
    rounds_per_draw
        Rounds per effective draw of each coordinate, ``[d]``: autocorrelation times.
    slowest
        Rounds per effective draw of the slowest direction.
    gradients
        In words, what is taken for the clients' gradients.
    mean_error, sd_error
        ``[d]``, standard errors of ``mean`` and of the standard deviations: zero where the law is
        exact.
    simulated
        Why the kernel was simulated on Gaussian clients, empty where the law is exact.
    num_simulated
        Rounds of all simulated chains together.
    of_functional
        Rounds per effective draw of the functional that was asked for; NaN without one.
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
    of_functional: float = float("nan")

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
        """Standard deviations over those of the posterior, ``[d]``."""
        return np.sqrt(np.diag(self.covariance) / np.diag(self.target_covariance))

    @property
    def spread_error(self) -> np.ndarray:
        """Standard error of `spread`, ``[d]``."""
        return self.sd_error / np.sqrt(np.diag(self.target_covariance))

    @property
    def is_biased(self) -> bool:
        """Whether the kernel diverges, or a mean is off by 0.1 sd, or an sd by a tenth.

        Of a simulated kernel, beyond two standard errors.
        """
        if not self.spectral_radius < 1:
            return True
        bias = np.abs(self.bias) - SURE * self.bias_error
        with np.errstate(divide="ignore", invalid="ignore"):  # of a chain that stands still
            stretch = np.abs(np.log(self.spread)) - SURE * self.spread_error / self.spread
        return bool(bias.max() > MAX_BIAS or not stretch.max() <= np.log(MAX_SPREAD))

    def __str__(self) -> str:
        """Return the largest errors in a sentence."""
        source = f"Predicted from Gaussian approximations and {self.gradients}"
        if not self.spectral_radius < 1:
            how = f"spectral radius {self.spectral_radius:.4g} per round"
            if self.simulated:
                how = "its simulated chains run away"
            return f"{source}: the kernel diverges ({how}); take a smaller step size."
        worst = np.abs(self.bias).argmax()
        told = (
            f"{source}: means off by up to {abs(self.bias[worst]):.3g} posterior sd "
            f"({self.names[worst]}), sds {self.spread.min():.3g} to {self.spread.max():.3g} of the "
            f"posterior's; a distance from the stationary mean shrinks to "
            f"{self.spectral_radius:.3g} of it per round."
        )
        if self.simulated and not np.isfinite(self.mean_error).all():
            told += (
                f" Simulated, since {self.simulated}, and not for long enough: chains that forget "
                f"this slowly are not predicted. Take a larger step size."
            )
        elif self.simulated:
            told += (
                f" Simulated over {self.num_simulated:,} rounds, since {self.simulated}: standard "
                f"errors are {self.bias_error.max():.2g} sd for means and "
                f"{self.spread_error.max():.2g} for ratios of sds."
            )
        return told


def predict_bias(
    kernel: FederatedKernel,
    data: Any,
    surrogates: Gaussian,
    *,
    scores: Array | None = None,
    round_: int = 0,
    functional: Callable[[ArrayTree], Array] | None = None,
) -> Prediction:
    """Predict the stationary law of `kernel` from Gaussian approximations of its clients.

    Exact where the clients' likelihoods and the prior are Gaussian and a round is an affine map of
    the position and of normals, whoever takes part. Kernels that compress messages, reject steps
    or keep more than the position between rounds (memories, snapshots, late messages) are simulated
    on the approximations, on the server and without a round of communication, until means are
    known to about 0.01 posterior sd and sds to one percent.

    Of ``lsd(refresh=...)`` with a refresh that is exact each move is taken for an independent draw;
    the law is exact then, with `fedmcmc.hierarchy.ula` simulated.

    Parameters
    ----------
    kernel
        A federated kernel that samples.
    data
        A `FederatedData`, or a consortium of clients elsewhere: of it the numbers of rows are read,
        and nobody is asked. Kernels that move latents need the rows, which say how much latents
        vary with the shared parameters.
    surrogates
        One `Gaussian` per client for its likelihood, as from `fedmcmc.surrogates.laplace`; with
        latents for that of `fedmcmc.marginal`. The prior is expanded to second order at the mode of
        its product with them.
    scores
        ``[num_clients, d, d]``, as from `fedmcmc.surrogates.score_covariance` at the mode: the
        noise of minibatches is part of the prediction then, and left out without. It is taken
        as normal noise that does not depend on the position. Hence there is none in differences of
        gradients at two places (`fedmcmc.svrg`, `fedmcmc.fixed_point`, `fedmcmc.scaffold`), as if
        all rows of a client had one curvature.
    round_
        The round whose step sizes are meant, where these are schedules.
    functional
        A number as a function of the position, unconstrained and in the user's coordinates, whose
        rounds per effective draw are wanted. It is taken as linear, by its gradient at the mode.

    Raises
    ------
    ValueError
        If the kernel is one on pooled rows or does not sample, what is given does not fit, or the
        dimension is above 512.

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
    federation = getattr(data, "federation", None)
    if not isinstance(kernel, FederatedKernel) or not isinstance(federation, Federation):
        raise TypeError(
            "predict_bias takes a FederatedKernel, a FederatedData (or a consortium) and "
            "surrogates, got "
            f"{type(kernel).__name__}, {type(data).__name__} and {type(surrogates).__name__}."
        )
    clients = on_gaussian_clients(kernel, data, surrogates, scores)
    direction = None if functional is None else _gradient(functional, kernel, clients.mode)
    law = affine_map(clients.kernel, clients.data, clients.mode, round_)
    if isinstance(law, str):
        return _by_simulation(clients, law, round_, direction)
    return _by_law(clients, *law, direction)


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
        raise ValueError(f"The gradient of functional at the mode must not vanish: {gradient}.")
    return gradient


def is_simulated(
    kernel: FederatedKernel, data: Any, surrogates: Gaussian, scores: Array | None
) -> bool:
    """Return whether `predict_bias` simulates `kernel`."""
    clients = on_gaussian_clients(kernel, data, surrogates, scores)
    return isinstance(affine_map(clients.kernel, clients.data, clients.mode, 0), str)


def _by_law(
    clients: GaussianClients, law: RandomMap, bits: float, direction: np.ndarray | None
) -> Prediction:
    """Return the prediction that follows from the map of a round."""
    mean, covariance, radius = law.stationary()
    times, slowest = np.full(len(mean), np.nan), float("nan")
    of_functional = float("nan")
    if radius < 1:
        times, slowest, _ = rounds_per_draw(law.on_position, covariance)
        if direction is not None:
            of_functional = rounds_along(direction, law.on_position, covariance)
    return Prediction(
        mean,
        covariance,
        clients.target_mean,
        clients.target_covariance,
        radius,
        tuple(trees.element_names(clients.mode)),
        law.on_position,
        bits,
        times,
        slowest,
        clients.gradients,
        np.zeros(len(mean)),
        np.zeros(len(mean)),
        of_functional=of_functional,
    )


def _by_simulation(
    clients: GaussianClients, reason: str, round_: int, direction: np.ndarray | None
) -> Prediction:
    """Return what chains on Gaussian clients say."""
    told = simulated(clients, round_, direction)
    return Prediction(
        told.mean,
        told.covariance,
        clients.target_mean,
        clients.target_covariance,
        told.spectral_radius,
        tuple(trees.element_names(clients.mode)),
        told.on_position,
        told.bits,
        told.rounds_per_draw,
        told.slowest,
        clients.gradients,
        told.mean_error,
        told.sd_error,
        reason,
        told.num_rounds,
        told.of_functional,
    )
