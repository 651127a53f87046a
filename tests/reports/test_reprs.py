"""Reprs of kernels, data and results: a line with names and settings, without arrays."""

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
def test_a_kernel_prints_its_settings_in_a_line_and_has_the_name_of_its_function(name):
    kernel = KERNELS[name](POSITION, Given())
    composed = {"sequence": "sequence(fa_hmc, lsd_pp)", "augment": "augment(dsgld)"}
    assert kernel.name == composed.get(name, name)
    printed = repr(kernel)
    assert printed.startswith(f"{type(kernel).__name__}(")
    assert "participation=" in printed and "\n" not in printed and len(printed) < 700
    for word in ("Array(", "<function", "object at", "Partial("):
        assert word not in printed


@pytest.mark.parametrize("name", [name for name in KERNELS if ":" in name])
def test_the_name_of_a_transformed_kernel_has_brackets(name):
    prefix, _, suffix = name.partition(": ")
    printed = KERNELS[name](POSITION, Given()).name
    # Arguments of the kernels are shorthands of these two transforms.
    if prefix in ("share_momentum", "natural_parameters"):
        assert printed == suffix
    elif prefix == "langevin":
        assert printed == "lsd"
    elif prefix not in ("augment", "compress", "faults", "secure_sum"):
        assert printed == prefix
    elif printed.startswith("q"):  # compression has its own algorithm
        assert "quantize" in suffix or "memory" in suffix
    else:
        assert printed.startswith(f"{prefix}(") and printed.count("(") == printed.count(")")


def test_a_repr_shows_the_settings():
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


def test_reprs_show_schedules_and_traced_numbers_in_words():
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
def test_compressors_print_no_array(name):
    compressor = COMPRESSORS[name](Given())
    assert isinstance(compressor, Described)
    assert "Array(" not in repr(compressor)


def test_describe_shows_no_array():
    key = jax.random.key(0)
    printed = describe(
        {"a": np.zeros((2, 3)), "b": (jnp.ones(()), 3, "x", None), "k": key, "f": np.sum}
    )
    assert printed == "{a: float64[2, 3], b: (1, 3, 'x', None), k: a key, f: sum}"


def test_results_and_data_have_a_repr_of_a_line():
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


def test_a_sweep_prints_its_grid():
    model = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    data = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
    swept = fedmcmc.sweep(
        jax.random.key(0),
        lambda step_size: fedmcmc.lsd(model, step_size=step_size),
        {"step_size": [0.01, 0.02]},
        data,
        0.0,
        num_rounds=5,
        num_seeds=3,
        mode="sequential",
    )
    assert repr(swept) == ("Sweep(step_size of 2; 3 seeds, 1 chains, 5 draws each; sequential)")


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

    posterior = fedmcmc.from_numpyro(
        model, example={"x": np.zeros(3)}, centered=1.0, check_rows=False
    )
    printed = posterior._repr_html_()
    for name, text in (
        ("shared by all clients", "mu"),
        ("one per group", "effect"),
        ("functions", "logprior_fn, constrain_fn, init_fn, local"),
    ):
        assert f">{name}</th><td style='text-align:left'>{text}</td>" in printed
    posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    assert posterior._repr_html_().count("<tr>") == 1
    printed = fedmcmc.lsd(posterior, step_size=0.5, batch_size=2)._repr_html_()
    assert printed.startswith("<strong>Langevin</strong>")
    assert ">step_size</th><td style='text-align:left'>0.5</td>" in printed
