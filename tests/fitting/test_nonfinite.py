"""Rows that are not finite in value or gradient are named before a search begins."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc import FederatedData, deploy, surrogates
from fedmcmc.fitting import find_modes
from fedmcmc.runs import as_consortium

KEY = jax.random.key(0)
MODULE = "tests.fitting.test_nonfinite"


def rates(t, y=None):
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
    with numpyro.plate("rows", len(t)):
        numpyro.sample("y", dist.Poisson(rate * t), obs=y)


def effects(t, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    effect = numpyro.sample("effect", dist.Normal(mu, 1.0), infer={"local": True})
    with numpyro.plate("rows", len(t)):
        numpyro.sample("y", dist.Poisson(t * jnp.exp(effect)), obs=y)


def compositions(y=None):
    weights = numpyro.sample("weights", dist.LogNormal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Dirichlet(weights), obs=y)


def logarithm(x, z, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * (jnp.log(x) + z), 1.0), obs=y)


GOOD = {"t": np.array([600.0, 250.0]), "y": np.array([4, 2])}
ZEROS = {"t": np.array([250.0, 0.0]), "y": np.array([2, 0])}
X = np.array([1.0, 0.0, 3.0])
CASES = {
    "local": (effects, GOOD, {"t": np.array([0.0, 250.0]), "y": np.array([0, 3])}, 0, "t = 0."),
    "dirichlet": (
        compositions,
        {"y": np.array([[0.1, 0.5, 0.4]])},
        {"y": np.array([[0.2, 0.8, 0.0], [0.3, 0.3, 0.4]])},
        0,
        r"y = \[0.2, 0.8, 0. \]",
    ),
    "log": (logarithm, {"x": X + 1, "z": X, "y": X}, {"x": X, "z": X, "y": X}, 1, "x = 0."),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_client_row_column_and_value(case):
    model, good, bad, row, column = CASES[case]
    data = FederatedData.from_clients({"Bern": good, "Chur": bad, "Jura": good})
    expected = rf"of row {row} of client 'Chur' \({column}\) is not finite at any of 32 starts\."
    with pytest.raises(ValueError, match=expected):
        fedmcmc.fit(model, data, rng_key=KEY, progress=False)


def test_rows_may_have_no_density_at_a_start():
    def log_likelihood(position, y):
        top = jnp.exp(position)
        return jnp.where(y < top, -position, -jnp.inf)

    posterior = fedmcmc.Posterior(lambda position: -0.5 * position**2, log_likelihood)
    data = FederatedData.from_clients([np.array([0.2, 1.4]), np.array([0.9])])
    search = find_modes(KEY, posterior, as_consortium(data), position=jnp.array(1.0))
    assert search.centre >= np.log(1.4)


def test_the_mode_names_a_row_and_many_rows_suggest_scaling():
    data = FederatedData.from_clients({"Bern": GOOD, "Chur": ZEROS})
    posterior = fedmcmc.from_numpyro(rates, example=data)
    with pytest.raises(ValueError, match=r"gradient .* of row 1 of client 'Chur' \(t = 0\.\)"):
        surrogates.mode(posterior, data, {"rate": 0.0})

    def counts(year, y=None):
        slope = numpyro.sample("slope", dist.Normal(5, 1))
        with numpyro.plate("rows", len(year)):
            numpyro.sample("y", dist.Poisson(jnp.exp(slope * year)), obs=y)

    years = {"year": np.array([2.0e9, 2.1e9, 2.2e9]), "y": np.array([2, 3, 1])}
    with pytest.raises(ValueError, match=r"none of 32 starts: scale the covariates.* 6 rows"):
        fedmcmc.fit(counts, FederatedData.from_clients([years] * 2), rng_key=KEY, progress=False)


def posterior(settings):
    rows = {"t": np.ones(2, np.float32), "y": np.ones(2, np.int32)}
    return fedmcmc.from_numpyro(rates, example=rows)


def test_the_log_of_a_site_names_the_row_and_the_server_no_value(tmp_path, caplog):
    rows = {"t": np.array([250.0, 0.0, 8.0], np.float32), "y": np.array([2, 0, 1], np.int32)}
    study = deploy.Study(
        name="rates",
        posterior=f"{MODULE}:posterior",
        sites={"bern": 2, "chur": 3},
        rows={name: jax.ShapeDtypeStruct((), rows[name].dtype) for name in rows},
        kernels={},
        settings={},
        asks=deploy.FIT,
    )
    local = deploy.LocalTransport()
    good = {name: leaf[::2] for name, leaf in rows.items()}
    for name, table in {"bern": good, "chur": rows}.items():
        local.join(deploy.Site(study, name, table, folder=tmp_path / name, min_rows=1))
    sites = deploy.Sites(study, local)
    with (
        caplog.at_level(logging.WARNING, "fedmcmc.deploy"),
        pytest.raises(ValueError, match="finite at none of 8 starts") as error,
    ):
        find_modes(KEY, study.model, sites)
    sites.close()
    assert "t = " not in str(error.value)
    (entry,) = [
        record.getMessage() for record in caplog.records if "not finite" in record.msg % record.args
    ]
    assert entry.startswith(
        "chur: The gradient of the log likelihood of row 1 of this site (t = 0.)"
    )
