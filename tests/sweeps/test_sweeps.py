"""Sweeps: the draws of single runs, in few programs, labelled, and nothing lost."""

import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedmcmc
from fedmcmc.sweeps import _sweeps as sweeps
from tests.support.lanes import fast_and_slow

KEY = jax.random.key(7)
DATA = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2)), jnp.zeros((5, 2)), jnp.ones((4, 2))])
POSTERIOR = fedmcmc.Posterior(
    lambda t: -0.5 * jnp.sum(t**2), lambda t, x: -0.5 * jnp.sum((x - t) ** 2, axis=-1)
)
ADAM = optax.adam(0.01)
ORIGIN = jnp.zeros(2)
RUN = dict(num_rounds=30, num_burnin=6, thinning=2)
STEPS = [0.01, 0.02, 0.04]
MODES = ("sequential", "vmapped")


def relay(step_size=0.01, num_local_steps=3, batch_size=2):
    return fedmcmc.dsgld(
        POSTERIOR, step_size=step_size, num_local_steps=num_local_steps, batch_size=batch_size
    )


def run(kernel_fn=relay, grid=None, position=ORIGIN, **settings):
    grid = {"step_size": STEPS} if grid is None else grid
    settings = RUN | dict(progress=False) | settings
    return fedmcmc.sweep(KEY, kernel_fn, grid, DATA, position, **settings)


def alone(kernel, seed, position=ORIGIN, **settings):
    settings = RUN | dict(progress=False) | settings
    return fedmcmc.sample(jax.random.fold_in(KEY, seed), kernel, DATA, position, **settings)


def assert_same(mode, found, wanted):
    tolerance = 0 if mode == "sequential" else 1e-5
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)


def start(rng_key):
    return jax.random.normal(rng_key, (2,))


KERNELS = {
    "relay": (lambda x: relay(step_size=x), STEPS),
    "momenta and a cohort": (
        lambda x: fedmcmc.fa_hmc(
            POSTERIOR,
            step_size=0.1,
            num_integration_steps=2,
            num_local_steps=2,
            rho=x,
            participation=fedmcmc.uniform(2),
        ),
        [0.0, 0.5, 1.0],
    ),
    "who takes part": (
        lambda x: fedmcmc.lsd(
            POSTERIOR, step_size=0.01, participation=fedmcmc.bernoulli(x), batch_size=2
        ),
        [0.3, 0.9],
    ),
    "memories": (
        lambda x: fedmcmc.qlsd_pp(
            POSTERIOR,
            step_size=0.01,
            compressor=fedmcmc.quantize(4),
            batch_size=2,
            refresh_every=10,
            memory_rate=x,
        ),
        [0.1, 0.3],
    ),
    "pooled": (lambda x: fedmcmc.sgld(POSTERIOR, step_size=x, batch_size=2), STEPS),
    "a schedule": (
        lambda x: relay(step_size=SCHEDULES[x]),
        ["slow", "fast"],
    ),
}
SCHEDULES = {
    "slow": lambda r: 0.01 / (1 + 0.1 * r),
    "fast": lambda r: 0.02 / (1 + 0.1 * r),
}


@pytest.mark.parametrize("mode", fast_and_slow(MODES, ["vmapped"]))
@pytest.mark.parametrize("name", fast_and_slow(KERNELS, ["relay"]))
def test_draws_are_those_of_single_runs(name, mode):
    kernel_fn, values = KERNELS[name]
    found = run(kernel_fn, {"x": values}, start, num_seeds=2, num_chains=2, mode=mode).dataset
    assert found.sizes["draw"] == 12
    assert np.unique(found.theta.values[..., 0]).size > found.theta[..., 0].size // 2
    for value in values:
        for seed in range(2):
            wanted = alone(kernel_fn(value), seed, start, num_chains=2)
            one = found.sel(x=value, seed=seed)
            assert_same(mode, one.theta.values, wanted.draws)
            for field in ("bits_up", "bits_down", "num_active"):
                np.testing.assert_array_equal(one[field], wanted.info[field])
            np.testing.assert_array_equal(one["round"], wanted.info["round"][0])
            np.testing.assert_array_equal(one.total_bits_up, wanted.totals["bits_up"])


@pytest.mark.parametrize("mode", fast_and_slow(MODES, ["vmapped"]))
def test_one_trace_for_all_numbers_and_one_more_for_each_structure(mode):
    traces = []

    def loglikelihood(t, x):
        traces.append(None)
        return POSTERIOR.loglikelihood_fn(t, x)

    posterior = POSTERIOR._replace(loglikelihood_fn=loglikelihood)

    def kernel_fn(step_size, num_local_steps):
        return fedmcmc.dsgld(posterior, step_size=step_size, num_local_steps=num_local_steps)

    counts = []
    for steps, local in (([0.01, 0.02], [2]), ([0.03, 0.04], [2]), ([0.01, 0.02], [2, 3])):
        swept = run(kernel_fn, dict(step_size=steps, num_local_steps=local), mode=mode, num_seeds=2)
        assert swept.modes == (mode,) * len(local)
        counts.append(len(traces))
    assert counts[0] > 0
    assert counts[1] == counts[0]
    assert 0 < counts[2] - counts[1] <= counts[0]


@pytest.mark.slow
def test_small_parts_give_the_same():
    whole = run(num_seeds=5, mode="vmapped").dataset
    for max_bytes in (1, 2000):
        parts = run(num_seeds=5, mode="vmapped", max_bytes=max_bytes).dataset
        assert_same("vmapped", parts.theta, whole.theta)
        np.testing.assert_array_equal(parts.bits_up, whole.bits_up)
        np.testing.assert_array_equal(parts.num_rounds, whole.num_rounds)


@pytest.mark.slow
def test_parts_grow_with_the_memory(monkeypatch):
    sizes = []

    def kept(self, where, at, *rest):
        if at == 0:
            sizes.append([len(np.unique(indices)) for indices in where])
        return put(self, where, at, *rest)

    put = sweeps.SweepResults.put
    monkeypatch.setattr(sweeps.SweepResults, "put", kept)
    parts = {}
    for max_bytes in (1, 1000, 2000, 2**30):
        sizes.clear()
        run(num_seeds=5, mode="vmapped", max_bytes=max_bytes)
        assert sum(points * seeds for points, seeds in sizes) == 15
        parts[max_bytes] = len(sizes)
    assert parts[1] == 15 and parts[2**30] == 1
    assert 15 > parts[1000] > parts[2000] > 1


@pytest.mark.slow
def test_labels_of_everything():
    grid = {
        "batch_size": [2, 3],
        "step_size": (0.01, np.float32(0.02)),
        "who": {"all": fedmcmc.full(), "some": fedmcmc.uniform(2)},
    }

    def kernel_fn(batch_size, step_size, who):
        return fedmcmc.lsd(POSTERIOR, step_size=step_size, batch_size=batch_size, participation=who)

    swept = run(kernel_fn, grid, num_seeds=2)
    found = swept.dataset
    assert found.theta.dims == (
        *("batch_size", "step_size", "who", "seed", "chain", "draw"),
        "theta_dim_0",
    )
    assert found.batch_size.values.tolist() == [2, 3]
    np.testing.assert_allclose(found.step_size, [0.01, 0.02], rtol=1e-6)
    assert found.who.values.tolist() == ["all", "some"]
    assert len(swept.modes) == 4
    assert (found.num_active.sel(who="all") == 3).all()
    assert (found.num_active.sel(who="some") == 2).all()
    one = found.theta.sel(batch_size=3, step_size=0.01, who="some", seed=1)
    wanted = alone(kernel_fn(3, 0.01, fedmcmc.uniform(2)), 1)
    assert_same("vmapped", one, wanted.draws)


@pytest.mark.slow
def test_what_some_kernels_report_is_missing_for_the_others():
    def kernel_fn(kind):
        if kind == "relay":
            return relay()
        return fedmcmc.fed_avg(POSTERIOR, client_optimizer=ADAM, num_local_epochs=1, batch_size=2)

    found = run(kernel_fn, {"kind": ["relay", "average"]}).dataset
    assert np.isnan(found.num_lost.sel(kind="relay")).all()
    assert (found.num_lost.sel(kind="average") == 0).all()
    assert found.num_active.dtype == np.int32


@pytest.mark.slow
def test_draws_of_several_leaves_and_constrained():
    posterior = fedmcmc.Posterior(
        lambda p: -0.5 * jnp.sum(p["m"] ** 2) - jnp.exp(p["s"]) + p["s"],
        lambda p, x: -0.5 * jnp.sum((x - p["m"]) ** 2, axis=-1),
        constrain_fn=lambda p: {"m": p["m"], "scale": jnp.exp(p["s"])},
    )

    def kernel_fn(step_size):
        return fedmcmc.dsgld(posterior, step_size=step_size, num_local_steps=2)

    swept = run(kernel_fn, position={"m": jnp.zeros(2), "s": 0.0}, num_chains=2)
    assert swept.dataset.s.dims == ("step_size", "seed", "chain", "draw")
    assert swept.dataset.m.shape == (3, 1, 2, 12, 2)
    np.testing.assert_allclose(swept.constrained.scale, np.exp(swept.dataset.s), rtol=1e-6)
    assert "s" not in swept.constrained
    plain = run()
    assert plain.constrained is plain.dataset


@pytest.mark.parametrize("mode", MODES)
def test_a_point_that_diverges_leaves_the_others_intact(mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swept = run(grid={"step_size": [0.01, 0.6, 0.02]}, num_seeds=2, num_chains=2, mode=mode)
    found = swept.dataset
    for step_size in (0.01, 0.02):
        for seed in range(2):
            wanted = alone(relay(step_size), seed, num_chains=2)
            assert_same(mode, found.theta.sel(step_size=step_size, seed=seed), wanted.draws)
    assert (swept.diverged.drop_sel(step_size=0.6) == -1).all()
    for seed in range(2):
        with pytest.raises(fedmcmc.NonFiniteError) as caught:
            alone(relay(0.6), seed, num_chains=2)
        bad = swept.diverged.sel(step_size=0.6, seed=seed)
        assert bad.min() == caught.value.round > RUN["num_burnin"]
        draws = found.theta.sel(step_size=0.6, seed=seed)
        for chain in range(2):
            before = found["round"].values < int(bad[chain])
            assert before.any() and not before.all()
            np.testing.assert_array_equal(np.isfinite(draws[chain, :, 0]), before)
    table = swept.summary(lambda theta: {"mean": theta.mean()})
    assert [row["seeds"] for row in table] == [2, 0, 2]
    assert np.isnan(table[1]["mean"])


@pytest.mark.parametrize("mode", MODES)
def test_an_interrupt_loses_nothing(mode, monkeypatch):
    updates = []

    class Bar(sweeps.tqdm):
        def update(self, n=1):
            updates.append(n)
            if len(updates) > 2:
                raise KeyboardInterrupt
            return super().update(n)

    monkeypatch.setattr(sweeps, "tqdm", Bar)
    with pytest.warns(RuntimeWarning, match="Interrupted; returning the draws kept before"):
        swept = run(num_seeds=2, max_bytes=1, mode=mode)
    ran = np.array([[1, 0], [1, 0], [1, 0]])
    np.testing.assert_array_equal(swept.dataset.num_rounds[..., 0], 30 * ran)
    theta = swept.dataset.theta.values
    np.testing.assert_array_equal(np.isfinite(theta).all(axis=(2, 3, 4)), ran == 1)
    np.testing.assert_array_equal(np.isnan(theta).all(axis=(2, 3, 4)), ran == 0)
    assert_same(mode, theta[1, 0], alone(relay(STEPS[1]), 0).draws)


def test_summary_and_figure():
    swept = run(num_seeds=3, num_chains=2)
    table = swept.summary()
    names = ["mean of theta[0]", "mean of theta[1]", "sd of theta[0]", "sd of theta[1]"]
    names += ["largest R-hat", "smallest ESS"]
    assert [row["statistic"] for row in table[:6]] == names
    assert len(table) == 18
    means = swept.dataset.theta.sel(step_size=0.04).mean(("chain", "draw"))[:, 1]
    row = table[12 + 1]
    assert row["step_size"] == 0.04 and row["seeds"] == 3
    np.testing.assert_allclose(row["mean"], means.mean(), rtol=1e-5)
    np.testing.assert_allclose(row["sd"], means.std(ddof=1), rtol=1e-5)
    figure = swept.plot()
    shown = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == names
    line = shown[1].containers[0].lines[0]
    np.testing.assert_allclose(line.get_xdata(orig=False), STEPS)
    np.testing.assert_allclose(line.get_ydata(orig=False)[2], row["mean"])
    with pytest.raises(ValueError, match="x must be a name of the grid, one of step_size"):
        swept.plot(x="rho")


def test_every_point_is_judged_and_one_warning_counts_those_that_are_off():
    """Of a Gaussian with precision 13: sds of 1 / sqrt(1 - 13 h / 2) over the posterior's."""

    def kernel_fn(step_size):
        return fedmcmc.lsd(POSTERIOR, step_size=step_size)

    settings = dict(num_rounds=4000, num_burnin=100, thinning=1, num_seeds=2, num_chains=2)
    grid = {"step_size": [0.02, 0.1, 0.3]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swept = run(kernel_fn, grid, **settings)
    (told,) = [w for w in caught if issubclass(w.category, fedmcmc.DiagnosisWarning)]
    assert "1 of 3 points are wrong or too few, first at step_size=0.1: These" in str(told.message)
    assert told.filename == __file__
    fine, off, diverged = swept.diagnoses
    assert fine.findings == () and diverged is None
    assert fine.ess > 800  # of both seeds together
    np.testing.assert_allclose(off.moments.spread, 1 / np.sqrt(1 - 13 * 0.1 / 2), rtol=0.1)
    table = swept.summary(lambda theta: {"variance": theta.var()})
    assert [row["warning"] for row in table] == ["", "These draws are not the posterior's", ""]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=fedmcmc.DiagnosisWarning)
        assert run(kernel_fn, grid, **settings).diagnoses == (None, None, None)


def test_a_judge_that_fails_costs_no_draws(monkeypatch):
    def broken(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(sweeps, "judge", broken)
    with pytest.warns(fedmcmc.DiagnosisWarning, match="could not be judged: RuntimeError: out of"):
        swept = run()
    assert swept.diagnoses == (None, None, None) and np.isfinite(swept.dataset.theta).all()


def refuse(step_size):
    raise AssertionError("a kernel was built before the check")


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (dict(mode="parallel"), ValueError, "mode must be one of auto, sequential, vmapped"),
        (dict(num_seeds=0), ValueError, "num_seeds must be an integer of at least 1, got 0"),
        (dict(max_bytes=0.5), ValueError, "max_bytes must be an integer"),
        (dict(num_burnin=31), ValueError, "num_rounds includes burn-in"),
        (dict(grid=[1]), TypeError, "grid must be a mapping"),
        (dict(grid={"step_size": []}), ValueError, "at least one value of step_size"),
        (dict(grid={"step_size": "ab"}), TypeError, "values of step_size must be a sequence"),
        (dict(grid={"step_size": 0.1}), TypeError, "values of step_size must be a sequence"),
        (dict(grid={"step_size": [1, 1.0]}), ValueError, "values of step_size must differ"),
        (dict(grid={"step_size": [fedmcmc.full()]}), TypeError, "mapping of labels to values"),
        (dict(grid={"seed": [1]}), ValueError, "none of seed, chain, draw, round; got 'seed'"),
        (dict(grid={"a b": [1]}), ValueError, "must be an argument of kernel_fn"),
    ],
)
def test_bad_settings_are_refused_before_a_kernel_is_built(settings, error, message):
    with pytest.raises(error, match=message):
        run(refuse, **settings)


def test_bad_points_are_named_before_anything_runs(monkeypatch):
    monkeypatch.setattr(sweeps, "run_group", refuse)
    with pytest.raises(ValueError, match=r"At step_size=-1.0: step_size must be .*above 0"):
        run(grid={"step_size": [0.1, -1.0]})
    with pytest.raises(TypeError, match=r"At step_size=0.1: kernel_fn must return a Federated"):
        run(lambda step_size: POSTERIOR, {"step_size": [0.1]})
    with pytest.raises(ValueError, match=r"At cohort=9: A cohort of 9 clients"):
        run(
            lambda cohort: fedmcmc.lsd(
                POSTERIOR, step_size=0.1, participation=fedmcmc.uniform(cohort)
            ),
            {"cohort": [2, 9]},
        )
    with pytest.raises(TypeError, match=r"At pace=1: .*pace"):
        run(grid={"pace": [1]})
    falling = {"falling": lambda r: 0.1 - 0.01 * r}
    with pytest.raises(ValueError, match=r"At step_size=falling: step_size .* in round 11"):
        run(grid={"step_size": falling})
    with pytest.raises(ValueError, match=r"same shapes: at num_local_steps=4, .*\[4, 2\]"):
        run(grid={"num_local_steps": [3, 4]}, collect=fedmcmc.runs.local_positions)
    with pytest.raises(ValueError, match="theta names both a coordinate"):
        run(lambda theta: relay(theta), {"theta": STEPS})
    with pytest.raises(TypeError, match="data must be a FederatedData"):
        fedmcmc.sweep(KEY, relay, {}, jnp.ones(3), jnp.zeros(2), num_rounds=1)


def test_functions_made_anew_warn():
    def kernel_fn(step_size):
        posterior = POSTERIOR._replace(logprior_fn=lambda t: -0.5 * jnp.sum(t**2))
        return fedmcmc.dsgld(posterior, step_size=step_size, num_local_steps=2)

    with pytest.warns(RuntimeWarning, match=r"Each of the 3 points .* 1 program would suffice"):
        swept = run(kernel_fn)
    assert len(swept.modes) == 3
    # Structure that differs is no fault.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(grid={"num_local_steps": [2, 3]})


def test_large_models_on_a_cpu_run_one_after_another(monkeypatch):
    assert run().modes == ("vmapped",)
    monkeypatch.setattr(sys.modules["fedmcmc.sweeps._runs"], "LARGE_BYTES", 7)
    expected = "sequential" if jax.default_backend() == "cpu" else "vmapped"
    assert run().modes == (expected,)


def test_one_point_without_a_grid():
    found = run(lambda: relay(0.01), {}, mode="vmapped").dataset
    assert_same("vmapped", found.theta[0], alone(relay(0.01), 0).draws)


def test_xarray_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(ImportError, match="arviz-base"):
        run(refuse)
