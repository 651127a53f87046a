"""Columns that index an axis of a model beyond its length are refused with their name."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import fedmcmc
from fedmcmc import FederatedData, deploy, from_numpyro
from fedmcmc.interop._numpyro_indices import find_bad_index

MODULE = "tests.interop.test_numpyro_indices"
SHAPE = jax.ShapeDtypeStruct((3,), jnp.float32)
GOOD = {"k": np.array([0, 1, 2, 1])}
BAD = {"k": np.array([0, 3, -1, 1])}
TABLE = np.array([2, 0, 1], np.int32)


def is_inside(k):
    return (k >= 0) & (k < 3)


CHECKED = {
    "brackets": lambda v, k: v[k],
    "take": jnp.take,
    "after a cast": lambda v, k: v[k.astype(float).astype(int)],
    "in a vmap": lambda v, k: jax.vmap(lambda i: v[i])(k),
    "in a scan": lambda v, k: jax.lax.scan(lambda carry, i: (carry, v[i]), 0.0, k)[1],
    "in a branch": lambda v, k: jax.lax.map(
        lambda i: jax.lax.cond(i == 1, lambda: 0.0, lambda: v[i]), k
    ),
    "along an axis": lambda v, k: jnp.take_along_axis(v[None, :] + k[:, None], k[:, None], 1)[:, 0],
    "in a table": lambda v, k: v[jnp.asarray(TABLE)[k]],
    "in a matrix": lambda v, k: jnp.outer(v, v)[1, k],
    "after a loop": lambda v, k: jax.lax.map(lambda i: v[i % 3], k) + v[k],
    "within functions": lambda v, k: jax.jit(jax.checkpoint(lambda k: v[k]))(k),
}
ACCEPTED = {
    "fill": lambda v, k: v.at[k].get(mode="fill", fill_value=0.0),
    "clip": lambda v, k: jnp.take(v, k, mode="clip"),
    "wrap": lambda v, k: jnp.take(v, k, mode="wrap"),
    "where": lambda v, k: jnp.where(is_inside(k), v[k], 0.0),
    "weight": lambda v, k: is_inside(k) * v[k],
    "one hot": lambda v, k: jax.nn.one_hot(k, 3) @ v,
    "constant": lambda v, k: v[-1] * k,
    "counter": lambda v, k: jax.lax.fori_loop(0, 3, lambda i, total: total + v[i - 1] * k, 0.0 * k),
    "order": lambda v, k: v[0] * k[jnp.argsort(k)],
}


def find_bad(lookup, rows):
    return find_bad_index(
        lambda v, rows: lookup(v, rows["k"]), SHAPE, jax.tree.map(jnp.asarray, rows)
    )


@pytest.mark.parametrize("how", CHECKED)
def test_indices_beyond_an_axis_are_reported(how):
    bad = find_bad(CHECKED[how], BAD)
    assert (bad.row, bad.columns, bad.length, bad.num_bad) == (1, {"k": 3}, 3, 2)
    assert bad.index == (None if how in ("in a scan", "in a branch") else 3)
    assert find_bad(CHECKED[how], GOOD) is None


def test_an_index_that_a_search_returns_is_reported():
    cuts = jnp.array([0.5, 1.5, 2.5])

    def interval(v, k):
        return v[jnp.searchsorted(cuts, k.astype(float))]

    bad = find_bad(interval, BAD)
    assert (bad.row, bad.columns, bad.index, bad.length) == (1, {"k": 3}, 3, 3)
    assert bad.num_bad == 1  # a search returns 0 for -1
    assert find_bad(interval, GOOD) is None


@pytest.mark.parametrize("how", ACCEPTED)
def test_indices_that_the_model_handles_are_accepted(how):
    assert find_bad(ACCEPTED[how], BAD) is None


def arms(k, y=None):
    v = numpyro.sample("v", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("rows", len(k)):
        numpyro.sample("y", dist.Normal(v[k - 1], 1.0), obs=y)


def effects(k, y=None):
    v = numpyro.sample("v", dist.Normal(0, 2).expand([3]).to_event(1))
    u = numpyro.sample("u", dist.Normal(0, 1), infer={"local": True})
    with numpyro.plate("rows", len(k)):
        numpyro.sample("y", dist.Normal(v[k - 1] + u, 1.0), obs=y)


@pytest.mark.parametrize("model", [arms, effects])
def test_the_error_names_client_row_column_and_range(model):
    y = np.array([0.5, 1.0, -0.3])
    good, bad = np.array([1, 2, 3]), np.array([3, 1, 0])
    clients = {"Bern": {"k": good, "y": y}, "Chur": {"k": bad, "y": y}}
    expected = (
        r"In row 2 of client 'Chur', k = 0 gives index -1 on an axis of length 3 .* are 0 to 2;"
    )
    with pytest.raises(ValueError, match=expected):
        from_numpyro(model, example=FederatedData.from_clients(clients))
    if model is arms:
        with pytest.raises(ValueError, match="In row 2 of example, k = 0"):
            from_numpyro(model, example=clients["Chur"])
    from_numpyro(model, example=clients["Chur"], check_rows=False)


def posterior(settings):
    rows = {"k": np.array([1, 2], np.int32), "y": np.ones(2, np.float32)}
    return from_numpyro(arms, example=rows)


def test_a_site_checks_its_rows_and_the_server_sees_no_value(tmp_path, caplog):
    study = deploy.Study(
        name="arms",
        posterior=f"{MODULE}:posterior",
        sites={"bern": 2},
        rows={"k": jax.ShapeDtypeStruct((), jnp.int32), "y": jax.ShapeDtypeStruct((), jnp.float32)},
        kernels={},
        settings={},
        asks=deploy.FIT,
    )
    rows = {"k": np.array([1, 4], np.int32), "y": np.ones(2, np.float32)}
    local = deploy.LocalTransport()
    local.join(deploy.Site(study, "bern", rows, folder=tmp_path, min_rows=1))
    sites = deploy.Sites(study, local)
    with (
        caplog.at_level(logging.ERROR, "fedmcmc.deploy"),
        pytest.raises(deploy.SiteError, match="see the log of bern") as error,
    ):
        fedmcmc.fitting.find_modes(jax.random.key(0), study.model, sites)
    sites.close()
    assert "k = 4" not in str(error.value)
    assert "In row 1 of bern, k = 4 gives index 3 on an axis of length 3" in caplog.text
