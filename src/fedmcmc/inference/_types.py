"""Interfaces of a client's inference: a Gaussian for its likelihood times its cavity."""

from typing import NamedTuple

from jax import Array

from fedmcmc.gaussian import Gaussian, from_flat
from fedmcmc.hierarchy import LatentState
from fedmcmc.types import ArrayTree, Client, Described, Federation, Posterior


class Tilted(NamedTuple):
    """Gaussian for the tilted distribution, and root mean square ``[]`` of the gradients."""

    gaussian: Gaussian
    gradient_norm: Array


class Inference(Described):
    """Approximation of a client's likelihood times its cavity.

    A subclass is a frozen dataclass registered as a pytree, whose fields are numbers (leaves) and
    structure (static). Its methods are pure.
    """

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Return all random draws of a fit; `like` has the shapes of a position."""
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
        """Return the fit, with the cavity's structure; `position` is the server's mean."""
        raise NotImplementedError

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        """Raise `ValueError` if the inference does not fit model, rows or structure."""


class LatentInference(Inference):
    """Inference that also samples latents of groups, which their client keeps."""

    def initial_latent_state(
        self, posterior: Posterior, position: ArrayTree, client: Client
    ) -> LatentState:
        """Return the client's first latents."""
        raise NotImplementedError

    def fit_latents(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        latents: LatentState,
    ) -> tuple[Tilted, LatentState]:
        """Return the fit of the shared position, as in `Inference.fit`, and the new latents."""
        raise NotImplementedError


class TiltedMoments(NamedTuple):
    """Moments of the tilted distribution.

    `mean` has the shape of a position; `variance` is ``()``, a tree of variances, or a covariance
    ``[d, d]``, see `Mean.find`; `gradient_norm` is ``[]``.
    """

    mean: ArrayTree
    variance: ArrayTree
    gradient_norm: Array


class Mean(Described):
    """Method for the mean of the tilted distribution, and for its variances if it has samples.

    Subclasses follow the same rules as subclasses of `Inference`.
    """

    def prepare(self, rng_key: Array, like: ArrayTree, client: Client) -> ArrayTree:
        """Return all random draws of a search; `like` has the shapes of a position."""
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
    ) -> TiltedMoments:
        """Return the mean, and variances if `second` is ``"diagonal"`` or ``"dense"``.

        The cavity contains the factor of `with_decay`.
        """
        raise NotImplementedError

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, second: str | None
    ) -> None:
        """Raise `ValueError` if the search does not fit model or rows."""

    def with_decay(self, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
        """Return the cavity times the weight decay, a factor of the client's likelihood."""
        return cavity


class Fit(NamedTuple):
    """State of a client's fit after the search for the mean.

    `draws` are the draws for the precision. `target` is the cavity with the weight decay of the
    mean.
    """

    posterior: Posterior
    draws: ArrayTree
    moments: TiltedMoments
    cavity: Gaussian
    target: Gaussian
    client: Client
    round: Array


class MeanFirst(Inference):
    """Inference that first finds the mean and then the precision; a subclass defines the latter."""

    mean: Mean  # a field of every subclass

    def precision(self, fit: Fit) -> Array:
        """Return the tilted precision ``[]``, ``[d]`` or ``[d, d]``, as in `flat_precision`."""
        raise NotImplementedError

    def second(self, structure: str) -> str | None:
        """Return the variances that the search for the mean must return, as in `Mean.find`."""
        return None

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return the random draws for the mean and for the precision."""
        return self.mean.prepare(rng_key, like, client), ()

    def fit(
        self,
        posterior: Posterior,
        draws: tuple[ArrayTree, ArrayTree],
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
    ) -> Tilted:
        target, second = self.mean.with_decay(cavity, client, round_), self.second(cavity.structure)
        moments = self.mean.find(posterior, draws[0], position, target, client, round_, second)
        fit = Fit(posterior, draws[1], moments, cavity, target, client, round_)
        gaussian = from_flat(moments.mean, self.precision(fit), cavity.structure)
        return Tilted(gaussian, moments.gradient_norm)

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, structure: str
    ) -> None:
        self.mean.check(posterior, position, federation, self.second(structure))
