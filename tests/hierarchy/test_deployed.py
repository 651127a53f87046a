"""Effects at real sites: what crosses is shaped as the shared parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData, deploy, hierarchy
from fedmcmc.interop.numpyro import from_numpyro
from tests.hierarchy.models import SIZES, clients, logistic

pytest.importorskip("cryptography")
HERE = "tests.hierarchy.test_deployed"
NAMES = ("bern", "basel", "chur", "davos", "genf")
ROWS = {
    "x": jax.ShapeDtypeStruct((), jnp.float32),
    "y": jax.ShapeDtypeStruct((), jnp.int32),
}


def shared(settings):
    example = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.int32)}
    return fedmcmc.marginal(from_numpyro(logistic, example=example))


def kernel(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=0.05)


def own(settings):
    example = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.int32)}
    return from_numpyro(logistic, example=example, centered=1.0)


def joint(posterior, settings):
    some = fedmcmc.uniform(3)
    refresh = hierarchy.independence(num_tries=2)
    return fedmcmc.lsd(posterior, step_size=0.05, refresh=refresh, participation=some)


def gibbs(posterior, settings):
    return fedmcmc.fed_gibbs(posterior, refresh=hierarchy.independence(num_tries=2))


@pytest.mark.slow
def test_draws_and_fits_are_those_of_the_simulation(tmp_path):
    own = [{"x": np.float32(group["x"]), "y": group["y"]} for group in clients("logistic")]
    data = FederatedData.from_clients(own)
    study = deploy.Study(
        name="effects",
        posterior=f"{HERE}:shared",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows=ROWS,
        kernels={"main": f"{HERE}:kernel"},
        settings={},
        asks=deploy.FIT,
    )

    def join():
        local = deploy.Local()
        for name, rows in zip(NAMES, own, strict=True):
            local.join(deploy.Site(study, name, rows, folder=tmp_path / name))
        return local

    key, start = jax.random.key(0), {"slope": 0.1, "tau": -0.2}
    settings = dict(num_rounds=6, progress=False)
    deployed = deploy.run(study, key, "main", transport=join(), position=start, **settings)
    simulated = fedmcmc.sample(key, study.kernel("main"), data, start, **settings)
    for name in start:
        np.testing.assert_allclose(deployed.draws[name], simulated.draws[name], rtol=1e-5)
    sites = deploy.Sites(study, join())
    around = fedmcmc.Gaussian.from_moments(start, variance={"slope": 0.3, "tau": 0.3})
    found, wanted = (
        fedmcmc.correct(key, study.model, where, around, num_draws=200) for where in (sites, data)
    )
    sites.close()
    np.testing.assert_allclose(found.log_evidence, wanted.log_evidence, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "gibbs"])
def test_sites_keep_effects_and_draws_are_those_of_the_simulation(tmp_path, name):
    rows = [{"x": np.float32(group["x"]), "y": group["y"]} for group in clients("logistic")]
    data = FederatedData.from_clients(rows)
    study = deploy.Study(
        name="effects",
        posterior=f"{HERE}:own",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows=ROWS,
        kernels={"main": f"{HERE}:{name}"},
        settings={},
    )
    local = deploy.Local()
    for site, own_rows in zip(NAMES, rows, strict=True):
        local.join(deploy.Site(study, site, own_rows, folder=tmp_path / site))
    key, start = jax.random.key(0), {"slope": 0.1, "tau": -0.2}
    settings = dict(num_rounds=6, progress=False)
    deployed = deploy.run(study, key, "main", transport=local, position=start, **settings)
    alone = fedmcmc.Placement(clients_at_a_time=1)
    simulated = fedmcmc.sample(key, study.kernel("main"), data, start, placement=alone, **settings)
    assert hierarchy.latents_in(deployed.state.clients) is None
    for site in start:
        np.testing.assert_array_equal(deployed.draws[site], simulated.draws[site])
