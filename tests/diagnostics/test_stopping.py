"""Runs that end when their chains agree."""

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc.diagnostics import StopDecision, StoppingRule

KEY = jax.random.key(2)
DATA = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((5, 2))])
POSTERIOR = fedmcmc.Posterior(
    lambda t: -0.5 * jnp.sum(t**2), lambda t, x: -0.5 * jnp.sum((x - t) ** 2, axis=-1)
)
KERNEL = fedmcmc.fa_hmc(POSTERIOR, step_size=0.2, num_integration_steps=3, num_local_steps=1)


def run(kernel=KERNEL, **settings):
    settings = dict(num_chains=4, num_burnin=10, thinning=2, progress=False) | settings
    return fedmcmc.sample(KEY, kernel, DATA, jnp.zeros(2), **settings)


def test_a_run_stops_at_the_first_check_that_the_rule_passes():
    rule = fedmcmc.rhat_below(1.01, min_ess=800, min_draws=50, growth=1.5)
    assert [rule.next_check(num) for num in (0, 50, 51)] == [50, 75, 77]
    samples = run(until=rule, max_rounds=20_000)
    stopped, num = samples.stopped, samples.num_draws
    assert stopped["reached"] and stopped["rhat"] < 1.01 and stopped["ess"] >= 800
    assert set(samples.totals["rounds"].tolist()) == {stopped["rounds"]}
    assert stopped["rounds"] == 10 + 2 * num
    checks = [rule.next_check(0)]
    while checks[-1] < num:
        checks.append(rule.next_check(checks[-1]))
    assert checks[-1] == num and len(checks) > 1

    theta = arviz_stats.rhat(samples.to_datatree().posterior)["theta"]
    np.testing.assert_allclose(stopped["rhat"], theta.max(), rtol=1e-6)
    earlier = rule.check(samples.draws[:, : checks[-2]])
    assert not earlier.stop and earlier.figures["ess"] < 800

    # A run of that length has the same draws.
    np.testing.assert_array_equal(samples.draws, run(num_rounds=stopped["rounds"]).draws)


@pytest.mark.slow
def test_a_rule_that_fails_warns_and_the_run_can_continue():
    slow = fedmcmc.fa_ld(POSTERIOR, step_size=1e-5, num_local_steps=1)
    with pytest.warns(RuntimeWarning, match=r"120 rounds without R-hat below 1.01.*rhat \d"):
        samples = run(slow, until=fedmcmc.rhat_below(min_draws=20), max_rounds=120)
    assert samples.stopped["reached"] is False and samples.stopped["rhat"] > 1.01
    more = fedmcmc.sample(KEY, slow, DATA, state=samples.state, num_rounds=10, progress=False)
    assert int(more.state.broadcast.round[0]) == 130
    with pytest.warns(RuntimeWarning, match="too few draws to check"):
        stopped = run(slow, until=fedmcmc.rhat_below(), max_rounds=20).stopped
    assert stopped["reached"] is False and stopped["rounds"] == 20 and "rhat" not in stopped


def test_chains_that_never_move_do_not_stop():
    assert not fedmcmc.rhat_below().check(np.ones((4, 200, 1))).stop


def test_users_write_rules():
    rule = StoppingRule(
        lambda n: n + 7, lambda draws: StopDecision(draws.shape[1] > 20, {}), "21 draws"
    )
    samples = run(until=rule, max_rounds=1000)
    assert samples.num_draws == 21
    assert samples.stopped == {"rule": "21 draws", "reached": True, "rounds": 52}


RULE = fedmcmc.rhat_below()


@pytest.mark.parametrize(
    "function, settings, message, error",
    [
        (run, dict(), "Give num_rounds=", ValueError),
        (run, dict(num_rounds=10, max_rounds=10), "Give num_rounds=", ValueError),
        (run, dict(until=RULE), "With until= give max_rounds=", ValueError),
        (run, dict(until=RULE, max_rounds=5, num_rounds=5), "With until= give", ValueError),
        (run, dict(until=RULE, max_rounds=5), "max_rounds=5, num_burnin=10", ValueError),
        (
            run,
            dict(until=RULE, max_rounds=100, num_chains=1),
            "needs num_chains of at least 2, got 1",
            ValueError,
        ),
        (
            run,
            dict(until=RULE, max_rounds=0),
            "max_rounds must be an integer of at least 1, got 0",
            ValueError,
        ),
        (run, dict(until=1.01, max_rounds=100), "until must be a stopping rule", TypeError),
        (
            fedmcmc.rhat_below,
            dict(threshold=1.0),
            "threshold must be a number above 1.0, got 1.0",
            ValueError,
        ),
        (fedmcmc.rhat_below, dict(min_ess=-1), "min_ess must be", ValueError),
        (
            fedmcmc.rhat_below,
            dict(min_draws=3),
            "min_draws must be a number at least 4",
            ValueError,
        ),
        (fedmcmc.rhat_below, dict(growth=1), "growth must be a number above", ValueError),
    ],
)
def test_wrong_settings_raise(function, settings, message, error):
    with pytest.raises(error, match=message):
        function(**settings)
