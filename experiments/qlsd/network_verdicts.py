"""What runs of networks say about Tables 4 and S2 and Figures 2, S5 and S6."""

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    DRAWN,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Given,
    Verdict,
    all_or_some,
    first_that_holds,
    on_other_data,
)
from experiments.qlsd.cifar10_findings import MIXED
from experiments.qlsd.mnist_findings import TABLE_S2
from experiments.qlsd.network_figures import EDGES

__all__ = [
    "calibrated_as_sgld",
    "calibration",
    "confident",
    "fed_be_behind",
    "fsgld_near_sgld",
    "labelled_by_entropy",
    "near_hmc",
    "near_sgld",
    "unsure_of_clothes",
]

OURS = ("QLSD++", "QLSD++ PP")
FEDERATED = ("DG-SGLD", "FSGLD", "FedBE-Dirichlet", "FedBE-Gauss")

# Of Table S2.
TRAINING, STEP_SIZE = 100_000, 1e-7  # iterations of QLSD and QLSD++
FED_BE_STEPS = 250  # local steps
FED_BE_GAP = 5  # points of accuracy that are "far"; the paper's are 20 and 56
FSGLD_GAP = 0.6  # points of accuracy that FSGLD is behind SGLD


def near_hmc(metrics: Given, config: Given) -> Verdict:
    """Judge predictions by their distance to those of HMC (Table 4)."""
    found, hmc = {n: s for n, s in metrics["scores"].items() if s}, metrics["hmc"]
    # Networks' weights have many modes that predict the same: where a run has it, that of the
    # predictions counts.
    rhat = hmc.get("rhat of predictions", hmc.get("rhat"))
    names = [name for name in (*OURS, "SGLD", *FEDERATED) if name in found]
    tv, agreement = ({n: found[n][score] for n in names} for score in ("tv", "agreement"))
    listed = "total variation: " + ", ".join(f"{name} {tv[name]:.3f}" for name in names)
    if hmc and (rhat is None or rhat > MIXED):
        told = "not to be told" if rhat is None else f"{rhat:.2g}"
        return Verdict(UNTESTABLE, f"our HMC has not mixed (R-hat {told})")
    # No farther than a chain of HMC is from the others, and than chance in the test images.
    noise = found.get("HMC", {}).get("tv", 0.0)
    share = agreement["SGLD"]
    chance = TIMES * (2 * share * (1 - share) / metrics["num_test"]) ** 0.5
    ours, others = ([n for n in names if n in of] for of in (OURS, FEDERATED))
    near = all(tv[n] <= tv["SGLD"] + noise and agreement[n] >= share - chance for n in ours)
    competes = all(
        tv[n] <= tv[other] + noise and agreement[n] >= agreement[other] - chance
        for n in ours
        for other in others
    )
    word = first_that_holds(
        (near and competes, REPRODUCED), (near or competes, PARTLY), otherwise=CONTRADICTED
    )
    listed += f", a chain of HMC to the others {noise:.3f}" if rhat is not None else ""
    listed += "; agreement: " + ", ".join(f"{name} {agreement[name]:.3f}" for name in names)
    digits, where = config.get("source") == "digits", _digits(config)
    if rhat is not None:
        of = "HMC's predictions" if "rhat of predictions" in hmc else "HMC"
        where += f"; R-hat of {of} {rhat:.3f}"
    return Verdict(on_other_data(word, digits), f"{listed} (up to {chance:.3f} is chance){where}")


def _digits(config: Given) -> str:
    """Return words on the data where they are not the paper's."""
    digits = config.get("source") == "digits"
    return "; scikit-learn's digits, a perceptron" if digits else ""


def calibration(metrics: Given, config: Given) -> Verdict:
    """List calibration errors; the paper concludes nothing from the curves (Figure 2)."""
    where = _digits(config)
    found = {n: s["ece"] for n, s in metrics["scores"].items() if s and n != "start"}
    listed = ", ".join(f"{name} {100 * ece:.2g}" for name, ece in found.items())
    return Verdict(
        DRAWN,
        f"expected calibration errors in hundredths: {listed}{where}",
    )


def near_sgld(metrics: Given, config: Given) -> Verdict:
    """Judge whether QLSD and QLSD++ predict as well as SGLD (Table S2)."""
    found = metrics["scores"]
    if not all(found.get(n) for n in ("SGLD", "QLSD", "QLSD++")):
        return Verdict(UNTESTABLE, "a chain turned non-finite")
    rate = found["SGLD"]["accuracy"]
    noise = TIMES * 100 * (2 * rate * (1 - rate) / metrics["num_test"]) ** 0.5
    gaps = {n: 100 * (found[n]["accuracy"] - rate) for n in ("QLSD", "QLSD++")}
    within = max(noise, 1.0)
    listed = ", ".join(f"{n} {gap:+.1f} points" for n, gap in gaps.items())
    listed += f" of accuracy (noise {noise:.1f}; up to {within:.1f} counts as close)"
    warm = bool(config["num_warm_steps"])
    start = "; all start at a trained network" if warm else "; from random weights"
    means = {n: found[n].get("accuracy_of_mean") for n in ("SGLD", *gaps)}
    apart = [0.0]
    if all(mean is not None for mean in means.values()):
        apart = [100 * (means[n] - means["SGLD"]) for n in gaps]
        listed += ", of the network at the posterior mean "
        listed += ", ".join(f"{n} {gap:+.1f}" for n, gap in zip(gaps, apart, strict=True))
    word = first_that_holds(
        (min(gaps.values()) < -within, CONTRADICTED),
        # Ahead is not close, either.
        (max(gaps.values()) > within or min(apart) < -within or warm, PARTLY),
        otherwise=REPRODUCED,
    )
    passes = config["batch_size"] / metrics["num_rows"]
    ours = passes * config["num_clients"] * config["num_rounds"]
    return Verdict(
        word,
        f"{listed}{start}, {config['num_rounds']:,} iterations with steps of "
        f"{config['step_size']:g} (the paper: {TRAINING:,} with {STEP_SIZE:g}): {ours:.0f} passes "
        f"over the rows, SGLD's "
        f"{passes * config['sgld_rounds']:.0f}",
    )


def calibrated_as_sgld(metrics: Given, config: Given) -> Verdict:
    """Judge whether QLSD and QLSD++ are calibrated nearly as SGLD is (Table S2)."""
    del config
    found, places = metrics["scores"], {"ece": 1, "nnll": 3}
    if not all(found.get(n) for n in ("SGLD", "QLSD", "QLSD++")):
        return Verdict(UNTESTABLE, "a chain turned non-finite")
    near, listed = [], []
    for name in ("QLSD", "QLSD++"):
        own = [100 * (found[name][score] - found["SGLD"][score]) for score in places]
        paper = [TABLE_S2[name][at] - TABLE_S2["SGLD"][at] for at in places.values()]
        near += [a <= b for a, b in zip(own, paper, strict=True)]
        listed.append(
            f"{name} {own[0]:+.2g} and {own[1]:+.2g} (the paper {paper[0]:+.2g} and "
            f"{paper[1]:+.2g})"
        )
    return Verdict(
        all_or_some(near, [not each for each in near]),
        f"expected calibration error and negative log likelihood, in hundredths, over SGLD's: "
        f"{'; '.join(listed)}; no farther than in the paper counts as close",
    )


def fsgld_near_sgld(metrics: Given, config: Given) -> Verdict:
    """Judge whether FSGLD predicts nearly as well as SGLD (Table S2)."""
    found = metrics["scores"]
    start = "a trained network" if config["num_warm_steps"] else "random weights"
    if not found.get("SGLD"):
        return Verdict(UNTESTABLE, "SGLD turned non-finite")
    if not found.get("FSGLD"):
        told, near = f"non-finite in round {metrics['diverged']['FSGLD']}", False
    else:
        own, other = (100 * found[name]["accuracy"] for name in ("FSGLD", "SGLD"))
        told = f"{own - other:+.1f} points of accuracy to SGLD (right for {own:.1f} %)"
        near = abs(own - other) <= FSGLD_GAP
    # The paper does not say how it made them, so that ours neither confirm nor contradict it.
    word = PARTLY if near else UNTESTABLE
    return Verdict(word, f"{told}; surrogates are our choice, fitted at {start}, the start")


def fed_be_behind(metrics: Given, config: Given) -> Verdict:
    """Judge whether FedBE predicts worse than SGLD (Table S2)."""
    found = metrics["scores"]
    gaps = {
        name: 100 * (found[name]["accuracy"] - found["SGLD"]["accuracy"])
        for name in ("FedBE-Gauss", "FedBE-Dirichlet")
        if found.get(name) and found.get("SGLD")
    }
    listed = ", ".join(f"{name} {gap:+.1f}" for name, gap in gaps.items())
    if config["num_warm_steps"]:
        return Verdict(UNTESTABLE, f"FedBE starts trained here: {listed} points to SGLD")
    far = [gap < -FED_BE_GAP for gap in gaps.values()]
    steps = config["fed_be_local_steps"]
    # The drift of long local runs is what the claim is about.
    short = steps < FED_BE_STEPS
    # Without the paper's rounds and labels, no run of ours confirms or contradicts it.
    word = PARTLY if any(far) and not short else UNTESTABLE
    told = f"{listed} points to SGLD after {config['num_rounds'] // steps} rounds of {steps} local "
    told += f"steps{f' (the paper: {FED_BE_STEPS})' if short else ''} from random weights, "
    told += f"{100 * config['proportion']:g} % of a client's images of one label; the paper does "
    told += "not state the rounds, and our copy lacks that share"
    told += "; a study of both: [`qlsd/fed_be_small`](#qlsdfed_be_small)"
    return Verdict(word, told)


def unsure_of_clothes(metrics: Given, config: Given) -> Verdict:
    """Tell how well entropy tells clothes from digits; the paper draws it alone (Figure S5)."""
    del config
    kept, lost = _learned(metrics)
    auc = {n: metrics["scores"][n]["auc"] for n in kept if "auc" in metrics["scores"][n]}
    low = min(auc, key=lambda name: auc[name])
    # As many images are in the distribution as out of it; this is the most their noise can be.
    noise = (auc[low] * (1 - auc[low]) / metrics["num_test"]) ** 0.5
    return Verdict(
        DRAWN,
        f"area under the curve {auc[low]:.3f} ({low}, s.e. at most {noise:.3f}) to "
        f"{max(auc.values()):.3f}{lost}",
    )


def _learned(metrics: Given) -> tuple[list[str], str]:
    """Return the methods that predict, and words on those left out: about as bad as chance."""
    found = {n: s["accuracy"] for n, s in metrics["scores"].items() if s and n != "start"}
    lost = [n for n, accuracy in found.items() if accuracy < max(found.values()) / 2]
    told = "".join(f"; without {n}, which is right for {100 * found[n]:.0f} %" for n in lost)
    return [n for n in found if n not in lost], told


def labelled_by_entropy(metrics: Given, config: Given) -> Verdict:
    """Tell how many images the rule of section S5.3 labels rightly."""
    del config
    (kept, lost), rates, width = _learned(metrics), [], np.diff(EDGES)
    for name in kept:
        inside, outside = (np.array(part["density"]) for part in metrics["curves"][name]["entropy"])
        digit = inside > outside
        right = [
            100 * (part * width)[which].sum()
            for part, which in ((inside, digit), (outside, ~digit))
        ]
        rates.append(f"{name} {right[0]:.0f} and {right[1]:.0f}")
    return Verdict(
        DRAWN, f"% of the digits and of the clothes that are told: {', '.join(rates)}{lost}"
    )


ENOUGH = 100  # images, of which an accuracy near one can be told


def confident(metrics: Given, config: Given) -> Verdict:
    """Judge how many predictions are right where they are sure (Figure S6)."""
    del config
    learned, lost = _learned(metrics)
    curves = {name: metrics["curves"][name]["credibility"] for name in learned}
    # At one threshold, the last that enough images of every method pass.
    counts = np.min([of["num_rows"] for of in curves.values()], axis=0)
    if counts[0] < ENOUGH:
        return Verdict(UNTESTABLE, "too few test images")
    last = int(np.flatnonzero(counts >= ENOUGH)[-1])
    found = {name: (of["accuracy"][0], of["accuracy"][last]) for name, of in curves.items()}
    least = next(iter(curves.values()))["threshold"][last]
    worst = min(found, key=lambda name: found[name][1])
    best = max(last for _, last in found.values())
    rises = all(last >= first for first, last in found.values())
    word = first_that_holds(
        (rises and found[worst][1] > 0.98 and not lost, REPRODUCED),
        (rises, PARTLY),
        otherwise=CONTRADICTED,
    )
    return Verdict(
        word,
        f"{100 * found[worst][1]:.1f} ({worst}) to {100 * best:.1f} % are right where the "
        f"predicted class has a probability of {least:.3g} or more (at least {ENOUGH} images of "
        f"each method), "
        f"{100 * min(first for first, _ in found.values()):.1f} to "
        f"{100 * max(first for first, _ in found.values()):.1f} % over all images{lost}",
    )
