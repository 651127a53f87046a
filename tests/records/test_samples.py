"""What a run returns: draws, info, totals, ArviZ trees and what works on them."""

import dataclasses

import arviz_plots
import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray

import fedmcmc
from fedmcmc.pytrees import named_leaves
from fedmcmc.records import ZarrRecorder
from fedmcmc.rounds import RoundRecord
from tests.support.lanes import fast_and_slow

SIZES = (5, 3, 1)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(0)
    data = fedmcmc.FederatedData.from_clients([rng.normal(size=n) for n in SIZES])
    posterior = fedmcmc.Posterior(
        lambda p: -0.5 * jnp.sum(p["m"] ** 2) - jnp.exp(p["s"]) + p["s"],
        lambda p, x: -0.5 * (x - p["m"][0]) ** 2 - 0.5 * (x - p["m"][1]) ** 2,
        constrain_fn=lambda p: {"m": p["m"], "scale": jnp.exp(p["s"])},
    )
    kernel = fedmcmc.dsgld(posterior, step_size=0.01, num_local_steps=3)
    return fedmcmc.sample(
        jax.random.key(0),
        kernel,
        data,
        {"m": jnp.zeros(2), "s": 0.0},
        num_rounds=211,
        num_burnin=10,
        thinning=2,
        num_chains=3,
        progress=False,
    )


def test_draws_info_and_totals_have_their_shapes_and_numbers(samples):
    assert (samples.num_chains, samples.num_draws) == (3, 100)
    assert samples.draws["m"].shape == (3, 100, 2)
    assert samples.draws["s"].shape == (3, 100)
    np.testing.assert_array_equal(samples.info["round"][0], 10 + 2 * np.arange(100) + 1)
    # Three floats to one client and back.
    for way in ("bits_up", "bits_down"):
        assert (samples.info[way] == 3 * 32).all()
        assert (samples.totals[way] == 3 * 32 * 211).all()
    assert (samples.info["num_active"] == 1).all()
    assert np.isfinite(samples.info["gradient_norm"]).all()
    assert (samples.info["gradient_norm"] > 0).all()


def test_constrained_draws_are_functions_of_draws(samples):
    np.testing.assert_allclose(samples.constrained["scale"], np.exp(samples.draws["s"]), rtol=1e-6)


def test_local_positions_are_constrained_and_other_values_are_not():
    data = fedmcmc.FederatedData.from_clients([np.zeros((3, 2)), np.ones((2, 2))])
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2),
        lambda t, x: -0.5 * jnp.sum((x - t) ** 2, axis=-1),
        constrain_fn=lambda t: {"norm": jnp.sqrt(t @ t)},
    )
    kernel = fedmcmc.dsgld(posterior, step_size=0.01, num_local_steps=4)

    def run(collect):
        return fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            jnp.zeros(2),
            num_rounds=5,
            collect=collect,
            progress=False,
        )

    samples = run(fedmcmc.runs.local_positions)
    assert samples.draws.shape == (1, 5, 4, 2)
    norms = np.linalg.norm(samples.draws, axis=-1)
    np.testing.assert_allclose(samples.constrained["norm"], norms, rtol=1e-5)
    scalars = run(lambda state, info: {"first": state.broadcast.position[0]})
    with pytest.raises(ValueError, match="are not positions"):
        scalars.constrained  # noqa: B018
    assert scalars.to_datatree(constrained=False).posterior["first"].shape == (1, 5)


def test_arviz_summarizes_and_stores_a_tree(samples, tmp_path):
    tree = samples.to_datatree(dims={"m": ["coordinate"]})
    assert dict(tree.posterior.sizes) == {"chain": 3, "draw": 100, "coordinate": 2}
    np.testing.assert_array_equal(tree.posterior["m"].values, samples.draws["m"])
    assert "bits_up" in tree.sample_stats
    summary = arviz_stats.summary(tree)
    assert list(summary.index) == ["m[0]", "m[1]", "scale"]
    tree.to_netcdf(tmp_path / "draws.nc", engine="h5netcdf")
    with xarray.open_datatree(tmp_path / "draws.nc", engine="h5netcdf") as back:
        np.testing.assert_array_equal(back["posterior"]["m"].values, samples.draws["m"])


PLOTS = ["plot_trace_dist", "plot_rank", "plot_forest"]


@pytest.mark.parametrize("name", fast_and_slow(PLOTS, ["plot_forest"]))
def test_arviz_draws_its_plots(name, samples, tmp_path):
    plots = getattr(arviz_plots, name)(samples.to_datatree(), backend="matplotlib")
    plots.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_leaves_are_named_by_their_path():
    tree = {"layer": [{"w": 1}, {"w": 2}], "b": 3}
    assert named_leaves(tree) == {"layer.0.w": 1, "layer.1.w": 2, "b": 3}
    assert named_leaves(np.ones(2)).keys() == {"theta"}


@pytest.fixture(scope="module")
def scoped():
    """Return draws of parameters whose names hold "/", as sites in NumPyro's `scope` do."""
    data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
    posterior = fedmcmc.Posterior(
        lambda p: -0.5 * (p["site/mean"] ** 2 + p["site/$x"] ** 2),
        lambda p, x: -0.5 * (x - p["site/mean"]) ** 2,
    )
    return fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.lsd(posterior, step_size=0.1),
        data,
        {"site/mean": 0.0, "site/$x": 0.0},
        num_rounds=100,
        num_chains=2,
        progress=False,
    )


def test_names_with_slashes_have_points_in_arviz(scoped, tmp_path):
    tree = scoped.to_datatree(dims={"site.mean": []})
    assert set(tree.posterior.data_vars) == {"site.mean", "site.$x"}
    np.testing.assert_array_equal(tree.posterior["site.mean"], scoped.draws["site/mean"])
    assert list(arviz_stats.summary(tree).index) == ["site.$x", "site.mean"]
    tree.to_netcdf(tmp_path / "draws.nc")
    page = scoped.report(tmp_path / "report.html").read_text()
    assert "site/mean" in page and "site.mean" in page  # the table and the figures


def test_two_names_that_become_one_are_an_error(scoped):
    draws = scoped.draws | {"site": {"mean": scoped.draws["site/mean"]}}
    with pytest.raises(ValueError, match=r"both be named 'site\.mean' in ArviZ.*rename one"):
        dataclasses.replace(scoped, draws=draws).to_datatree()


def test_names_with_slashes_have_points_in_a_store(tmp_path):
    zarr = pytest.importorskip("zarr")
    shape = {"site/mean": jax.ShapeDtypeStruct((), np.float32)}
    shapes = RoundRecord(shape, {}, ())
    ZarrRecorder(tmp_path / "draws.zarr", shapes, 2, resume=False, replace=False)
    assert list(zarr.open_group(tmp_path / "draws.zarr")["posterior"]) == ["site.mean"]


def test_a_pooled_reference_sends_nothing():
    data = fedmcmc.FederatedData.from_clients([np.zeros(2), np.ones(3)])
    posterior = fedmcmc.Posterior(lambda t: -(t**2), lambda t, x: -((x - t) ** 2))
    run = fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.sgld(posterior, step_size=0.01),
        data,
        0.0,
        num_rounds=3,
        progress=False,
    )
    assert run.totals["bits_up"].tolist() == [0]
    assert run.totals["rounds"].tolist() == [3]


def test_one_program_serves_any_number_of_draws():
    data = fedmcmc.FederatedData.from_clients([np.zeros(2), np.ones(3)])
    traces = []

    def loglikelihood(t, x):
        traces.append(None)
        return -((x - t) ** 2)

    posterior = fedmcmc.Posterior(lambda t: -(t**2), loglikelihood)
    kernel = fedmcmc.dsgld(posterior, step_size=0.01, num_local_steps=2)
    counts = []
    for num_rounds, num_burnin, thinning in ((200, 0, 1), (201, 0, 1), (250, 20, 1), (500, 7, 2)):
        samples = fedmcmc.sample(
            jax.random.key(0),
            kernel,
            data,
            0.0,
            num_rounds=num_rounds,
            num_burnin=num_burnin,
            thinning=thinning,
            progress=False,
        )
        assert samples.num_draws == (num_rounds - num_burnin) // thinning
        counts.append(len(traces))
    assert counts == counts[:1] * 4


def test_visits_of_many_clients_have_their_probabilities():
    num_clients, num_rounds = 50_000, 400_000
    # The last tenth of the probability is spread over very many clients, where sums of float32
    # round most.
    p = np.r_[np.full(10, 0.09), np.full(num_clients - 10, 0.1 / (num_clients - 10))]
    rare = p[-1] * 1000
    participation = fedmcmc.categorical(p / p.sum())
    ids = jax.jit(jax.vmap(lambda key: participation.prepare(key, num_clients).ids[0]))(
        jax.random.split(jax.random.key(0), num_rounds)
    )
    ids = np.asarray(ids)
    for low, high in ((num_clients - 1000, num_clients), (10, 1010), (25_000, 26_000)):
        count = ((ids >= low) & (ids < high)).sum()
        assert abs(count - num_rounds * rare) / np.sqrt(num_rounds * rare) < 5.5
    assert abs((ids == 3).mean() - 0.09) / np.sqrt(0.09 * 0.91 / num_rounds) < 5.5


def test_a_store_holds_bfloat16_as_float32(tmp_path):
    posterior = fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2), lambda t, x: -0.5 * jnp.sum((x - t) ** 2, axis=-1)
    )
    data = fedmcmc.FederatedData.from_clients([jnp.ones((3, 2), jnp.bfloat16)] * 2)
    kernel, start = fedmcmc.lsd(posterior, step_size=0.1), jnp.zeros(2, jnp.bfloat16)

    def run(record=None):
        return fedmcmc.sample(
            jax.random.key(0), kernel, data, start, num_rounds=7, progress=False, record=record
        ).draws

    in_memory = run()
    stored = run(fedmcmc.Record(draws_to=tmp_path / "draws.zarr"))
    assert in_memory.dtype == jnp.bfloat16 and stored.dtype == np.float32
    assert len(np.unique(in_memory.astype(np.float32))) > 7
    np.testing.assert_array_equal(stored[:], in_memory.astype(np.float32))
