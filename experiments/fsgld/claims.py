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
)
from experiments.fsgld import alpha, mlp_scores, spreads
from experiments.fsgld.gaussian_figures import coin_gradients
from experiments.fsgld.gaussian_law import one_machine

__all__ = ["CLAIMS"]

TOO_WIDE = 1.5  # times the posterior's variance
PAPERS_GAIN = mlp_scores.papers("FSGLD", "non_iid")[0] - mlp_scores.papers("DSGLD", "non_iid")[0]
FAR = 0.1 * PAPERS_GAIN
"""Nats by which one network is far better than another, and below which they are alike."""
FAR_SMALLER = 0.5  # of a standard deviation, times another


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


def _plateau(metrics: Given, config: Given) -> Verdict:
    del config
    rows = [r for r in _of(metrics, "DSGLD") if r["T"] >= 100] or _of(metrics, "DSGLD")
    bias = max(r["exact bias"] for r in rows)
    share = max(r["exact bias"] ** 2 / r["exact MSE"] for r in rows)
    word = REPRODUCED if share > 0.1 else CONTRADICTED
    own = [r["exact MSE"] for r in _of(metrics, "FSGLD") if r["T"] == rows[0]["T"]]
    above = rows[0]["exact MSE"] / own[0]
    return Verdict(
        word,
        f"the bias, which would be the plateau, is at most {bias:.1g} from T = 100 on, that is 0; "
        f"the error at T = {rows[0]['T']} is {above:.0f} times FSGLD's, and falls as fast, as one "
        "over the number of samples",
    )


def _constants(metrics: Given, config: Given) -> Verdict:
    del config
    gamma, eps = (np.array(metrics[k]) for k in ("gamma_squared", "eps_squared"))
    word = REPRODUCED if (gamma > 10 * eps).all() else CONTRADICTED
    return Verdict(word, f"{(gamma / eps).min():.0f} to {(gamma / eps).max():.0f} times smaller")


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
    del config
    curve, told = metrics["curves"]["learn"], []
    at = (curve["at"][0] + 1) * metrics["samples_a_draw"]
    for name in ("DSGLD", "FSGLD"):
        level = np.nanmean(np.array(metrics["methods"][name]["learn"], float))
        told.append(f"{abs(level - curve[name]['mean'][0]):.3f} ({name})")
    return Verdict(
        UNTESTABLE,
        f"where our curves begin, after {at} samples, they have come from {np.log(0.5):.3f} to "
        f"within {' and '.join(told)} nats per learning pair of their levels; where the paper's "
        "begin, and from what start, our copy does not say",
    )


def _spread(metrics: Given, config: Given) -> Verdict:
    del config
    of = metrics["methods"]
    found = {
        where: spreads.compare(of["FSGLD"][pairs], of["DSGLD"][pairs])
        for pairs, where in (("learn", "learning pairs"), ("test", "pairs held out"))
    }
    word = first_that_holds(
        (all(ratio.high < 1 for ratio in found.values()), REPRODUCED),
        (any(ratio.high < 1 for ratio in found.values()), PARTLY),
        (any(ratio.low > 1 for ratio in found.values()), CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    text = "; ".join(f"on {where} {ratio}" for where, ratio in found.items())
    return Verdict(
        word, f"standard deviations over DSGLD's, by Pitman and Morgan's test for pairs: {text}"
    )


def _laplace(metrics: Given, config: Given) -> Verdict:
    num, (row,) = config["num_repetitions"], _of(metrics, "FSGLD")
    told = f"FSGLD diverged in {row['diverged']} of {num} repetitions (our data and prior)"
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
            if config["table"] == "susy":
                text += f", the paper's {PAPERS_GAIN:+.2f}"
            text += _beside_a_coin(scores[kept])
            (row,) = [row for row in _of(metrics, "FSGLD") if row["split"] == split]
            if row["ignores input"] not in ("-", "0%"):
                text += f"; {row['ignores input']} of its networks ignore their input"
        return Verdict(word, text)

    return judge


def _where(metrics: Given, config: Given) -> str:
    """Return the data, if not the paper's, and the step size ``h``."""
    data = "" if config["table"] == "susy" else f" on {metrics['data'].lower()}"
    return f"{data} at h = {2 * config['step_size']:.0e}" if data else ""


def _beside_a_coin(scores: np.ndarray) -> str:
    """Return that log likelihoods are no better than a coin toss, if so within their noise."""
    mean, error = paired(scores, np.full(len(scores), -np.log(2)))
    if not np.isfinite(error) or mean > TIMES * error:
        return ""
    word = "worse than" if mean < -TIMES * error else "no better than"
    return f"; FSGLD is {word} a coin toss ({mean:+.3f}, s.e. {error:.3f})"


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
    data = "" if config["table"] == "susy" else f" on {metrics['data'].lower()}"
    return Verdict(
        UNTESTABLE,
        f"FSGLD diverged{data} in all {config['num_repetitions']} repetitions of both splits",
    )


STABLE = ("fsgld/mlp", "fsgld/mlp_small")
OURS = {
    "fsgld/mlp_small_fisher": "with diagonal expansions at a trained network as surrogates (ours).",
    "fsgld/mlp_small_fisher_dense": "with dense expansions as surrogates (ours).",
    "fsgld/mlp_small_fisher_dense_short": "with dense expansions and a tenth as many steps a visit "
    "(ours).",
    "fsgld/mlp_small_fisher_dense_shorter": "with dense expansions and a tenth as many steps a "
    "visit, each a tenth as large (ours).",
}
"""Runs with surrogates that the paper does not have, and in what they differ."""
SAMPLED = ("fsgld/metric", "fsgld/metric_small")


def _exploration(metrics: Given, config: Given) -> Verdict:
    del config
    table = metrics["table"]
    right = [r for r in table if r["error of surrogates"] == 0]
    widths = {r["alpha"]: r[alpha.NAME] for r in right}
    up_to = [w for a, w in sorted(widths.items()) if a <= 1]
    beyond = [w for a, w in sorted(widths.items()) if a >= 1]
    turns = all(b < a for a, b in itertools.pairwise(up_to))
    turns &= all(b > a for a, b in itertools.pairwise(beyond))
    word = first_that_holds(
        (not turns, CONTRADICTED), (not alpha.as_theory(metrics), PARTLY), otherwise=REPRODUCED
    )
    least = [
        f"{r['best alpha']:.2f} (e = {r['error of surrogates']:g}; theory {r['theory']:.2f})"
        for r in metrics["least"]
    ]
    return Verdict(
        word,
        f"with right surrogates the variance over the posterior's goes from "
        f"{widths[min(widths)]:.2g} with {min(widths):g} to {min(widths.values()):.3g} with 1, and "
        f"to {widths[max(widths)]:.2g} with {max(widths):g}; the best multiple, by how far "
        f"surrogates' means are off (e, in the scatter of the shards): {', '.join(least)}",
    )


def _table_1(text: str, better: bool, runs: tuple[str, ...]) -> Claim:
    split = "non_iid" if better else "iid"
    figure = "log_likelihood.png" if runs == STABLE else None
    return Claim("Table 1", text, "fsgld/mlp", _network(split, better), figure, runs)


CLAIMS = (
    Claim(
        "Figure 1",
        "Gradient estimates from non-IID shards vary more than those from all data.",
        "fsgld/gaussian",
        _coin,
        "gradients.png",
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
        "The error of DSGLD with a hundred local updates, which falls as fast as FSGLD's, "
        "plateaus higher.",
        "fsgld/gaussian",
        _plateau,
        "mse.png",
    ),
    Claim(
        "Remark 1",
        "A multiple of the conducive gradient controls how far a visit explores.",
        "fsgld/alpha",
        _exploration,
        "alpha.png",
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
        SAMPLED,
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
        "Results with Laplace approximations as surrogates (the appendix is not in our copy).",
        "fsgld/metric",
        _laplace,
        None,
        ("fsgld/metric_laplace",),
    ),
    _table_1("Networks on non-IID shards: FSGLD is far better on held-out rows.", True, STABLE),
    *(_table_1(f"The same {text}", True, (name,)) for name, text in OURS.items()),
    _table_1("On IID shards both perform alike.", False, STABLE),
    *(_table_1(f"The same {text}", False, (name,)) for name, text in OURS.items()),
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
        None,
        ("fsgld/mlp", "fsgld/mlp_small_paper_step"),
    ),
)
