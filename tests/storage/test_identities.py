"""A refused checkpoint's message names the number, setting or function that differs."""

import jax
import jax.numpy as jnp
import pytest

import fedmcmc
from fedmcmc.pytrees import schedules
from fedmcmc.storage._identity import describe
from fedmcmc.types import as_functions
from tests.storage.small_run import kernel, run
from tests.support import killed_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the checkpoint of a run, which no refused run may change."""
    path = tmp_path_factory.mktemp("first")
    run(path, 10)
    record = (path / "run.json").read_bytes()
    yield path
    assert (path / "run.json").read_bytes() == record
    run(path, 10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 4}, r"structure of the kernel \(.*batch_size: 2, now 4\)"),
        ({"batch_size": None}, r"structure of the kernel \(.*[Mm]inibatch.*, now "),
        ({"step_size": 2e-3}, r"numbers of the kernel \(.*step_size: 0.001, now 0.002\)"),
        (
            {"step_size": lambda r: 1e-3 / (1 + r)},
            r"numbers of the kernel \(.*step_size: 0.001, now schedule of float32\[64\] 0.001, ",
        ),
        ({"participation": fedmcmc.uniform(2)}, r"structure of the kernel \(.*[Uu]niform"),
    ],
)
def test_a_setting_of_the_kernel_that_differs_is_named(changes, message, folder):
    with pytest.raises(fedmcmc.CheckpointError, match=f"it differs in .*{message}") as caught:
        run(folder, 10, chosen=kernel(**changes))
    assert "model or kind of kernel" not in str(caught.value)


def test_another_model_kernel_data_key_or_start_is_named(folder):
    posterior, data = killed_run.posterior(), killed_run.data()
    model = posterior._replace(logprior_fn=lambda theta: -0.25 * jnp.sum(theta**2))
    bare = fedmcmc.FederatedData.from_clients([data.client_rows(i) for i in range(5)])
    settings = dict(step_size=1e-3, batch_size=2)

    def run_with(key=0, chosen=None, data=data, start=0.0):
        return fedmcmc.sample(
            jax.random.key(key),
            kernel() if chosen is None else chosen,
            data,
            jnp.full(3, start),
            num_rounds=10,
            num_chains=2,
            progress=False,
            checkpoint=fedmcmc.Checkpoint(folder),
        )

    for changes, message in (
        (dict(chosen=fedmcmc.lsd(model, **settings)), "structure of the kernel.*logprior_fn"),
        (dict(chosen=fedmcmc.sgld(posterior, **settings)), "structure of the kernel"),
        (dict(data=bare), "rows of the data"),
        (dict(key=1), "rng_key"),
        (dict(start=1.0), "start"),
    ):
        with pytest.raises(fedmcmc.CheckpointError, match=message):
            run_with(**changes)
    run_with()


def test_functions_of_the_same_name_are_distinguished(tmp_path):
    def kernel_with(scale):
        model = killed_run.posterior()._replace(logprior_fn=lambda t: -scale * jnp.sum(t**2))
        return fedmcmc.lsd(model, step_size=1e-3)

    run(tmp_path, 10, chosen=kernel_with(0.5))
    with pytest.raises(fedmcmc.CheckpointError, match="functions of the same names"):
        run(tmp_path, 10, chosen=kernel_with(0.25))


def quantized(num_levels=4, batch_size=2, cohort_size=3):
    return fedmcmc.qlsd(
        killed_run.posterior(),
        step_size=1e-3,
        compressor=fedmcmc.quantize(num_levels),
        batch_size=batch_size,
        participation=fedmcmc.uniform(cohort_size),
    )


@pytest.mark.slow
def test_a_setting_within_a_compressed_kernel_is_named(tmp_path):
    run(tmp_path, 10, chosen=quantized())
    for changes, message in (
        ({"num_levels": 8}, r"numbers of the kernel \(.*num_levels: 4.0, now 8.0\)"),
        ({"batch_size": 4}, r"structure of the kernel \(.*batch_size: 2, now 4\)"),
        ({"cohort_size": 2}, r"structure of the kernel \(.*cohort_size: 3, now 2\)"),
    ):
        with pytest.raises(fedmcmc.CheckpointError, match=f"it differs in .*{message}"):
            run(tmp_path, 10, chosen=quantized(**changes))


def test_a_part_that_a_kernel_holds_often_is_described_once():
    deep = fedmcmc.compress(quantized(), fedmcmc.quantize(8))
    description = describe(schedules.tabulate(as_functions(deep), 0, 64, 0))
    assert 3 <= len(description["numbers"]) < 10 and len(description["structure"]) < 250
    paths = [path for path in description["structure"] if path.endswith("batch_size")]
    assert len(paths) == 1
