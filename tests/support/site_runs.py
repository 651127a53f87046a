"""A run at sites in threads beside the same run in a simulation."""

import sys
import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._shapes import shapes_of_run
from fedmcmc.deploy._site import Site
from fedmcmc.pytrees import trees
from tests.contracts.model import DATA, KEY, POSITIONS
from tests.support import studies

ONE_BY_ONE = fedmcmc.Placement(clients_at_a_time=1)
POSITION = POSITIONS["nested"]
MASKED = "masked: "
ADAPTING = pytest.mark.filterwarnings(
    "ignore:.*from rounds in which step sizes still adapted:fedmcmc.SamplingWarning"
)
"""For tests that compare the first rounds of two runs, in which a kernel's step sizes adapt."""


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def at_sites(study, folder, *, kernel="main", position=POSITION, **settings):
    """Run a study's kernel with its sites in threads."""
    local = deploy.LocalTransport()
    studies.join_all(local, study, Path(folder))
    settings = dict(progress=False) | settings
    return deploy.run(study, KEY, kernel, position, transport=local, **settings)


def clients_draw(study):
    """Return whether clients draw numbers that no other client draws."""
    shapes = shapes_of_run(study.kernel("main"), study, trees.shapes_of(POSITION))
    return bool(jax.tree.leaves([phase.private for phase in shapes.phases]))


@contextmanager
def public_keys(num_chains):
    """Have sites draw from the chains' keys, although their study is not reproducible."""
    keys = jax.vmap(lambda c: jax.random.fold_in(KEY, c))(jnp.arange(num_chains))
    with mock.patch.object(Site, "_keys", lambda *_: keys):
        yield


def run_both(row, folder, compare=close, **settings):
    """Compare draws, figures, totals and the server's broadcast; return the run at sites.

    `row` is one of the table, or a study. Where clients draw numbers of their own, they draw them
    from the simulation's keys: the study is reproducible, or, as it has masks, its sites are
    changed. Where they do not, their draws are those of the simulation without that.
    """
    study = studies.study_of(row) if isinstance(row, str) else row
    settings, same_keys = dict(num_rounds=6, progress=False) | settings, nullcontext()
    if clients_draw(study):
        same_keys = public_keys(settings.get("num_chains", 1))
        if not study.secure:
            study, same_keys = replace(study, reproducible=True), nullcontext()
    with same_keys:
        samples = at_sites(study, folder, **settings)
    simulated = fedmcmc.sample(
        KEY, study.kernel("main"), DATA, POSITION, placement=ONE_BY_ONE, **settings
    )
    jax.tree.map(compare, samples.draws, simulated.draws)
    jax.tree.map(compare, samples.state.broadcast, simulated.state.broadcast)
    for name, moments in samples.streams.items():
        jax.tree.map(close, moments.mean, simulated.streams[name].mean)
    assert samples.info.keys() == simulated.info.keys()
    for name in set(samples.info) - {"bits_up", "bits_down"}:
        if study.secure and name == "gradient_norm":
            assert np.isnan(samples.info[name]).all()  # which no site tells
            continue
        close(samples.info[name], simulated.info[name])
    for name in ("bits_up", "bits_down"):
        np.testing.assert_array_equal(samples.info[name], simulated.info[name])
        np.testing.assert_array_equal(samples.totals[name], simulated.totals[name])
    return samples


def main(rows):
    for row in rows:
        try:
            with tempfile.TemporaryDirectory() as folder:
                masked = row.startswith(MASKED)
                study = studies.masked_study(row.removeprefix(MASKED)) if masked else row
                run_both(study, folder, np.testing.assert_array_equal)
        except AssertionError as error:
            raise AssertionError(row) from error
    print("same")


if __name__ == "__main__":
    main(sys.argv[1:])
