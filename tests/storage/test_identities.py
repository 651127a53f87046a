"""What a refusal says: which number, setting or function differs."""

import jax.numpy as jnp
import pytest

import fedmcmc
from fedmcmc.pytrees import schedules
from fedmcmc.storage._identity import describe
from fedmcmc.types import as_functions
from tests.storage.small_run import kernel, run
from tests.support import killed_run


def quantized(**settings):
    given = dict(num_levels=4, batch_size=2, cohort_size=3) | settings
    return fedmcmc.qlsd(
        killed_run.posterior(),
        step_size=1e-3,
        compressor=fedmcmc.quantize(given["num_levels"]),
        batch_size=given["batch_size"],
        participation=fedmcmc.uniform(given["cohort_size"]),
    )


@pytest.mark.parametrize(
    ("changed", "words"),
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
def test_a_setting_that_differs_is_named(changed, words, tmp_path):
    run(tmp_path, 10)
    with pytest.raises(fedmcmc.CheckpointError, match=f"it differs in .*{words}") as caught:
        run(tmp_path, 10, chosen=kernel(**changed))
    assert "model or kind of kernel" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_levels": 8}, r"numbers of the kernel \(.*num_levels: 4.0, now 8.0\)"),
        ({"batch_size": 4}, r"structure of the kernel \(.*batch_size: 2, now 4\)"),
        ({"cohort_size": 2}, r"structure of the kernel \(.*cohort_size: 3, now 2\)"),
    ],
)
def test_a_setting_within_a_compressed_kernel_is_named(changed, words, tmp_path):
    run(tmp_path, 10, chosen=quantized())
    with pytest.raises(fedmcmc.CheckpointError, match=f"it differs in .*{words}"):
        run(tmp_path, 10, chosen=quantized(**changed))


def test_functions_of_one_name_are_told_apart(tmp_path):
    def model(scale):
        return killed_run.posterior()._replace(logprior_fn=lambda t: -scale * jnp.sum(t**2))

    run(tmp_path, 10, chosen=fedmcmc.lsd(model(0.5), step_size=1e-3))
    with pytest.raises(fedmcmc.CheckpointError, match="functions of the same names"):
        run(tmp_path, 10, chosen=fedmcmc.lsd(model(0.25), step_size=1e-3))


def test_a_part_that_a_kernel_holds_often_is_described_once():
    deep = fedmcmc.compress(quantized(), fedmcmc.quantize(8))
    words = describe(schedules.tabulate(as_functions(deep), 0, 64, 0))
    assert 3 <= len(words["numbers"]) < 10 and len(words["structure"]) < 250
    batch_sizes = [path for path in words["structure"] if path.endswith("batch_size")]
    assert len(batch_sizes) == 1
