"""Shared by tests of what runs leave in a directory."""

import functools

import pytest

from tests.support import killed_run


@pytest.fixture(autouse=True, scope="package")
def shared_model():
    """Build the model and the data once, so that runs share their compiled programs.

    ``killed_run.posterior.__wrapped__`` still builds new functions, as another process does.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("posterior", "data"):
            patch.setattr(killed_run, name, functools.cache(getattr(killed_run, name)))
        yield
