"""What a client's inference is: a Gaussian for its likelihood times its cavity."""

from typing import NamedTuple

from jax import Array

from fedmcmc._types import ArrayTree, Client, Described, Federation, Posterior
from fedmcmc.gaussian import Gaussian, from_flat
from fedmcmc.hierarchy import Locals


class Tilted(NamedTuple):
    """A Gaussian for the tilted distribution, and the gradients' root mean square ``[]``."""

    gaussian: Gaussian
    gradient_norm: Array


class Inference(Described):
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


class LatentInference(Inference):
    """An inference that moves latents of groups along, which their client keeps."""

    def first_locals(self, posterior: Posterior, position: ArrayTree, client: Client) -> Locals:
        """Return where the client's latents begin."""
        raise NotImplementedError

    def fit_latents(
        self,
        posterior: Posterior,
        draws: ArrayTree,
        position: ArrayTree,
        cavity: Gaussian,
        client: Client,
        round_: Array,
        kept: Locals,
    ) -> tuple[Tilted, Locals]:
        """Return the fit of the shared position as `Inference.fit`, and the latents moved."""
        raise NotImplementedError


class Moments(NamedTuple):
    """Moments of the tilted distribution.

    `mean` is shaped as a position; `variance` is ``()``, a tree of variances, or a covariance
    ``[d, d]``, as was asked for; `gradient_norm` ``[]``.
    """

    mean: ArrayTree
    variance: ArrayTree
    gradient_norm: Array


class Mean(Described):
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
    ) -> Moments:
        """Return mean and variance; the latter as `second`, ``"diagonal"``, ``"dense"`` or none.

        The cavity contains the factor of `with_decay`.
        """
        raise NotImplementedError

    def check(
        self, posterior: Posterior, position: ArrayTree, federation: Federation, second: str | None
    ) -> None:
        """Raise `ValueError` where the search does not fit model or rows."""

    def with_decay(self, cavity: Gaussian, client: Client, round_: Array) -> Gaussian:
        """Return the cavity times the factor of the client's likelihood that is a weight decay."""
        return cavity


class Fit(NamedTuple):
    """What is known of a client's fit once its mean is found.

    `randomness` is what the inference prepared besides that of the search for the mean, `target`
    the cavity with the weight decay of the mean.
    """

    posterior: Posterior
    randomness: ArrayTree
    moments: Moments
    cavity: Gaussian
    target: Gaussian
    client: Client
    round: Array


class MeanFirst(Inference):
    """An inference that first finds the mean, and then a precision, which a subclass computes."""

    mean: Mean  # a field of every subclass

    def precision(self, fit: Fit) -> Array:
        """Return the tilted precision as of `flat_precision`, ``[]``, ``[d]`` or ``[d, d]``."""
        raise NotImplementedError

    def second(self, structure: str) -> str | None:
        """Return what of the covariance the search for the mean has to return, as `Mean.find`."""
        return None

    def prepare(
        self, rng_key: Array, like: ArrayTree, client: Client
    ) -> tuple[ArrayTree, ArrayTree]:
        """Return what is random in the search for the mean, and in the precision."""
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
