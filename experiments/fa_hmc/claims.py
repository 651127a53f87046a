"""The claims of Liang et al. (2024), in the paper's order."""

from experiments.claims import Claim
from experiments.fa_hmc import image_verdicts, simulated_verdicts
from experiments.fa_hmc.image_findings import LOST_ABOVE, LOST_ONE
from experiments.fa_hmc.image_verdicts import ALL, BEST_L

__all__ = ["CLAIMS"]

HIGH = ("fa_hmc/logistic", "fa_hmc/logistic_small")
LOW = ("fa_hmc/logistic_low", "fa_hmc/logistic_low_small")
ABOUT = (0.025, 0.1)  # what "about 5 %" may be
PLAIN = ("accuracy", "brier", "ece")
CLAIMS = (
    Claim(
        "Theorem 4.1",
        "The bound lets rounds form a U against T with noisy gradients, or momenta that differ.",
        "fa_hmc/local_steps",
        simulated_verdicts.in_u,
        "local_steps.png",
    ),
    Claim(
        "Section 4.1",
        "With exact gradients and shared momenta (vanilla) rounds vary little with T, so that a "
        "small one is to be preferred.",
        "fa_hmc/local_steps",
        simulated_verdicts.vanilla,
        "local_steps.png",
    ),
    Claim(
        "Proposition 4.5",
        "A step size that changes saves a logarithmic factor of the bound on rounds.",
        "fa_hmc/local_steps",
        simulated_verdicts.falling,
        "local_steps.png",
    ),
    Claim(
        "Figure 1a",
        "Exact gradients: FA-HMC beats FA-LD by about 5 %.",
        "fa_hmc/logistic",
        simulated_verdicts.gain("exact", ABOUT),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1b",
        "Noisy gradients: FA-HMC beats FA-LD by about 5 %.",
        "fa_hmc/logistic",
        simulated_verdicts.gain("noisy", ABOUT),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1a",
        "A wide range of step sizes does well for FA-HMC: it is easier to tune than FA-LD.",
        "fa_hmc/logistic",
        simulated_verdicts.easy("exact"),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1b",
        "A wide range of step sizes does well for FA-HMC: it is easier to tune than FA-LD.",
        "fa_hmc/logistic",
        simulated_verdicts.easy("noisy"),
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figures 1a, 1b",
        "A small step size usually does well for FA-HMC.",
        "fa_hmc/logistic",
        simulated_verdicts.small_steps,
        "errors.png",
        HIGH,
    ),
    Claim(
        "Figure 1c",
        "The best T, 70, needs more than 65 times fewer rounds than another T "
        f"{LOST_ONE}, where a setting (lost, presumably the ME) has some value (lost, too).",
        "fa_hmc/rounds_by_law",
        simulated_verdicts.fewer_rounds,
        "law.png",
    ),
    Claim(
        "Figure 1c",
        "The best T is 70; larger ones need more rounds again.",
        "fa_hmc/rounds_by_law",
        simulated_verdicts.best_is_claimed,
        "law.png",
    ),
    Claim(
        "Figure 1c",
        "The best T saves more rounds, against another "
        f"{LOST_ONE}, the smaller a setting is (lost, presumably the ME).",
        "fa_hmc/rounds_by_law",
        simulated_verdicts.thresholds,
        "law.png",
    ),
    Claim(
        "Figure 1d",
        "In dimension 10, too, FA-HMC is better with noisy gradients.",
        "fa_hmc/logistic",
        simulated_verdicts.gain("noisy"),
        "errors.png",
        LOW,
    ),
    Claim(
        "Figure 1d",
        "In dimension 10 the gap is larger for smaller step sizes.",
        "fa_hmc/logistic",
        simulated_verdicts.larger_gap,
        "errors.png",
        LOW,
    ),
    Claim(
        "Figures 1b, 1d",
        "FA-HMC's advantage is larger in high dimension.",
        "fa_hmc/logistic",
        simulated_verdicts.more_in_high,
        "errors.png",
        LOW,
    ),
    Claim(
        "Figure 2",
        "The square of the number of rounds is approximately proportional to the dimension.",
        "fa_hmc/dimension",
        simulated_verdicts.dimension,
        "rounds.png",
    ),
    Claim(
        "Figure 3",
        "Fashion-MNIST: FA-LD (L = 1) is the worst in Brier score, ECE and NLL and the second "
        "worst in accuracy.",
        "fa_hmc/fashion_mnist",
        image_verdicts.worst_and_second,
        "curves_L.png",
    ),
    Claim(
        "Figure 3",
        "Fashion-MNIST: one L (value lost, presumably 50) is the best in accuracy, Brier score "
        "and NLL.",
        "fa_hmc/fashion_mnist",
        image_verdicts.best_values("L", dict.fromkeys(("accuracy", "brier", "nnll"), (BEST_L,))),
        "curves_L.png",
    ),
    Claim(
        "Figure 3",
        f"Fashion-MNIST: it is up to 26 % better in ECE and 2 % in NLL than another L {LOST_ONE}.",
        "fa_hmc/fashion_mnist",
        image_verdicts.gains_of_best,
        "curves_L.png",
    ),
    Claim(
        "Section 5.3",
        "Fashion-MNIST: FA-HMC beats FA-LD at the same computation, too.",
        "fa_hmc/fashion_mnist",
        image_verdicts.at_same_work,
    ),
    Claim(
        "Figure 4",
        f"Fashion-MNIST: one T {LOST_ONE} is the worst in all four scores.",
        "fa_hmc/fashion_mnist",
        image_verdicts.above_one("T", ALL, all_of_them=True),
        "curves_T.png",
    ),
    Claim(
        "Figure 4",
        "Fashion-MNIST: T = 50 is the best in Brier score, T = 20 in NLL.",
        "fa_hmc/fashion_mnist",
        image_verdicts.best_values("T", {"brier": (50,), "nnll": (20,)}),
        "curves_T.png",
    ),
    Claim(
        "Figure 5",
        "A network: some L above 1 is better in accuracy and ECE.",
        "fa_hmc/network",
        image_verdicts.above_one("L", ("accuracy", "ece")),
        "curves_L.png",
    ),
    Claim(
        "Figure 5",
        "A network: FA-LD (L = 1) is slightly better in Brier score.",
        "fa_hmc/network",
        image_verdicts.one_best("L", "brier"),
        "curves_L.png",
    ),
    Claim(
        "Figure 5",
        f"A network: one T {LOST_ONE} is the worst.",
        "fa_hmc/network",
        image_verdicts.above_one("T", PLAIN, all_of_them=True),
        "curves_T.png",
    ),
    Claim(
        "Figure 6",
        "KMNIST: L = 1 is never the best.",
        "fa_hmc/kmnist",
        image_verdicts.above_one("L", PLAIN),
        "curves_L.png",
    ),
    Claim(
        "Figure 6",
        "Two classes of CIFAR-10: L = 1 is never the best.",
        "fa_hmc/cifar2",
        image_verdicts.above_one("L", PLAIN),
        "curves_L.png",
    ),
    Claim(
        "Figure 6",
        "Two classes of CIFAR-10: L = 10 is the best in accuracy and Brier score, a larger one in "
        "ECE.",
        "fa_hmc/cifar2",
        image_verdicts.best_values("L", {"accuracy": (10,), "brier": (10,), "ece": (50, 100)}),
        "curves_L.png",
    ),
    Claim(
        "Figure 7",
        f"KMNIST: T {LOST_ABOVE} is better than another {LOST_ONE} in all scores.",
        "fa_hmc/kmnist",
        image_verdicts.above_one("T", PLAIN),
        "curves_T.png",
    ),
    Claim(
        "Figure 7",
        f"Two classes of CIFAR-10: T {LOST_ABOVE} is better than another {LOST_ONE} but for "
        "accuracy.",
        "fa_hmc/cifar2",
        image_verdicts.above_one("T", ("brier", "ece")),
        "curves_T.png",
    ),
    *(
        Claim(
            f"Figure {figure}",
            f"{title}, in small: is some {varied} above 1 better than 1 in the later samples "
            "alone, too?",
            f"fa_hmc/{name}",
            image_verdicts.in_later_samples(image_verdicts.above_one(varied, ALL)),
            f"curves_{varied}.png",
            (f"fa_hmc/{name}_small",),
            ours=True,
        )
        for figure, varied, title, name in (
            (3, "L", "Fashion-MNIST", "fashion_mnist"),
            (4, "T", "Fashion-MNIST", "fashion_mnist"),
            (5, "L", "A network", "network"),
            (5, "T", "A network", "network"),
            (6, "L", "KMNIST", "kmnist"),
            (6, "L", "Two classes of CIFAR-10", "cifar2"),
            (7, "T", "KMNIST", "kmnist"),
            (7, "T", "Two classes of CIFAR-10", "cifar2"),
        )
    ),
    Claim(
        "Section 5.3",
        "Fashion-MNIST, in small: does FA-HMC beat FA-LD at the same computation in the later "
        "samples alone?",
        "fa_hmc/fashion_mnist",
        image_verdicts.in_later_samples(image_verdicts.at_same_work),
        runs=("fa_hmc/fashion_mnist_small",),
        ours=True,
    ),
    Claim(
        "Section 6",
        "Control variates, as we read the paper's proposal, have FA-HMC beat FA-LD with exact "
        "gradients.",
        "fa_hmc/drift",
        simulated_verdicts.corrected,
        "drift.png",
        ("fa_hmc/drift_1000", "fa_hmc/drift"),
        ours=True,
    ),
)
