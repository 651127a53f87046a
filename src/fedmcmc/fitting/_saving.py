"""Storage of `Fitted` in NetCDF files."""

from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from fedmcmc.fitting._report import Report, StageReport
from fedmcmc.gaussian import Gaussian
from fedmcmc.records import Samples, SavedResult, restore_samples, store_samples
from fedmcmc.types import MissingFunction, Posterior

REASON = (
    "The functions of a model are not part of a saved fit: pass the model's posterior to "
    "fedmcmc.load(path, posterior=...)."
)


def store_fitted(fitted: Any) -> SavedResult:
    """Return the content of a file with samples, verdict, evidence, report and Gaussian."""
    saved = store_samples(fitted.samples)
    report = fitted.report
    saved.record |= {
        "kind": "fitted",
        "verdict": fitted.verdict,
        "model path": fitted.posterior.model_path,
        "evidence": [fitted.log_evidence, fitted.log_evidence_sd],
        "report": {
            "stages": [asdict(stage) for stage in report.stages],
            "summary": report.summary,
            "about": report.about,
            "warnings": report.warnings,
        },
    }
    if fitted.gaussian is not None:
        saved.record["gaussian"] = {
            "precision_mean": saved.store(fitted.gaussian.precision_mean, "precision_mean"),
            "precision": saved.store(fitted.gaussian.precision, "precision"),
            "structure": fitted.gaussian.structure,
        }
    return saved


def restore_fitted(
    cls: Any, saved: SavedResult, posterior: Posterior | None, draw_figures: object
) -> Any:
    """Return the fit in a file, with functions only from `posterior`."""
    record = saved.record
    constrain_fn = None if posterior is None else posterior.constrain_fn
    samples = restore_samples(Samples, saved, constrain_fn)
    report = Report(
        tuple(StageReport(**stage) for stage in record["report"]["stages"]),
        record["verdict"],
        record["report"]["summary"],
        record["report"]["about"],
        partial(draw_figures, samples, None) if callable(draw_figures) else None,
        tuple(record["report"]["warnings"]),
    )
    if posterior is None:
        path = record["model path"]
        model = f" The model was {path}." * bool(path)
        missing = MissingFunction(REASON + model, {"model_path": path})
        posterior = Posterior(missing, missing)
    gaussian = record.get("gaussian")
    if gaussian is not None:
        mean, precision = (saved.restore(gaussian[x]) for x in ("precision_mean", "precision"))
        gaussian = Gaussian(mean, precision, gaussian["structure"])
    evidence = (np.nan if x is None else float(x) for x in record["evidence"])
    return cls(samples, record["verdict"], *evidence, report, posterior, None, gaussian)
