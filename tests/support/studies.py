"""Studies of the contract's model, whose functions sites find here by name."""

import hashlib
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import fedmcmc
from fedmcmc import deploy
from tests.contracts.model import DATA, POSITIONS, POSTERIOR, SIZES, Given
from tests.contracts.tables import KERNELS

NAMES = ("bern", "basel", "chur")
HERE = "tests.support.studies"
FEW_ROWS = dict(min_rows=1, min_batch=1)
"""Limits of sites whose rows are few, as in these tests."""


def posterior(settings):
    return POSTERIOR


def outcomes(rng_key, position, rows):
    """Draw rows around a number of the position; for what asks about outcomes drawn anew."""
    return {"x": position["a"] + jax.random.normal(rng_key, rows["x"].shape)}


def with_outcomes(settings):
    return POSTERIOR._replace(resample_fn=outcomes)


def kernel(posterior, settings):
    """Return a row of the contract's table, with a step size that the settings may have."""
    built = KERNELS[settings["row"]](POSITIONS["nested"], Given(posterior))
    if "step_size" in settings:
        built = replace(built, step_size=jnp.float32(settings["step_size"]))
    if settings.get("masked"):
        if not isinstance(built.participation, type(fedmcmc.full())):
            built = replace(built, participation=fedmcmc.full())
        room = dict(max_abs=2.0**30, resolution=2.0**-22) if built.traits.needs_all_clients else {}
        if "uniform" in settings:
            changes = fedmcmc.uniform(settings["uniform"])
            built = replace(built, participation=changes)
            room["allow_differencing"] = True
        built = fedmcmc.secure_sum(built, **room)
        if "faults" in settings:
            built = fedmcmc.faults(built, late=0.5)
    return built


def identity_of(name):
    """Return a site's private key, the same in every process."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public_key(name):
    return identity_of(name).public_key().public_bytes_raw().hex()


def natural(posterior, settings):
    return KERNELS["natural"](POSITIONS["nested"], Given(posterior))


def expansions(posterior, settings):
    """Return a kernel whose clients keep a state of the same shapes and draw nothing."""
    return KERNELS["fed_ep: expansions"](POSITIONS["nested"], Given(posterior))


@fedmcmc.types.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class Half(type(fedmcmc.full())):
    """Participation of each client with probability 1/2."""

    def prepare(self, rng_key, num_clients):
        cohort = super().prepare(rng_key, num_clients)
        return cohort._replace(active=jax.random.bernoulli(rng_key, shape=(num_clients,)))


def half(posterior, settings):
    return replace(fedmcmc.lsd(posterior, step_size=0.01), participation=Half(may_drop=True))


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


def straight(settings):
    """Return a model whose gradients are sums of rows, exactly."""
    return fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2), lambda theta, rows: rows["x"] @ theta
    )


def plain_kernel(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=2.0**-5, batch_size=settings.get("batch_size"))


def straight_kernel(posterior, settings):
    return fedmcmc.secure_sum(plain_kernel(posterior, settings))


def local_kernel(posterior, settings):
    """Clients take steps of their own, with noise whose correlation the settings say."""
    return fedmcmc.fa_ld(posterior, step_size=0.01, num_local_steps=2, rho=settings["rho"])


def masked_study(row, settings=(), secure=(), **changes):
    """Return the study of a row as a secure sum over all sites, under masks."""
    asked = dict(identities={name: public_key(name) for name in NAMES}, rounds=100)
    settings = {"row": row, "masked": True} | dict(settings)
    return study_of(settings=settings, secure=asked | dict(secure), **changes)


def give_secret(folder, name):
    """Write a site's secret, the same in every test, unless its folder has one."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "secret").exists():
        (folder / "secret").write_bytes(hashlib.sha256(f"secret of {name}".encode()).digest())


def site_of(study, name, folder, **changes):
    """Return a site whose secret depends on its name alone: other folders, the same draws."""
    given = dict(rows=rows_of(name), folder=folder / name) | FEW_ROWS
    give_secret(folder / name, name)
    if study.secure:
        given["identity"] = identity_of(name)
    return deploy.Site(study, name, **(given | changes))


def rows_of(name):
    return jax.tree.map(np.asarray, DATA.client_rows(NAMES.index(name)))


def join_all(local, study, folder, **changes):
    """Connect all sites of a study in threads; return them."""
    sites = {name: site_of(study, name, folder, **changes) for name in study.sites}
    for site in sites.values():
        local.join(site)
    return sites


def everyone(posterior, settings):
    """Return a kernel whose sites all take part, and keep nothing."""
    return fedmcmc.lsd(posterior, step_size=settings["step_size"])


def walled(settings):
    """Return a model whose likelihood is zero beyond a wall."""

    def loglikelihood(position, rows):
        value = POSTERIOR.loglikelihood_fn(position, rows)
        return jnp.where(position["a"] > 0, value, -jnp.inf)

    return POSTERIOR._replace(loglikelihood_fn=loglikelihood)
