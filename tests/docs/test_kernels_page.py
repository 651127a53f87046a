"""The page of kernels lists all of them, and its table of transforms has the right exceptions."""

import re
from pathlib import Path

import pytest

import fedmcmc
from tests.contracts.kernels import PLAIN
from tests.contracts.model import POSITIONS, Given

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "kernels.md").read_text()
ADJUSTED = {"hmc", "mala", "gaussian_mh", "multiple_try"}
TRANSFORMS = {
    "compress": (
        lambda kernel: fedmcmc.compress(kernel, fedmcmc.quantize(4)),
        ADJUSTED | {"fed_gibbs"},
    ),
    "compress: top_k": (
        lambda kernel: fedmcmc.compress(kernel, fedmcmc.top_k(0.5, error_feedback=False)),
        {"gaussian_mh", "multiple_try", "fed_gibbs"},
    ),
    "faults": (lambda kernel: fedmcmc.faults(kernel, drop=0.1), set()),
    "faults: late": (
        lambda kernel: fedmcmc.faults(kernel, late=0.1),
        ADJUSTED | {"fed_gibbs", "fsgld: refreshed"},
    ),
    "sequence": (lambda kernel: fedmcmc.sequence(kernel, kernel), ADJUSTED),
}
NEVER_SECURE = {"sgld", "psgld", "dsgld", "fsgld"}
"""Pooled rows and relays, whose sums would hide nothing."""


def refusals(transform, names=PLAIN):
    """Return the kernels that a transform refuses."""
    for name in names:
        try:
            transform(PLAIN[name](POSITIONS["vector"], Given()))
        except ValueError:
            yield name


def test_all_constructors_are_on_the_page():
    missing = {name.partition(":")[0] for name in PLAIN} - set(re.findall(r"`(\w+)[`(]", TEXT))
    assert not missing


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_page_names_what_a_transform_refuses(name):
    transform, expected = TRANSFORMS[name]
    refused = set(refusals(transform))
    refused -= {"langevin: noise of clients"}  # the page has a remark about this variant
    variants = {kernel for kernel in refused if kernel not in expected}
    assert {kernel.partition(":")[0] for kernel in variants} <= expected
    assert expected <= refused
    row = next(line for line in TEXT.split("\n") if line.startswith(f"| `{name.split(':')[0]}`"))
    assert all(f"`{kernel.partition(':')[0]}`" in row for kernel in expected)


def test_secure_sums_refuse_relays_and_pooled_rows():
    assert set(refusals(fedmcmc.secure_sum, NEVER_SECURE)) == NEVER_SECURE
