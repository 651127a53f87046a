"""Federated kernels under `numpyro.infer.MCMC` and the tools that read its runs."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, Predictive, log_likelihood

import fedmcmc
from fedmcmc.interop.numpyro import FederatedMCMCKernel

STEP, LOCAL = 2e-4, 2
CHAINS, WARMUP, DRAWS = 3, 4, 6
BITS = 3 * 8 * jnp.zeros(()).dtype.itemsize  # of a position
START = {"b": jnp.zeros(2), "s": jnp.zeros(())}


def model(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(1.0))
    numpyro.deterministic("variance", s**2)
    with numpyro.plate("rows", x.shape[0]):
        mean = numpyro.deterministic("mean", x @ b)
        numpyro.sample("y", dist.Normal(mean, s), obs=y)


def kernel_fn(posterior):
    return fedmcmc.dsgld(posterior, step_size=STEP, num_local_steps=LOCAL)


def client(rng, n):
    x = rng.normal(size=(n, 2))
    return {"x": x, "y": x @ np.array([1.0, -1.0]) + 0.5 * rng.normal(size=n)}


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    return fedmcmc.FederatedData.from_clients([client(rng, n) for n in (9, 1, 14)])


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all tests: the model is analyzed once."""
    return FederatedMCMCKernel(model, kernel_fn, init_radius=1.0, check_rows=False)


def build_mcmc(kernel, *, chains=CHAINS, method="vectorized", draws=DRAWS, **options):
    options = {"num_warmup": WARMUP, "progress_bar": False, **options}
    return MCMC(kernel, num_samples=draws, num_chains=chains, chain_method=method, **options)


@pytest.fixture(scope="module")
def run(data, kernel):
    mcmc = build_mcmc(kernel)
    mcmc.run(jax.random.key(0), data, extra_fields=("i", "z.s", "federated.broadcast.round"))
    return mcmc


def test_draws_are_in_the_space_of_the_model_and_fields_have_the_bits(run, capsys):
    samples = run.get_samples(group_by_chain=True)
    shapes = {name: leaf.shape for name, leaf in samples.items()}
    axes = (CHAINS, DRAWS)
    assert shapes == {"b": (*axes, 2), "s": axes, "variance": axes}  # `mean` has a row axis
    fields = run.get_extra_fields(group_by_chain=True)
    np.testing.assert_allclose(samples["s"], np.exp(fields["z.s"]), rtol=1e-5)
    np.testing.assert_allclose(samples["variance"], samples["s"] ** 2, rtol=1e-5)
    assert len(np.unique(samples["s"])) == CHAINS * DRAWS
    assert run.get_samples()["b"].shape == (CHAINS * DRAWS, 2)
    rounds = np.tile(np.arange(WARMUP + 1, WARMUP + DRAWS + 1), (CHAINS, 1))
    np.testing.assert_array_equal(fields["i"], rounds)
    np.testing.assert_array_equal(fields["federated.broadcast.round"], rounds)
    for name in ("bits_up", "bits_down"):
        np.testing.assert_array_equal(fields[name], BITS)
    np.testing.assert_array_equal(fields["num_active"], 1)
    assert (np.asarray(fields["gradient_norm"]) > 0).all() and not fields["diverging"].any()
    run.print_summary()
    printed = capsys.readouterr().out
    assert "b[1]" in printed and "r_hat" in printed and "Number of divergences: 0" in printed
    assert "variance" not in printed  # deterministic sites are left out by default


@pytest.mark.slow
def test_diagnose_returns_the_diagnosis_of_sample(data):
    """The diagnosis has the figures of `fedmcmc.sample`, and finds the error of a large step."""

    def too_large_steps(posterior):
        return fedmcmc.lsd(posterior, step_size=0.006)

    options = dict(init_radius=0.1, check_rows=False)
    federated_kernel = FederatedMCMCKernel(model, too_large_steps, **options)
    mcmc = build_mcmc(federated_kernel, chains=2, draws=600, num_warmup=100)
    key = jax.random.key(5)
    mcmc.run(jax.vmap(lambda c: jax.random.fold_in(key, c))(jnp.arange(2)), data)
    diagnosis = federated_kernel.diagnose(mcmc.get_samples(group_by_chain=True), data)
    assert diagnosis.names == ("b[0]", "b[1]", "s")
    assert "not the posterior's" in diagnosis.findings[-1]
    posterior = fedmcmc.from_numpyro(model, example=data, **options)
    rounds = dict(num_rounds=700, num_burnin=100, num_chains=2, progress=False)
    samples = fedmcmc.sample(key, too_large_steps(posterior), data, posterior.init_fn, **rounds)
    expected = fedmcmc.diagnostics.diagnose(samples.draws, posterior, data)
    np.testing.assert_allclose(diagnosis.rhat, expected.rhat, rtol=1e-3)
    np.testing.assert_allclose(diagnosis.moments.spread, expected.moments.spread, rtol=1e-3)
    with pytest.raises(ValueError, match="group_by_chain=True"):
        federated_kernel.diagnose(mcmc.get_samples(), data)


@pytest.fixture(scope="module")
def reference(data):
    """Return the keys of two chains of `fedmcmc.sample` and their draws."""
    posterior = fedmcmc.from_numpyro(model, example=data, init_radius=1.0, check_rows=False)
    options = dict(num_rounds=WARMUP + DRAWS, num_burnin=WARMUP, num_chains=2, progress=False)
    samples = fedmcmc.sample(
        jax.random.key(5), kernel_fn(posterior), data, posterior.init_fn, **options
    )
    keys = jax.vmap(lambda c: jax.random.fold_in(jax.random.key(5), c))(jnp.arange(2))
    return keys, samples.constrained


@pytest.mark.slow
@pytest.mark.parametrize("method", ["vectorized", "sequential"])
def test_a_chain_equals_the_chain_of_sample_with_its_key(reference, data, kernel, method):
    """The same streams, start included, with and without a chain axis, raw keys and typed."""
    keys, expected = reference
    mcmc = build_mcmc(kernel, chains=2, method=method)
    mcmc.run(keys if method == "sequential" else jax.random.key_data(keys), data)
    draws = mcmc.get_samples(group_by_chain=True)
    chex.assert_trees_all_close(draws, dict(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_thinning_keeps_every_other_round(run, data, kernel):
    thinned = build_mcmc(kernel, thinning=2)
    thinned.run(jax.random.key(0), data)
    full = run.get_samples(group_by_chain=True)
    for name, leaf in thinned.get_samples(group_by_chain=True).items():
        np.testing.assert_allclose(leaf, full[name][:, 1::2], rtol=1e-4)


@pytest.mark.slow
def test_a_run_continues_where_it_stopped(run, data, kernel):
    mcmc = build_mcmc(kernel, draws=DRAWS // 2, jit_model_args=True)
    mcmc.warmup(jax.random.key(0), data)
    halves = []
    for _ in range(2):
        mcmc.run(mcmc.post_warmup_state.rng_key, data)
        halves.append(mcmc.get_samples(group_by_chain=True))
        warm_state = mcmc.post_warmup_state
        mcmc.post_warmup_state = mcmc.last_state
    for name, leaf in run.get_samples(group_by_chain=True).items():
        joined = np.concatenate([half[name] for half in halves], axis=1)
        np.testing.assert_allclose(joined, leaf, rtol=1e-4)
    mcmc.post_warmup_state = warm_state
    mcmc.run(jax.random.key(77), data)  # another key: the same start, other numbers
    other_draws = mcmc.get_samples(group_by_chain=True)["s"]
    assert not np.isclose(other_draws, halves[1]["s"], rtol=1e-6).any()


def test_chains_start_at_init_params(data, kernel):
    start = {"b": jnp.arange(4.0).reshape(2, 2), "s": jnp.array([0.1, -0.1])}
    state = kernel.init(jax.random.split(jax.random.key(0), 2), 0, start, (data,), {})
    for tree in (state.z, state.federated.broadcast.position):
        for name, leaf in start.items():
            np.testing.assert_array_equal(tree[name], leaf)
    with pytest.raises(ValueError, match="init_params must hold the unconstrained latent sites"):
        kernel.init(jax.random.key(0), 0, {"b": jnp.zeros(2)}, (data,), {})


def test_arviz_reads_the_run_and_traces_the_model_on_all_rows(run, data):
    arviz_base = pytest.importorskip("arviz_base")
    tree = arviz_base.from_numpyro(run, log_likelihood=True)
    assert tree["posterior"]["b"].shape == (CHAINS, DRAWS, 2)
    assert tree["sample_stats"]["bits_up"].shape == (CHAINS, DRAWS)
    np.testing.assert_allclose(tree["observed_data"]["y"], data.rows["y"])
    expected = log_likelihood(model, run.get_samples(), **data.rows)["y"]
    actual = tree["log_likelihood"]["y"].values.reshape(expected.shape)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_predictive_takes_the_draws(run, data, kernel):
    samples, x = run.get_samples(), np.array([[1.0, 0.0], [0.0, 2.0]])
    drawn = Predictive(model, samples)(jax.random.key(1), x=x, y=None)
    np.testing.assert_allclose(drawn["mean"], samples["b"] @ x.T, rtol=1e-5)
    assert drawn["y"].shape == (CHAINS * DRAWS, 2)
    # With the arguments of `run`, through the kernel's model.
    fitted = Predictive(kernel.model, samples)(jax.random.key(1), data)
    np.testing.assert_allclose(fitted["mean"], samples["b"] @ data.rows["x"].T, rtol=1e-4)


def test_kernel_and_run_pickle(run, data):
    copy = pickle.loads(pickle.dumps(run))
    chex.assert_trees_all_equal(copy.get_samples(), run.get_samples())
    np.testing.assert_array_equal(copy.last_state.z["b"], run.last_state.z["b"])
    assert copy.sampler._sample_fn is None  # so that the next run builds it again
    state = copy.sampler.init(jax.random.key(3), 0, START, (data,), {})
    assert state.z["b"].shape == (2,) and copy.sampler._sample_fn is not None


def test_progress_bar_describes_the_round(data, kernel, monkeypatch, capsys):
    for name in ("CI", "PYTEST_XDIST_WORKER"):  # under which NumPyro shows no bar
        monkeypatch.delenv(name, raising=False)
    mcmc = build_mcmc(kernel, chains=1, draws=2, progress_bar=True, jit_model_args=True)
    mcmc.run(jax.random.key(0), data, init_params=START)
    assert mcmc.get_samples()["b"].shape == (2, 2)
    text = kernel.get_diagnostics_str(mcmc.last_state)
    assert text.startswith("|gradient| ") and text.endswith(f"1 active, {BITS} bits up")
    assert f"{BITS} bits up" in capsys.readouterr().err


def test_data_of_the_same_shapes_reuses_the_posterior(data, kernel):
    kernel.init(jax.random.key(0), 0, START, (data,), {})
    built = kernel._posterior
    other_data = fedmcmc.FederatedData.from_clients([client(np.random.default_rng(1), 3)])
    kernel.init(jax.random.key(0), 0, START, (other_data,), {})
    assert kernel._posterior is built


def test_pooled_kernels_and_schedules_run(data):
    rounds = []

    def schedule(round_):
        rounds.append(jnp.shape(round_))
        return 1e-3 / (1 + round_)

    def pooled_fn(posterior):
        return fedmcmc.sgld(posterior, step_size=schedule, batch_size=4)

    kernel = FederatedMCMCKernel(model, pooled_fn, check_rows=False)
    starts = jax.tree.map(lambda x: jnp.stack([x, x]), START)
    states = kernel.init(jax.random.split(jax.random.key(0), 2), 0, starts, (data,), {})
    states = jax.jit(kernel.sample)(states, (data,), {})
    assert states.z["b"].shape == (2, 2) and (states.num_active == 1).all()
    assert set(rounds) == {()}  # the round has no chain axis inside of a round


def test_a_diverging_chain_is_marked(data, kernel):
    state = kernel.init(jax.random.key(0), 0, START, (data,), {})
    assert not state.diverging
    # From here the residuals overflow.
    state = kernel.init(jax.random.key(0), 0, dict(START, s=jnp.float32(-50.0)), (data,), {})
    with pytest.warns(RuntimeWarning, match="A chain turned non-finite in round 0"):
        state = jax.jit(kernel.sample)(state, (data,), {})
        jax.block_until_ready(state)
        jax.effects_barrier()
    assert state.diverging and int(state.i) == 1


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((np.ones(3),), {}), ((None, None), {}), ((), {"x": 1})]
)
def test_run_takes_one_federation(kernel, data, args, kwargs):
    model_args = tuple(data if arg is None else arg for arg in args)
    with pytest.raises(ValueError, match="takes one FederatedData and nothing else"):
        kernel.init(jax.random.key(0), 0, None, model_args, kwargs)


def test_an_invalid_model_raises_in_init(data):
    def local(x, y):
        with numpyro.plate("rows", x.shape[0]):
            effect = numpyro.sample("effect", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(effect, 1), obs=y)

    mcmc = build_mcmc(FederatedMCMCKernel(local, kernel_fn))
    with pytest.raises(ValueError, match="'effect' lies in the data plate"):
        mcmc.run(jax.random.key(0), data)


def test_a_kernel_for_a_different_federation_raises_in_init(data):
    def kernel_fn(posterior):
        probabilities = jnp.array([0.5, 0.5])
        return fedmcmc.dsgld(
            posterior, step_size=STEP, num_local_steps=1, probabilities=probabilities
        )

    kernel = FederatedMCMCKernel(model, kernel_fn, check_rows=False)
    with pytest.raises(ValueError, match="probabilities for 2 clients"):
        kernel.init(jax.random.key(0), 0, START, (data,), {})
    with pytest.raises(RuntimeError, match="init must be called before"):
        FederatedMCMCKernel(model, kernel_fn).postprocess_fn((data,), {})
