"""What runs and exact laws of Gaussian shards say about Figures 1 to 4, Remark 1 and the cost."""

import itertools
from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    Given,
    Rows,
    Verdict,
    all_or_some,
    first_that_holds,
    rows_of,
)
from experiments.fsgld import alpha, cost
from experiments.fsgld.gaussian_figures import coin_gradients
from experiments.fsgld.gaussian_law import constants_of_means, one_machine, slope
from experiments.output import percent

__all__ = [
    "as_fast",
    "best_multiple",
    "coin",
    "constants",
    "draws",
    "exploration",
    "mse",
    "plateau",
    "price",
    "unbiased",
]

TOO_WIDE = 1.5  # times the posterior's variance


def coin(metrics: Given, config: Given) -> Verdict:
    """Judge how much gradients from non-IID shards vary (Figure 1)."""
    del metrics, config
    of = {name: deviation for name, (_, deviation) in coin_gradients()[1].items()}
    ratio = of["DSGLD"] / of["SGLD"]
    word = REPRODUCED if (ratio > 1).all() else CONTRADICTED
    return Verdict(
        word, f"standard deviations at least {ratio.min():.2g} times those of SGLD (exact)"
    )


def _of(metrics: Given, method: str) -> Rows:
    return rows_of(metrics, "method", method)


def draws(metrics: Given, config: Given) -> Verdict:
    """Judge where draws of DSGLD and FSGLD lie with many local steps (Figures 2 and 3a)."""
    last, posterior = _of(metrics, "DSGLD")[-1], metrics["posterior"]["variance"]
    wide = max(row["exact variance"] for row in _of(metrics, "FSGLD")) / posterior
    mixture = last["exact variance"] / metrics["shard_means_variance"]
    word = first_that_holds(
        (not 0.8 < mixture < 1.25, CONTRADICTED), (wide > TOO_WIDE, PARTLY), otherwise=REPRODUCED
    )
    return Verdict(
        word,
        f"DSGLD's variance is {mixture:.2f} times that of the shards' means at T = {last['T']}; "
        f"FSGLD's is the same for every T, but {wide:.3g} times the posterior's (SGLD on one "
        f"machine with minibatches as large: {one_machine(config)['minibatches']:.0f} times)",
    )


def mse(metrics: Given, config: Given) -> Verdict:
    """Judge FSGLD's error of the mean against DSGLD's (Figure 3b)."""
    del config
    errors = {m: [r["exact MSE"] for r in _of(metrics, m)] for m in ("DSGLD", "FSGLD")}
    smaller = min(errors["DSGLD"]) / max(errors["FSGLD"])
    alike = max(errors["FSGLD"]) / min(errors["FSGLD"])
    word = first_that_holds((smaller > 2 and alike < 1.1, REPRODUCED), otherwise=CONTRADICTED)
    return Verdict(
        word,
        f"at least {smaller:.0f} times smaller; FSGLD's for all T agree within a factor of "
        f"{alike:.4f} (exact laws)",
    )


def _delayed(metrics: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of DSGLD and FSGLD with a hundred local updates, or the most tried."""
    of = {m: _of(metrics, m) for m in ("DSGLD", "FSGLD")}
    num = next((r["T"] for r in of["DSGLD"] if r["T"] == 100), of["DSGLD"][-1]["T"])
    one, other = (next(r for r in of[m] if r["T"] == num) for m in ("DSGLD", "FSGLD"))
    return one, other


def as_fast(metrics: Given, config: Given) -> Verdict:
    """Judge how fast errors of averages fall at a hundred local steps (Figure 3b)."""
    num = _delayed(metrics)[0]["T"]
    powers = {m: slope(config, num, a) for m, a in (("DSGLD", 0.0), ("FSGLD", 1.0))}
    alike = abs(powers["DSGLD"] - powers["FSGLD"]) < 0.05
    return Verdict(
        REPRODUCED if alike else CONTRADICTED,
        f"at T = {num} the error of the average falls with the number of samples to the power "
        f"{powers['DSGLD']:.2f} (DSGLD) and {powers['FSGLD']:.2f} (FSGLD), in the second half of "
        "the chain (exact laws)",
    )


def plateau(metrics: Given, config: Given) -> Verdict:
    """Judge whether DSGLD's error stops falling (Figure 3b)."""
    del config
    row, own = _delayed(metrics)
    share = row["exact bias"] ** 2 / row["exact MSE"]
    return Verdict(
        REPRODUCED if share > 0.1 else CONTRADICTED,
        f"the bias, which would be the plateau, is {row['exact bias']:.1g} at T = {row['T']}, that "
        f"is 0, so that DSGLD's average converges as well; its error is "
        f"{row['exact MSE'] / own['exact MSE']:.0f} times FSGLD's for as many samples (exact laws)",
    )


def unbiased(metrics: Given, config: Given) -> Verdict:
    """Judge the exact bias of FSGLD's gradients on Gaussian shards (Lemma 1)."""
    del config
    bias = max(row["exact bias"] for row in _of(metrics, "FSGLD"))
    return Verdict(
        PARTLY if bias < 1e-9 else CONTRADICTED,
        f"on Gaussian shards, where gradients are linear and a biased one would move the mean, the "
        f"exact bias of FSGLD's is {bias:.0e} at most; no other model was tried, and Gaussian "
        "surrogates are not what the lemma asks for, whose logarithms are Lipschitz continuous",
    )


def constants(metrics: Given, config: Given) -> Verdict:
    """Judge the constants of FSGLD's bound against those of DSGLD's (Figure 4)."""
    gamma, eps = (np.array(metrics[k]) for k in ("gamma_squared", "eps_squared"))
    word = REPRODUCED if (gamma > 10 * eps).all() else CONTRADICTED
    alike = constants_of_means(config)
    return Verdict(
        word,
        f"{(gamma / eps).min():.0f} to {(gamma / eps).max():.0f} times smaller, on our grid, with "
        "which gamma grows; by its definition gamma is of the worst row, epsilon of the average "
        f"one: with the average row for both, at the mean of all rows, {alike.min():.1f} to "
        f"{alike.max():.0f} times",
    )


def exploration(metrics: Given, config: Given) -> Verdict:
    """Judge by where a visit ends: the further from its shard, the larger the multiple."""
    del metrics
    ends = sorted(alpha.ends(config).items())
    moves = all(b < a for (_, a), (_, b) in itertools.pairwise(ends))
    told = ", ".join(f"{end:.2f} with {multiple:g}" for multiple, end in ends)
    return Verdict(
        REPRODUCED if moves else CONTRADICTED,
        f"a visit of {config['num_local_steps']} steps ends at this share of the way from the mean "
        f"of all shards to that of its own, with right surrogates (exact law): {told}; that is 1 "
        "less the multiple",
    )


def best_multiple(metrics: Given, config: Given) -> Verdict:
    """Judge which multiple of the corrections has the least variance; a theory of ours."""
    del config
    right = {r["alpha"]: r[alpha.NAME] for r in metrics["table"] if r["error of surrogates"] == 0}
    least = [
        f"{r['best alpha']:.2f} (e = {r['error of surrogates']:g}; theory {r['theory']:.2f})"
        for r in metrics["least"]
    ]
    ends = ", ".join(f"{right[a]:.3g} with {a:g}" for a in (min(right), 1.0, max(right)))
    return Verdict(
        REPRODUCED if alpha.as_theory(metrics) else CONTRADICTED,
        f"best, by the exact law: {', '.join(least)}; with right surrogates the variance over the "
        f"posterior's is {ends}",
    )


def price(metrics: Given, config: Given) -> Verdict:
    """Judge what a conducive gradient costs, against a prior and over numbers of clients."""
    clients = ", ".join(f"{num:,}" for num in config["num_clients"])
    found = cost.same_for_all(metrics)
    if None in found.values():
        return Verdict(CONTRADICTED, f"operations depend on the number of clients ({clients})")
    times = {kind: [] for kind, _ in found}
    more = {kind: {num: [] for num in config["batch_sizes"]} for kind in times}
    for (kind, _), row in found.items():
        times[kind].append(row[cost.OWN] / row[cost.PRIOR])
        for num, shares in more[kind].items():
            shares.append(row[cost.OWN] / (row[cost.PRIOR] + row[cost.batch_of(num)]))
    told = [
        f"{kind} surrogates: {_range(of, '{:.2g}'.format)} times the prior's, "
        + " and ".join(
            f"{_range(shares, _share)} of a local step's with {num} rows"
            for num, shares in more[kind].items()
        )
        for kind, of in times.items()
    ]
    alike = [max(of) < 2 for of in times.values()]
    return Verdict(
        all_or_some(alike, [not one for one in alike]),
        f"the same number of operations with {clients} clients; {'; '.join(told)} (a diagonal "
        f"prior; {' or '.join(map(str, config['dims']))} parameters)",
    )


def _share(share: float) -> str:
    return percent(share, 1 if share < 0.1 else 0)


def _range(values: list[float], told: Any) -> str:
    return " to ".join(dict.fromkeys(told(end) for end in (min(values), max(values))))
