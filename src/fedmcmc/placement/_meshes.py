"""Which mesh a run is spread over, and whether it can be."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from jax.sharding import Mesh

from fedmcmc._checks import positive_integer
from fedmcmc._types import FederatedKernel
from fedmcmc.data import AXIS, CHAINS, ClientLoader, FederatedData
from fedmcmc.pytrees import trees

__all__ = ["TOTALS", "Spread", "check_mesh", "chosen_layout", "use_layout"]

TOTALS = ("gather", "psum")


class Spread(NamedTuple):
    """A mesh, and how messages are summed over it."""

    mesh: Mesh
    totals: str


class _Ambient(NamedTuple):
    spread: Spread | None = None
    clients_at_a_time: int | None = None


_NOTHING = _Ambient()
_AMBIENT: ContextVar[_Ambient] = ContextVar("fedmcmc_layout", default=_NOTHING)


@contextmanager
def use_layout(
    mesh: Mesh | None = None,
    *,
    totals: Literal["gather", "psum"] = "gather",
    clients_at_a_time: int | None = None,
) -> Iterator[None]:
    """Within the context, lay out the runs of `fedmcmc.sample` that are not told otherwise.

    So code that calls `sample` and knows of no mesh is spread as well. What cannot be (kernels of
    pooled rows, runs with ``client_store=``) runs on one device.

    Parameters
    ----------
    mesh, totals
        As of `fedmcmc.sample`.
    clients_at_a_time
        As of ``data.chunked(clients_at_a_time)``.

    Examples
    --------
    >>> import fedmcmc
    >>> with fedmcmc.distributed.use_layout(fedmcmc.distributed.mesh(), clients_at_a_time=1):
    ...     pass  # fedmcmc.sample(...)
    """
    if mesh is not None:
        _check_axes(mesh, totals)
    if clients_at_a_time is not None:
        positive_integer(clients_at_a_time, "clients_at_a_time")
    spread = None if mesh is None else Spread(mesh, totals)
    token = _AMBIENT.set(_Ambient(spread, clients_at_a_time))
    try:
        yield
    finally:
        _AMBIENT.reset(token)


def chosen_layout(
    mesh: Any,
    totals: str,
    kernel: FederatedKernel,
    data: FederatedData | ClientLoader,
    *,
    spreads: bool,
) -> tuple[Spread | None, FederatedData | ClientLoader]:
    """Return the mesh of a run, the one given or that of `use_layout`, and the data for it.

    With `spreads` false the latter is not for this run.
    """
    ambient = _AMBIENT.get()
    if ambient.clients_at_a_time is not None and data.at_a_time is None:
        data = data.chunked(ambient.clients_at_a_time)
    if mesh is not None:
        _check_axes(mesh, totals)
        return Spread(mesh, totals), data
    if totals != "gather":
        raise ValueError(
            f"totals= goes with mesh= (or use_layout(mesh, totals=...)), got {totals!r} without."
        )
    if ambient.spread is None or not spreads or kernel.participation.pooled:
        return None, data
    if isinstance(data, FederatedData):
        data = replace(data, mesh=None)
    return ambient.spread, data


def _check_axes(mesh: Any, totals: str) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if totals not in TOTALS:
        raise ValueError(f"totals must be one of {TOTALS}, got {totals!r}.")
    if AXIS not in mesh.shape or not set(mesh.axis_names) <= {AXIS, CHAINS}:
        raise ValueError(
            f"The mesh needs an axis named {AXIS!r} and may have one named {CHAINS!r}, got axes "
            f"{tuple(mesh.axis_names)}."
        )


def check_mesh(
    mesh: Mesh, kernel: FederatedKernel, data: FederatedData | ClientLoader, num_chains: int
) -> None:
    """Raise `ValueError` where a run cannot be spread over `mesh`."""
    if num_chains % mesh.shape.get(CHAINS, 1):
        raise ValueError(
            f"num_chains must be a multiple of the mesh's axis {CHAINS!r}, {mesh.shape[CHAINS]}, "
            f"got {num_chains}."
        )
    if kernel.participation.pooled:
        raise ValueError("Pooled rows are those of one client, which no mesh spreads.")
    if isinstance(data, ClientLoader):
        return
    if data.mesh is not None:
        raise ValueError("Give mesh= data that is not sharded: it lays it out.")
    if not trees.is_empty((data.members, data.slots)):
        raise ValueError("Data of a store cannot be spread over a mesh.")
