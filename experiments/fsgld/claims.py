"""The claims of El Mekkaoui et al. (2021), in the paper's order."""

import itertools
from typing import Any

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Claim,
    Given,
    Rows,
    Verdict,
    first_that_holds,
    on_other_data,
    paired,
    rows_of,
    with_lost_settings,
)
from experiments.fsgld import alpha, metric_scores, mlp_scores, spreads
from experiments.fsgld.gaussian_figures import coin_gradients
from experiments.fsgld.gaussian_law import constants_of_means, one_machine, slope

__all__ = ["CLAIMS"]

TOO_WIDE = 1.5  # times the posterior's variance
PAPERS_GAIN = mlp_scores.papers("FSGLD", "non_iid")[0] - mlp_scores.papers("DSGLD", "non_iid")[0]
FAR = 0.1 * PAPERS_GAIN
"""Nats by which one network is far better than another, and below which they are alike."""
FAR_SMALLER = 0.5  # of a standard deviation, times another
MOST = 0.9  # of the points of a curve
CLIMB = 0.9  # of the way from the start of a curve to its level


def _coin(metrics: Given, config: Given) -> Verdict:
    del metrics, config
    of = {name: deviation for name, (_, deviation) in coin_gradients()[1].items()}
    ratio = of["DSGLD"] / of["SGLD"]
    word = REPRODUCED if (ratio > 1).all() else CONTRADICTED
    return Verdict(
        word, f"standard deviations at least {ratio.min():.2g} times those of SGLD (exact)"
    )


def _of(metrics: Given, method: str) -> Rows:
    return rows_of(metrics, "method", method)


def _draws(metrics: Given, config: Given) -> Verdict:
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


def _mse(metrics: Given, config: Given) -> Verdict:
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


def _as_fast(metrics: Given, config: Given) -> Verdict:
    num = _delayed(metrics)[0]["T"]
    powers = {m: slope(config, num, a) for m, a in (("DSGLD", 0.0), ("FSGLD", 1.0))}
    alike = abs(powers["DSGLD"] - powers["FSGLD"]) < 0.05
    return Verdict(
        REPRODUCED if alike else CONTRADICTED,
        f"at T = {num} the error of the average falls with the number of samples to the power "
        f"{powers['DSGLD']:.2f} (DSGLD) and {powers['FSGLD']:.2f} (FSGLD), in the second half of "
        "the chain (exact laws)",
    )


def _plateau(metrics: Given, config: Given) -> Verdict:
    del config
    row, own = _delayed(metrics)
    share = row["exact bias"] ** 2 / row["exact MSE"]
    return Verdict(
        REPRODUCED if share > 0.1 else CONTRADICTED,
        f"the bias, which would be the plateau, is {row['exact bias']:.1g} at T = {row['T']}, that "
        f"is 0, so that DSGLD's average converges as well; its error is "
        f"{row['exact MSE'] / own['exact MSE']:.0f} times FSGLD's for as many samples (exact laws)",
    )


def _unbiased(metrics: Given, config: Given) -> Verdict:
    del config
    bias = max(row["exact bias"] for row in _of(metrics, "FSGLD"))
    return Verdict(
        PARTLY if bias < 1e-9 else CONTRADICTED,
        f"on Gaussian shards, where gradients are linear and a biased one would move the mean, the "
        f"exact bias of FSGLD's is {bias:.0e} at most; no other model was tried, and Gaussian "
        "surrogates are not what the lemma asks for, whose logarithms are Lipschitz continuous",
    )


def _constants(metrics: Given, config: Given) -> Verdict:
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


def _better(metrics: Given, config: Given) -> Verdict:
    del config
    of = metrics["methods"]
    found = [paired(of["FSGLD"][k], of["DSGLD"][k]) for k in ("learn", "test")]
    word = first_that_holds(
        (all(gain > TIMES * error for gain, error in found), REPRODUCED),
        (any(gain > TIMES * error for gain, error in found), PARTLY),
        (any(gain < -TIMES * error for gain, error in found), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    (a, b), (c, d) = found
    text = f"{a:+.3f} (s.e. {b:.3f}) nats per learning pair, {c:+.3f} (s.e. {d:.3f}) held out"
    if "NUTS" in of and "mean_off_sds" in of["FSGLD"]:
        off = np.nanmean(np.array(of["FSGLD"]["mean_off_sds"], float))
        text += f"; FSGLD's worst mean is off by {off:.1f} posterior standard deviations"
    return Verdict(word, text)


def _faster(metrics: Given, config: Given) -> Verdict:
    """Judge by who leads while both climb, and by who reaches which level first."""
    if config["keep_every"] > 1 or config["num_burnin"]:
        return Verdict(UNTESTABLE, "the curves of this run begin too late")
    leads, sooner, told = [], [], []
    for key, where in metric_scores.WHERE.items():
        curve = metrics["curves"][key]
        samples = (np.array(curve["at"]) + 1) * metrics["samples_a_draw"]
        means = {m: np.array(curve[m]["mean"]) for m in ("DSGLD", "FSGLD")}
        levels = {m: mean[len(mean) // 2 :].mean() for m, mean in means.items()}
        reached = {}
        for m, mean in means.items():
            goals = (levels["DSGLD"], np.log(0.5) + CLIMB * (levels[m] - np.log(0.5)))
            reached[m] = [_first(mean > goal, samples) for goal in goals]
        climbing = samples <= max(times[0] for times in reached.values())
        gap, error = (np.array(curve["difference"][k])[climbing] for k in ("mean", "spread"))
        ahead, behind = int((gap > TIMES * error).sum()), int((gap < -TIMES * error).sum())
        leads.append(ahead > len(gap) / 2 and not behind)
        sooner.append(reached["FSGLD"][0] < reached["DSGLD"][0])
        told.append(
            f"on {where} DSGLD comes to its level (the mean of the second half of its curve) after "
            f"{reached['DSGLD'][0]:.0f} samples, FSGLD "
            f"to the same after {reached['FSGLD'][0]:.0f}; until then FSGLD is ahead at {ahead} "
            f"and behind at {behind} of {len(gap)} points by more than {TIMES:g} s.e. (on average "
            f"by {gap.mean():.4f} nats); nine tenths of the way to its own level take "
            f"{reached['DSGLD'][1]:.0f} (DSGLD) and {reached['FSGLD'][1]:.0f} (FSGLD)"
        )
    word = first_that_holds(
        (all(sooner) and all(leads), REPRODUCED),
        (any(sooner) or any(leads), PARTLY),
        otherwise=CONTRADICTED,
    )
    return Verdict(with_lost_settings(word), "; ".join(told))


def _first(holds: np.ndarray, samples: np.ndarray) -> float:
    """Return after how many samples a curve first is where it should be."""
    return float(samples[holds.argmax()]) if holds.any() else np.inf


def _spread(metrics: Given, config: Given) -> Verdict:
    """Judge the error bars of the curves, and test differences within repetitions."""
    del config
    of = metrics["methods"]
    bars = metric_scores.bars(metrics)
    if not bars:
        return Verdict(UNTESTABLE, "FSGLD diverged, so that its bars are of fewer repetitions")
    told = [
        f"on {metric_scores.WHERE[key]} FSGLD's bars are the smaller ones at {bar.smaller:.0%} of "
        f"the points after burn-in and {bar.FSGLD / bar.DSGLD:.2f} times DSGLD's on average"
        for key, bar in bars.items()
    ]
    overall = [bar.smaller >= MOST for bar in bars.values()]
    tests = []
    if "NUTS" in of:
        gaps = metric_scores.from_pooled(metrics)
        tests = [spreads.compare(gap["FSGLD"], gap["DSGLD"]) for gap in gaps.values()]
        told.append(
            "standard deviations over DSGLD's of what averages differ from pooled NUTS on the same "
            "pairs, by Pitman and Morgan's test: "
            + " and ".join(str(ratio) for ratio in tests)
            + "; DSGLD is further off, which inflates its own: "
            + metric_scores.of_their_gaps(metrics)
        )
    word = first_that_holds(
        (all(overall) and bool(tests) and all(r.high < 1 for r in tests), REPRODUCED),
        (any(overall) or any(r.high < 1 for r in tests), PARTLY),
        (all(bar.smaller <= 1 - MOST for bar in bars.values()), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    return Verdict(with_lost_settings(word), "; ".join(told))


def _laplace(metrics: Given, config: Given) -> Verdict:
    num, (row,) = config["num_repetitions"], _of(metrics, "FSGLD")
    told = (
        "whatever a run gives, since what the appendix found is not in our copy; here FSGLD "
        f"diverged in {row['diverged']} of {num} repetitions (the paper's data, our prior and "
        "numbers of rounds and local steps)"
    )
    return Verdict(UNTESTABLE, told)


def _network(split: str, better: bool) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        of = {m: metrics["values"][f"{split} {m}"]["test"] for m in ("DSGLD", "FSGLD")}
        scores = np.array(of["FSGLD"], float)
        kept = np.isfinite(scores)
        if not kept.any():
            return Verdict(UNTESTABLE, f"FSGLD diverged in all {len(scores)} repetitions")
        gain, error = paired(of["FSGLD"], of["DSGLD"])
        low, high = gain - TIMES * error, gain + TIMES * error
        if better:
            word = first_that_holds(
                (low > FAR, REPRODUCED),
                (low > 0, PARTLY),
                (high < FAR, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        else:
            word = first_that_holds(
                (low > -FAR and high < FAR, REPRODUCED),
                (low > FAR or high < -FAR, CONTRADICTED),
                otherwise=UNTESTABLE,
            )
        word = on_other_data(word, config["table"] != "susy")
        text = f"FSGLD less DSGLD{_where(metrics, config)}: {gain:+.4f} (s.e. {error:.4f}) nats"
        if not kept.all():
            text += f" where it did not diverge, in {kept.sum()} of {len(kept)} repetitions"
        if better:
            text += f"; far better would be more than {FAR:.3f}, a tenth of the paper's lead"
            if config["table"] == "susy":
                text += f", {PAPERS_GAIN:+.2f}"
            text += _beside_a_coin(metrics, split)
        else:
            text += f"; alike is less than {FAR:.3f} apart, a tenth of the paper's non-IID lead"
        return Verdict(word, text)

    return judge


def _where(metrics: Given, config: Given) -> str:
    """Return the data, if not the paper's, and the step size ``h``."""
    data = "" if config["table"] == "susy" else f" on {metrics['data'].lower()}"
    return f"{data} at h = {2 * config['step_size']:.0e}" if data else ""


def _beside_a_coin(metrics: Given, split: str) -> str:
    """Return which methods are no better than a coin toss on held-out rows within their noise.

    With their accuracies there: a network may be right more often than not and as surely wrong.
    """
    told = []
    for method in ("DSGLD", "FSGLD"):
        values = metrics["values"][f"{split} {method}"]
        scores = np.array(values["test"], float)
        mean, error = paired(scores, np.full(len(scores), -np.log(2)))
        if not np.isfinite(error) or mean > TIMES * error:
            continue
        word = "worse" if mean < -TIMES * error else "no better"
        of = f"{mean:+.3f}, s.e. {error:.3f}"
        if "accuracy" in values:
            right, constant = (
                np.nanmean(np.array(values[k], float)) for k in ("accuracy", "constant")
            )
            of += f"; right for {right:.1%} of them, {constant:.0%} ignore their input"
        told.append(f"{method} is {word} than a coin toss ({of})")
    return "".join(f"; {text}" for text in told)


def _generalises(metrics: Given, config: Given) -> Verdict:
    """Judge whether DSGLD fits the shard that it is at, and held-out rows far less well."""
    values = metrics["values"]["non_iid DSGLD"]
    gap, error = paired(values["visited"], values["test"])
    word = first_that_holds(
        (gap - TIMES * error > FAR, REPRODUCED),
        (gap + TIMES * error < FAR, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    visited, test = (np.nanmean(np.array(values[k], float)) for k in ("visited", "test"))
    return Verdict(
        on_other_data(word, config["table"] != "susy"),
        f"DSGLD's log likelihood{_where(metrics, config)} is {visited:.3f} on the shard visited "
        f"and {test:.3f} on held-out rows, {gap:.3f} (s.e. {error:.3f}) nats apart; the paper's "
        f"are {mlp_scores.papers('DSGLD', 'non_iid', 'train')[0]:.2f} (train) and "
        f"{mlp_scores.papers('DSGLD', 'non_iid')[0]:.2f}",
    )


def _deviations(metrics: Given, config: Given) -> Verdict:
    found, papers = {}, []
    for split in mlp_scores.SPLITS:
        of = {m: metrics["values"][f"{split} {m}"]["test"] for m in ("FSGLD", "DSGLD")}
        found[split] = spreads.compare(of["FSGLD"], of["DSGLD"])
        papers.append(mlp_scores.papers("FSGLD", split)[1] / mlp_scores.papers("DSGLD", split)[1])
    ratios = found.values()
    word = first_that_holds(
        (all(ratio.high < FAR_SMALLER for ratio in ratios), REPRODUCED),
        (any(ratio.high < 1 for ratio in ratios), PARTLY),
        (all(ratio.low > FAR_SMALLER for ratio in ratios), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    other = config["table"] != "susy"
    told = "; ".join(f"{mlp_scores.SPLITS[split]} {ratio}" for split, ratio in found.items())
    return Verdict(
        on_other_data(word, other),
        f"held-out standard deviations over those of DSGLD{_where(metrics, config)}, by Pitman and "
        f"Morgan's test: {told}"
        + ("" if other else f"; the paper's are {papers[0]:.2f} and {papers[1]:.2f}"),
    )


def _paper_step(metrics: Given, config: Given) -> Verdict:
    lost = [row["diverged"] for row in _of(metrics, "FSGLD")]
    if min(lost) < config["num_repetitions"]:
        return _network("non_iid", True)(metrics, config)
    other = config["table"] != "susy"
    data = f" on {metrics['data'].lower()}" if other else ""
    return Verdict(
        # The paper does not give its prior and its surrogates' samplers.
        with_lost_settings(on_other_data(CONTRADICTED, other)),
        f"FSGLD diverged{data} in all {config['num_repetitions']} repetitions of both splits",
    )


STABLE = ("fsgld/mlp", "fsgld/mlp_small")
OURS = {
    "fsgld/mlp_small_fisher": "diagonal expansions at a trained network as surrogates",
    "fsgld/mlp_small_fisher_dense": "dense expansions as surrogates",
    "fsgld/mlp_small_fisher_dense_short": "dense expansions and a tenth as many steps a visit",
    "fsgld/mlp_small_fisher_dense_shorter": "dense expansions and a tenth as many steps a visit, "
    "each a tenth as large",
}
"""Runs with surrogates that the paper does not have, and in what they differ."""
SAMPLED = ("fsgld/metric", "fsgld/metric_small")


def _exploration(metrics: Given, config: Given) -> Verdict:
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


def _best_multiple(metrics: Given, config: Given) -> Verdict:
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


def _table_1(text: str, better: bool, runs: tuple[str, ...], ours: bool = False) -> Claim:
    split = "non_iid" if better else "iid"
    figure = "log_likelihood.png"
    return Claim("Table 1", text, "fsgld/mlp", _network(split, better), figure, runs, ours)


CLAIMS = (
    Claim(
        "Figure 1",
        "Gradient estimates from non-IID shards vary more than those from all data.",
        "fsgld/gaussian",
        _coin,
        "gradients.png",
    ),
    Claim(
        "Remark 1",
        "A multiple of the conducive gradient controls how far a visit explores.",
        "fsgld/alpha",
        _exploration,
        "alpha.png",
    ),
    Claim(
        "Sections 3.1, 5",
        "A conducive gradient costs about one more evaluation of the prior, however many shards "
        "there are.",
    ),
    Claim(
        "Lemma 1",
        "With conducive gradients the gradient estimator is unbiased and of finite variance.",
        "fsgld/gaussian",
        _unbiased,
    ),
    Claim(
        "Theorems 1, 2",
        "Bounds on the squared error of averages (with a constant that is not given, so that no "
        "run can exceed them; `tests/laws` has the exact laws on Gaussian shards).",
    ),
    Claim(
        "Figures 2, 3a",
        "With more local updates DSGLD turns into a mixture of local posteriors; FSGLD stays at "
        "the posterior.",
        "fsgld/gaussian",
        _draws,
        "draws.png",
    ),
    Claim(
        "Figure 3b",
        "FSGLD's error of the mean is far smaller, whatever the number of local updates.",
        "fsgld/gaussian",
        _mse,
        "mse.png",
    ),
    Claim(
        "Figure 3b",
        "DSGLD with a hundred local updates converges as fast as FSGLD.",
        "fsgld/gaussian",
        _as_fast,
        "mse.png",
    ),
    Claim(
        "Figure 3b",
        "Its error plateaus higher: only FSGLD converges to the mean.",
        "fsgld/gaussian",
        _plateau,
        "mse.png",
    ),
    Claim(
        "Figure 4",
        "The constants of FSGLD's bound are much smaller than those of DSGLD's.",
        "fsgld/gaussian",
        _constants,
        "constants.png",
    ),
    Claim(
        "Figure 5",
        "Metric learning: FSGLD's samples have the higher likelihood on learning and held-out "
        "pairs.",
        "fsgld/metric",
        _better,
        "log_likelihood.png",
        SAMPLED,
    ),
    Claim(
        "Figure 5",
        "FSGLD converges faster.",
        "fsgld/metric",
        _faster,
        "log_likelihood.png",
        ("fsgld/metric_start",),
    ),
    Claim(
        "Figure 5",
        "FSGLD varies less overall.",
        "fsgld/metric",
        _spread,
        "log_likelihood.png",
        SAMPLED,
    ),
    Claim(
        "Appendix F.2",
        "Additional results with Laplace approximations as surrogates.",
        "fsgld/metric",
        _laplace,
        "log_likelihood.png",
        ("fsgld/metric_laplace",),
    ),
    _table_1("Networks on non-IID shards: FSGLD is far better on held-out rows.", True, STABLE),
    Claim(
        "Section 5.3",
        "On non-IID shards DSGLD fits the shard that it visits and does not generalise.",
        "fsgld/mlp",
        _generalises,
        "log_likelihood.png",
        STABLE,
    ),
    _table_1("On IID shards both perform alike.", False, STABLE),
    Claim(
        "Table 1",
        "FSGLD's standard deviations are far smaller everywhere.",
        "fsgld/mlp",
        _deviations,
        "log_likelihood.png",
        STABLE,
    ),
    Claim(
        "Table 1",
        "All of it at the step size 1e-4.",
        "fsgld/mlp",
        _paper_step,
        "log_likelihood.png",
        ("fsgld/mlp", "fsgld/mlp_small_paper_step"),
    ),
    Claim(
        "Remark 1",
        "The multiple with the least variance is 1 / (1 + e^2), where e is how far surrogates' "
        "means are off, in the scatter of the shards' own.",
        "fsgld/alpha",
        _best_multiple,
        "alpha.png",
        ours=True,
    ),
    *(
        _table_1(f"On {kind} shards, with {text}: FSGLD {claimed}.", better, (name,), ours=True)
        for kind, better, claimed in (
            ("non-IID", True, "is far better than DSGLD on held-out rows"),
            ("IID", False, "and DSGLD perform alike"),
        )
        for name, text in OURS.items()
    ),
)
