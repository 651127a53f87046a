"""The claims of Vono et al. (2022), in the paper's order."""

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    DRAWN,
    PARTLY,
    REPRODUCED,
    TIMES,
    Claim,
    Given,
    Verdict,
    first_that_holds,
    rows_of,
)
from experiments.qlsd import gaussian_verdicts, hpd_verdicts, network_verdicts
from experiments.qlsd.consistency import VARIED, power, power_of_added
from experiments.qlsd.label_split import shares
from experiments.qlsd.synthetic_findings import by_memory, cut_by_memory

__all__ = ["CLAIMS"]

ON_HMC = ("qlsd/cifar10", "qlsd/digits_network", "qlsd/cifar10_small")
RANDOM_START = ("qlsd/mnist", "qlsd/mnist_gpu", "qlsd/mnist_small_random", "qlsd/mnist_small")
WARM_START = ("qlsd/mnist_gpu_warm", "qlsd/mnist_small_warm")
REDUCED = ("QLSD*", "QLSD++")


def _sources(metrics: Given, config: Given) -> Verdict:
    del config
    sources = ("batch", "levels", "participation")
    found = {VARIED[name]: power(metrics, name, "QLSD") for name in sources}
    less = [value < -0.05 for value in found.values()]
    word = first_that_holds((all(less), REPRODUCED), (any(less), PARTLY), otherwise=CONTRADICTED)
    listed = ", ".join(f"{name} to the power {value:+.2f}" for name, value in found.items())
    return Verdict(
        word,
        f"the squared distance of QLSD from the posterior goes as {listed} (by the law; each "
        "varied alone)",
    )


def _heterogeneity(metrics: Given, config: Given) -> Verdict:
    del config
    plain, *reduced = (power(metrics, "spread", name) for name in ("QLSD", *REDUCED))
    none = [abs(value) < 0.05 for value in reduced]
    # That these two have none follows from equal Hessians, and is no measurement.
    word = PARTLY if plain > 1 and all(none) else CONTRADICTED
    listed = ", ".join(f"{v:.2f} with {n}" for n, v in zip(REDUCED, reduced, strict=True))
    return Verdict(
        word,
        "the squared distance from the posterior goes as the spread of the clients' means to the "
        f"power {plain:.2f} with QLSD, {listed} (by the law; the latter two follow from the equal "
        "Hessians of this example)",
    )


def _discrepancy(metrics: Given, config: Given) -> Verdict:
    del config
    found = {name: power_of_added(metrics, name) for name in ("compression", "participation")}
    grows = [value > 0.1 for value in found.values()]
    word = first_that_holds((all(grows), REPRODUCED), (any(grows), PARTLY), otherwise=CONTRADICTED)
    listed = ", ".join(f"{value:.2f} ({name})" for name, value in found.items())
    return Verdict(
        word,
        "what each adds to the squared distance of QLSD from the posterior goes as the spread of "
        f"the clients' means to the power {listed} (by the law)",
    )


def _rows(metrics: Given, config: Given) -> Verdict:
    del config
    names = ("QLSD", *REDUCED)
    plain, *reduced = powers = [power(metrics, "rows", name) for name in names]
    word = first_that_holds(
        # In part at most: with equal Hessians QLSD* and QLSD++ have no noise of minibatches.
        (min(reduced) < plain, PARTLY),
        otherwise=CONTRADICTED,
    )
    first, *_, last = [row for row in metrics["table"] if row["varied"] == "rows"]
    listed = ", ".join(f"{v:+.2f} with {n}" for n, v in zip(names, powers, strict=True))
    sizes = [[row[f"{name}, relative"] for row in (first, last)] for name in names]
    shares = ", ".join(
        f"from {a:.2g} to {b:.2g} with {n}" for n, (a, b) in zip(names, sizes, strict=True)
    )
    return Verdict(
        word,
        f"the squared distance from the posterior goes as the number of rows to the power {listed} "
        f"(by the law; on this target QLSD* and QLSD++ have no noise of minibatches, so that their "
        "powers follow from the step size); in proportion to the posterior's own size, which "
        f"shrinks as well, {shares}",
    )


def _dominant(metrics: Given, config: Given) -> Verdict:
    del config
    found, counts = shares(metrics), np.array(metrics["counts"])
    return Verdict(
        DRAWN,
        f"{100 * found.min():.3g} to {100 * found.max():.3g} % of a client's images are of one "
        f"label, at least {counts.min()} of any other; {len(found)} clients (the paper's share is "
        "lost, and so is what it is a share of)",
    )


def _memory(metrics: Given, config: Given) -> Verdict:
    del config
    without, with_ = by_memory(metrics)
    gains = [
        a["error of variances"] - b["error of variances"]
        for a, b in zip(without, with_, strict=True)
    ]
    errors = [np.hypot(a["s.e."], b["s.e."]) for a, b in zip(without, with_, strict=True)]
    order = np.argsort([-a["omega"] for a in without])
    largest_first = list(np.argsort([-g for g in gains])) == list(order)
    good = gains[order[0]] > TIMES * errors[order[0]] and largest_first
    added = cut_by_memory(without, with_)
    drawn = "clients share all noise" if metrics["shared_seed"] else "clients' noise is independent"
    text = f"{drawn}: the variance that compression adds is "
    text += f"{min(added):.0f} to {max(added):.0f} times less" if added else "not told from zero"
    coarsest = (without[order[0]], with_[order[0]])
    (plain,) = rows_of(metrics, "algorithm", "LSD++")
    over = [row["error of variances"] / plain["error of variances"] for row in coarsest]
    # At most, as runs of the same noise are closer to each other.
    noise = [
        ratio * np.hypot(*(row["s.e."] / row["error of variances"] for row in (each, plain)))
        for ratio, each in zip(over, coarsest, strict=True)
    ]
    text += (
        f"; error over LSD++'s at {coarsest[0]['algorithm'][8:]}: {over[0]:.2f} without, "
        f"{over[1]:.2f} with (s.e. at most {max(noise):.1g})"
    )
    return Verdict(REPRODUCED if good else CONTRADICTED, text)


CLAIMS = (
    Claim(
        "Section 3, Table 2",
        "Stochastic gradients, compression and partial participation each bias QLSD.",
        "qlsd/consistency",
        _sources,
        "bias.png",
    ),
    Claim(
        "Section 3, Table 2",
        "The bias that compression and partial participation add to QLSD's grows with how much "
        "clients differ.",
        "qlsd/consistency",
        _discrepancy,
        "bias.png",
    ),
    Claim(
        "Theorems 1 to 3",
        "Bounds on the distance from the posterior after so many rounds (our copy lacks their "
        "constants).",
    ),
    Claim(
        "Table 2",
        "How much clients differ biases QLSD, not QLSD* and QLSD++.",
        "qlsd/consistency",
        _heterogeneity,
        "bias.png",
    ),
    Claim(
        "Figure 1, top",
        "The clients' data are independent but not identically distributed (a picture of them).",
        "qlsd/gaussian",
        gaussian_verdicts.clients_apart,
        "data.png",
    ),
    Claim(
        "Figure 1, bottom",
        "QLSD* reaches the error of LSD* with about 2.5 times fewer bits (with how many a number "
        "is lost; 16 fit).",
        "qlsd/gaussian",
        gaussian_verdicts.bits_saved,
        "mse.png",
    ),
    Claim(
        "Figure 1, bottom",
        "QLSD* always outperforms QLSD.",
        "qlsd/gaussian",
        gaussian_verdicts.outperforms,
        "mse.png",
    ),
    Claim(
        "Figure 1, bottom",
        "Decreasing a parameter (lost; we read omega, which less compression decreases) does not "
        "significantly reduce QLSD's bias.",
        "qlsd/gaussian",
        gaussian_verdicts.less_compression,
        "squares.png",
    ),
    Claim(
        "Table 3",
        "QLSD++ gives results like its uncompressed counterpart's.",
        "qlsd/digits",
        hpd_verdicts.as_reference,
        "hpd.png",
    ),
    Claim(
        "Table 3",
        "QLSD++ is 3 to 7 times more efficient than LSD++.",
        "qlsd/digits",
        hpd_verdicts.efficiency,
        "hpd.png",
    ),
    Claim(
        "Table 3",
        "The error falls with the number of bits (read off the table).",
        "qlsd/digits",
        hpd_verdicts.by_bits,
        "hpd.png",
    ),
    Claim(
        "Table 3",
        "QLSD++ performs like DG-SGLD and FSGLD, which save bits by local steps.",
        "qlsd/digits",
        hpd_verdicts.competing,
        "hpd.png",
    ),
    Claim(
        "Table 4",
        "By agreement and total variation QLSD++, even with partial participation, is as close to "
        "HMC as SGLD and competes with other federated methods.",
        "qlsd/cifar10",
        network_verdicts.near_hmc,
        "calibration.png",
        ON_HMC,
    ),
    Claim(
        "Figure 2",
        "Calibration curves of the predictions (a picture of them).",
        "qlsd/cifar10",
        network_verdicts.calibration,
        "calibration.png",
        ON_HMC,
    ),
    Claim(
        "Section S4, Table 2",
        "With more rows QLSD* and QLSD++ get more accurate, QLSD does not.",
        "qlsd/consistency",
        _rows,
        "bias.png",
    ),
    Claim(
        "Figure S1",
        "Clients have very different numbers of rows.",
        "qlsd/gaussian",
        gaussian_verdicts.client_sizes,
        "clients.png",
    ),
    Claim(
        "Figure S2",
        "A smaller step size (lost; we read it so) saves still more bits.",
        "qlsd/gaussian",
        gaussian_verdicts.small_steps,
        "budget.png",
    ),
    Claim(
        "Figure S3",
        "The memory reduces the error of the variances, most where compression is coarse.",
        "qlsd/synthetic",
        _memory,
        "memory.png",
    ),
    Claim(
        "Table S1",
        "Covertype: 4 bits have nine times less error than 8 and 16 (read off the table).",
        "qlsd/covtype",
        hpd_verdicts.covertype,
        "hpd.png",
    ),
    Claim(
        "Figure S4",
        "Each client has one dominant label, and some of all others (a picture).",
        "qlsd/label_split",
        _dominant,
        "labels.png",
    ),
    Claim(
        "Table S2",
        "QLSD and QLSD++ come close to SGLD in accuracy.",
        "qlsd/mnist",
        network_verdicts.near_sgld,
        "calibration.png",
        RANDOM_START,
    ),
    Claim(
        "Table S2",
        "They come close to SGLD in calibration, too (we read this off its ECE and negative log "
        "likelihood).",
        "qlsd/mnist",
        network_verdicts.calibrated_as_sgld,
        "calibration.png",
        RANDOM_START,
    ),
    Claim(
        "Table S2",
        "FedBE is 20 to 56 points of accuracy behind.",
        "qlsd/mnist",
        network_verdicts.fed_be_behind,
        "calibration.png",
        RANDOM_START,
    ),
    Claim(
        "Table S2",
        "FSGLD is 0.6 points behind SGLD.",
        "qlsd/mnist",
        network_verdicts.fsgld_near_sgld,
        "calibration.png",
        RANDOM_START,
    ),
    Claim(
        "Figure S5",
        "Predictions are less sure of clothes than of digits (entropy; the paper draws it).",
        "qlsd/mnist",
        network_verdicts.unsure_of_clothes,
        "entropy.png",
        RANDOM_START,
    ),
    Claim(
        "Section S5.3",
        "An image is taken for a digit where the density of its entropy is higher among digits "
        "than among clothes (a rule; the paper has no rates).",
        "qlsd/mnist",
        network_verdicts.labelled_by_entropy,
        "entropy.png",
        RANDOM_START,
    ),
    Claim(
        "Figure S6",
        "The accuracy tends to one where predictions are confident.",
        "qlsd/mnist",
        network_verdicts.confident,
        "calibration.png",
        RANDOM_START,
    ),
    Claim("Section S5.3", "CIFAR-10 against SVHN out of distribution (SVHN is not at hand)."),
    Claim(
        "Table S2",
        "Do QLSD and QLSD++ come close to SGLD in accuracy from a trained network, too?",
        "qlsd/mnist",
        network_verdicts.near_sgld,
        "calibration.png",
        WARM_START,
        ours=True,
    ),
    Claim(
        "Table S2",
        "Is FedBE behind from a trained network, too?",
        "qlsd/mnist",
        network_verdicts.fed_be_behind,
        "calibration.png",
        WARM_START,
        ours=True,
    ),
    Claim(
        "Table S2",
        "Is FSGLD as close to SGLD from a trained network?",
        "qlsd/mnist",
        network_verdicts.fsgld_near_sgld,
        "calibration.png",
        WARM_START,
        ours=True,
    ),
)
