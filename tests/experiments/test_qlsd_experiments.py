"""The logistic experiments: what they measure by, what they run, and tiny runs of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc

pytest.importorskip("hydra")

from experiments import models, setup
from experiments.qlsd import baselines, gaussian, hpd, synthetic

RNG = np.random.default_rng(8)


def some_data(num_rows=60, dim=5, num_classes=3, num_clients=4):
    features = RNG.normal(size=(num_rows, dim)).astype(np.float32)
    rows = {"features": features, "label": RNG.permutation(np.arange(num_rows) % num_classes)}
    return fedmcmc.FederatedData.from_arrays(rows, np.arange(num_rows) ** 2 % num_clients)


def test_the_published_level_is_the_notebooks():
    level = np.linspace(0.01, 0.99, 200)[99]
    assert pytest.approx(1 - level, abs=1e-4) == hpd.PUBLISHED_ALPHA


def test_gap_is_that_of_quantiles_of_all_chains():
    own, reference = RNG.gamma(20, size=(3, 50)), RNG.gamma(25, size=(3, 70))
    for alpha in (0.01, 0.3):
        found = hpd.gap(own, reference, alpha)
        eta, eta_ref = (np.quantile(x, 1 - alpha) for x in (own, reference))
        assert found.signed == pytest.approx((eta - eta_ref) / eta_ref, rel=1e-4)
        assert found.error == pytest.approx(abs(found.signed), rel=1e-4)
    with pytest.raises(ValueError, match="as many chains, got 3 and 2"):
        hpd.gap(own, reference[:2])


def test_a_single_chain_is_cut_into_stretches():
    own, reference = RNG.gamma(20, size=(1, 47)), RNG.gamma(25, size=(1, 60))
    found = hpd.gap(own, reference, 0.3)
    eta, eta_ref = (np.quantile(x, 0.7) for x in (own, reference))
    assert found.signed == pytest.approx((eta - eta_ref) / eta_ref, rel=1e-4)  # of all draws
    cut = hpd.gap(own[:, :40].reshape(10, 4), reference.reshape(10, 6), 0.3)
    assert found.standard_error == pytest.approx(cut.standard_error, rel=1e-6)
    assert found.standard_error > 0
    with pytest.raises(ValueError, match="a single chain needs 10 draws or more, got 9"):
        hpd.gap(own[:, :9], reference)


def test_standard_error_of_a_single_chain_knows_what_its_draws_remember():
    def repetition():
        noise = RNG.normal(size=(2, 1, 2000))
        chains = np.zeros_like(noise)
        for i in range(1, 2000):
            chains[..., i] = 0.9 * chains[..., i - 1] + noise[..., i]
        return hpd.gap(50 + chains[0], 50 + chains[1], 0.5)

    found = [repetition() for _ in range(60)]
    spread = np.std([gap.signed for gap in found])
    claimed = np.sqrt(np.mean([gap.standard_error**2 for gap in found]))
    assert 0.6 < claimed / spread < 1.6


def test_standard_error_of_a_gap_knows_what_chains_share():
    def repetition(shared):
        centres = RNG.normal(50, 2, size=(2, 8, 1))
        noise = RNG.normal(size=(2, 8, 40))
        own, reference = centres + noise
        return hpd.gap(centres[1] + noise[0] if shared else own, reference, 0.5)

    for shared, size in ((False, 2 * np.sqrt(2 / 8) / 50), (True, 0)):
        found = [repetition(shared) for _ in range(60)]
        spread = np.std([gap.signed for gap in found])
        claimed = np.sqrt(np.mean([gap.standard_error**2 for gap in found]))
        # 60 repetitions of 8 chains: a ratio of standard deviations is known to about a tenth.
        assert 0.6 < claimed / spread < 1.6
        if size:
            assert 0.6 < claimed / size < 1.6


def test_efficiencies_are_the_published_ones():
    potential = RNG.gamma(20, size=(2, 50))
    for bits, efficiency in {4: 7.6, 8: 6.7, 16: 3.1}.items():  # Table 3
        run = hpd.Run("QLSD++", bits, potential, 500.0)
        row = hpd.row(run, potential, 1000.0, 784)
        assert row["by bound, ln"] == pytest.approx(efficiency, abs=0.05)
        assert row["efficiency"] == 2.0 and row["HPD error"] == 0.0
        assert row["by bound, log2"] < row["by bound, ln"]


def test_settings_of_dg_sgld():
    given = some_data()
    found = baselines.dg_settings(given, 7.0, 0.25, 10.0)
    for client in range(4):
        own = np.asarray(given.client_rows(client)["features"], float)
        top = np.linalg.svd(own, compute_uv=False)[0] ** 2
        smoothness = top / 4 + 7.0 * len(own) / 60
        rho = 10 / smoothness
        np.testing.assert_allclose(found["tolerance"][client], rho, rtol=1e-5)
        step = rho / (2 * (rho * smoothness + 1))
        np.testing.assert_allclose(found["step_size"][client], step, rtol=1e-5)


def test_surrogates_in_closed_form_are_the_expansions():
    given = some_data()
    model = models.multinomial(given, 2.0, by_class=True)
    centre = tuple(jnp.asarray(RNG.normal(size=5), jnp.float32) for _ in range(3))
    wanted = fedmcmc.surrogates.taylor(model, given, centre, structure="diagonal")
    found = baselines.diagonal_surrogates(given, centre)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(own, other, rtol=2e-4, atol=2e-4)
    assert found.structure == "diagonal" and jax.tree.structure(found) == jax.tree.structure(wanted)


def test_one_vector_a_class_is_the_same_model():
    given = some_data()
    whole, model = (models.multinomial(given, 2.0, by_class) for by_class in (False, True))
    theta = whole.init_fn(jax.random.key(0))
    columns = model.init_fn(jax.random.key(0))
    np.testing.assert_array_equal(np.stack(columns, axis=1), theta)
    found, expected = (
        setup.potential(p, given.rows, at) for p, at in ((model, columns), (whole, theta))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_gradients_of_clients():
    given = synthetic.problem(synthetic.Config(num_clients=4, prior_precision=10.0))
    found = synthetic.client_gradients(given.data, given.centre)

    ids = np.repeat(np.arange(4), given.data.sizes)

    def each(theta):
        terms = given.posterior.loglikelihood_fn(theta, given.data.rows)
        return jax.ops.segment_sum(terms, ids, 4)

    wanted = jax.jit(jax.jacobian(each))(given.centre)
    np.testing.assert_allclose(found, wanted, atol=2e-4)
    # At the mode they sum to what the prior pulls back.
    np.testing.assert_allclose(found.sum(axis=0), 10 * given.centre, atol=2e-3)
    assert given.heterogeneity == pytest.approx((found**2).sum())


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (synthetic, dict(levels=(0, 2))),
        (synthetic, dict(step_size_factor=2.0)),
        (synthetic, dict(num_chains=1)),
        (gaussian, dict(batch_fraction=1.0)),
        (gaussian, dict(budget_factors=(0.5, 2.0))),
    ],
)
def test_out_of_range_is_named(module, settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}.*, got"):
        module.Config(**settings)


@pytest.mark.slow
def test_memory_takes_away_what_coarse_messages_add(tmp_path):
    config = synthetic.Config(
        num_rounds=1500, num_chains=8, levels=(2,), mala_warmup=200, mala_draws=400
    )
    metrics = synthetic.run(config, tmp_path)
    plain, without, with_ = metrics["table"]
    assert (plain["memory"], without["memory"], with_["memory"]) == ("-", "no", "yes")
    assert without["added by compression"] > 5 * without["s.e. of that"]
    assert without["added by compression"] > 4 * abs(with_["added by compression"])
    assert without["bits per message"] < plain["bits per message"] == 320
    # Langevin on a Gaussian with curvature 1 / v is 1 / (1 - step / (2 v)) times too wide.
    variances = np.asarray(metrics["truth"]["variances"])
    widened = 1 / (1 - metrics["step_size"] / (2 * variances))
    assert plain["variance over MALA"] == pytest.approx(widened.mean(), rel=0.1)
    assert (tmp_path / metrics["figures"][0]["file"]).stat().st_size > 1000
