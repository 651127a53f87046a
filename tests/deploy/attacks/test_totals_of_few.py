"""A dishonest server under masks that seeks totals in which one site's message stands out."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from tests.deploy.attacks.support import (
    KERNELS,
    RESOLUTION,
    Network,
    at_position,
    make_study,
    open_site,
    rows_of,
    sample,
    server_of,
    totals_of,
)

HERE = "tests.deploy.attacks.test_totals_of_few"
MOST = 2.0**30


def quadratic(settings):
    """Return a model whose gradients grow with the position."""
    return fedmcmc.Posterior(
        lambda position: -0.5 * jnp.sum(position**2),
        lambda position, rows: -0.5 * (rows["x"] @ position) ** 2,
    )


def snapshots(posterior, settings):
    """Return a kernel under masks whose clients keep something between rounds."""
    return fedmcmc.secure_sum(KERNELS["snapshot"](posterior), resolution=RESOLUTION, max_abs=MOST)


def rows_without(name):
    """Return rows of a site; the second column of Chur is zero."""
    x = rows_of(name)["x"].copy()
    if name == "chur":
        x[:, 1] = 0
    return {"x": x}


def open_with(study, name, folder, **changes):
    return open_site(study, name, folder, rows=rows_without(name), **changes)


def test_a_server_asks_where_one_site_alone_is_within_the_range(tmp_path):
    """All other sites send the ends of the range, or zeros, which the server subtracts."""
    study = make_study("masked", masked=True, posterior=f"{HERE}:quadratic")
    network = Network(study, tmp_path, opened=open_with)
    x = rows_without("chur")["x"].astype(float)
    with server_of(study, network) as sites:
        for far in (1e9, 1e38):  # too large, and not finite
            position = np.array([0.5, far, -0.5])
            with pytest.raises(fedmcmc.NonFiniteError, match="beyond the range"):
                sample(sites, study, position=jnp.asarray(position, jnp.float32))
            others_total = totals_of(network)[-1] + x.T @ (x @ position)
            assert not np.isin(others_total, MOST * np.arange(-2, 3)).any()
    assert len(totals_of(network)) == 2


def to_earlier_state(frame):
    """Return a step before which the site drops the state after its last answer."""
    previous = [frame.tag.round - 2, frame.tag.phase]
    return frame._replace(header=frame.header | {"last": previous})


def uncounted(frame):
    return frame._replace(header=frame.header | {"counted": [False]})


STATES = {
    "another start": ("start", 0, lambda frame: at_position(frame, 0.5), "do not cancel"),
    "an earlier state": ("step", 2, to_earlier_state, "do not cancel"),
    "a chain that does not count": ("step", 2, uncounted, "of all chains"),
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Return a study, its network and a connected server that has run it honestly."""
    study = make_study(
        masked=True, posterior=f"{HERE}:quadratic", kernels={"main": f"{HERE}:snapshots"}
    )
    network = Network(study, tmp_path_factory.mktemp("sites"))
    with server_of(study, network) as sites:
        sample(sites, study, position=START, num_rounds=3)
        yield study, network, sites


START = jnp.full(3, 1e-3)


@pytest.mark.parametrize("how", STATES)
def test_a_server_has_one_site_alone_in_another_state(how, federation):
    """All other sites would send the same as before, and two totals differ by one message."""
    study, network, sites = federation
    kind, round_, change, message = STATES[how]

    def request(name, frame):
        is_target = name == "bern" and frame.kind == kind and frame.tag.round == round_
        return change(frame) if is_target else frame

    network.change_request = request
    with pytest.raises(deploy.SiteError, match=message):
        sample(sites, study, position=START, num_rounds=3)
    network.change_request = None
    sample(sites, study, position=START, num_rounds=3)
