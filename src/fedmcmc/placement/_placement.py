"""The user's object: where the clients and chains of a run lie, and how they are computed."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from fedmcmc._checks import expect, positive_integer
from fedmcmc._types import FederatedKernel
from fedmcmc.data import ClientLoader, FederatedData
from fedmcmc.placement._layouts import by_size
from fedmcmc.placement._stores import HostStore
from fedmcmc.rounds import AXIS, CHAINS, Arrangement

TOTALS = ("gather", "psum")


@dataclass(frozen=True)
class Placement:
    """Where the clients and chains of a run lie, and how many clients are computed together.

    Draws do not depend on it, up to rounding. By default all is on one device, and the clients of
    a round are computed together.

    Parameters
    ----------
    mesh
        Devices to run on: each holds the rows and the states of its own clients along the axis
        ``clients`` (balanced by rows), and its own chains along an axis ``chains``, if there is
        one. They may be those of several processes, all of which make the same call: see
        `fedmcmc.distributed`.
    totals
        How messages are summed over the mesh. ``"gather"``: every device gets all messages and sums
        them in the order of the clients, as one device does. ``"psum"``: one partial sum per
        device, which is less traffic and another floating-point rounding.
    clients_at_a_time
        How many clients are computed together. All together is the default and mostly the fastest,
        until memory runs out. Clients that move positions of their own over all their rows can be
        faster one at a time, as their rows then stay in the cache; on CPUs `fedmcmc.sample` chooses
        so by itself for 32 clients or more with large positions, and over several devices for large
        rows. With one, a client's numbers are the same to the last bit whatever the mesh.
    num_buckets
        Clients are grouped by size into so many groups at most, which are computed one after the
        other. Where all clients take part in a round and what they compute grows with their size
        (full gradients, minibatches that are a fraction of the rows), each is then padded to the
        largest of its group instead of the largest of all. A client's draws are the same; sums over
        its rows differ by rounding. Each group adds to the compile time.
    client_store
        Where clients' states lie, if not on the device: a `fedmcmc.HostStore`.

    Raises
    ------
    ValueError, TypeError
        If an argument is off, or two do not go together.

    Examples
    --------
    >>> import numpy as np
    >>> import fedmcmc
    >>> fedmcmc.Placement(clients_at_a_time=1)
    Placement(clients_at_a_time=1)
    >>> data = fedmcmc.FederatedData.from_clients([np.ones(n) for n in (900, 10, 12, 11)])
    >>> groups = fedmcmc.Placement(num_buckets=2).arrangement(data).buckets.groups()
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
        if self.mesh is not None:
            _check_axes(self.mesh)
        elif self.totals != "gather":
            raise ValueError(f"totals= goes with mesh=, got {self.totals!r} without.")
        for name in ("clients_at_a_time", "num_buckets"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, positive_integer(given, name))
        if self.client_store is not None:
            expect(self.client_store, HostStore, "client_store")
            if self.mesh is not None:
                raise ValueError("Give mesh= or client_store=, and not both.")

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

        A CPU is one device unless JAX is told otherwise before it starts:
        ``jax.config.update("jax_num_cpu_devices", 2)`` makes two, so that a run uses two cores. Of
        one device there is no mesh.

        Parameters
        ----------
        num_chains
            Chains of the run. They are spread first, as they need nothing of one another: over as
            many devices as divide both numbers. Each chain's clients are spread over the others.
        totals, clients_at_a_time, num_buckets
            As of `Placement`.

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
        chains = math.gcd(num_chains, len(devices))
        if chains == 1:
            mesh = Mesh(np.asarray(devices), (AXIS,))
        else:
            mesh = Mesh(np.asarray(devices).reshape(chains, -1), (CHAINS, AXIS))
        return cls(mesh, totals, clients_at_a_time, num_buckets)

    def arrangement(self, data: FederatedData | ClientLoader) -> Arrangement:
        """Return how a program computes the clients of `data` together.

        Raises
        ------
        ValueError
            If clients are to be grouped whose sizes a compiled function does not know.
        """
        if self.num_buckets is None:
            return Arrangement(self.clients_at_a_time)
        sizes = data.size if isinstance(data, FederatedData) else data.sizes
        if isinstance(sizes, jax.core.Tracer):
            raise ValueError(
                "num_buckets= groups clients by their sizes: the data must be no argument of a "
                "compiled function, which does not know them."
            )
        return Arrangement(self.clients_at_a_time, by_size(np.asarray(sizes), self.num_buckets))

    def on_one_device(self, data: FederatedData) -> Arrangement:
        """Return how a program on one device computes the clients of `data`.

        Raises
        ------
        ValueError
            If a mesh or a store is given, or as `arrangement`.
        """
        if self.mesh is not None or self.client_store is not None:
            raise ValueError(
                "A mesh and a client_store are for fedmcmc.sample: here a placement has "
                "clients_at_a_time and num_buckets alone."
            )
        return self.arrangement(data)

    def __str__(self) -> str:
        """Say in words where a run is."""
        where = "one device"
        if self.mesh is not None and self.mesh.size > 1:
            spread = [f"{name} over {num}" for name, num in self.mesh.shape.items() if num > 1]
            where = f"{self.mesh.size} devices ({', '.join(spread)})"
        at_a_time = {None: "clients together", 1: "clients one by one"}.get(
            self.clients_at_a_time, f"{self.clients_at_a_time} clients at a time"
        )
        words = [where, at_a_time]
        if self.num_buckets not in (None, 1):
            words.append(f"at most {self.num_buckets} groups by size")
        if self.totals != "gather":
            words.append(f"totals by {self.totals}")
        if self.client_store is not None:
            words.append("states in a store")
        return ", ".join(words)

    def __repr__(self) -> str:
        """Name what differs from the default."""
        default = Placement.__dataclass_fields__
        given = [
            f"{name}={getattr(self, name)!r}"
            for name, field in default.items()
            if getattr(self, name) != field.default
        ]
        return f"Placement({', '.join(given)})"


def _check_axes(mesh: Any) -> None:
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}.")
    if AXIS not in mesh.shape or not set(mesh.axis_names) <= {AXIS, CHAINS}:
        raise ValueError(
            f"The mesh needs an axis named {AXIS!r} and may have one named {CHAINS!r}, got axes "
            f"{tuple(mesh.axis_names)}."
        )


def check_fits(placement: Placement, kernel: FederatedKernel, num_chains: int) -> None:
    """Raise `ValueError` where a run of `kernel` cannot lie as `placement` says."""
    mesh, participation = placement.mesh, kernel.participation
    if mesh is not None and num_chains % mesh.shape.get(CHAINS, 1):
        raise ValueError(
            f"num_chains must be a multiple of the mesh's axis {CHAINS!r}, {mesh.shape[CHAINS]}, "
            f"got {num_chains}."
        )
    if mesh is not None and participation.pooled:
        raise ValueError(
            "A kernel on pooled rows (sgld, psgld) treats them as one client's, so it cannot run "
            "over a mesh."
        )
    if placement.client_store is not None and participation.cohort_size is None:
        raise ValueError(
            "With client_store= only a cohort's states are on the device: use a participation that "
            "chooses a cohort, uniform(cohort_size) or categorical(...)."
        )
