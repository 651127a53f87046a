"""What a client's inference is: a Gaussian for its likelihood times its cavity."""

from typing import NamedTuple

from jax import Array

from fedmcmc._types import ArrayTree, Client, Federation, Posterior
from fedmcmc.gaussian import Gaussian

__all__ = ["Found", "Inference", "Mean", "Tilted"]


class Tilted(NamedTuple):
    """A Gaussian for the tilted distribution, and the gradients' root mean square ``[]``."""

    gaussian: Gaussian
    gradient_norm: Array


class Inference:
    """A client's approximation of its likelihood times its cavity.

    A subclass is a frozen dataclass registered as a pytree, whose fields hold numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Return all that is random in a fit; `like` holds the position's shapes."""
        return ()

    def fit(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        """Return the fit, of the cavity's structure; `position` is where the server's mean is."""
        raise NotImplementedError

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        """Raise `ValueError` where the inference does not fit model, rows or structure."""


class Found(NamedTuple):
    """Moments of the tilted distribution.

    `mean` is shaped as a position; `variance` is ``()``, a tree of variances, or a covariance
    ``[d, d]``, as was asked for; `gradient_norm` ``[]``.
    """

    mean: ArrayTree
    variance: ArrayTree
    gradient_norm: Array


class Mean:
    """A way to the tilted distribution's mean, and to what it sees of its covariance on that way.

    A subclass is as one of `Inference`.
    """

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Return all that is random in a search; `like` holds the position's shapes."""
        return ()

    def find(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        second: str | None,
    ) -> Found:
        """Return mean and variance; the latter as `second`, ``"diagonal"``, ``"dense"`` or none.

        The cavity contains the factor of `with_decay`.
        """
        raise NotImplementedError

    def check(
        self,
        posterior: Posterior,
        position: ArrayTree,
        federation: Federation,
        second: str | None,
    ) -> None:
        """Raise `ValueError` where the search does not fit model or rows."""

    def with_decay(self, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
        """Return the cavity times the factor of the client's likelihood that is a weight decay."""
        return cavity
