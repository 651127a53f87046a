"""Effects at real sites: messages have the shapes of the shared parameters."""

import chex
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
MODULE = "tests.hierarchy.test_deployed"
NAMES = ("bern", "basel", "chur", "davos", "genf")
EXAMPLE = {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.int32)}
ROWS = {name: jax.ShapeDtypeStruct((), leaf.dtype) for name, leaf in EXAMPLE.items()}
KEY, START = jax.random.key(0), {"slope": 0.1, "tau": -0.2}


def integrated(settings):
    return fedmcmc.marginal(from_numpyro(logistic, example=EXAMPLE))


def centered(settings):
    return from_numpyro(logistic, example=EXAMPLE, centered=1.0)


def langevin(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=0.05)


def joint(posterior, settings):
    cohort = fedmcmc.uniform(3)
    refresh = hierarchy.independence(num_tries=2)
    return fedmcmc.lsd(posterior, step_size=0.05, refresh=refresh, participation=cohort)


def gibbs(posterior, settings):
    return fedmcmc.fed_gibbs(posterior, refresh=hierarchy.independence(num_tries=2))


def recentered(posterior, settings):
    return fedmcmc.fed_gibbs(posterior, refresh=hierarchy.independence(), recenter=True)


def build_study(posterior, kernel, **settings):
    return deploy.Study(
        name="effects",
        posterior=f"{MODULE}:{posterior}",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows=ROWS,
        kernels={"main": f"{MODULE}:{kernel}"},
        settings={},
        **settings,
    )


def make_rows():
    return [{"x": np.float32(group["x"]), "y": group["y"]} for group in clients("logistic")]


def join_sites(study, folder, messages=None):
    """Return a transport and its sites; pairs of messages go to `messages` by name."""
    transport, sites = deploy.LocalTransport(), []
    for name, rows in zip(NAMES, make_rows(), strict=True):
        sites.append(deploy.Site(study, name, rows, folder=folder / name, min_rows=1))
        if messages is None:
            transport.join(sites[-1])
        else:
            pairs = messages.setdefault(name, [])
            transport.join(sites[-1], heard=lambda *pair, pairs=pairs: pairs.append(pair))
    return transport, sites


def test_sites_cannot_be_left_out_between_exchanges_that_belong_together():
    study = build_study("centered", "recentered")
    sites = deploy.Sites(study, deploy.LocalTransport(), on_missing="leave_out")
    with pytest.raises(ValueError, match="must be 'wait'"):
        sites.sample(KEY, study.kernel("main"), START, num_rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "gibbs"])
def test_draws_are_those_of_the_simulation_and_sites_keep_effects(tmp_path, name):
    study = build_study("centered", name, reproducible=True)
    data = FederatedData.from_clients(make_rows())
    transport, sites = join_sites(study, tmp_path)
    assert sites[0].state is None
    settings = dict(num_rounds=6, progress=False)
    deployed = deploy.run(study, KEY, "main", START, transport=transport, **settings)
    placement = fedmcmc.Placement(clients_at_a_time=1)
    simulated = fedmcmc.sample(
        KEY, study.kernel("main"), data, START, placement=placement, **settings
    )
    # A compiler fuses the computations of a site with few rows in another way.
    chex.assert_trees_all_close(dict(deployed.draws), dict(simulated.draws), rtol=1e-5)
    assert hierarchy.find_latent_state(deployed.state.clients) is None
    in_simulation = hierarchy.find_latent_state(simulated.state.clients)
    for index, site in enumerate(sites):
        at_site = hierarchy.find_latent_state(site.state)
        accepted = in_simulation.accepted.mean[:, index]
        np.testing.assert_allclose(at_site.accepted.mean[:, 0], accepted)
        expected = jax.tree.map(lambda leaf, i=index: leaf[:, i], in_simulation.latents)
        latents = jax.tree.map(lambda leaf: leaf[:, 0], at_site.latents)
        chex.assert_trees_all_close(latents, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_messages_of_a_marginal_posterior_hold_no_effects(tmp_path):
    """A site sends the gradient of its integral, a function of rows and position alone.

    Importance sampling at sites and in the simulation gives the same evidence.
    """
    study, messages = build_study("integrated", "langevin", asks=deploy.FIT), {}
    transport, _ = join_sites(study, tmp_path, messages)
    samples = deploy.run(
        study, KEY, "main", START, transport=transport, num_rounds=3, progress=False
    )
    data, terms = FederatedData.from_clients(make_rows()), study.model.loglikelihood_fn.terms
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), jnp.float32), START)

    @jax.jit
    def gradients(position):
        def of_client(client):
            return jax.grad(lambda place: terms(place, client)[0])(position)

        return data.map_clients(of_client)

    places = [{k: float(x[0, i]) for k, x in samples.draws.items()} for i in range(2)]
    expected = [gradients(place) for place in [START, *places]]
    for index, name in enumerate(NAMES):
        frames = [Frame.parse(answer) for _, answer in messages[name] if answer]
        codes = [unpack(frame.body, 2)[0] for frame in frames if frame.kind == "answer"]
        assert len(codes) == len(expected)
        # All other frames are empty, so that no number can hide in them.
        assert all(not frame.body for frame in frames if frame.kind != "answer")
        for code, of_clients in zip(codes, expected, strict=True):
            gradient = jax.tree.map(lambda leaf, i=index: leaf[i], of_clients)
            message = wire.decode(code, like)  # exactly as long as the gradient
            for key in like:
                np.testing.assert_allclose(message[key], gradient[key], rtol=2e-4, atol=1e-5)
    questions = deploy.Sites(study, join_sites(study, tmp_path)[0])
    around = fedmcmc.Gaussian.from_moments(START, variance={"slope": 0.3, "tau": 0.3})
    evidence, expected = (
        fedmcmc.correct(KEY, study.model, source, around, num_draws=200).log_evidence
        for source in (questions, data)
    )
    questions.close()
    np.testing.assert_allclose(evidence, expected, rtol=1e-4)
