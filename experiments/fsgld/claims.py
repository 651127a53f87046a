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
from experiments.fsgld.alpha import best as best_multiples
from experiments.fsgld.gaussian_figures import coin_gradients

__all__ = ["CLAIMS"]

TOO_WIDE = 1.5  # times the posterior's variance


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
    del config
    last, posterior = _of(metrics, "DSGLD")[-1], metrics["posterior"]["variance"]
    wide = max(row["exact variance"] for row in _of(metrics, "FSGLD")) / posterior
    mixture = last["exact variance"] / metrics["shard_means_variance"]
    word = first_that_holds(
        (not 0.8 < mixture < 1.25, CONTRADICTED), (wide > TOO_WIDE, PARTLY), otherwise=REPRODUCED
    )
    return Verdict(
        word,
        f"DSGLD's variance is {mixture:.2f} times that of the shards' means at T = {last['T']}; "
        f"FSGLD's is the same for every T, but {wide:.3g} times the posterior's",
    )


def _mse(metrics: Given, config: Given) -> Verdict:
    del config
    errors = {m: [r["exact MSE"] for r in _of(metrics, m)] for m in ("DSGLD", "FSGLD")}
    smaller = min(errors["DSGLD"]) / max(errors["FSGLD"])
    alike = max(errors["FSGLD"]) / min(errors["FSGLD"])
    word = first_that_holds((smaller > 2 and alike < 1.1, REPRODUCED), otherwise=CONTRADICTED)
    return Verdict(
        word,
        f"at least {smaller:.0f} times smaller; within {100 * (alike - 1):.0f} % for every T "
        "(exact laws)",
    )


def _plateau(metrics: Given, config: Given) -> Verdict:
    del config
    rows = [r for r in _of(metrics, "DSGLD") if r["T"] >= 100] or _of(metrics, "DSGLD")
    bias = max(r["exact bias"] for r in rows)
    share = max(r["exact bias"] ** 2 / r["exact MSE"] for r in rows)
    word = REPRODUCED if share > 0.1 else CONTRADICTED
    return Verdict(
        word,
        f"the bias, which would be the plateau, is at most {bias:.1g} from T = 100 on; the error "
        "falls as one over the number of samples, as FSGLD's does, from a higher start",
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
    del metrics, config
    return Verdict(UNTESTABLE, "both curves start near their levels")


def _spread(metrics: Given, config: Given) -> Verdict:
    del config
    told = []
    for pairs, where in (("learn", "learning pairs"), ("test", "pairs held out")):
        sd = {m: np.nanstd(np.array(v[pairs], float)) for m, v in metrics["methods"].items()}
        text = f"standard deviations on {where} {sd['FSGLD']:.3f}, {sd['DSGLD']:.3f} (DSGLD)"
        told.append(text + (f", {sd['NUTS']:.3f} (pooled NUTS)" if "NUTS" in sd else ""))
    text = "; ".join(told)
    return Verdict(UNTESTABLE, text)


def _laplace(metrics: Given, config: Given) -> Verdict:
    num, (row,) = config["num_repetitions"], _of(metrics, "FSGLD")
    told = f"FSGLD diverged in {row['diverged']} of {num} repetitions (our data and prior)"
    return Verdict(UNTESTABLE, told)


def _network(split: str, better: bool) -> Any:
    def judge(metrics: Given, config: Given) -> Verdict:
        of = {m: metrics["values"][f"{split} {m}"]["test"] for m in ("DSGLD", "FSGLD")}
        if not np.isfinite(np.array(of["FSGLD"], float)).any():
            return Verdict(UNTESTABLE, f"FSGLD diverged in all {len(of['FSGLD'])} repetitions")
        gain, error = paired(of["FSGLD"], of["DSGLD"])
        where = "" if config["table"] == "susy" else f" on {metrics['data'].lower()}"
        seen = abs(gain) > TIMES * error
        if better:
            word = REPRODUCED if seen and gain > 0 else CONTRADICTED
        else:
            word = REPRODUCED if not seen else PARTLY
        word = on_other_data(word, config["table"] != "susy")
        if not np.isfinite(error):
            word = UNTESTABLE
        (row,) = [row for row in _of(metrics, "FSGLD") if row["split"] == split]
        coin = np.nanmean(np.array(of["FSGLD"], float)) < -np.log(2)
        below = "; FSGLD is below a coin toss" * bool(coin and better)
        ignores = f", {row['ignores input']} of its networks ignore their input" * bool(below)
        text = f"FSGLD less DSGLD{where}: {gain:+.4f} (s.e. {error:.4f}) nats"
        return Verdict(word, text + below + ignores)

    return judge


def _deviations(metrics: Given, config: Given) -> Verdict:
    ratios = {}
    for split in ("iid", "non_iid"):
        sd = [
            np.nanstd(np.array(metrics["values"][f"{split} {m}"]["test"], float))
            for m in ("FSGLD", "DSGLD")
        ]
        ratios[split] = sd[0] / sd[1]
    word = REPRODUCED if max(ratios.values()) < 0.5 else CONTRADICTED
    word = on_other_data(word, config["table"] != "susy")
    return Verdict(
        word,
        f"standard deviations over those of DSGLD: {ratios['iid']:.2f} (IID), "
        f"{ratios['non_iid']:.2f} (non-IID); the paper's are 0.22 and 0.10",
    )


def _paper_step(metrics: Given, config: Given) -> Verdict:
    lost = [row["diverged"] for row in _of(metrics, "FSGLD")]
    if min(lost) < config["num_repetitions"]:
        return _network("non_iid", True)(metrics, config)
    return Verdict(
        UNTESTABLE, f"FSGLD diverged in all {config['num_repetitions']} repetitions of both splits"
    )


STABLE = ("fsgld/mlp", "fsgld/mlp_small")
SHORT = ("fsgld/mlp_small_fisher_dense_short",)
SHORTER = ("fsgld/mlp_small_fisher_dense_shorter",)
SAMPLED = ("fsgld/metric", "fsgld/metric_small")


def _exploration(metrics: Given, config: Given) -> Verdict:
    del config
    found = best_multiples(metrics)
    errors = sorted(found)
    multiples = [found[error]["alpha"] for error in errors]
    falls = all(b <= a for a, b in itertools.pairwise(multiples)) and multiples[-1] < multiples[0]
    listed = ", ".join(f"{a:g} ({e:g})" for a, e in zip(multiples, errors, strict=True))
    return Verdict(
        REPRODUCED if falls else CONTRADICTED,
        "of the multiples tried that with the least variance, by how far surrogates' means are "
        f"off (in the scatter of the shards): {listed}",
    )


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
        "DSGLD with a hundred local updates converges as fast as FSGLD, and plateaus higher.",
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
    Claim("Figure 5", "FSGLD varies less.", "fsgld/metric", _spread, "log_likelihood.png", SAMPLED),
    Claim(
        "Appendix F.2",
        "Results with Laplace approximations as surrogates (the appendix is not in our copy).",
        "fsgld/metric",
        _laplace,
        None,
        ("fsgld/metric_laplace",),
    ),
    Claim(
        "Table 1",
        "Networks on non-IID shards: FSGLD is far better on held-out rows.",
        "fsgld/mlp",
        _network("non_iid", True),
        "log_likelihood.png",
        STABLE,
    ),
    Claim(
        "Table 1",
        "The same with expansions at a trained network as surrogates (diagonal; ours).",
        "fsgld/mlp",
        _network("non_iid", True),
        None,
        ("fsgld/mlp_small_fisher",),
    ),
    Claim(
        "Table 1",
        "The same with dense expansions as surrogates (ours).",
        "fsgld/mlp",
        _network("non_iid", True),
        None,
        ("fsgld/mlp_small_fisher_dense",),
    ),
    Claim(
        "Table 1",
        "The same with dense expansions and visits a tenth as long (ours).",
        "fsgld/mlp",
        _network("non_iid", True),
        None,
        SHORT,
    ),
    Claim(
        "Table 1",
        "The same with dense expansions and visits a hundredth as long (ours).",
        "fsgld/mlp",
        _network("non_iid", True),
        None,
        SHORTER,
    ),
    Claim(
        "Table 1",
        "On IID shards both perform alike.",
        "fsgld/mlp",
        _network("iid", False),
        "log_likelihood.png",
        STABLE,
    ),
    Claim(
        "Table 1",
        "The same with dense expansions and visits a tenth as long (ours).",
        "fsgld/mlp",
        _network("iid", False),
        None,
        SHORT,
    ),
    Claim(
        "Table 1",
        "FSGLD's standard deviations are smaller everywhere.",
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
