"""What is printed of kernels, blocks, data and results: a line with names and settings, no numbers
in bulk."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pandas as pd
import pytest
from numpyro import distributions as dist

import fedmcmc
from fedmcmc.types import Described, describe
from tests.contracts.model import POSITIONS, Given
from tests.contracts.tables import COMPRESSORS, KERNELS

POSITION = next(iter(POSITIONS.values()))


@pytest.mark.parametrize("name", [name for name in KERNELS if ":" not in name])
def test_kernels_name_their_settings_in_a_line(name):
    kernel = KERNELS[name](POSITION, Given())
    printed = repr(kernel)
    assert printed.startswith(f"{type(kernel).__name__}(")
    assert "participation=" in printed and "\n" not in printed and len(printed) < 700
    for word in ("Array(", "<function", "object at", "Partial("):
        assert word not in printed


@pytest.mark.parametrize("name", [name for name in KERNELS if ":" not in name])
def test_kernels_are_called_by_what_makes_them(name):
    printed = KERNELS[name](POSITION, Given()).name
    composed = {"sequence": "sequence(fa_hmc, lsd_pp)", "augment": "augment(dsgld)"}
    assert printed == composed.get(name, name)


@pytest.mark.parametrize("name", [name for name in KERNELS if ":" in name])
def test_what_a_transform_changed_is_in_brackets(name):
    first, _, rest = name.partition(": ")
    printed = KERNELS[name](POSITION, Given()).name
    # Arguments of the kernels are shorthands of these two transforms.
    if first in ("share_momentum", "natural_parameters"):
        assert printed == rest
    elif first == "langevin":  # of minibatches, which is an algorithm
        assert printed == "lsd"
    elif first not in ("augment", "compress", "faults", "secure_sum"):
        assert printed == first
    elif printed.startswith("q"):  # an algorithm of its own
        assert "quantize" in rest or "memory" in rest
    else:
        assert printed.startswith(f"{first}(") and printed.count("(") == printed.count(")")


def test_settings_are_those_given():
    surrogates = fedmcmc.Gaussian.from_moments(jnp.zeros((3, 2)), variance=jnp.ones((3, 2)))
    model = fedmcmc.Posterior(lambda t: -0.5 * t @ t, lambda t, x: -0.5 * ((x - t) ** 2).sum(-1))
    kernel = fedmcmc.fsgld(model, surrogates, step_size=0.02, num_local_steps=10, batch_size=5)
    assert repr(kernel) == (
        "Relay(estimator=Conducive(estimator=Minibatch(batch_size=5, replace=True), "
        "surrogates=Gaussian(precision_mean=float32[3, 2], precision=float32[3, 2], "
        "structure='diagonal') per client, alpha=1, shares=float32[3] per client), "
        "participation=Categorical(cohort_size=1), "
        "step_size=0.02, temperature=1, metric=Metric(), num_local_steps=10)"
    )


def test_schedules_and_traced_numbers():
    model = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)

    def decay(round_):
        return 0.1 / (1 + round_)

    assert "step_size=decay" in repr(fedmcmc.lsd(model, step_size=decay))
    assert "step_size=a function" in repr(fedmcmc.lsd(model, step_size=lambda r: 0.1))
    reprs = []

    @jax.jit
    def build(step_size):
        reprs.append(repr(fedmcmc.lsd(model, step_size=step_size)))
        return step_size

    build(0.1), build(0.2)
    assert len(reprs) == 1 and "step_size=traced" in reprs[0]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_compressors(name):
    compressor = COMPRESSORS[name](Given())
    assert isinstance(compressor, Described)
    assert "Array(" not in repr(compressor)


def test_described_shows_no_array():
    key = jax.random.key(0)
    printed = describe(
        {"a": np.zeros((2, 3)), "b": (jnp.ones(()), 3, "x", None), "k": key, "f": np.sum}
    )
    assert printed == "{a: float64[2, 3], b: (1, 3, 'x', None), k: a key, f: sum}"


def test_results_and_data():
    loader = fedmcmc.ClientLoader([3, 1], lambda i: np.ones((3 - 2 * i, 2)))
    assert repr(loader) == "ClientLoader(2 clients, 4 rows, 1 to 3 per client)"
    record = fedmcmc.Record(streams={"m": fedmcmc.streaming.moments()}, keep_draws=False)
    assert repr(record) == "Record(streams={m: Accumulator()}, keep_draws=False)"
    assert repr(fedmcmc.Record()) == "Record()"
    study = fedmcmc.deploy.Study(
        name="heights",
        posterior="model.py:posterior",
        sites={"bern": 5, "basel": 3},
        rows=jax.ShapeDtypeStruct((), jnp.float32),
        kernels={"slow": "model.py:slow"},
    )
    assert repr(study) == "Study('heights'; rows per site: bern 5, basel 3; runs slow)"


def test_sweeps():
    model = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
    swept = fedmcmc.sweep(
        jax.random.key(0),
        lambda step_size: fedmcmc.lsd(model, step_size=step_size),
        {"step_size": [0.01, 0.02]},
        data,
        0.0,
        num_rounds=20,
        num_seeds=3,
        mode="sequential",
    )
    assert repr(swept) == ("Sweep(step_size of 2; 3 seeds, 1 chains, 20 draws each; sequential)")


def test_notebooks_show_tables():
    frames = [
        pd.DataFrame({"x": [0.5], "sex": ["<f>"]}),
        pd.DataFrame({"x": [0.5, 1.5], "sex": ["m", "m"]}),
    ]
    printed = fedmcmc.FederatedData.from_clients(frames)._repr_html_()
    assert "FederatedData: 2 clients, 3 rows, 1 to 2 per client" in printed
    assert ">x</th><td style='text-align:left'>float32</td>" in printed
    assert ">int32 (alphabetical: 0 &#x27;&lt;f&gt;&#x27;, 1 &#x27;m&#x27;)</td>" in printed

    def model(x):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        effect = numpyro.sample("effect", dist.Normal(mu, 1), infer={"local": True})
        with numpyro.plate("rows", len(x)):
            numpyro.sample("x", dist.Normal(effect, 1), obs=x)

    posterior = fedmcmc.from_numpyro(model, example={"x": np.zeros(3)}, centered=1.0)
    printed = posterior._repr_html_()
    for name, text in (
        ("shared by all clients", "mu"),
        ("one per group", "effect"),
        ("functions", "logprior_fn, constrain_fn, init_fn, local"),
    ):
        assert f">{name}</th><td style='text-align:left'>{text}</td>" in printed
    own = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    assert own._repr_html_().count("<tr>") == 1
    printed = fedmcmc.lsd(own, step_size=0.5, batch_size=2)._repr_html_()
    assert printed.startswith("<strong>Langevin</strong>")
    assert ">step_size</th><td style='text-align:left'>0.5</td>" in printed
