"""Results come back from files as they were, without code and without rows."""

import jax
import numpy as np
import numpyro.distributions as dist
import pandas as pd
import pytest
from chex import assert_trees_all_equal
from numpyro.distributions import transforms

import fedmcmc
from fedmcmc import models
from fedmcmc.models._loading import from_record
from fedmcmc.models._saving import as_record
from fedmcmc.models._survival import specify_survival, survival_curves
from tests.models.stand_in import make_fit, make_specified_fit, make_tables

NEW = pd.DataFrame({"age": [40.0, 55.0], "trt": ["A", "B"]})


@pytest.fixture(scope="module")
def model_fit():
    specification = models.specify(
        "y ~ age * trt + (1 | hospital)",
        make_tables(),
        family="bernoulli",
        client="hospital",
        priors={"trt[B]": dist.StudentT(4.0, 0.0, 1.0)},
    )
    return make_specified_fit(specification, num=400)


def test_a_formula_model_comes_back_with_its_functions(model_fit, tmp_path):
    loaded = fedmcmc.load(model_fit.save(tmp_path / "trial.nc"))
    assert isinstance(loaded, models.ModelFit)
    assert_trees_all_equal(loaded.samples.draws, model_fit.samples.draws)
    assert loaded.verdict == model_fit.verdict and loaded.verdict.k_hat == 0.1
    assert repr(loaded) == repr(model_fit)
    assert loaded.design.schema == model_fit.design.schema
    assert loaded.methods_text() == model_fit.methods_text()
    assert str(loaded.priors) == str(model_fit.priors)
    pd.testing.assert_frame_equal(loaded.summary(), model_fit.summary())
    pd.testing.assert_frame_equal(loaded.predict(NEW), model_fit.predict(NEW))
    position = jax.tree.map(lambda leaf: leaf[0, 0], model_fit.samples.draws)
    for name in ("posterior", "fitted.posterior"):
        values = []
        for fit in (model_fit, loaded):
            posterior = fit.fitted.posterior if "." in name else fit.posterior
            values.append(posterior.logprior_fn(position))
        assert values[0] == values[1]
    # Again, from the loaded fit.
    again = fedmcmc.load(loaded.save(tmp_path / "again.nc"))
    assert repr(again) == repr(model_fit)


def test_a_loaded_model_needs_the_rows_for_effects_of_hospitals(model_fit, tmp_path):
    loaded = fedmcmc.load(model_fit.save(tmp_path / "trial.nc"))
    assert loaded.data is None
    for method in (loaded.ranef, loaded.loo, loaded.pp_check, lambda: loaded.effects("trt")):
        with pytest.raises(ValueError, match="Rows and effects of groups stay with their owner"):
            method()
    complete = loaded.with_data(make_tables())
    pd.testing.assert_frame_equal(complete.effects("trt"), model_fit.effects("trt"))
    pd.testing.assert_frame_equal(complete.ranef(), model_fit.ranef())


def test_a_file_has_no_rows_and_is_read_by_arviz(model_fit, tmp_path):
    import xarray

    path = model_fit.save(tmp_path / "trial.nc")
    with xarray.open_datatree(path, engine="h5netcdf") as tree:
        posterior = tree["posterior"]
        assert posterior["b"].coords["coefficient"].values.tolist() == list(model_fit.design.names)
        largest = max(x.size for node in tree.subtree for x in node.data_vars.values())
        assert posterior["b"].dims[:2] == ("chain", "draw")
    ages = np.concatenate([table["age"] for table in make_tables().values()])
    content = path.read_bytes()
    assert largest >= 400 and not any(np.float32(age).tobytes() in content for age in ages)


@pytest.mark.parametrize("hazard", ["piecewise", "weibull", "mspline"])
def test_a_survival_model_comes_back(tmp_path, hazard):
    tables = {}
    for i, (name, table) in enumerate(make_tables().items()):
        time = np.random.default_rng(i).exponential(size=len(table))
        tables[name] = table.assign(time=np.minimum(time, 2.0), event=time < 2)
    formula = models.parse("Surv(time, event) ~ age + (1 | hospital)")
    schema = models.exchange(formula, tables, client="hospital")
    design, family, priors, model = specify_survival(formula, schema, hazard=hazard, intervals=3)
    data = design.data(tables)
    fit = make_specified_fit(
        models.Specification(formula, family, priors, design, data, model, tables)
    )
    loaded = fedmcmc.load(fit.save(tmp_path / "trial.nc"))
    assert loaded.family == family and repr(loaded) == repr(fit)
    curves = [survival_curves(x, NEW, [0.5, 1.0]) for x in (fit, loaded)]
    np.testing.assert_array_equal(*curves)
    assert "hazard ratio" in str(fit.report.page())
    with pytest.raises(ValueError, match=r"models\.survival_curves"):
        fit.predict(NEW)
    with pytest.raises(ValueError, match="No outcomes can be drawn"):
        fit.pp_check()


def test_fits_and_samples_come_back(tmp_path):
    fit = make_fit(chains=2, num=50)
    fitted, samples = fit.fitted, fit.samples
    loaded = fedmcmc.load(fitted.save(tmp_path / "deep" / "fit.nc"))
    assert isinstance(loaded, fedmcmc.fitting.Fitted)
    assert loaded.verdict == fitted.verdict and loaded.log_evidence == fitted.log_evidence
    assert_trees_all_equal(loaded.samples.draws, samples.draws)
    assert_trees_all_equal(loaded.samples.constrained, samples.constrained)
    assert str(loaded.report) == str(fitted.report) and str(loaded) == str(fitted)
    assert loaded.samples.info.keys() == samples.info.keys()
    with pytest.raises(RuntimeError, match=r"The model was tests\.models\.stand_in:Model\."):
        loaded.posterior.logprior_fn(samples.draws)
    restored = fedmcmc.load(tmp_path / "deep" / "fit.nc", posterior=fit.posterior)
    assert_trees_all_equal(restored.samples.constrained, samples.constrained)
    assert restored.posterior == fit.posterior
    loaded = fedmcmc.load(samples.save(tmp_path / "samples.nc"))
    assert_trees_all_equal(loaded.constrained, samples.constrained)
    assert str(loaded) == str(samples)
    loaded = fedmcmc.load(loaded.save(tmp_path / "again.nc"))
    assert_trees_all_equal(loaded.constrained, samples.constrained)


def test_positions_of_other_structures_come_back_or_are_refused(tmp_path):
    data = fedmcmc.FederatedData.from_clients([np.ones(3, np.float32), np.zeros(5, np.float32)])

    def posterior(value):
        return fedmcmc.Posterior(
            lambda t: -0.5 * value(t) ** 2, lambda t, x: -0.5 * (x - value(t)) ** 2
        )

    def run(value, position):
        kernel = fedmcmc.lsd(posterior(value), step_size=0.02)
        return fedmcmc.sample(
            jax.random.key(0), kernel, data, position, num_rounds=20, progress=False
        )

    for value, position in (
        (lambda t: t["a"][0], {"a": (np.float32(0),), "b/c": None}),
        (lambda t: t, np.float32(0)),
    ):
        samples = run(value, position)
        loaded = fedmcmc.load(samples.save(tmp_path / "samples.nc"))
        assert_trees_all_equal(loaded.draws, samples.draws)
        assert jax.tree.structure(loaded.draws) == jax.tree.structure(samples.draws)
    gaussian = fedmcmc.Gaussian.from_moments(np.zeros(1, np.float32), variance=1.0)
    samples = run(lambda t: t.precision_mean[0], gaussian)
    with pytest.raises(ValueError, match="got a Gaussian"):
        samples.save(tmp_path / "samples.nc")


@pytest.mark.parametrize(
    "prior",
    [
        dist.Normal(0.0, 2.5),
        dist.LKJCholesky(3, 2.0),
        dist.TransformedDistribution(dist.Exponential(1.0), transforms.PowerTransform(-2.0)),
        dist.ImproperUniform(dist.constraints.real, (), ()),
        dist.TruncatedNormal(0.0, 1.0, low=0.5),
        dist.MixtureSameFamily(
            dist.Categorical(np.array([0.3, 0.7])), dist.Normal(np.array([0.0, 1.0]), 1.0)
        ),
    ],
    ids=lambda prior: type(prior).__name__,
)
def test_priors_come_back(prior):
    restored = from_record(as_record(prior))
    assert type(restored) is type(prior)
    if isinstance(prior, dist.ImproperUniform):
        assert restored.support == prior.support
        return
    value = prior.sample(jax.random.key(0))
    assert restored.log_prob(value) == prior.log_prob(value)


def test_a_file_cannot_name_other_objects():
    for record in (
        {"class": "_saving.import_module", "fields": {}},
        {"distribution": "constraints", "arguments": {}},
        {"class": "_command.Path", "fields": {}},
    ):
        with pytest.raises((ValueError, AttributeError)):
            from_record(record)
    with pytest.raises(ValueError, match="cannot be saved"):
        as_record(object())


def test_damaged_and_other_files_are_refused(tmp_path):
    path = tmp_path / "other.nc"
    path.write_bytes(b"no result")
    with pytest.raises(ValueError, match="no result that fedmcmc saved"):
        fedmcmc.load(path)
    with pytest.raises(FileNotFoundError):
        fedmcmc.load(tmp_path / "missing.nc")
