"""Every public constructor has a row in the table that the tests of contracts run through."""

import pytest

from tests.contracts.kernels import PLAIN
from tests.contracts.tables import COMPRESSED, COMPRESSORS, TABLES, constructors, names

pytestmark = pytest.mark.check


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_public_constructor_is_in_the_table(kind):
    module, rows = TABLES[kind]
    assert constructors(kind, module) == names(rows)


def test_every_kernel_is_compressed_and_every_compressor_used():
    kernels, compressors = zip(*COMPRESSED, strict=True)
    assert set(kernels) == set(PLAIN)
    assert set(compressors) == set(COMPRESSORS)
