"""Columns in place of clients, ordinal outcomes without an order, keys, and inputs of `fit`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import polars
import pytest

import fedmcmc
from fedmcmc import FederatedData
from fedmcmc.interop.numpyro import from_numpyro
from fedmcmc.random import as_key

X = np.arange(6.0)
KEY = jax.random.key(0)


def line(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def one_column(y):
    mean = numpyro.sample("mean", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def ordinal(pain, y=None):
    simplex = dist.transforms.SimplexToOrderedTransform(0.0)
    cut = numpyro.sample("cut", dist.TransformedDistribution(dist.Dirichlet(jnp.ones(3)), simplex))
    with numpyro.plate("rows", len(pain)):
        numpyro.sample("pain", dist.OrderedLogistic(0.0, cut), obs=pain)
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)


def test_a_dictionary_of_columns_in_place_of_clients_raises():
    data = FederatedData.from_clients({"x": X, "y": X + 0.1})
    assert "2 clients ('x', 'y')" in repr(data)
    with pytest.raises(TypeError, match=r"clients of the data are 'x', 'y', which are arguments"):
        from_numpyro(line, example=data)
    with pytest.raises(TypeError, match="clients of the data are 'x', 'y', 'more'"):
        from_numpyro(line, example=FederatedData.from_clients({"x": X, "y": X, "more": X}))
    data = FederatedData.from_clients([{"x": X, "y": X}])
    posterior = from_numpyro(line, example=data, check_rows=False)
    assert float(posterior.logprior_fn({"slope": jnp.zeros(())})) == pytest.approx(-0.918939, 1e-5)
    # One array per client is allowed.
    for names in ("ab", "yz"):
        data = FederatedData.from_clients(dict.fromkeys(names, X))
        from_numpyro(one_column, example=data, check_rows=False)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": X, "y": X}, r"got dict\. .*from_clients\(\[columns\]\) with the columns"),
        (pd.DataFrame({"x": X, "y": X}), r"got DataFrame\. .*from_dataframe\(table, client=...\)"),
        (polars.DataFrame({"x": X, "y": X}), r"got DataFrame\. .*from_dataframe\(table"),
        ([pd.DataFrame({"x": X, "y": X})], r"got list\. .*from_clients\(clients\) with a table"),
        (X, r"got ndarray\. .*from_arrays\(rows, client_ids\)"),
    ],
)
def test_fit_names_the_constructor_of_federated_data(data, message):
    with pytest.raises(TypeError, match=message):
        fedmcmc.fit(line, data, rng_key=KEY, progress=False)


def test_tables_and_text_are_no_example():
    with pytest.raises(TypeError, match=r"must be a FederatedData or arrays.*from_dataframe"):
        from_numpyro(line, example=pd.DataFrame({"x": X, "y": X}))
    with pytest.raises(ValueError, match=r"example must hold numbers, got dtype <U1 in \['x'\]"):
        from_numpyro(line, example={"x": np.array(["a", "b"]), "y": np.ones(2)})


def test_integers_of_an_example_do_not_wrap():
    def square(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(slope + 0 * x, 1.0), obs=y * y)

    rows = {"x": np.zeros(2, np.int8), "y": np.full(2, 100, np.int8)}
    posterior = from_numpyro(square, example=rows, check_rows=False)
    zero = {"slope": jnp.zeros(())}
    np.testing.assert_allclose(
        posterior.loglikelihood_fn(zero, FederatedData.from_clients([rows]).rows), -5e7, rtol=1e-6
    )


@pytest.mark.parametrize("key", [jax.random.split(KEY), jax.random.split(jax.random.PRNGKey(0))])
def test_an_array_of_keys_raises(key):
    with pytest.raises(TypeError, match=r"single key, got an array of keys with shape \(2,\)"):
        as_key(key)
    data = FederatedData.from_clients([{"y": np.ones(3)}])
    with pytest.raises(TypeError, match=r"Pass one of them, such as keys\[0\]"):
        fedmcmc.fit(one_column, data, rng_key=key, progress=False)


@pytest.mark.parametrize("key", [jnp.zeros(2), jnp.array([0, 1]), jnp.uint32(3), 0])
def test_numbers_are_no_key(key):
    with pytest.raises(TypeError, match="rng_key must be a JAX key"):
        as_key(key)
    assert as_key(jax.random.PRNGKey(0)) == jax.random.key(0)


PAIN = ["low", "medium", "high", "low"]


def test_an_ordinal_outcome_in_alphabetical_order_warns():
    table = pd.DataFrame({"pain": PAIN, "y": np.ones(4)})
    message = (
        "Site 'pain' has an ordinal distribution.*'pain'.*'high', 'low', 'medium'.*ordered=True"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        from_numpyro(ordinal, example=FederatedData.from_clients([table]))
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "pain",
    [
        pd.Categorical(PAIN, ["low", "medium", "high"], ordered=True),
        pd.Categorical(PAIN, ["low", "medium", "high"]),
        np.array([0, 1, 2, 0]),
        pd.Categorical([1, 2, 10, 1]),
    ],
    ids=["ordered", "declared", "numbers", "categories of numbers"],
)
def test_ordinal_outcomes_with_an_order_do_not_warn(pain):
    data = FederatedData.from_clients([pd.DataFrame({"pain": pain, "y": np.ones(4)})])
    assert data.rows["pain"].tolist() == [0, 1, 2, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        from_numpyro(ordinal, example=data)
