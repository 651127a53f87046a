"""The ten methods of the benchmarks: FedAvg, FedPA, and FedEP and FedSEP with four inferences."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import fedmcmc
from experiments import checks
from fedmcmc import inference

__all__ = ["METHODS", "Federation", "Settings", "build", "burn_in", "flat"]

LETTERS = {"I": "scaled identity", "M": "MCMC", "L": "Laplace", "V": "NGVI"}
METHODS = (
    "FedAvg",
    "FedPA",
    *(f"{name} ({letter})" for name in ("FedEP", "FedSEP") for letter in LETTERS),
)


class Federation(NamedTuple):
    """Rows to learn from, by client, rows held out (a batch of the model), and what they are."""

    data: fedmcmc.FederatedData
    test: Any
    text: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all methods; the defaults are those of CIFAR-100 (Table 7, released code).

    Attributes
    ----------
    num_seeds
        Independent runs of each method.
    cohort_size
        Clients a round, ``M``.
    num_burnin, num_rounds
        Rounds of FedAvg that all methods share, and rounds in all.
    num_epochs, batch_size
        Of a client in a round; an epoch gives a sample.
    client_learning_rate, client_momentum
        Of the clients' SGD.
    server_optimizer, server_learning_rate, server_momentum
        ``"sgd"`` or ``"adagrad"``, for positions and for natural parameters.
    site_learning_rate, site_momentum
        Of FedEP's clients, for their sites.
    weight_decay
        Precision a row: a prior of FedAvg and FedPA, a factor of each client's likelihood else.
    row_curvature
        Of `fedmcmc.inference.sgd_mean`; zero for gradients as they are.
    covariance
        The paper's ``alpha_cov``, which in the released code is a precision a row: of variant I,
        of the first sites after the burn-in, and of the norm that variant M is given.
    scale
        Of what L and V add to the cavity: ``covariance / weight_decay`` in the released code.
    shrinkage
        Of variant M.
    clip
        Of M, L and V, in standard deviations over coordinates; zero for none.
    laplace_passes, stateful_laplace_passes, ngvi_epochs, ngvi_samples, ngvi_decay
        Of L and V.
    max_norms
        Of a client's change in FedEP (I), (M), (L), (V); zero for none.
    pa_shrinkage, pa_burnin
        FedPA's ``rho``, and its epochs before the first sample.
    methods
        Which to run.
    """

    seed: int = 0
    num_seeds: int = 5
    cohort_size: int = 20
    num_burnin: int = 400
    num_rounds: int = 1500
    num_epochs: int = 10
    batch_size: int = 20
    client_learning_rate: float = 0.01
    client_momentum: float = 0.9
    server_optimizer: str = "sgd"
    server_learning_rate: float = 0.5
    server_momentum: float = 0.9
    site_learning_rate: float = 0.5
    site_momentum: float = 0.9
    weight_decay: float = 1e-4
    row_curvature: float = 0.0
    covariance: float = 5e-2
    scale: float = 500.0
    shrinkage: float = 1e-4
    clip: float = 2.0
    laplace_passes: int = 5
    stateful_laplace_passes: int = 10
    ngvi_epochs: int = 5
    ngvi_samples: int = 5
    ngvi_decay: float = 0.99
    max_norms: tuple[float, ...] = (100.0, 300.0, 6500.0, 2000.0)
    pa_shrinkage: float = 0.01
    pa_burnin: int = 5
    methods: tuple[str, ...] = METHODS

    def __post_init__(self) -> None:
        checks.at_least(
            1, self, "num_seeds", "cohort_size", "num_burnin", "batch_size", "laplace_passes"
        )
        checks.at_least(1, self, "stateful_laplace_passes", "ngvi_epochs", "ngvi_samples")
        checks.at_least(2, self, "num_epochs")
        checks.positive(self, "client_learning_rate", "server_learning_rate", "site_learning_rate")
        checks.positive(self, "covariance", "scale")
        for name in ("client_momentum", "server_momentum", "site_momentum", "shrinkage"):
            value = getattr(self, name)
            checks.require(0 <= value < 1, f"{name} must lie in [0, 1)", value)
        checks.between(0, 1, self, "ngvi_decay")
        for name in ("weight_decay", "row_curvature", "clip", "pa_shrinkage"):
            value = getattr(self, name)
            checks.require(value >= 0, f"{name} must not be negative", value)
        checks.require(
            self.num_burnin < self.num_rounds,
            "num_burnin must be less than num_rounds",
            self.num_burnin,
        )
        checks.require(
            0 <= self.pa_burnin < self.num_epochs,
            "pa_burnin must be less than num_epochs",
            self.pa_burnin,
        )
        checks.require(
            self.server_optimizer in ("sgd", "adagrad"),
            "server_optimizer must be 'sgd' or 'adagrad'",
            self.server_optimizer,
        )
        checks.require(
            len(self.max_norms) == len(LETTERS) and min(self.max_norms) >= 0,
            "max_norms must be four numbers that are not negative",
            self.max_norms,
        )
        unknown = [name for name in self.methods if name not in METHODS]
        checks.require(
            not unknown and len(self.methods) > 0,
            f"methods must be some of {', '.join(METHODS)}",
            unknown,
        )


def burn_in(settings: Settings, posterior: fedmcmc.Posterior) -> fedmcmc.FederatedKernel:
    """Return FedAvg, which is also the burn-in of all others."""
    return fedmcmc.fed_avg(
        posterior,
        num_local_epochs=settings.num_epochs,
        server_optimizer=_server(settings),
        **_clients(settings),
    )


def build(name: str, settings: Settings, posterior: fedmcmc.Posterior) -> fedmcmc.FederatedKernel:
    """Return the kernel of a method; `posterior` has the prior of the weight decay."""
    if name == "FedAvg":
        return burn_in(settings, posterior)
    if name == "FedPA":
        return fedmcmc.fed_pa(
            posterior,
            shrinkage=settings.pa_shrinkage,
            num_samples=settings.num_epochs - settings.pa_burnin,
            num_burnin=settings.pa_burnin,
            server_optimizer=_server(settings),
            **_clients(settings),
        )
    # Weight decay is a factor of each client's likelihood here, as in the released code.
    model = posterior._replace(logprior_fn=flat)
    letter = name[-2]
    stateful = name.startswith("FedEP")
    found = _inference(letter, settings, stateful)
    common: dict[str, Any] = dict(
        prior=fedmcmc.Gaussian.uniform(jax.eval_shape(posterior.init_fn, jax.random.key(0))),
        inference=found,
        cohort_size=settings.cohort_size,
        initial_precision=settings.covariance,
    )
    # The server adds the cohort's changes; the released code's optimizers are given their mean.
    mean = optax.scale(1 / settings.cohort_size)
    if not stateful:
        optimizer = optax.chain(mean, _server(settings))
        return fedmcmc.fed_sep(model, cavity="power", server_optimizer=optimizer, **common)
    norm = settings.max_norms[list(LETTERS).index(letter)]
    sites = optax.sgd(settings.site_learning_rate, settings.site_momentum or None)
    return fedmcmc.fed_ep(
        model,
        server_optimizer=optax.chain(mean, _server(settings)),
        client_optimizer=optax.chain(mean, sites),
        max_norm=norm or None,
        **common,
    )


def flat(position: Any) -> jax.Array:
    """Return the log of an improper uniform density."""
    del position
    return jnp.zeros(())


def _server(settings: Settings) -> optax.GradientTransformation:
    if settings.server_optimizer == "adagrad":
        return optax.adagrad(settings.server_learning_rate, 0.0, eps=1e-5)
    return optax.sgd(settings.server_learning_rate, settings.server_momentum or None)


def _client_optimizer(settings: Settings) -> optax.GradientTransformation:
    return optax.sgd(settings.client_learning_rate, settings.client_momentum or None)


def _clients(settings: Settings) -> Mapping[str, Any]:
    return dict(
        client_optimizer=_client_optimizer(settings),
        batch_size=settings.batch_size,
        cohort_size=settings.cohort_size,
    )


def _inference(letter: str, settings: Settings, stateful: bool) -> inference.Inference:
    mean = inference.sgd_mean(
        _client_optimizer(settings),
        num_samples=settings.num_epochs,
        batch_size=settings.batch_size,
        weight_decay=settings.weight_decay,
        row_curvature=settings.row_curvature or None,
    )
    clip = settings.clip or None
    if letter == "I":
        return inference.scaled_identity(mean, precision_per_row=settings.covariance)
    if letter == "M":
        return inference.mcmc(
            mean,
            shrinkage=settings.shrinkage,
            clip=clip,
            match_precision_per_row=settings.covariance,
        )
    if letter == "L":
        passes = settings.stateful_laplace_passes if stateful else settings.laplace_passes
        return inference.laplace(mean, num_passes=passes, clip=clip, scale=settings.scale)
    return inference.ngvi(
        mean,
        num_epochs=settings.ngvi_epochs,
        num_samples=settings.ngvi_samples,
        decay=settings.ngvi_decay,
        initial=max(settings.covariance / settings.scale - settings.weight_decay, 0.0),
        batch_size=settings.batch_size,
        clip=clip,
        scale=settings.scale,
    )
