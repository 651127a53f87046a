"""Studies of the contract's model, whose functions sites find here by name."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from fedmcmc import deploy
from tests.contracts.model import DATA, POSITIONS, POSTERIOR, SIZES, Given
from tests.contracts.tables import KERNELS

NAMES = ("bern", "basel", "chur")
HERE = "tests.support.studies"


def posterior(settings):
    return POSTERIOR


def kernel(posterior, settings):
    """Return a row of the contract's table, with a step size that the settings may have."""
    built = KERNELS[settings["row"]](POSITIONS["nested"], Given(posterior))
    step_size = settings.get("step_size")
    return built if step_size is None else replace(built, step_size=jnp.float32(step_size))


def study_of(row="lsd", **changes):
    given = dict(
        name="contract",
        posterior=f"{HERE}:posterior",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows={"x": jax.ShapeDtypeStruct((3,), jnp.float32)},
        kernels={"main": f"{HERE}:kernel"},
        settings={"row": row},
    )
    return deploy.Study(**(given | changes))


def rows_of(name):
    return jax.tree.map(np.asarray, DATA.client_rows(NAMES.index(name)))


def join_all(local, study, folder, **changes):
    """Connect all sites of a study in threads; return them."""
    sites = {
        name: deploy.Site(study, name, rows_of(name), folder=folder / name, **changes)
        for name in study.sites
    }
    for site in sites.values():
        local.join(site)
    return sites
