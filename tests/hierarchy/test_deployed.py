"""Effects at real sites: what crosses is shaped as the shared parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import FederatedData, deploy, hierarchy, wire
from fedmcmc.deploy._frames import Frame, unpack
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


def recentered(posterior, settings):
    return fedmcmc.fed_gibbs(posterior, refresh=hierarchy.independence(), recenter=True)


def test_no_site_is_left_out_between_exchanges_that_belong_together():
    study = deploy.Study(
        name="effects",
        posterior=f"{HERE}:own",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows=ROWS,
        kernels={"main": f"{HERE}:recentered"},
        settings={},
    )
    sites = deploy.Sites(study, deploy.LocalTransport(), on_missing="leave_out")
    start = {"slope": 0.1, "tau": -0.2}
    with pytest.raises(ValueError, match="must be 'wait'"):
        sites.sample(jax.random.key(0), study.kernel("main"), start, num_rounds=1)


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
        reproducible=True,
    )

    def join():
        local = deploy.LocalTransport()
        for name, rows in zip(NAMES, own, strict=True):
            local.join(deploy.Site(study, name, rows, folder=tmp_path / name, min_rows=1))
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
        reproducible=True,
    )
    local, sites = deploy.LocalTransport(), []
    for site, own_rows in zip(NAMES, rows, strict=True):
        sites.append(deploy.Site(study, site, own_rows, folder=tmp_path / site, min_rows=1))
        local.join(sites[-1])
    assert sites[0].state is None
    key, start = jax.random.key(0), {"slope": 0.1, "tau": -0.2}
    settings = dict(num_rounds=6, progress=False)
    deployed = deploy.run(study, key, "main", transport=local, position=start, **settings)
    alone = fedmcmc.Placement(clients_at_a_time=1)
    simulated = fedmcmc.sample(key, study.kernel("main"), data, start, placement=alone, **settings)
    assert hierarchy.locals_in(deployed.state.clients) is None
    for site in start:
        # A compiler fuses what a site computes of few rows in other ways: without that, contracts
        # are tested to the last bit.
        np.testing.assert_allclose(deployed.draws[site], simulated.draws[site], rtol=1e-5)
    everyone = hierarchy.locals_in(simulated.state.clients)
    for index, site in enumerate(sites):
        found = hierarchy.locals_in(site.state)
        np.testing.assert_allclose(found.accepted.mean[:, 0], everyone.accepted.mean[:, index])
        for leaf, expected in zip(
            jax.tree.leaves(found.latents), jax.tree.leaves(everyone.latents), strict=True
        ):
            np.testing.assert_allclose(leaf[:, 0], expected[:, index], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_no_message_of_marginal_holds_an_effect(tmp_path):
    """What leaves a site is the gradient of its integral, a function of rows and position alone."""
    rows = [{"x": np.float32(group["x"]), "y": group["y"]} for group in clients("logistic")]
    study = deploy.Study(
        name="effects",
        posterior=f"{HERE}:shared",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows=ROWS,
        kernels={"main": f"{HERE}:kernel"},
        settings={},
    )
    local, heard = deploy.LocalTransport(), {name: [] for name in NAMES}
    for (name, pairs), own_rows in zip(heard.items(), rows, strict=True):
        site = deploy.Site(study, name, own_rows, folder=tmp_path / name, min_rows=1)
        local.join(site, heard=lambda *pair, pairs=pairs: pairs.append(pair))
    start = {"slope": 0.1, "tau": -0.2}
    samples = deploy.run(
        study, jax.random.key(0), "main", start, transport=local, num_rounds=3, progress=False
    )
    data, terms = FederatedData.from_clients(rows), study.model.loglikelihood_fn
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), jnp.float32), start)

    @jax.jit
    def slopes(position):
        def of_client(client):
            return jax.grad(lambda at: terms.terms(at, client)[0])(position)

        return data.map_clients(of_client)

    places = [{k: float(x[0, i]) for k, x in samples.draws.items()} for i in range(2)]
    wanted = [slopes(place) for place in [start, *places]]
    for index, name in enumerate(NAMES):
        told = [Frame.parse(answer) for _, answer in heard[name] if answer]
        codes = [unpack(frame.body, 2)[0] for frame in told if frame.kind == "answer"]
        assert len(codes) == len(wanted)
        # Every other answer is empty, so that nothing else can hold a number.
        assert all(not frame.body for frame in told if frame.kind != "answer")
        for code, slope in zip(codes, wanted, strict=True):
            own = jax.tree.map(lambda leaf, i=index: leaf[i], slope)
            found = wire.decode(code, like)  # of this size to the bit
            for key in like:
                np.testing.assert_allclose(found[key], own[key], rtol=2e-4, atol=1e-5)
