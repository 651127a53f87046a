"""What a user of FA-HMC should know: its part of ``docs/findings.md``."""

from experiments.claims import Finding, Given
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.drift import agreement, compared, ends, share_told
from experiments.fa_hmc.image_comparisons import (
    against_one,
    compare,
    of_later_samples,
    standard_error,
    told,
)
from experiments.fa_hmc.image_figures import TITLES
from experiments.fa_hmc.image_findings import same_work
from experiments.fa_hmc.logistic_findings import of_errors, of_rule
from experiments.fa_hmc.logistic_judging import compared as compared_errors

__all__ = ["FINDINGS"]


def _fa_hmc(logistic: Given, low: Given, drift: Given, high_: Given) -> str:
    parts = []
    for of, kinds in ((logistic, ("exact", "noisy")), (low, ("noisy",))):
        told_ = []
        for kind in kinds:
            found = compared_errors(of["table"], kind)
            words = "not to be said" if found is None else of_errors(found)
            told_.append(f"with {kind} gradients {words}")
        parts.append(f"in dimension {of['dim']}, {', '.join(told_)}")
    bias = [row["bias of means, FA-HMC"] for row in drift["table"] if row["L, FA-HMC"] > 1]
    low_, high = agreement(drift)
    corrected = ("FA-LD, control variate", "FA-HMC, control variate")
    return (
        "On simulated logistic regression, best marginal errors over step sizes, against FA-LD's "
        f"and at the same number of rounds, so with more gradients: {'; '.join(parts)}. The paper "
        "has about 5 % smaller ones, with settings that our copy has lost."
        f"{_rule(logistic)} On long trajectories each client goes to its own mode. In a study on "
        f"the data of dimension {high_['dim']}, with step sizes nearer to the best ones, FA-HMC's "
        f"best error is {compared(high_, 'FA-HMC')} than FA-LD's. With `control_variate=True`, "
        "which takes one more exchange per round, it is "
        f"{compared(high_, corrected[1])} than FA-LD's without, and "
        f"{compared(high_, corrected[1], corrected[0])} than FA-LD's with it. At FA-HMC's best "
        f"step size control variates take away {share_told(high_)} of what the error "
        f"has above a perfect sampler's.{ends(high_)} In dimension "
        f"{drift['dim']} FA-HMC's means are off by {min(bias):.2f} to {max(bias):.2f} posterior "
        "standard deviations. `predict_bias` says so before "
        f"any run: the errors that follow from its law are {low_:.2f} to {high:.2f} times "
        "those measured. There FA-HMC's best error is "
        f"{compared(drift, 'FA-HMC')} than FA-LD's; with control variates FA-LD's is "
        f"{compared(drift, corrected[0])} and FA-HMC's {compared(drift, corrected[1])} than "
        f"FA-LD's without, and FA-HMC's {compared(drift, corrected[1], corrected[0])} than "
        f"FA-LD's with them.{ends(drift)}"
    )


def _rule(logistic: Given) -> str:
    """Say what the rule for L does, at the step size that is best where L is tuned."""
    found = of_rule(logistic["table"])
    if not found:
        return ""
    return (
        " Exact gradients have L by the paper's rule as we recall it, noisy ones have it tuned: in "
        f"dimension {logistic['dim']} {found}."
    )


def _equal_work(fashion: Given, kmnist: Given, cifar2: Given, *small: Given) -> str:
    parts, titles = [], ("Fashion-MNIST", "KMNIST", "CIFAR-10, 2")
    for title, of in zip(titles, (fashion, kmnist, cifar2), strict=True):
        results, chains = of["results"], of["config"]["num_chains"]
        ((long, short),) = [pair for pair in same_work(results) if pair[1]["L"] == 1]
        words: dict[str, list[str]] = {}
        for name, text in TITLES.items():
            word, gain = compare(name, long["scores"][name], short["scores"][name], chains)
            words.setdefault(word, []).append(text)
            if name == "accuracy":
                error = standard_error(long["scores"][name], short["scores"][name], chains)
                points = f"{100 * gain:+.1f} points (s.e. {100 * error:.1f})"
        listed = "; ".join(f"{word} in {', '.join(texts)}" for word, texts in words.items())
        equal = against_one(results, "L", "accuracy", chains)
        parts.append(
            f"{title} ({of['num_rows']:,} images, {of['rounds'][-1]} rounds): {listed}; accuracy "
            f"{points}. At equal rounds, L above 1 in accuracy: {equal.word}, {told(equal)}."
        )
    return (
        "With as many rounds and leapfrog steps, so as many gradients, one trajectory of ten steps "
        "(FA-HMC, L = 10, T = 1) against ten of one (FA-LD, L = 1, T = 10), by the noise of "
        f'chains. {" ".join(parts)} At equal rounds longer trajectories take more gradients. "So '
        'far": the difference was larger at half of the rounds, or, where the later samples are '
        "scored, it is not significant in these, reversed or not judged."
        + "".join(_later(title, of) for title, of in zip(titles, small, strict=True))
    )


def _later(title: str, small: Given) -> str:
    """Say what is left at equal rounds and at equal work in the later samples of a small run."""
    results, chains = of_later_samples(small["results"]), small["config"]["num_chains"]
    if results is None:
        return ""
    ((long, short),) = [pair for pair in same_work(results) if pair[1]["L"] == 1]
    told_ = [told(against_one(results, "L", name, chains)) for name in ("accuracy", "nnll")]
    words = [against_one(results, "L", name, chains).word for name in ("accuracy", "nnll")]
    same = [
        compare(name, long["scores"][name], short["scores"][name], chains)[0]
        for name in ("accuracy", "nnll")
    ]
    return (
        f" {title} in small ({small['num_rows']:,} images, {small['rounds'][-1]} rounds), in the "
        "later samples alone: L above 1 at equal "
        f"rounds is {words[0]} in accuracy ({told_[0]}) and {words[1]} in NLL ({told_[1]}), at "
        f"equal work it is {same[0]} and {same[1]}."
    )


def _dimension(dimension: Given) -> str:
    last, (low, high) = dimension["table"][-1], with_logarithm(dimension, dimension["config"])
    return (
        f"Rounds to a given distance grow as the dimension to the power {dimension['power']:.2f} "
        f"up to dimension {last['dimension']}, by the exact law, with Gaussians of our "
        "own and a step size made for the power 0.5, which the paper finds (Figure 2, Proposition "
        "4.3; its own step is lost). The rest is a logarithm: divided by sqrt(d) log(start's "
        f"distance / tolerance), rounds lie between {low:.2g} and {high:.2g}, as the start is the "
        "root of the dimension away."
    )


FINDINGS = (
    Finding(
        "Long trajectories let clients drift, which control variates mend",
        "Give FA-HMC's long trajectories `control_variate=True`, for one more exchange per round.",
        (
            ("fa_hmc/logistic", "fa_hmc/logistic_small"),
            "fa_hmc/logistic_low",
            "fa_hmc/drift",
            "fa_hmc/drift_1000",
        ),
        _fa_hmc,
        "errors.png",
    ),
    Finding(
        "Long trajectories against many short ones, at equal work",
        "Expect little of long trajectories at equal work.",
        (
            *("fa_hmc/fashion_mnist_gpu", "fa_hmc/kmnist_gpu", "fa_hmc/cifar2_gpu"),
            *("fa_hmc/fashion_mnist_small", "fa_hmc/kmnist_small", "fa_hmc/cifar2_small"),
        ),
        _equal_work,
        "curves_L.png",
    ),
    Finding(
        "FA-HMC's rounds grow a little faster than the root of the dimension",
        "Plan FA-HMC's rounds by the root of the dimension, times a logarithm.",
        ("fa_hmc/dimension",),
        _dimension,
        "rounds.png",
    ),
)
