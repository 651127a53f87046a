"""Calls of the user-facing functions for `benchmarks.calls`, on small data sets."""

import tempfile
from pathlib import Path
from types import FunctionType

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import fedmcmc
from fedmcmc import criticism, deploy, hierarchy, inference, metrics, streaming, surrogates, tuning
from fedmcmc.interop.numpyro import centering

SIZES = (413, 164, 22, 3)
"""Rows per client, as in `examples.demo`."""
GROUPS = (12, 9, 7, 10, 8, 11)
"""Rows per group of the model with random effects."""
NUM_DRAWS = 1000
RUN = dict(num_rounds=200, num_chains=2, progress=False)


def logistic(x, y=None):
    """Logistic regression."""
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    numpyro.deterministic("odds_ratio", jnp.exp(coefficients[1]))
    logits = coefficients[0] + x @ coefficients[1:]
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def effects(x, y=None):
    """Linear regression with an intercept per client."""
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mean, spread), infer={"local": True})
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(effect + slope * x, 0.5), obs=y)


def logprior(position):
    return -0.5 * jnp.sum((position["coefficients"] / 2.5) ** 2)


def loglikelihood(position, rows):
    logits = position["coefficients"][0] + rows["x"] @ position["coefficients"][1:]
    return rows["y"] * logits - jnp.logaddexp(0.0, logits)


def probabilities(position, x):
    chance = jax.nn.sigmoid(position["coefficients"][0] + x @ position["coefficients"][1:])
    return jnp.stack([1 - chance, chance], -1)


def outcomes(rows):
    return rows["y"]


def draw_prior(rng_key):
    return {"coefficients": 2.5 * jax.random.normal(rng_key, (3,))}


def statistics(rows, mask):
    return jnp.sum(mask * rows["y"]), jnp.sum(mask)


def gaussian_of(sums, size):
    return fedmcmc.Gaussian(
        {"coefficients": jnp.ones(3) * sums[0]}, {"coefficients": size * jnp.ones(3)}, "diagonal"
    )


POSTERIOR = fedmcmc.Posterior(logprior, loglikelihood)
ADAM = optax.adam(0.01)


def copy_function(fn):
    """Return a copy of a function, which JAX and fedmcmc have never seen."""
    return FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__)


class Case:
    """Data sets and draws of one seed, and models."""

    def __init__(self, seed, logistic=logistic, effects=effects):
        self.rng, self.key = np.random.default_rng(seed), jax.random.key(seed)
        self.logistic, self.effects = logistic, effects
        self.tables = [self.draw_table(size) for size in SIZES]
        self.data = fedmcmc.FederatedData.from_clients(self.tables)
        self.groups = fedmcmc.FederatedData.from_clients([self.draw_group(n) for n in GROUPS])
        # Not zero, where the curvature of abs(logits) in NumPyro's Bernoulli(logits=) is wrong.
        self.origin = {"coefficients": np.full(3, 0.1, np.float32)}
        mean, precisions = self.find_mode()
        covariance = np.linalg.inv(precisions.sum(0) + np.eye(3) / 6.25)
        draws = self.rng.multivariate_normal(mean, covariance, NUM_DRAWS)
        self.draws = {"coefficients": np.float32(draws)}
        self.gaussian = fedmcmc.Gaussian.from_moments(
            {"coefficients": np.float32(mean)}, np.float32(covariance)
        )
        self.prior = fedmcmc.Gaussian.from_moments(self.origin, 6.25 * np.eye(3, dtype=np.float32))
        self.surrogates = fedmcmc.Gaussian(
            {"coefficients": np.float32(precisions @ mean)}, np.float32(precisions), "dense"
        )
        self.scores = np.float32(precisions)
        self.shared = {
            name: np.float32(center + 0.1 * self.rng.normal(size=(1, NUM_DRAWS)))
            for name, center in (("mean", 0.5), ("slope", 0.3), ("spread", -0.3))
        }
        self.probabilities = self.rng.dirichlet(np.ones(3), (5, 50)).astype(np.float32)
        self.labels = self.rng.integers(0, 3, 50)

    def find_mode(self):
        """Return the logistic posterior's mode, and the precision of each client's likelihood."""
        mode = np.zeros(3)
        for _ in range(8):
            gradient, precisions = -mode / 6.25, []
            for table in self.tables:
                x = np.column_stack([np.ones(len(table["x"])), table["x"]])
                chance = 1 / (1 + np.exp(-x @ mode))
                gradient = gradient + (table["y"] - chance) @ x
                precisions.append((x.T * chance * (1 - chance)) @ x)
            mode = mode + np.linalg.solve(np.sum(precisions, 0) + np.eye(3) / 6.25, gradient)
        return mode, np.array(precisions)

    def draw_table(self, size):
        x = self.rng.normal(size=(size, 2)).astype(np.float32)
        y = self.rng.random(size) < 1 / (1 + np.exp(1.5 + x @ [0.7, -0.5]))
        return {"x": x, "y": y.astype(np.int32)}

    def draw_group(self, size):
        x = self.rng.normal(size=size).astype(np.float32)
        effect = 0.5 + 0.8 * self.rng.normal()
        y = effect + 0.3 * x + 0.5 * self.rng.normal(size=size)
        return {"x": x, "y": y.astype(np.float32)}

    @property
    def posterior(self):
        return fedmcmc.from_numpyro(self.logistic, example=self.data)

    @property
    def effects_posterior(self):
        return fedmcmc.from_numpyro(self.effects, example=self.groups)

    def fit(self, model, data, **settings):
        return fedmcmc.fit(model, data, rng_key=self.key, progress=False, **settings)

    def sample(self, kernel, **settings):
        settings = RUN | settings
        return fedmcmc.sample(self.key, kernel, self.data, self.origin, **settings).draws


def calls_of_fits():
    return {
        "fit, NumPyro model": lambda c: c.fit(c.logistic, c.data).samples.constrained,
        "fit, Posterior": lambda c: c.fit(POSTERIOR, c.data, position=c.origin).samples.draws,
        "fit, random effects": lambda c: c.fit(c.effects, c.groups).samples.constrained,
        "from_numpyro": lambda c: c.posterior,
        "correct": lambda c: fedmcmc.correct(c.key, c.posterior, c.data, c.gaussian).constrained,
        "tempered": lambda c: fedmcmc.tempered(c.key, c.posterior, c.data, c.gaussian).draws,
        "whiten": lambda c: fedmcmc.whiten(c.posterior, c.data, c.origin).surrogates,
        "surrogates.mode": lambda c: surrogates.mode(c.posterior, c.data, c.origin).position,
        "surrogates.taylor": lambda c: surrogates.taylor(c.posterior, c.data, c.origin),
        "surrogates.laplace": lambda c: surrogates.laplace(
            c.key, c.posterior, c.data, prior_fraction=0.1
        ),
        "surrogates.analytic": lambda c: surrogates.analytic(
            statistics, gaussian_of, c.data, check="ignore"
        ),
        "surrogates.score_covariance": lambda c: surrogates.score_covariance(
            c.posterior, c.data, c.origin
        ),
    }


def calls_of_sample():
    def whitened(kernel_fn):
        def run(c):
            white = fedmcmc.whiten(c.posterior, c.data, c.origin)
            samples = fedmcmc.sample(c.key, kernel_fn(white), c.data, white.position, **RUN)
            return samples.constrained

        return run

    steps = dict(step_size=1e-3)
    return {
        "sample, lsd": lambda c: c.sample(fedmcmc.lsd(c.posterior, **steps)),
        "sample, qlsd_pp": lambda c: c.sample(
            fedmcmc.qlsd_pp(
                c.posterior,
                **steps,
                batch_size=0.2,
                refresh_every=100,
                compressor=fedmcmc.quantize(16),
            )
        ),
        "whiten and sample, fsgld": whitened(
            lambda w: fedmcmc.fsgld(w.posterior, w.surrogates, step_size=0.01, num_local_steps=10)
        ),
        "sample, fa_hmc": lambda c: c.sample(
            fedmcmc.fa_hmc(c.posterior, step_size=0.02, num_integration_steps=5, num_local_steps=1)
        ),
        "sample, hmc": lambda c: c.sample(fedmcmc.hmc(c.posterior, c.origin, step_size=0.05)),
        "sample, fed_ep": lambda c: c.sample(fedmcmc.fed_ep(c.posterior), num_rounds=10),
        "sample, fed_avg": lambda c: c.sample(
            fedmcmc.fed_avg(c.posterior, client_optimizer=ADAM, num_local_steps=5)
        ),
        "sample, fed_gibbs": lambda c: (
            fedmcmc.sample(
                c.key,
                fedmcmc.fed_gibbs(
                    fedmcmc.from_numpyro(c.effects, example=c.groups, centered=1.0),
                    refresh=hierarchy.independence(),
                ),
                c.groups,
                {name: leaf[0, 0] for name, leaf in c.shared.items()},
                **RUN,
            ).constrained
        ),
        "sample, streaming accumulators": lambda c: c.sample(
            fedmcmc.lsd(c.posterior, **steps),
            record=fedmcmc.Record(
                {
                    "moments": streaming.moments(),
                    "thinned": streaming.thinned(10),
                    "reservoir": streaming.reservoir(10),
                    "predictive": streaming.predictive(probabilities, c.data.rows["x"][:5]),
                    "calibration": streaming.calibration(
                        probabilities, c.data.rows["x"][:5], c.data.rows["y"][:5]
                    ),
                }
            ),
        ),
        "sweep": sweep,
        "simulate, one round": simulate_round,
        "tune": tune,
        "predict_bias": lambda c: fedmcmc.predict_bias(
            fedmcmc.lsd(c.posterior, **steps), c.data, c.surrogates, scores=c.scores
        ),
        "predict_bias, simulated": lambda c: fedmcmc.predict_bias(
            fedmcmc.qlsd_pp(
                c.posterior,
                **steps,
                batch_size=0.2,
                refresh_every=10,
                compressor=fedmcmc.quantize(16),
            ),
            c.data,
            c.surrogates,
            scores=c.scores,
        ),
        "estimate_smoothness": lambda c: fedmcmc.estimate_smoothness(
            c.key, c.posterior, c.data, c.origin
        ),
        "tuning.noise_at_mode": lambda c: tuning.noise_at_mode(c.posterior, c.data, c.origin),
        "tuning.relay_constants": lambda c: tuning.relay_constants(
            c.posterior, c.data, c.surrogates, {"coefficients": c.draws["coefficients"][:4]}
        ),
    }


def tune(case):
    posterior = case.posterior
    return fedmcmc.tune(
        lambda step_size: fedmcmc.lsd(posterior, step_size=step_size),
        posterior,
        case.data,
        case.surrogates,
        scores=case.scores,
    )


def sweep(case):
    posterior = case.posterior
    return fedmcmc.sweep(
        case.key,
        lambda step_size: fedmcmc.lsd(posterior, step_size=step_size),
        {"step_size": [1e-3, 2e-3]},
        case.data,
        case.origin,
        num_rounds=100,
        progress=False,
    ).constrained


def simulate_round(case):
    kernel = fedmcmc.lsd(case.posterior, step_size=1e-3)
    init, step = fedmcmc.simulate(kernel, case.data)
    return step(case.key, init(case.origin))


def calls_of_criticism():
    def corrected(key, posterior, data):
        clients = surrogates.taylor(posterior, data, {"coefficients": jnp.zeros(3)})
        prior = fedmcmc.Gaussian.from_moments({"coefficients": jnp.zeros(3)}, 6.25 * jnp.eye(3))
        return fedmcmc.correct(key, posterior, data, clients.sum() * prior, num_draws=400)

    def calibrate(c):
        posterior = c.posterior
        return criticism.calibrate(
            c.key,
            posterior,
            c.data,
            lambda key, data: corrected(key, posterior, data),
            draw_prior,
            num_repetitions=4,
        )

    return {
        "criticism.loo": lambda c: criticism.loo(c.posterior, c.data, c.draws),
        "criticism.compare": lambda c: criticism.compare(
            {"one": (c.posterior, c.draws), "other": (POSTERIOR, c.draws)}, c.data
        ),
        "criticism.predictive_check": lambda c: criticism.predictive_check(
            c.key, c.posterior, c.data, c.draws, {"y": outcomes}
        ),
        "criticism.prior_predictive": lambda c: criticism.prior_predictive(
            c.key, c.posterior, c.data, draw_prior, {"y": outcomes}
        ),
        "criticism.conflict": lambda c: criticism.conflict(c.posterior, c.data, c.draws),
        "criticism.leave_out": lambda c: criticism.leave_out(
            c.posterior, c.data, c.draws, surrogates=c.surrogates, prior=c.prior
        ),
        "criticism.calibrate, 4 repetitions": calibrate,
    }


def calls_of_hierarchy():
    def marginal_value(c):
        posterior = fedmcmc.marginal(c.effects_posterior)
        kernel = fedmcmc.lsd(posterior, step_size=1e-3)
        position = {name: leaf[0, 0] for name, leaf in c.shared.items()}
        return fedmcmc.sample(c.key, kernel, c.groups, position, **RUN).draws

    def with_draws(fn):
        return lambda c: fn(c.effects_posterior, c.groups, c.shared, rng_key=c.key)

    return {
        "marginal and sample, lsd": marginal_value,
        "local_draws": with_draws(hierarchy.local_draws),
        "hierarchy.unpooled": with_draws(hierarchy.unpooled),
        "hierarchy.new_group": with_draws(hierarchy.new_group),
        "hierarchy.few_groups_warning": lambda c: hierarchy.few_groups_warning(
            c.effects_posterior, 3, c.shared
        ),
        "hierarchy.quadrature_error": lambda c: hierarchy.quadrature_error(
            fedmcmc.marginal(c.effects_posterior), c.groups, c.shared
        ),
        "hierarchy.failed_searches": lambda c: hierarchy.failed_searches(
            c.effects_posterior.local, c.groups, c.shared
        ),
        "interop.numpyro.centering": lambda c: centering(
            c.effects_posterior, c.groups, {name: leaf[0, 0] for name, leaf in c.shared.items()}
        ),
    }


def calls_of_inference():
    def run(name, inference_):
        def call(c):
            kernel = fedmcmc.fed_ep(c.posterior, inference=inference_(), structure="diagonal")
            return c.sample(kernel, num_rounds=3)

        return {f"fed_ep, inference.{name}": call}

    def mean():
        return inference.langevin_mean(1e-3, num_samples=20)

    return {
        **run("importance", inference.importance),
        **run("mcmc", lambda: inference.mcmc(mean())),
        **run("laplace", lambda: inference.laplace(mean())),
        **run("scaled_identity", lambda: inference.scaled_identity(mean(), precision=100.0)),
        **run("ngvi", lambda: inference.ngvi(mean(), num_steps=20)),
    }


def calls_of_metrics():
    names = ("accuracy", "brier_score", "negative_log_likelihood", "expected_calibration_error")
    names += ("reliability", "credibility_accuracy_curve")

    def score(name):
        return lambda c: getattr(metrics, name)(c.probabilities, c.labels)

    def compare(name):
        return lambda c: getattr(metrics, name)(c.probabilities, c.probabilities[::-1])

    scores = {f"metrics.{name}": score(name) for name in names}
    pair = {f"metrics.{name}": compare(name) for name in ("agreement", "total_variation")}
    return {
        **scores,
        **pair,
        "metrics.predictive_entropy": lambda c: metrics.predictive_entropy(c.probabilities),
        "metrics.predictive": lambda c: metrics.predictive(
            probabilities, c.draws, c.data.rows["x"][:5]
        ),
        "metrics.potential": lambda c: metrics.potential(c.posterior, c.data, c.draws),
        "metrics.hpd_error": lambda c: metrics.hpd_error(c.scores[0, 0], c.scores[1, 1]),
        "metrics.ood_auc": lambda c: metrics.ood_auc(c.scores[0, 0], c.scores[1, 1]),
        "metrics.marginal_error": lambda c: metrics.marginal_error(c.draws, c.draws),
        "metrics.marginal_error_floor": lambda c: metrics.marginal_error_floor(c.key, c.draws, 100),
        "metrics.gaussian_w2": lambda c: metrics.gaussian_w2(
            c.scores[0, 0], c.scores[0], c.scores[1, 0], c.scores[1]
        ),
        "metrics.estimation_error": lambda c: metrics.estimation_error(
            c.draws["coefficients"], np.zeros(3)
        ),
        "metrics.best_running_mean": lambda c: metrics.best_running_mean(c.shared["mean"][0]),
        "metrics.rounds_to_threshold": lambda c: metrics.rounds_to_threshold(
            c.shared["mean"][0], 0.5
        ),
    }


def calls_of_networks():
    from flax import linen as nn

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.tanh(nn.Dense(5)(x)))

    def run(c):
        network = dict(prior_scale=1.0, likelihood="categorical")
        posterior = fedmcmc.from_flax(Mlp(), example=c.data, **network)
        position = posterior.init_fn(c.key)
        kernel = fedmcmc.lsd(posterior, step_size=1e-4, batch_size=0.5)
        return fedmcmc.sample(c.key, kernel, c.data, position, **RUN).draws

    return {"from_flax and sample, lsd": run}


def study_posterior(settings):
    rows = {"x": np.ones((2, 2), np.float32), "y": np.ones(2, np.int32)}
    return fedmcmc.from_numpyro(logistic, example=rows)


def study_kernel(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=1e-3)


def calls_of_studies():
    def at_sites(run):
        def call(c):
            rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), c.data.rows)
            sizes = {f"site{i}": size for i, size in enumerate(SIZES)}
            study = deploy.Study(
                name="calls",
                posterior="benchmarks.call_list:study_posterior",
                sites=sizes,
                rows=rows,
                kernels={"main": "benchmarks.call_list:study_kernel"},
                asks=deploy.FIT,
            )
            transport = deploy.LocalTransport()
            with tempfile.TemporaryDirectory() as folder:
                for i, name in enumerate(sizes):
                    table = c.data.client_rows(i)
                    site = deploy.Site(study, name, table, folder=Path(folder, name), min_rows=1)
                    transport.join(site)
                sites = deploy.Sites(study, transport)
                result = run(c, study, sites)
                sites.close()
            return result

        return call

    return {
        "real sites, lsd": at_sites(
            lambda c, study, sites: (
                sites.sample(
                    c.key, study.kernel("main"), c.origin, num_rounds=20, progress=False
                ).draws
            )
        ),
        "real sites, fit": at_sites(
            lambda c, study, sites: c.fit(study.model, sites).samples.constrained
        ),
    }


def draw_cases():
    """Return two cases with the same models, which are new functions."""
    models = copy_function(logistic), copy_function(effects)
    return [Case(seed, *models) for seed in (2, 1)]


CALLS = {
    **calls_of_fits(),
    **calls_of_sample(),
    **calls_of_criticism(),
    **calls_of_hierarchy(),
    **calls_of_inference(),
    **calls_of_networks(),
    **calls_of_studies(),
    **calls_of_metrics(),
}
