"""Reasons why a run did not judge its draws, and the warning about a missing target."""

import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc.runs import missing_target
from fedmcmc.runs._unjudged import why_not_judged

KEY = jax.random.key(0)
POSTERIOR = fedmcmc.Posterior(
    lambda theta: -0.5 * jnp.sum(theta["a"] ** 2),
    lambda theta, x: -0.5 * jnp.sum((x - theta["a"]) ** 2, axis=-1),
)
DATA = fedmcmc.FederatedData.from_clients([np.ones((3, 2)), np.zeros((2, 2))])
START = {"a": jnp.zeros(2)}
ENOUGH = np.zeros((4, 1_000, 2), np.float32)
"""Draws that would be judged."""


@fedmcmc.types.register_dataclass
@dataclass(frozen=True, eq=False)
class Langevin(fedmcmc.kernels.EstimatorKernel):
    """User's kernel with the name of a kernel of the package and without a target."""

    step_size: float

    def prepare(self, rng_key, like, client):
        draws = self.estimator.prepare(rng_key, like.position, client, 1)
        return jax.tree.map(lambda leaf: leaf[0], draws)

    def step(self, draws, broadcast, client_state, client):
        gradient_fn, client_state, _ = self.begin(broadcast, client_state, client)
        message = gradient_fn(draws, broadcast.position)
        norm = fedmcmc.trees.norm(message)
        return message, client_state, fedmcmc.types.StepInfo(jnp.int32(64), norm)

    def prepare_server(self, rng_key, like):
        return fedmcmc.random.normals_like(rng_key, like.position)

    def aggregate(self, noise, broadcast, server_state, total):
        position = broadcast.position
        slope = fedmcmc.trees.add(total, jax.grad(self.posterior.logprior_fn)(position))
        position = fedmcmc.trees.add_scaled(position, self.step_size, slope)
        position = fedmcmc.trees.add_scaled(position, jnp.sqrt(2 * self.step_size), noise)
        return self.next_broadcast(broadcast, position), server_state, ()


@fedmcmc.types.register_dataclass
@dataclass(frozen=True, eq=False)
class Sampler(Langevin):
    """The same kernel with a target."""

    @property
    def target(self):
        return self.posterior


@fedmcmc.types.register_dataclass
@dataclass(frozen=True, eq=False)
class Optimizer(Langevin):
    """The same kernel, with a reason why it has no target."""

    traits = fedmcmc.types.Traits(no_target_reason="it looks for the mode")


@fedmcmc.types.register_dataclass
@dataclass(frozen=True, eq=False)
class WithNone(Langevin):
    """The same kernel with a target that is ``None`` by intent."""

    traits = fedmcmc.types.Traits(no_target_reason="its target is None")


def build(kind=Langevin, posterior=POSTERIOR):
    return kind(posterior, fedmcmc.full_gradient(), fedmcmc.full(), 0.02)


def run(kernel, num_rounds=500, position=START, **settings):
    """Return the samples of a run and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = fedmcmc.sample(
            KEY, kernel, DATA, position, num_rounds=num_rounds, progress=False, **settings
        )
    return samples, [w for w in caught if issubclass(w.category, fedmcmc.SamplingWarning)]


def test_a_long_run_without_a_target_warns_with_the_remedy(tmp_path):
    kernel = fedmcmc.compress(build(), fedmcmc.quantize(8))
    samples, caught = run(kernel)
    (warning,) = caught
    text = str(warning.message)
    assert warning.category is fedmcmc.DiagnosisWarning and warning.filename == __file__
    assert "compress(Langevin) does not define `target`" in text
    assert "a property `target`" in text and "self.posterior" in text
    assert samples.warnings == (text,) and samples.diagnosis is None
    reason = str(samples).splitlines()[1]
    assert reason == (
        "not judged: compress(Langevin) does not define `target`, the posterior that its draws "
        "are meant to follow"
    )
    short, caught = run(kernel, num_rounds=20)
    assert caught == [] and "does not define `target`" in str(short)
    page = short.report(tmp_path / "page.html").read_text()
    assert "Not judged: compress(Langevin) does not define" in page


def test_a_kernel_with_a_target_is_judged():
    samples, caught = run(build(Sampler), num_rounds=5_000, num_burnin=100, num_chains=4)
    assert caught == [] and samples.reason_not_judged == ""
    # Five rows and the prior: the precision is 6, and a step of 0.02 widens sds by 3 %.
    np.testing.assert_allclose(samples.diagnosis.moments.spread, 1.03, atol=0.06)


@pytest.mark.parametrize(
    ("kernel", "name", "reason"),
    [
        (build(Optimizer), "Optimizer", "it looks for the mode"),
        (build(WithNone), "WithNone", "its target is None"),
        (
            fedmcmc.fed_avg(POSTERIOR, client_optimizer=optax.sgd(0.1), num_local_steps=2),
            "fed_avg",
            "it trains models",
        ),
        (
            fedmcmc.fed_be(POSTERIOR, client_optimizer=optax.sgd(0.1), num_local_steps=2),
            "fed_be",
            "it trains models",
        ),
        (
            fedmcmc.lsd(POSTERIOR, step_size=0.1, temperature=lambda round_: 1 / (1 + round_)),
            "lsd",
            "its temperature is a schedule",
        ),
        (
            fedmcmc.secure_sum(fedmcmc.lsd(POSTERIOR, step_size=0.1, temperature=0.0)),
            "secure_sum(lsd)",
            "its temperature is a schedule or zero",
        ),
        (
            fedmcmc.fa_ld(POSTERIOR, step_size=0.1, num_local_steps=2, temperature=0.0),
            "fa_ld",
            "its temperature is a schedule or zero",
        ),
    ],
)
def test_a_documented_absence_of_a_target_does_not_warn(kernel, name, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        expected = f"not judged: {name} has no posterior to compare draws with: {reason}"
        assert why_not_judged(ENOUGH, kernel).startswith(expected)
        assert missing_target(ENOUGH, kernel) == ""


@pytest.mark.parametrize(
    "build_kernel",
    [
        lambda: fedmcmc.lsd(POSTERIOR, step_size=0.1),
        lambda: fedmcmc.dsgld(POSTERIOR, step_size=0.1, num_local_steps=2),
        lambda: fedmcmc.dg_sgld(POSTERIOR, step_size=0.1, tolerance=1.0, num_local_steps=2),
        lambda: fedmcmc.fa_hmc(
            POSTERIOR, step_size=0.1, num_integration_steps=2, num_local_steps=1
        ),
        lambda: fedmcmc.hmc(POSTERIOR, START, step_size=0.1),
        lambda: fedmcmc.fed_ep(POSTERIOR),
        lambda: fedmcmc.faults(fedmcmc.lsd(POSTERIOR, step_size=0.1), drop=0.1),
        lambda: build(Sampler),
    ],
)
def test_samplers_are_judged(build_kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert why_not_judged(ENOUGH, build_kernel()) == ""


def test_unusable_draws_are_not_judged():
    kernel = build(Sampler)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert "fewer than 400)" in why_not_judged(ENOUGH[:, :99], kernel)
        assert "fewer than 4 per chain" in why_not_judged(np.zeros((200, 3, 2)), kernel)
        assert "no draws were kept" in why_not_judged({}, kernel)
        huge = {"a": jax.ShapeDtypeStruct((4, 1_000, 2**18), jnp.float32)}
        assert "take 3.9 GiB" in why_not_judged(huge, kernel)
        warnings.filterwarnings("ignore", category=fedmcmc.DiagnosisWarning)
        assert "category DiagnosisWarning are ignored" in why_not_judged(ENOUGH, kernel)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (dict(num_rounds=20), "too few to judge (fewer than 400)"),
        (dict(record=fedmcmc.Record(keep_draws=False)), "no draws were kept"),
        (
            dict(collect=lambda state, info: info.gradient_norm),
            "collect= kept something other than positions",
        ),
    ],
)
def test_a_run_prints_the_reason(settings, reason):
    samples, caught = run(build(Sampler), **settings)
    assert reason in str(samples).splitlines()[1] and caught == []


def test_more_than_256_parameters_are_not_compared_with_the_posterior():
    data = fedmcmc.FederatedData.from_clients([np.ones((3, 257)), np.zeros((2, 257))])
    with pytest.warns(fedmcmc.DiagnosisWarning):  # few effective draws
        samples = fedmcmc.sample(
            KEY, build(Sampler), data, {"a": jnp.zeros(257)}, num_rounds=400, progress=False
        )
    line = str(samples).splitlines()[1]
    assert line.startswith("R-hat") and samples.diagnosis.moments is None
    assert line.endswith("not compared with the posterior: more than 256 parameters")


def test_a_failed_judgment_is_the_reason():
    broken = POSTERIOR._replace(loglikelihood_fn=lambda theta, x: 1 / 0)

    @fedmcmc.types.register_dataclass
    @dataclass(frozen=True, eq=False)
    class Broken(Langevin):
        @property
        def target(self):
            return broken

    samples, _ = run(build(Broken))
    assert "The draws could not be judged: ZeroDivisionError" in str(samples)


def test_a_chain_that_is_not_finite_is_the_reason():
    kernel = Sampler(POSTERIOR, fedmcmc.full_gradient(), fedmcmc.full(), 1e3)
    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run(kernel)
    assert f"not judged: round {caught.value.round} is not finite" in str(caught.value.samples)


def test_a_sweep_warns_once():
    def kernel_fn(step_size):
        return Langevin(POSTERIOR, fedmcmc.full_gradient(), fedmcmc.full(), step_size)

    with pytest.warns(
        fedmcmc.DiagnosisWarning, match="Langevin does not define `target`"
    ) as caught:
        swept = fedmcmc.sweep(
            KEY,
            kernel_fn,
            {"step_size": [0.01, 0.02]},
            DATA,
            START,
            num_seeds=1,
            num_rounds=500,
            progress=False,
        )
    assert len(caught) == 1 and swept.diagnoses == (None, None)
