"""Effects of clients as shared parameters, for models with effects of clients and of groups."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpyro
from jax import Array
from numpyro import distributions as dist
from numpyro import handlers
from numpyro.infer.reparam import Reparam

from fedmcmc.data import FederatedData, Grouped, row_values
from fedmcmc.interop._numpyro_structure import facts_of
from fedmcmc.interop._rows import client_rows
from fedmcmc.types import ArrayTree

COLUMN = "client_index"
"""Name of the column with the client's number."""
CLIENT = "client"
"""Mark of an effect of clients, ``infer={"local": "client"}``."""


def share_client_effects(
    model: Callable[..., Any], data: FederatedData, sites: Sequence[str] | None = None
) -> tuple[Callable[..., Any], FederatedData]:
    """Return a model and data in which effects of clients are shared parameters.

    A model has one level of local sites. If patients in hospitals have local effects, the effects
    of the hospitals become shared parameters: site ``NAME`` becomes ``NAME_clients``
    ``[num_clients]``, with location 0 and scale 1, and a row has ``location + scale *
    NAME_clients[client_index]``. The posterior of the model does not change.

    Parameters
    ----------
    model
        NumPyro model whose rows are columns by name.
    data
        Rows of the clients, usually with ``groups=``.
    sites
        Names of the effects of clients, each a number with a location-scale prior such as a normal
        distribution; by default the sites with ``infer={"local": "client"}``.

    Returns
    -------
    model, data
        Arguments for `fedmcmc.fit`, `fedmcmc.from_numpyro` and `fedmcmc.criticism`. The data have
        an additional column ``client_index``.

    Raises
    ------
    ValueError
        If rows have no names, there is no such site, or a site is not a number with a
        location-scale prior.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(y=None):
    ...     hospital = numpyro.sample("hospital", dist.Normal(0, 2), infer={"local": "client"})
    ...     patient = numpyro.sample("patient", dist.Normal(0, 1), infer={"local": True})
    ...     with numpyro.plate("rows", len(y)):
    ...         numpyro.sample("y", dist.Normal(hospital + patient, 1), obs=y)
    >>> clients = [{"y": jnp.array([1.0, 2.0, 0.5])}, {"y": jnp.array([0.0, 1.0])}]
    >>> data = FederatedData.from_clients(clients, groups=[[1, 1, 2], [3, 4]])
    >>> shared, data = share_client_effects(model, data)
    >>> data.rows.values["client_index"].tolist(), shared.sites
    ([0, 0, 0, 1, 1], ('hospital',))
    """
    columns = row_values(data.rows)
    if not isinstance(columns, Mapping) or COLUMN in columns:
        names = f"the columns {', '.join(columns)}" if isinstance(columns, Mapping) else "no names"
        raise ValueError(
            f"share_client_effects adds a column {COLUMN!r} to rows that are columns by name; the "
            f"rows have {names}."
        )
    facts = facts_of(model, client_rows(data))
    latent = [name for name, site in facts.items() if site["latent"]]
    if sites is None:
        sites = [name for name in latent if facts[name]["local"] == CLIENT]
    unknown = [name for name in sites if name not in latent]
    if unknown or not sites:
        problem = f"{unknown[0]!r} is no latent site" if unknown else "no site is marked"
        raise ValueError(
            f"sites must name effects of clients, or the model must mark them with "
            f"infer={{'local': 'client'}}: {problem}. The latent sites are {', '.join(latent)}."
        )
    numbers = np.repeat(np.arange(data.num_clients, dtype=np.int32), np.asarray(data.sizes))
    rows: ArrayTree = {**columns, COLUMN: numbers}
    if isinstance(data.rows, Grouped):
        rows = replace(data.rows, values=rows)
    shared = SharedClientEffects(model, tuple(sites), data.num_clients)
    return shared, replace(data, rows=rows)


@dataclass(frozen=True)
class SharedClientEffects:
    """NumPyro model with effects of clients as shared parameters; see `share_client_effects`.

    Attributes
    ----------
    model, sites, num_clients
        Original model, names of its effects of clients, and number of clients.
    """

    model: Callable[..., Any]
    sites: tuple[str, ...]
    num_clients: int

    def __call__(self, **rows: Any) -> Any:
        """Run the original model with the effects of the rows' clients."""
        effect = _SharedEffect(self.num_clients, rows.pop(COLUMN))
        return handlers.reparam(self.model, config=dict.fromkeys(self.sites, effect))(**rows)


class _SharedEffect(Reparam):
    """Reparametrization of an effect of one client by the standardized effects of all clients."""

    def __init__(self, num_clients: int, index: Array) -> None:
        self.num_clients, self.index = num_clients, index

    def __call__(self, name: str, fn: dist.Distribution, obs: object) -> tuple[None, Array]:
        parameters = {key: getattr(fn, key, None) for key in fn.arg_constraints}
        if {"loc", "scale"} - set(parameters) or fn.shape() != ():
            raise ValueError(
                f"Site {name!r} must be a number with a location-scale prior, such as "
                f"Normal(location, scale); got {type(fn).__name__} of shape {fn.shape()}."
            )
        location, scale = parameters["loc"], parameters["scale"]
        standard = type(fn)(**{**parameters, "loc": 0.0, "scale": 1.0})
        clients = standard.expand([self.num_clients]).to_event(1)
        effects = numpyro.sample(f"{name}_clients", clients)
        return None, location + scale * effects[self.index]
