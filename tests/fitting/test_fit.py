"""Tests of `fit` against exact distributions, quadrature and pooled NUTS."""

import dataclasses
import html
import json
import re
import shutil
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import fedmcmc
from fedmcmc.diagnostics import MonteCarloErrors
from fedmcmc.fitting._chains import Chains
from fedmcmc.fitting._progress import ticking
from fedmcmc.runs import SimulatedConsortium
from tests.fitting.models import (
    EXACT,
    FEDERATION,
    bimodal,
    count_data,
    counts,
    log_evidence,
    poisson,
)

KEY = jax.random.key(11)


def fit(model, data, **settings):
    return fedmcmc.fit(model, data, rng_key=KEY, progress=False, **settings)


@pytest.fixture(scope="module")
def gaussian():
    return fit(FEDERATION.posterior, FEDERATION.data, position=jnp.zeros(3))


def test_draws_of_a_gaussian_federation_are_exact(gaussian):
    assert gaussian.verdict.startswith("passed (importance): Monte Carlo errors")
    assert "modes searched from 8 starts" in gaussian.verdict
    assert gaussian.report.rounds <= 8
    draws = gaussian.samples.draws
    assert draws.shape == (1, 4000, 3)
    sds = np.sqrt(np.diag(EXACT.covariance))
    assert (np.abs(draws.mean((0, 1)) - EXACT.mean) / sds).max() < 5.5 / np.sqrt(3700)
    np.testing.assert_allclose(draws.std((0, 1)) / sds, 1, atol=5.5 / np.sqrt(2 * 3700))
    assert abs(gaussian.log_evidence - log_evidence()) < 4 * gaussian.log_evidence_sd + 1e-3
    np.testing.assert_allclose(gaussian.gaussian.mean(), EXACT.mean, atol=1e-3)
    again = fit(FEDERATION.posterior, FEDERATION.data, position=jnp.zeros(3))
    np.testing.assert_array_equal(again.samples.draws, draws)


def test_a_report_has_stages_figures_and_settings(gaussian, tmp_path):
    report = json.loads(json.dumps(gaussian.report.to_dict()))
    assert report["total"]["rounds"] == gaussian.report.rounds
    stages = {stage["stage"]: stage for stage in report["stages"]}
    assert stages["modes"]["k_hat"] is None and stages["correction"]["verdict"] == "passed"
    assert stages["prediction"]["k_hat"] == 0 and stages["prediction"]["rounds"] == 0
    assert "rows per parameter" in stages["prediction"]["why"]
    text = str(gaussian)
    assert text.startswith("passed (importance)") and "coordinate 2:" in text
    assert repr(gaussian.samples).endswith(gaussian.verdict)
    page = gaussian.report.save(tmp_path / "new" / "fit.html").read_text()
    assert "These results can be used" in page
    assert page.count("<svg") == 2 and "Importance weights" in page
    settings = "effort='auto', num_draws=4000, max_rounds=2000"
    assert report["about"]["fit"] == gaussian.samples.settings["fit"] == settings
    assert html.escape(settings) in page
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert gaussian.samples.to_datatree()["posterior"]["theta"].shape == (1, 4000, 3)


def test_approximate_effort_stops_at_the_gaussian():
    fitted = fit(FEDERATION.posterior, FEDERATION.data, position=jnp.zeros(3), effort="approximate")
    assert fitted.verdict.startswith("approximate: Gaussian at 1 mode, not compared")
    assert np.isnan(fitted.log_evidence) and fitted.samples.draws.shape == (1, 4000, 3)


def by_quadrature(x, y):
    """Return mean, sd and log evidence of the Poisson model on a grid, in float64."""
    from scipy.special import gammaln, logsumexp

    grid = np.linspace(-4, 4, 801)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    log_p = -0.5 * (a**2 + b**2) - np.log(2 * np.pi)
    for xi, yi in zip(x.astype(float), y, strict=True):
        eta = a + b * xi
        log_p = log_p + yi * eta - np.exp(eta) - gammaln(yi + 1)
    log_z = logsumexp(log_p) + 2 * np.log(grid[1] - grid[0])
    p = np.exp(log_p - logsumexp(log_p))
    mean = np.array([(p * a).sum(), (p * b).sum()])
    sd = np.sqrt([(p * (a - mean[0]) ** 2).sum(), (p * (b - mean[1]) ** 2).sum()])
    return mean, sd, log_z


def test_a_numpyro_model_has_the_moments_of_quadrature(poisson_fit):
    mean, sd, log_z = by_quadrature(*counts())
    assert poisson_fit.verdict.startswith("passed (importance)")
    draws = poisson_fit.samples.constrained
    num = poisson_fit.corrected.ess
    assert (np.abs(draws["b"].mean((0, 1)) - mean) / sd).max() < 5 / np.sqrt(num)
    np.testing.assert_allclose(draws["b"].std((0, 1)) / sd, 1, atol=5 / np.sqrt(num))
    np.testing.assert_allclose(draws["rate"], np.exp(draws["b"][..., 0]), rtol=1e-5)
    assert abs(poisson_fit.log_evidence - log_z) < 4 * poisson_fit.log_evidence_sd + 1e-3


def test_a_consortium_may_hide_its_rows(poisson_fit):
    """A consortium may hide its data, and faults repeat rounds."""

    class HiddenConsortium:
        def __init__(self):
            self.__inner = SimulatedConsortium(
                count_data(),
                transform=lambda k: fedmcmc.faults(k, drop=0.1, nan=0.05, rescale=False),
            )
            self.federation = self.__inner.federation

        def ask(self, question, content):
            return self.__inner.ask(question, content)

        def sample(self, *args, **kwargs):
            return self.__inner.sample(*args, **kwargs)

    hidden = fit(poisson, HiddenConsortium())
    means, expected = (
        x.samples.draws["b"].mean((0, 1), dtype=np.float64) for x in (hidden, poisson_fit)
    )
    np.testing.assert_allclose(means, expected, atol=0.02)
    assert hidden.report.rounds > poisson_fit.report.rounds


def test_draws_come_from_both_modes_of_two_clients():
    posterior, data = bimodal()
    fitted = fit(posterior, data, position=jnp.zeros(2))
    assert fitted.verdict.startswith("passed") and "2 modes" in fitted.report.stages[0].verdict
    np.testing.assert_allclose(fitted.gaussian.mean()[0], -3.0, atol=0.05)  # the heavier mode
    share = (fitted.samples.draws[..., 0] > 0).mean()
    assert abs(share - 0.3) < 4 * np.sqrt(0.21 / 3000)


def curved(x, rows):
    """Return the log likelihood of a banana: x[1] is about x[0] squared."""
    return -0.25 * (rows - x[0]) ** 2 - 0.5 * (x[1] - x[0] ** 2) ** 2


CURVED = fedmcmc.Posterior(lambda x: -0.5 * jnp.sum(x**2) / 4, curved)
CURVED_DATA = fedmcmc.FederatedData.from_clients([jnp.ones(1), jnp.zeros(2), jnp.zeros(1)])


def test_more_draws_are_weighted_if_the_error_is_too_large():
    fitted = fit(FEDERATION.posterior, FEDERATION.data, position=jnp.zeros(3), num_draws=100)
    first, second = [x for x in fitted.report.stages if x.stage == "correction"]
    assert first.verdict == "doubtful" and "too few draws" in first.why
    assert second.verdict == "passed" and "more draws" in second.method
    assert fitted.verdict.kind == "passed" and fitted.verdict.error < 0.05
    assert fitted.corrected.num_draws > 400 and fitted.samples.num_draws == 100


def test_auto_runs_no_chains_if_no_row_depends_on_a_parameter():
    """Weights fail, and chains would run for hundreds of rounds."""
    posterior = CURVED._replace(loglikelihood_fn=lambda x, rows: curved(x[:2], rows))
    with pytest.warns(fedmcmc.SamplingWarning, match=r"no row depends on coordinate 2: change"):
        fitted = fit(posterior, CURVED_DATA, position=jnp.zeros(3), num_draws=500)
    assert fitted.verdict.kind in ("approximate", "doubtful")
    assert "chains" not in [stage.stage for stage in fitted.report.stages]


def test_chains_that_are_far_apart_leave_the_gaussian_at_the_mode(monkeypatch):
    """The curvature describes the posterior better than chains that have not mixed."""

    def distant_chains(rng_key, posterior, consortium, search, corrected, *, max_rounds):
        draws = np.random.default_rng(0).normal(size=(64, 50, 2)).astype(np.float32)
        run = fedmcmc.sample(
            KEY,
            fedmcmc.lsd(posterior, step_size=1e-3),
            CURVED_DATA,
            jnp.zeros(2),
            num_rounds=50,
            num_chains=64,
            progress=False,
        )
        samples = dataclasses.replace(run, draws=draws)
        return Chains(samples, 50, 1.5, 90.0, MonteCarloErrors(0.3, 0.3), "HMC", "")

    monkeypatch.setattr("fedmcmc.fitting._stages.run_chains", distant_chains)
    without_weights_and_tempering(monkeypatch)
    with pytest.warns(fedmcmc.SamplingWarning, match="failed: chains did not agree"):
        fitted = fit(CURVED, CURVED_DATA, position=jnp.zeros(2), num_draws=500, effort="exact")
    assert "the draws are from the Gaussian at the mode" in fitted.verdict
    assert fitted.samples.draws.shape == (1, 500, 2)
    mean, covariance = fedmcmc.gaussian.moments_of(fitted.gaussian)
    gaps = fitted.samples.draws[0].mean(0) - mean
    assert np.abs(gaps / np.sqrt(np.diag(covariance))).max() < 5 / np.sqrt(500)


def test_the_progress_bar_of_a_stage_advances(capsys, monkeypatch):
    monkeypatch.setattr("fedmcmc.fitting._progress.SECONDS_BETWEEN", 0.01)
    with ticking("modes", shown=True) as bar:
        time.sleep(0.5)
        bar.set_postfix_str("done")
    assert capsys.readouterr().err.count("modes [") > 5
    with ticking("modes", shown=False):
        pass
    assert not capsys.readouterr().err


@pytest.mark.slow
def test_chains_run_if_weights_fail():
    fitted = fit(CURVED, CURVED_DATA, position=jnp.zeros(2), num_draws=2000)
    assert fitted.verdict.startswith("passed (MCMC): Monte Carlo errors")
    grid = np.linspace(-6, 14, 1001)
    a, b = np.meshgrid(grid, grid, indexing="ij")
    log_p = sum(
        jax.vmap(jax.vmap(lambda u, v, r=r: jnp.sum(curved(jnp.stack([u, v]), r))))(a, b)
        for r in (jnp.ones(1), jnp.zeros(2), jnp.zeros(1))
    )
    log_p = np.asarray(log_p, float) - 0.125 * (a**2 + b**2)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = np.array([(p * a).sum(), (p * b).sum()])
    sd = np.sqrt([(p * (a - mean[0]) ** 2).sum(), (p * (b - mean[1]) ** 2).sum()])
    draws = fitted.samples.draws
    chains = fitted.report.stages[3]
    num = chains.ess
    match = re.search(r"means were up to (\S+) sd away, their sds (\S+) to (\S+) of", chains.why)
    shift, low, high = map(float, match.groups())
    assert 0 < shift < 1 and 0.5 < low <= high < 2
    assert num >= 400 and draws.shape[0] == 64
    assert (np.abs(draws.mean((0, 1)) - mean) / sd).max() < 5 / np.sqrt(num)
    np.testing.assert_allclose(draws.std((0, 1)) / sd, 1, atol=6 / np.sqrt(num))


@pytest.mark.slow
def test_tempering_runs_if_weights_fail_at_several_modes():
    """Two bananas: the curvature at a mode misleads, and no chain moves between the modes."""
    posterior, data = bimodal()

    def bent(x, rows):
        x = jnp.stack([x[0], x[1] - 0.35 * x[0] ** 2])
        return posterior.loglikelihood_fn(jnp.stack([x[0], 3 * x[1]]), rows)

    bent_posterior = posterior._replace(loglikelihood_fn=bent)
    fitted = fit(bent_posterior, data, position=jnp.zeros(2), num_draws=1000)
    assert fitted.verdict.startswith("passed (SMC)"), fitted.verdict
    draws = fitted.samples.draws
    assert draws.shape == (8, 2000, 2)
    assert abs((draws[..., 0] > 0).mean() - 0.3) < 0.08  # chains share their seeds' modes
    inside = draws[..., 1] - 0.35 * draws[..., 0] ** 2
    assert abs(3 * inside.std() - 1) < 0.1
    assert np.isfinite(fitted.log_evidence)


def without_weights_and_tempering(monkeypatch):
    monkeypatch.setattr("fedmcmc.fitting._decisions.WEIGHTING", ())
    monkeypatch.setattr("fedmcmc.fitting._decisions.MAX_TEMPERED_PARAMETERS", 0)


@pytest.mark.slow
def test_too_few_rounds_fail(monkeypatch):
    without_weights_and_tempering(monkeypatch)
    with pytest.warns(fedmcmc.SamplingWarning, match=r"fit: failed: chains did not agree"):
        fitted = fit(CURVED, CURVED_DATA, position=jnp.zeros(2), num_draws=500, max_rounds=1)
    assert fitted.verdict.startswith("failed") and np.isnan(fitted.log_evidence)
    assert "raise max_rounds" in fitted.verdict and fitted.corrected is None
    assert f"{fitted.report.rounds} rounds" in fitted.verdict


class WatchedConsortium(SimulatedConsortium):
    """Counts rounds of chains, and interrupts a call of `sample` as Ctrl-C does."""

    def __init__(self, interrupt_call=None, lasts=10):
        super().__init__(CURVED_DATA)
        self.interrupt_call, self.lasts, self.calls = interrupt_call, lasts, 0

    def sample(self, *args, num_rounds, **kwargs):
        self.calls += 1
        if self.calls == self.interrupt_call:
            num_rounds = self.lasts
        return super().sample(*args, num_rounds=num_rounds, **kwargs)


@pytest.mark.slow
def test_an_interrupt_keeps_the_draws_so_far(monkeypatch):
    without_weights_and_tempering(monkeypatch)
    settings = dict(position=jnp.zeros(2), num_draws=500)
    with pytest.warns(fedmcmc.SamplingWarning, match="fit: failed: chains did not agree"):
        stopped = fit(CURVED, WatchedConsortium(interrupt_call=7), **settings)
    assert stopped.samples.draws.shape == (64, 10, 2)
    with pytest.raises(KeyboardInterrupt):
        fit(CURVED, WatchedConsortium(interrupt_call=3, lasts=2), **settings)


@pytest.mark.slow
def test_a_fit_resumes(tmp_path):
    """Completed calls of `sample` are restored, and the draws equal an uninterrupted run."""
    settings = dict(position=jnp.zeros(2), num_draws=500, max_rounds=200)

    def program(consortium):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fedmcmc.SamplingWarning)
            return fit(CURVED, consortium, **settings)

    uninterrupted = program(WatchedConsortium())
    with fedmcmc.resumable(tmp_path, every_seconds=600), pytest.raises(KeyboardInterrupt):
        program(WatchedConsortium(interrupt_call=5, lasts=2))
    # An interrupted call is a run of another length; its checkpoint cannot be used.
    shutil.rmtree(tmp_path / "0005")
    with fedmcmc.resumable(tmp_path, every_seconds=600):
        again = program(WatchedConsortium())
    np.testing.assert_array_equal(again.samples.draws, uninterrupted.samples.draws)
    assert again.verdict.split(";")[0] == uninterrupted.verdict.split(";")[0]


@pytest.mark.slow
def test_whitened_posteriors_give_draws_in_the_users_coordinates():
    white = fedmcmc.whiten(FEDERATION.posterior, FEDERATION.data, jnp.zeros(3))
    fitted = fit(white.posterior, FEDERATION.data, position=white.position)
    sds = np.sqrt(np.diag(EXACT.covariance))
    draws = fitted.samples.draws
    assert (np.abs(draws.mean((0, 1)) - EXACT.mean) / sds).max() < 5.5 / np.sqrt(3700)


GAUSSIAN = FEDERATION.posterior, FEDERATION.data
NOT_A_MODEL = r"takes a NumPyro model or a fedmcmc\.Posterior, got int"


@pytest.mark.parametrize(
    ("error", "message", "model_and_data", "settings"),
    [
        (TypeError, NOT_A_MODEL, (3, FEDERATION.data), {}),
        (TypeError, "a consortium of clients, got dict", (poisson, {"x": 1}), {}),
        (ValueError, "effort must be one of", GAUSSIAN, {"effort": "much"}),
        (ValueError, "num_draws must be a positive integer", GAUSSIAN, {"num_draws": 0}),
        (ValueError, "max_rounds must be a positive integer", GAUSSIAN, {"max_rounds": 0.5}),
        (ValueError, "latency must be at least 0 seconds", GAUSSIAN, {"latency": -1.0}),
        (ValueError, "pass position=", GAUSSIAN, {}),
    ],
)
def test_wrong_arguments_raise(error, message, model_and_data, settings):
    with pytest.raises(error, match=message):
        fit(*model_and_data, **settings)


@pytest.mark.slow
def test_eight_schools_have_the_moments_of_quadrature():
    """Non-centered, one client per school: Laplace's tail index is 0.92, and chains take over."""
    from scipy.special import logsumexp
    from scipy.stats import halfcauchy, norm

    y = np.array([28, 8, -3, 7, -1, 1, 18, 12.0], np.float32)
    s = np.array([15, 10, 16, 11, 9, 11, 10, 18.0], np.float32)

    def schools(k, s, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 5))
        tau = numpyro.sample("tau", dist.HalfCauchy(5))
        effects = numpyro.sample("effects", dist.Normal(0, 1).expand([8]).to_event(1))
        with numpyro.plate("rows", len(k)):
            numpyro.sample("y", dist.Normal(mu + tau * effects[k], s), obs=y)

    data = fedmcmc.FederatedData.from_clients(
        [{"k": np.array([i]), "s": s[i : i + 1], "y": y[i : i + 1]} for i in range(8)]
    )
    # Effects integrated out: y is normal with mean mu and variance s**2 + tau**2.
    mu, log_tau = np.meshgrid(np.linspace(-25, 35, 601), np.linspace(-12, 6, 1801), indexing="ij")
    tau = np.exp(log_tau)
    log_p = norm.logpdf(mu, 0, 5) + halfcauchy.logpdf(tau, 0, 5) + log_tau
    for yi, si in zip(y.astype(float), s.astype(float), strict=True):
        log_p = log_p + norm.logpdf(yi, mu, np.sqrt(si**2 + tau**2))
    log_z = logsumexp(log_p) + np.log(0.1) + np.log(0.01)
    assert abs(log_z - -31.3113) < 1e-3
    p = np.exp(log_p - logsumexp(log_p))
    fitted = fit(schools, data, num_draws=8000)
    assert fitted.verdict.startswith("passed (MCMC)")
    assert abs(fitted.log_evidence - log_z) < 5 * fitted.log_evidence_sd
    draws, ess = fitted.samples.constrained, fitted.report.stages[-2].ess
    for values, exact in ((draws["mu"], mu), (np.log(draws["tau"]), log_tau)):
        mean = (p * exact).sum()
        sd = np.sqrt((p * (exact - mean) ** 2).sum())
        assert abs(values.mean() - mean) < 5 * sd / np.sqrt(ess)
        assert abs(values.std() / sd - 1) < 6 / np.sqrt(ess)


def compares_codes_with_a_label(x, arm, y=None):
    effect = numpyro.sample("effect", dist.Normal(0, 1))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x + effect * (arm == "drug"), 1), obs=y)


@pytest.mark.slow
def test_a_parameter_on_which_no_row_depends_is_reported(tmp_path, monkeypatch):
    """A label compared with codes is false in every row, so the draws follow the prior."""

    def stopped(*args):
        raise KeyboardInterrupt

    rng = np.random.default_rng(0)
    tables = [
        pd.DataFrame({"x": rng.normal(size=n), "arm": ["drug", "none"] * (n // 2)}) for n in (8, 20)
    ]
    tables = [table.assign(y=table["x"]) for table in tables]
    data = fedmcmc.FederatedData.from_clients(tables)
    with monkeypatch.context() as patched:
        patched.setattr("fedmcmc.fitting._fit.decide", stopped)  # before the expensive stages
        with (
            pytest.warns(fedmcmc.DiagnosisWarning, match="No row depends on effect"),
            pytest.raises(KeyboardInterrupt),
        ):
            fit(compares_codes_with_a_label, data)
    with pytest.warns(fedmcmc.DiagnosisWarning, match=r"No row depends on effect.*arm == 0"):
        fitted = fit(compares_codes_with_a_label, data)
    (message,) = fitted.report.warnings
    assert fitted.samples.warnings == (message,)
    assert f"Warning: {message}" in str(fitted)
    page = fitted.report.save(tmp_path / "fit.html").read_text()
    assert "Read the warning below" in page and "No row depends on effect" in page


@pytest.mark.slow
def test_a_parameter_that_rows_inform_through_another_is_not_reported():
    """Only the prior of the slope depends on its mean."""

    def model(x, y=None):
        mean = numpyro.sample("mean", dist.Normal(0, 1))
        slope = numpyro.sample("slope", dist.Normal(mean, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, 1), obs=y)

    x = np.linspace(-1, 1, 30)
    data = fedmcmc.FederatedData.from_clients([{"x": x, "y": x}])
    assert fit(model, data).report.warnings == ()
