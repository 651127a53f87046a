"""What a fit returns."""

import io
import re
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from fedmcmc._types import ArrayTree, Federation, Posterior
from fedmcmc.exact import Corrected
from fedmcmc.fitting._report import Report, Stage
from fedmcmc.gaussian import Gaussian
from fedmcmc.pytrees import trees
from fedmcmc.records import Samples


@dataclass(frozen=True, repr=False)
class Fitted:
    """A posterior, with a verdict on whether it is exact.

    Attributes
    ----------
    samples
        `Samples` of equal weight: ``.draws``, ``.constrained``, ``.to_datatree()``. Where they are
        of importance weights, resampled, one chain.
    verdict
        A sentence with figures that begins with ``exact (importance)``, ``exact (MCMC)``,
        ``doubtful``, ``approximate`` or ``failed``.
    log_evidence, log_evidence_sd
        Log of ``p(data)`` in nats, and its standard error; NaN where no correction passed. Right if
        log prior and log likelihood are normalized, as those of `fedmcmc.from_numpyro` are.
    report
        Stage by stage: ``print(fitted.report)``, ``.save(path)`` for a page, ``.to_dict()``.
    posterior
        The model as a `Posterior`, as `fedmcmc.criticism` takes it.
    corrected
        The weighted draws that `samples` were resampled from, or ``None`` where they are others.
    gaussian
        Laplace's approximation at the highest mode, over sampled positions, or ``None``.
    """

    samples: Samples
    verdict: str
    log_evidence: float
    log_evidence_sd: float
    report: Report
    posterior: Posterior
    corrected: Corrected | None = field(default=None)
    gaussian: Gaussian | None = field(default=None)

    def __repr__(self) -> str:
        """Return the verdict, the parameters and what was done."""
        lines = [str(self.report), ""]
        for name, row in self.report.summary.items():
            lines.append(
                f"{name}: {row['mean']:.4g} (sd {row['sd']:.2g}), 90 % in "
                f"[{row['5 %']:.4g}, {row['95 %']:.4g}]"
            )
        return "\n".join(lines)


def reported(
    stages: tuple[Stage, ...],
    verdict: str,
    samples: Samples,
    federation: Federation,
    num_parameters: int,
    *,
    evidence: tuple[float, float] = (np.nan, np.nan),
    weighted: Corrected | None = None,
) -> Report:
    """Return the report of a fit; `evidence` is its logarithm and the standard error of that."""
    log_evidence, sd = evidence
    return Report(
        stages,
        verdict,
        summarized(samples.constrained),
        {
            "clients": federation.num_clients,
            "rows": federation.num_rows,
            "parameters": num_parameters,
            "log evidence": f"{log_evidence:.4f} (sd {sd:.2g})" if sd >= 0 else "",
            "fedmcmc": _version(),
            "JAX": jax.__version__,
        },
        lambda: figures_of(samples, weighted),
    )


def _version() -> str:
    try:
        return version("fedmcmc")
    except PackageNotFoundError:  # run from a source tree
        return "not installed"


MOST_NAMED = 200
"""Parameters that a summary lists."""


def summarized(constrained: ArrayTree) -> dict[str, dict[str, float]]:
    """Return moments and quantiles of draws with leaves ``[num_chains, num_draws, *event]``."""
    first = jax.tree.map(lambda leaf: np.zeros(leaf.shape[2:]), constrained)
    names = trees.element_names(first)
    values = np.concatenate(
        [
            np.asarray(leaf, np.float64).reshape(leaf.shape[0] * leaf.shape[1], -1)
            for leaf in jax.tree.leaves(constrained)
        ],
        axis=1,
    )[:, :MOST_NAMED]
    with np.errstate(all="ignore"):  # of chains that ran away
        low, middle, high = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
        columns = dict(mean=values.mean(0), sd=values.std(0))
    columns |= {"5 %": low, "50 %": middle, "95 %": high}
    return {
        name: {key: float(column[i]) for key, column in columns.items()}
        for i, name in enumerate(names[:MOST_NAMED])
    }


def figures_of(samples: Samples, corrected: Corrected | None) -> dict[str, str]:
    """Return a forest plot, and traces or weights, by title, as SVG elements.

    Raises
    ------
    ImportError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            'The figures of a report need matplotlib: pip install "fedmcmc[plots]".'
        ) from error
    draws = samples.constrained
    rows = list(summarized(draws).items())[:40]
    forest = Figure(figsize=(7, 0.6 + 0.28 * len(rows)))
    ax = forest.add_subplot()
    for place, (_, row) in enumerate(rows):
        ax.plot([row["5 %"], row["95 %"]], [-place, -place], color="#0072b2")
        ax.plot(row["50 %"], -place, "o", color="#0072b2", markersize=4)
    ax.set_yticks([-i for i in range(len(rows))], [name for name, _ in rows])
    ax.axvline(0, color="#bbb", linewidth=0.8, zorder=0)
    ax.set_xlabel("posterior median and 90 % interval")
    found = {"Posterior": _svg(forest)}
    if samples.num_chains > 1:
        found["Traces of the first parameters"] = _traces(samples, Figure)
    elif corrected is not None:
        found["Importance weights"] = _weights(corrected, Figure)
    return found


def _traces(samples: Samples, figure: Any) -> str:
    flat = np.concatenate(
        [
            np.asarray(leaf).reshape(*leaf.shape[:2], -1)
            for leaf in jax.tree.leaves(samples.constrained)
        ],
        axis=-1,
    )
    num = min(flat.shape[-1], 4)
    drawn = figure(figsize=(7, 1.5 * num))
    for i in range(num):
        ax = drawn.add_subplot(num, 1, i + 1)
        ax.plot(flat[:8, :, i].T, linewidth=0.5)
        ax.set_ylabel(list(summarized(samples.constrained))[i])
    ax.set_xlabel("draw (eight chains)")
    return _svg(drawn)


def _weights(corrected: Corrected, figure: Any) -> str:
    drawn = figure(figsize=(7, 2.5))
    ax = drawn.add_subplot()
    ax.hist(corrected.weights * corrected.num_draws, bins=60, color="#0072b2")
    ax.set_yscale("log")
    ax.set_xlabel("weight of a draw over the mean weight: all at one is perfect")
    ax.set_ylabel("draws")
    return _svg(drawn)


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
    whole = text.getvalue()
    # What is left out names its license by addresses; the page has none.
    whole = re.sub(r"<metadata>.*?</metadata>", "", whole, flags=re.DOTALL)
    return whole[whole.index("<svg") :]
