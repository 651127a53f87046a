"""What a user of FA-HMC should know: its part of ``docs/findings.md``."""

import math

from experiments.claims import Finding, Given
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.drift import agreement, compared
from experiments.fa_hmc.image_findings import ranking
from experiments.fa_hmc.logistic_findings import best, gain, said

__all__ = ["FINDINGS"]


def _fa_hmc(logistic: Given, drift: Given) -> str:
    told = []
    for kind in ("exact", "noisy"):
        longer = [row for row in logistic["table"] if row[f"L, {kind}"] > 1]
        ours, theirs = best(longer, f"FA-HMC, {kind}"), best(logistic["table"], f"FA-LD, {kind}")
        told.append(f"{said(*gain(ours, theirs))} with {kind} gradients")
    plain, corrected = (compared(drift, name) for name in ("FA-HMC", "FA-HMC, control variate"))
    low, high = agreement(drift)
    with_correction = "FA-HMC, control variate"
    langevin, hamiltonian = (
        min(
            row[with_correction]
            for row in drift["table"]
            if (row[f"L, {with_correction}"] > 1) is longer
        )
        for longer in (False, True)
    )
    bias = [row["bias of means, FA-HMC"] for row in drift["table"] if row["L, FA-HMC"] > 1]
    return (
        f"On logistic regression in dimension {logistic['dim']}, FA-HMC's best marginal error over "
        f"step sizes, at the same number of rounds, is {' and '.join(told)} than FA-LD's. The "
        "paper has about 5 % smaller. With exact gradients the drift of the clients is what costs: "
        "on long trajectories each goes to its own mode, and the means are off by "
        f"{min(bias):.2f} to {max(bias):.2f} posterior standard deviations. `predict_bias` says so "
        f"before any run: the errors that follow from its law are {low:.2f} to {high:.2f} times "
        "those measured. On the step sizes of that study FA-HMC's best error is "
        f"{said(*plain)} than FA-LD's without and {said(*corrected)} with `control_variate=True`, "
        "which takes one more exchange per round; FA-LD with the same correction has "
        f"{langevin:.3g}, FA-HMC {hamiltonian:.3g}."
    )


def _equal_work(fashion: Given, kmnist: Given, cifar2: Given) -> str:
    told = []
    for name, of in (("Fashion-MNIST", fashion), ("KMNIST", kmnist), ("CIFAR-10, 2", cifar2)):
        (local,) = [r for r in of["results"] if (r["L"], r["T"]) == (1, 10)]
        (long,) = [r for r in of["results"] if (r["L"], r["T"]) == (10, 1)]
        ours, theirs = (r["scores"]["accuracy"] for r in (long, local))
        spread = 100 * math.hypot(ours["sd"], theirs["sd"])
        order = ranking(of["results"], "L", "accuracy")
        told.append(
            f"{name}: {100 * (ours['mean'] - theirs['mean']):+.1f} (spread over chains "
            f"{spread:.1f}; best L at equal rounds: {order[0][0]})"
        )
    return (
        "With as many rounds and leapfrog steps, one trajectory of ten steps (L = 10, T = 1) "
        f"against ten of one (L = 1, T = 10), in points of accuracy: {'; '.join(told)}. At equal "
        "rounds longer trajectories take more gradients."
    )


def _dimension(dimension: Given) -> str:
    last, (low, high) = dimension["table"][-1], with_logarithm(dimension, dimension["config"])
    return (
        f"Rounds to a given distance grow as the dimension to the power {dimension['power']:.2f} "
        f"up to dimension {last['dimension']}, by the exact law; the paper finds 0.5 "
        "(Figure 2, Proposition 4.3). The rest is a logarithm: over the root of the dimension and "
        "the logarithm of the start's distance in tolerances, rounds lie between "
        f"{low:.2g} and {high:.2g}, as the start is the root of the dimension away."
    )


FINDINGS = (
    Finding(
        "Long trajectories let clients drift, which control variates mend",
        ("fa_hmc/logistic_small", "fa_hmc/drift"),
        _fa_hmc,
        "errors.png",
    ),
    Finding(
        "At equal work, leapfrog steps and local steps differ by less than a point",
        ("fa_hmc/fashion_mnist_gpu", "fa_hmc/kmnist_gpu", "fa_hmc/cifar2_gpu"),
        _equal_work,
        "curves_L.png",
    ),
    Finding(
        "FA-HMC's rounds grow a little faster than the root of the dimension",
        ("fa_hmc/dimension",),
        _dimension,
        "rounds.png",
    ),
)
