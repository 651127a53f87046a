"""What the experiments on images share: settings, and both sweeps."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from experiments import output, restarts
from experiments.checks import require
from experiments.fa_hmc import image_figures
from experiments.fa_hmc.image_data import DATASETS, Task, federate
from experiments.fa_hmc.image_sweep import SCORES, Curves, Plan, sweep
from experiments.fa_hmc.image_tuning import num_diverged, tuned
from experiments.models import Mlp
from experiments.qlsd import networks
from fedmcmc.pytrees import trees

__all__ = ["Problem", "Settings", "execute", "plans", "problem", "table_row"]

POWER_STEPS = 20  # Of the estimate of the largest curvature, within a few percent.


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of all; the defaults are those of section 5.3 where the paper states them.

    Attributes
    ----------
    dataset
        ``"fashion_mnist"``, ``"kmnist"`` or ``"cifar2"``.
    model
        ``"logistic"`` (multinomial, with intercepts) or ``"mlp"`` (a hidden layer of `width`
        rectifiers).
    num_rows, num_test
        Training and test images, zero for all there are.
    prior_scale
        Standard deviation of the normal prior of every parameter.
    batch_size
        Rows of a client in a stochastic gradient, drawn with replacement.
    gradients
        ``"fresh"`` or ``"reuse"``, see `fedmcmc.leapfrog`.
    leapfrog_steps, at_local_steps
        The values of ``L``, compared at one ``T``.
    local_steps, at_leapfrog_steps
        The values of ``T``, compared at one ``L``.
    step_sizes
        Ascending multiples of ``2 / sqrt(lambda)``, above which leapfrog steps are unstable:
        ``lambda`` is the largest curvature of any client's weighted loss at the first chain's
        start. A multiple above one may do where curvature falls on the way from there.
    num_rounds, thinning
        Rounds, and rounds a sample. Scores are those of averages over all samples so far, and
        beside them over the later ones.
    num_bins
        Of the expected calibration error.
    """

    seed: int = 0
    dataset: str = "fashion_mnist"
    model: str = "logistic"
    width: int = 512
    num_clients: int = 10
    num_rows: int = 0
    num_test: int = 0
    prior_scale: float = 0.1
    batch_size: int = 1000
    gradients: str = "fresh"
    leapfrog_steps: tuple[int, ...] = (1, 10, 50, 100)
    at_local_steps: int = 10
    local_steps: tuple[int, ...] = (1, 10, 20, 50, 100)
    at_leapfrog_steps: int = 10
    step_sizes: tuple[float, ...] = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
    num_rounds: int = 1000
    thinning: int = 10
    num_chains: int = 5
    num_bins: int = 20

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in ("seed", "num_rows", "num_test") else 1
            if item.type is int:
                require(value >= least, f"{item.name} must be at least {least}", value)
        require(self.prior_scale > 0, "prior_scale must be positive", self.prior_scale)
        for name, choices in (
            ("dataset", tuple(DATASETS)),
            ("model", ("logistic", "mlp")),
            ("gradients", ("fresh", "reuse")),
        ):
            value = getattr(self, name)
            require(value in choices, f"{name} must be one of {', '.join(choices)}", repr(value))
        for name in ("leapfrog_steps", "local_steps"):
            values = getattr(self, name)
            require(
                len(values) > 1 and values[0] == 1 and list(values) == sorted(set(values)),
                f"{name} must begin with 1, what others are compared with, and increase",
                values,
            )
        steps = self.step_sizes
        require(
            len(steps) > 0 and list(steps) == sorted(set(steps)) and steps[0] > 0,
            "step_sizes must be positive and increase",
            steps,
        )
        require(
            self.thinning <= self.num_rounds,
            f"thinning must be at most num_rounds={self.num_rounds}",
            self.thinning,
        )
        require(
            self.num_rows == 0 or self.num_rows >= self.num_clients,
            f"num_rows must be 0 or at least num_clients={self.num_clients}",
            self.num_rows,
        )


def plans(config: Settings) -> dict[tuple[int, int], tuple[Plan, list[str]]]:
    """Return for each ``(L, T)`` what is compiled, and in which sweeps (``"L"``, ``"T"``) it is."""
    settings = [("L", steps, config.at_local_steps) for steps in config.leapfrog_steps]
    settings += [("T", config.at_leapfrog_steps, steps) for steps in config.local_steps]
    found: dict[tuple[int, int], tuple[Plan, list[str]]] = {}
    for varied, leapfrogs, local in settings:
        plan = Plan(
            leapfrogs,
            local,
            config.num_rounds,
            config.thinning,
            config.batch_size,
            cast(Any, config.gradients),
            config.num_bins,
        )
        found.setdefault((leapfrogs, local), (plan, []))[1].append(varied)
    return found


class Problem(NamedTuple):
    """A model, what chains start with, and the largest stable step there."""

    posterior: fedmcmc.Posterior
    predict_fn: networks.Prediction
    keys: jax.Array
    starts: Any
    step_limit: float


def problem(rng_key: jax.Array, config: Settings, task: Task) -> Problem:
    """Return the model of `task` with starts and keys of every chain."""
    start_key, curvature_key, run_key = jax.random.split(rng_key, 3)
    module = Mlp((config.width,) if config.model == "mlp" else (), task.num_classes)
    posterior, predict_fn = networks.make(module, task.data, config.prior_scale)
    chains = jnp.arange(config.num_chains)
    keys, start_keys = (
        jax.vmap(lambda c, key=key: jax.random.fold_in(key, c))(chains)
        for key in (run_key, start_key)
    )
    starts = jax.vmap(posterior.init_fn)(start_keys)
    first = jax.tree.map(lambda leaf: leaf[0], starts)
    curvature = fedmcmc.estimate_smoothness(
        curvature_key, posterior, task.data, first, num_steps=POWER_STEPS
    ).largest
    return Problem(posterior, predict_fn, keys, starts, 2 / curvature**0.5)


def execute(config: Settings, out: Path) -> dict[str, Any]:
    """Run both sweeps; write the curves of all step sizes and chains, and figures."""
    split_key, run_key = jax.random.split(jax.random.key(config.seed))
    pictures, source = DATASETS[config.dataset]()
    task = federate(
        split_key,
        pictures,
        config.num_clients,
        num_rows=config.num_rows or None,
        num_test=config.num_test or None,
    )
    given = problem(run_key, config, task)
    steps = jnp.asarray(config.step_sizes, jnp.result_type(float)) * given.step_limit
    results, stored = [], {}
    for (leapfrogs, local), (plan, sweeps) in plans(config).items():
        curves = restarts.once(partial(_curves, plan, given, task, steps))
        results.append(
            {
                "L": leapfrogs,
                "T": local,
                "sweeps": sweeps,
                "gradients": plan.num_gradients,
                "diverged": num_diverged(curves.finite),
                "scores": _with_later(curves, config.step_sizes),
            }
        )
        of = f"L{leapfrogs}_T{local}"
        stored |= {f"{name}_{of}": scores for name, scores in curves.scores.items()}
        stored |= {f"{name}_later_{of}": scores for name, scores in curves.later.items()}
    np.savez_compressed(out / "curves.npz", step_sizes=np.asarray(steps), **stored)
    rounds = [(i + 1) * config.thinning for i in range(config.num_rounds // config.thinning)]
    metrics = {
        "table": [table_row(result, len(config.step_sizes)) for result in results],
        "results": results,
        "rounds": rounds,
        "step_limit": given.step_limit,
        "source": source,
        "settings": dataclasses.asdict(config),
        "num_rows": task.data.num_rows,
        "num_test": len(task.test.label),
        "num_parameters": trees.num_elements(given.starts) // config.num_chains,
    }
    return metrics | {"figures": image_figures.draw(metrics, out)}


def table_row(result: Mapping[str, Any], num_step_sizes: int) -> dict[str, Any]:
    """Return one line: scores with the best step size, and their deviation over chains."""
    row: dict[str, Any] = {
        "L": result["L"],
        "T": result["T"],
        "varied": " and ".join(result["sweeps"]),
        "gradients": result["gradients"],
    }
    for name, title in zip(SCORES, ("accuracy %", "Brier", "ECE", "nNLL"), strict=True):
        score, unit = result["scores"][name], 100 if name == "accuracy" else 1
        row[title] = None if score["mean"] is None else unit * score["mean"]
        row[f"sd {title}"] = None if score["sd"] is None else unit * score["sd"]
    chosen = [result["scores"][name]["step"] for name in SCORES]
    row["best steps"] = ", ".join(output.format_number(step) for step in chosen)
    row["diverged"] = f"{result['diverged']} of {num_step_sizes}"
    return row


def _with_later(curves: Curves, multiples: tuple[float, ...]) -> dict[str, dict[str, Any]]:
    """Return the tuned scores, each with that of the later samples, tuned for itself."""
    later = tuned(curves.later, multiples)
    return {
        name: score | {"later": later[name]}
        for name, score in tuned(curves.scores, multiples).items()
    }


def _curves(plan: Plan, given: Problem, task: Task, steps: jax.Array) -> Curves:
    posterior, predict_fn, keys, starts, _ = given
    found = sweep(plan, posterior, predict_fn, task.data, task.test, keys, starts, steps)
    # The last positions stay behind: a network's are large, and not used.
    return jax.tree.map(np.asarray, found._replace(position=()))
