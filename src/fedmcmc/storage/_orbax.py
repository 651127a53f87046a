"""A state in a folder of Orbax's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree
from fedmcmc.storage._files import plain_leaves, tree_of_plain

__all__ = ["read_orbax", "written_orbax"]


def _checkpointer() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            'format="orbax" needs orbax-checkpoint: pip install "fedmcmc[orbax]".'
        ) from error
    return ocp.StandardCheckpointer()


def written_orbax(tree: ArrayTree, copy: bool) -> Callable[[Path], None]:
    """Return what writes the leaves of `tree` as a new folder, which is there whole or not."""
    checkpointer = _checkpointer()
    leaves = {
        name: np.array(leaf) if copy and isinstance(leaf, np.ndarray) else leaf
        for name, leaf in plain_leaves(tree).items()
    }

    def write(path: Path) -> None:
        checkpointer.save(path.absolute(), leaves, force=True)
        checkpointer.wait_until_finished()

    return write


def read_orbax(path: Path, like: ArrayTree) -> ArrayTree:
    """Return the tree in a folder, in the structure and of the types of `like`."""
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in plain_leaves(like).items()
    }
    return tree_of_plain(_checkpointer().restore(path.absolute(), shapes), like)
