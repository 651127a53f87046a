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
    joined,
    make_study,
    open_site,
    parts_of,
    rows_of,
    run,
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
    """Return rows of a site; those of Chur lack what the second column is about."""
    x = rows_of(name)["x"].copy()
    if name == "chur":
        x[:, 1] = 0
    return {"x": x}


def open_with(study, name, folder, **changes):
    return open_site(study, name, folder, rows=rows_without(name), **changes)


@pytest.mark.parametrize("far", [1e9, 1e38], ids=["too large", "not finite"])
def test_a_server_asks_where_one_site_alone_is_within_the_range(far, tmp_path):
    """All others send the ends of the range, or zeros, which the server subtracts."""
    study = make_study("masked", masked=True, posterior=f"{HERE}:quadratic")
    network = Network(study, tmp_path, opened=open_with)
    position = np.array([0.5, far, -0.5])
    with pytest.raises(fedmcmc.NonFiniteError, match="beyond the range"):
        run(study, network, position=jnp.asarray(position, jnp.float32))
    x = rows_without("chur")["x"].astype(float)
    others = totals_of(network)[0] + x.T @ (x @ position)
    assert not np.isin(others, MOST * np.arange(-2, 3)).any()


def started_elsewhere(frame):
    """Return a first broadcast at another position: round, position."""
    parts = [part[:4] + np.full(3, 0.5, ">f4").tobytes() for part in parts_of(frame.body)]
    return frame._replace(body=joined([parts[0] + parts_of(frame.body)[0][16:]]))


def gone_back(frame):
    """Return a step before which the site drops what it made of the answer before."""
    before = [frame.tag.round - 2, frame.tag.phase]
    return frame._replace(header=frame.header | {"last": before})


def uncounted(frame):
    return frame._replace(header=frame.header | {"counted": [False]})


STATES = {
    "another start": ("start", 0, started_elsewhere, "do not cancel"),
    "an earlier state": ("step", 2, gone_back, "do not cancel"),
    "a chain that does not count": ("step", 2, uncounted, "of all chains"),
}


@pytest.mark.parametrize("how", STATES)
def test_a_server_has_one_site_alone_in_another_state(how, tmp_path):
    """All others would send the same as before, and two totals differ by one site's messages."""
    kind, at, change, message = STATES[how]
    study = make_study(
        masked=True, posterior=f"{HERE}:quadratic", kernels={"main": f"{HERE}:snapshots"}
    )

    def request(name, frame):
        apart = name == "bern" and frame.kind == kind and frame.tag.round == at
        return change(frame) if apart else frame

    position = jnp.full(3, 1e-3)
    run(study, Network(study, tmp_path / "honest"), position=position, num_rounds=3)
    with pytest.raises(deploy.SiteError, match=message):
        run(
            study,
            Network(study, tmp_path / "apart", request=request),
            position=position,
            num_rounds=3,
        )
