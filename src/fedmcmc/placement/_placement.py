"""`Placement`: the devices and batches on which the clients and chains of a run are computed."""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from fedmcmc._checks import expect, positive_integer
from fedmcmc.data import ClientLoader, FederatedData
from fedmcmc.placement._choice import spreads_chains_only
from fedmcmc.placement._layouts import by_size, mesh_of
from fedmcmc.placement._stores import HostStore
from fedmcmc.rounds import CHAIN_AXIS, CLIENT_AXIS, Layout
from fedmcmc.types import FederatedKernel

TOTALS = ("gather", "psum")


@dataclass(frozen=True)
class Placement:
    """Devices for the clients and chains of a run, and the number of clients computed together.

    Draws do not depend on the placement, up to rounding. With these defaults one device computes
    all clients of a round together. Without a placement, `fedmcmc.sample` uses all devices of a CPU
    on which the run is faster. See docs/guides/runs.md.

    Parameters
    ----------
    mesh
        Devices of the run. Clients are spread along the axis ``clients`` (balanced by rows), and
        chains along an optional axis ``chains``; see `fedmcmc.distributed`.
    totals
        Summation of messages over the mesh. With ``"gather"`` every device sums all messages in
        client order, as one device does. ``"psum"`` adds one partial sum per device.
    clients_at_a_time
        Number of clients computed together, by default all. One at a time can be faster for clients
        with local steps over all their rows, and makes numbers bit-identical on every mesh.
    num_buckets
        Maximum number of groups of clients of similar size, which are computed one after the other.
        If all clients take part, each client is padded only to the largest client of its group.
    client_store
        `fedmcmc.HostStore` for the clients' states, if they do not fit on the device.

    Raises
    ------
    ValueError, TypeError
        If an argument is invalid, or two arguments exclude each other.

    Examples
    --------
    >>> import fedmcmc, numpy as np
    >>> data = fedmcmc.FederatedData.from_clients([np.ones(n) for n in (900, 10, 12, 11)])
    >>> groups = fedmcmc.Placement(num_buckets=2).layout(data).buckets.groups()
    >>> [(ids.tolist(), size) for ids, size in groups]
    [([1, 3, 2], 12), ([0], 900)]
    """

    mesh: Mesh | None = None
    totals: Literal["gather", "psum"] = "gather"
    clients_at_a_time: int | None = None
    num_buckets: int | None = None
    client_store: HostStore | None = None

    def __post_init__(self) -> None:
        if self.totals not in TOTALS:
            raise ValueError(f"totals must be one of {TOTALS}, got {self.totals!r}.")
        if self.mesh is None and self.totals != "gather":
            raise ValueError(f"totals={self.totals!r} needs mesh=.")
        if self.mesh is not None:
            if not isinstance(self.mesh, Mesh):
                kind = type(self.mesh).__name__
                raise TypeError(f"mesh must be a jax.sharding.Mesh, got {kind}.")
            if CLIENT_AXIS not in self.mesh.shape or not set(self.mesh.axis_names) <= {
                CLIENT_AXIS,
                CHAIN_AXIS,
            }:
                raise ValueError(
                    f"mesh must have an axis {CLIENT_AXIS!r} and may have an axis {CHAIN_AXIS!r}, "
                    f"got axes {tuple(self.mesh.axis_names)}."
                )
        for name in ("clients_at_a_time", "num_buckets"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, positive_integer(value, name))
        if self.client_store is not None:
            expect(self.client_store, HostStore, "client_store")
            if self.mesh is not None:
                raise ValueError("Give either mesh= or client_store=, not both.")

    @classmethod
    def over_devices(
        cls,
        num_chains: int = 1,
        *,
        totals: Literal["gather", "psum"] = "gather",
        clients_at_a_time: int | None = None,
        num_buckets: int | None = None,
    ) -> "Placement":
        """Return a placement over all devices of this process.

        A CPU is one device by default; `fedmcmc.use_all_cores` makes one per core. With one device
        there is no mesh.

        Parameters
        ----------
        num_chains
            Number of chains of the run. Chains are independent, so they are spread first: over the
            largest number of devices that divides both. The clients of a chain are spread over the
            remaining devices.
        totals, clients_at_a_time, num_buckets
            See `Placement`.

        Raises
        ------
        ValueError
            If `num_chains` is not positive.

        Examples
        --------
        >>> import fedmcmc
        >>> print(fedmcmc.Placement.over_devices(num_chains=4, clients_at_a_time=1))
        one device, clients one by one
        """
        num_chains, devices = positive_integer(num_chains, "num_chains"), jax.local_devices()
        if len(devices) == 1:
            return cls(clients_at_a_time=clients_at_a_time, num_buckets=num_buckets)
        mesh = mesh_of(devices, math.gcd(num_chains, len(devices)))
        return cls(mesh, totals, clients_at_a_time, num_buckets)

    def layout(self, data: FederatedData | ClientLoader) -> Layout:
        """Return how a program computes the clients of `data` together.

        Raises
        ------
        ValueError
            If `num_buckets` is set and the sizes of the clients are traced.
        """
        if self.num_buckets is None:
            return Layout(self.clients_at_a_time)
        sizes = data.size if isinstance(data, FederatedData) else data.sizes
        if isinstance(sizes, jax.core.Tracer):
            raise ValueError(
                "num_buckets= needs the sizes of the clients, which are unknown if the data are an "
                "argument of a compiled function: use the data of the enclosing scope."
            )
        buckets = by_size(np.asarray(sizes), self.num_buckets)
        return Layout(self.clients_at_a_time, buckets=buckets)

    def on_one_device(self, data: FederatedData) -> Layout:
        """Return how a program on one device computes the clients of `data`.

        Raises
        ------
        ValueError
            If there is a mesh or a store, or from `layout`.
        """
        if self.mesh is not None or self.client_store is not None:
            raise ValueError(
                "mesh= and client_store= are for fedmcmc.sample only: give a placement with "
                "clients_at_a_time= and num_buckets= alone."
            )
        return self.layout(data)

    def __str__(self) -> str:
        """Describe the placement in words."""
        devices = "one device"
        if self.mesh is not None and self.mesh.size > 1:
            axes = [f"{name} over {num}" for name, num in self.mesh.shape.items() if num > 1]
            devices = f"{self.mesh.size} devices ({', '.join(axes)})"
        at_a_time = {None: "clients together", 1: "clients one by one"}.get(
            self.clients_at_a_time, f"{self.clients_at_a_time} clients at a time"
        )
        words = [devices, at_a_time]
        if self.num_buckets not in (None, 1):
            words.append(f"at most {self.num_buckets} groups by size")
        if self.totals != "gather":
            words.append(f"totals by {self.totals}")
        if self.client_store is not None:
            words.append("states in a store")
        return ", ".join(words)

    def __repr__(self) -> str:
        """Return the call with the arguments that differ from their defaults."""
        arguments = [
            f"{name}={getattr(self, name)!r}"
            for name, field in Placement.__dataclass_fields__.items()
            if getattr(self, name) != field.default
        ]
        return f"Placement({', '.join(arguments)})"


def check_fits(placement: Placement, kernel: FederatedKernel, num_chains: int) -> None:
    """Raise `ValueError` if a run of `kernel` does not support `placement`."""
    mesh, participation = placement.mesh, kernel.participation
    if mesh is not None and num_chains % mesh.shape.get(CHAIN_AXIS, 1):
        raise ValueError(
            f"num_chains must be a multiple of the mesh's axis {CHAIN_AXIS!r}, "
            f"{mesh.shape[CHAIN_AXIS]}, got {num_chains}."
        )
    if mesh is not None and participation.pooled and not spreads_chains_only(mesh):
        raise ValueError(
            "A kernel on pooled rows (sgld, psgld) has a single client, so only its chains can run "
            "over a mesh of this process: leave out mesh=."
        )
    if placement.client_store is not None and participation.cohort_size is None:
        raise ValueError(
            "With client_store= only a cohort's states are on the device: use a participation that "
            "samples a cohort, uniform(cohort_size) or categorical(...)."
        )
