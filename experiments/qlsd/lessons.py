"""What a user of QLSD should know: its part of ``docs/findings.md``."""

import math

from experiments import output
from experiments.claims import Finding, Given
from experiments.qlsd.consistency import power
from experiments.qlsd.digits_findings import few_beyond, with_error, with_middle
from experiments.qlsd.fed_be import ENSEMBLES
from experiments.qlsd.gaussian_findings import final_ratio, small_over_large
from experiments.qlsd.hpd import PUBLISHED_ALPHA
from experiments.qlsd.mnist_findings import TABLE_S2
from experiments.qlsd.network_scores import standard_error
from experiments.qlsd.synthetic_findings import by_memory, cut_by_memory

__all__ = ["FINDINGS"]


def _centered(gaussian: Given) -> str:
    right = gaussian["dim"] * gaussian["posterior_variance"]
    wide = {
        row["algorithm"]: row["E |theta - mean|^2"] / right
        for row in gaussian["table"]
        if row["algorithm"] in ("QLSD, 4 bits", "QLSD, 16 bits", "QLSD*, 4 bits", "LSD*")
    }
    listed = ", ".join(f"{name} {value:.3g}" for name, value in wide.items())
    return (
        "Where clients differ, their gradients do not vanish at the mode, and quantizing them adds "
        "noise that no number of rounds removes. The squared distance from the posterior mean over "
        f"its expectation: {listed}. With 16 bits what is left is the noise of minibatches, which "
        "messages that vanish at the mode do not have either. Center the messages (`qlsd_star`) or "
        "let clients remember (`qlsd_pp`); the factor of LSD* is the price of the step size."
    )


def _rows(consistency: Given) -> str:
    rows = [row for row in consistency["table"] if row["varied"] == "rows"]
    names = ("QLSD", "QLSD*", "QLSD++")
    powers = ", ".join(f"{power(consistency, 'rows', name):+.2f} with {name}" for name in names)
    shares = ", ".join(
        f"with {name} from {a:.2g} to {b:.2g}"
        for name in names
        for a, b in [[row[f"{name}, relative"] for row in (rows[0], rows[-1])]]
    )
    return (
        "With a step size of a tenth over the number of rows and minibatches of one row the "
        "squared distance of the stationary law from the posterior goes as the number of rows to "
        f"the power {powers}, by the law on Gaussian clients: as section S4 of the paper says (we "
        "read its lost step size so), the latter two get more accurate and QLSD does not. But the "
        "posterior shrinks, too. In "
        f"proportion to its size the squared distance goes {shares}, with {rows[-1]['value']:g} "
        "times the rows: relative to the posterior none gets better."
    )


def _real_bits(gaussian: Given) -> str:
    (best_,) = [row for row in gaussian["table"] if row["algorithm"] == "QLSD*, 16 bits"]
    same, noise = final_ratio(gaussian, "QLSD*, 16 bits", "LSD*")
    return (
        f"QLSD* with 16 bits has {same:.2f} (s.e. {noise:.2f}) times LSD*'s error with "
        f"{best_['fewer bits than LSD*']:.2f} times fewer bits in real messages; "
        f"the published bound gives {best_['by bound, log2']:.2f} with logarithms to base 2 and "
        f"{best_['by bound, ln']:.2f} as the paper counts. "
        "`samples.info['bits_up']` counts what is sent ([bits.md](bits.md))."
    )


def _real_efficiency(digits: Given) -> str:
    rows = [r for r in digits["table"] if r["algorithm"].startswith("QLSD++")]
    listed = "; ".join(
        f"{r['algorithm'][8:]} {r['efficiency']:.3g} ({r['by bound, ln']:.3g})" for r in rows
    )
    return (
        "How many times fewer bits go up a round in logistic regression on digits, in real "
        f"messages (by the paper's formula): {listed}. Sparse messages code shorter than the bound "
        "says, those of fine levels may code longer; by how much depends on the dimension and the "
        "data."
    )


def _noise(digits: Given) -> str:
    rows = {row["algorithm"]: row for row in digits["table"]}
    ours = [row for name, row in rows.items() if name.startswith("QLSD++")]
    again = rows["LSD++, another key"]
    largest = max(ours, key=lambda row: row["HPD error"])
    middle = max(ours, key=lambda row: row["at published level"])
    settings = digits["settings"]
    return (
        "In logistic regression on digits, runs that share all other noise show what compression "
        "with memory alone changes. It moves the threshold that "
        f"{100 * (1 - PUBLISHED_ALPHA):.4g} % of the draws stay below by at most "
        f"{with_middle(middle)} with {middle['algorithm'][8:]}, and that of the 99 % region by at "
        f"most {largest['HPD error']:.0e} with {largest['algorithm'][8:]}. Two runs of the "
        f"uncompressed sampler with other keys differ by {with_middle(again)} and by "
        f"{with_error(again, digits)}{few_beyond(digits)}: chains of {settings['kept_rounds']:,} "
        f"rounds whose slowest directions take about {settings['slow_rounds']:,.0f} to forget. "
        "Compare compressed with uncompressed chains of the same key."
    )


def _memory(synthetic: Given, independent: Given) -> str:
    without, with_ = by_memory(synthetic)
    ratios, apart = (cut_by_memory(*by_memory(given)) for given in (synthetic, independent))
    (plain, added), (apart_plain, apart_added) = (
        [
            100 * given["table"][0]["variance over MALA"] - 100,
            100 * by_memory(given)[0][0]["added by compression"],
        ]
        for given in (synthetic, independent)
    )
    return (
        f"Memory cuts the variance that compression adds {min(ratios):.0f}- to {max(ratios):.0f}"
        f"-fold where clients share all noise, as in the paper's code, and {min(apart):.0f}- to "
        f"{max(apart):.0f}-fold in a shorter run where they do not. It costs no bits there "
        f"({with_[0]['bits per message']:.1f} and {without[0]['bits per message']:.1f} per message "
        f"at {with_[0]['algorithm'][8:]}). The step size alone makes the variance "
        f"{plain:.0f} % too large. Without memory, compression at {without[0]['algorithm'][8:]} "
        f"adds {added:.0f} % where noise is shared. Where it is not, compression adds "
        f"{apart_added:.0f} %, beside {apart_plain:.0f} % of the step size."
    )


def _small_steps(gaussian: Given) -> str:
    grid = gaussian["budget"]
    mean, square = small_over_large(gaussian)
    small, large = (f"{pick(grid['factors']):g} / L" for pick in (min, max))
    return (
        f"For the same {grid['budget']:g} bits per client, the step size {small} has "
        f"{mean.min():.2g} to {mean.max():.2g} times the squared error of {large} for the "
        "posterior mean, depending on the number of levels. For the squared distance from the "
        "mean, whose expectation large steps get wrong, it has "
        f"{square.min():.1g} to {square.max():.1g} times, by the law of QLSD*. Smaller steps "
        "reduce biases, of which a Gaussian's mean has none, and slow the chain down. Section S5.1 "
        "of the paper says that they save bits."
    )


def _alike(fed_be: Given) -> str:
    rows = {(r["ensemble"], r["share"], r["rounds"]): r for r in fed_be["table"]}
    shares = sorted({share for _, share, _ in rows})
    last = max(rounds for _, _, rounds in rows)
    told = "; ".join(
        f"{name}: "
        + ", ".join(
            f"{rows[name, share, last]['accuracy %']:.1f} % with {100 * share:g} %"
            for share in shares
        )
        for name in ENSEMBLES
    )
    half = sorted({rounds for _, _, rounds in rows})[-2]
    climbs = ", ".join(
        f"{name} {rows[name, shares[-1], half]['accuracy %']:.1f} % after {half} rounds"
        for name in ENSEMBLES
    )
    apart = max(
        abs(rows["gaussian", *at]["accuracy %"] - rows["dirichlet", *at]["accuracy %"])
        for at in {at[1:] for at in rows}
    )
    return (
        f"On MNIST ({fed_be['num_rows']:,} images, {last} rounds of "
        f"{fed_be['config']['num_local_steps']} local steps, no distillation) the test images that "
        "FedBE's ensembles predict rightly, by the share of a client's images that are of one "
        "label: "
        f"{told} (s.e. at most {max(r['s.e.'] for r in fed_be['table']):.1f}). With "
        f"{100 * shares[-1]:g} % it still climbs: {climbs}. It averages "
        "clients' models, each of which has mostly seen one digit. Table S2 of QLSD, where it is "
        f"right for {TABLE_S2['FedBE-Gauss'][0]:g} and {TABLE_S2['FedBE-Dirichlet'][0]:g} %, does "
        "not say the rounds, and our copy lacks the share; here the two ensembles are at most "
        f"{apart:.0f} points apart."
    )


def _mean_network(mnist: Given) -> str:
    found = mnist["scores"]
    listed = ", ".join(
        f"{name} {100 * found[name]['accuracy']:.1f} and "
        f"{100 * found[name]['accuracy_of_mean']:.1f}"
        for name in found
        if name != "start" and found[name] and "accuracy_of_mean" in found[name]
    )
    return (
        "Digits of MNIST that are predicted rightly, in percent, by averaged probabilities and by "
        f"the network whose weights are the average of the draws: {listed}. Section S5.3 of QLSD's "
        "paper measures the accuracy of its Table 4 by the latter. Weights of a network have many "
        "modes that predict the same, and their average may predict something else; no run tests "
        "whether that is why. Keep draws and average what they predict."
    )


def _starts(random: Given, warm: Given) -> str:
    starts = {"random weights": random["scores"], "a trained network": warm["scores"]}
    rows = [
        {"method": name}
        | {
            f"{column}, {start}": found[name].get(key) and 100 * found[name][key]
            for column, key in (("accuracy %", "accuracy"), ("nNLL", "nnll"))
            for start, found in starts.items()
        }
        for name in random["scores"]
    ]
    gaps = {
        start: 100 * (found["FedBE-Gauss"]["accuracy"] - found["SGLD"]["accuracy"])
        for start, found in starts.items()
    }
    behind = " and ".join(f"{gap:+.1f} from {start}" for start, gap in gaps.items())
    errors = [
        standard_error(found[name]["accuracy"], of["num_test"])
        for of, found in zip((random, warm), starts.values(), strict=True)
        for name in ("FedBE-Gauss", "SGLD")
    ]
    first, second = gaps.values()
    config, lost = (
        random["config"],
        any(not found for of in starts.values() for found in of.values()),
    )
    return (
        f"The settings of Table S2 of QLSD's paper in small (MNIST, {random['num_rows']:,} images, "
        f"{config['num_rounds']:,} rounds with a step size of {config['step_size']:g}), from "
        "random weights, the paper's start on MNIST, and from a network that Adam trained on all "
        f"rows. In points of accuracy over SGLD, FedBE-Gauss is {behind}, which differ by "
        f"{second - first:+.1f} (s.e. at most {math.hypot(*errors):.1f}, of the test "
        "images alone; one seed). The row start is the network there. Negative log likelihoods "
        f"(nNLL) are in hundredths.{' A dash is a chain that turned non-finite.' * lost}\n\n"
        f"{output.markdown_table(rows)}"
    )


FINDINGS = (
    Finding(
        "QLSD's messages have to vanish at the mode",
        "Center QLSD's messages (`qlsd_star`) or let clients remember (`qlsd_pp`).",
        ("qlsd/gaussian",),
        _centered,
        "squares.png",
    ),
    Finding(
        "With more rows the bias of QLSD* and QLSD++ shrinks as the posterior does, not QLSD's",
        "Do not wait for rows to mend QLSD's bias: relative to the posterior it does not shrink.",
        ("qlsd/consistency",),
        _rows,
        "bias.png",
    ),
    Finding(
        "Bounds on bits are not what messages take",
        'Count the bits that are sent: `samples.info["bits_up"]`.',
        ("qlsd/gaussian",),
        _real_bits,
        "mse.png",
    ),
    Finding(
        "Sparse messages take fewer bits than bounds say",
        "Choose levels by real bits: bounds may be off either way.",
        (("qlsd/digits", "qlsd/digits_small"),),
        _real_efficiency,
        "hpd.png",
    ),
    Finding(
        "Compression errors are far below Monte Carlo errors",
        "Compare compressed with uncompressed chains of the same key.",
        (("qlsd/digits", "qlsd/digits_small"),),
        _noise,
        "hpd.png",
    ),
    Finding(
        "Memory is worth having",
        "Keep the memory of `qlsd_pp`: in logistic regression it costs no bits.",
        ("qlsd/synthetic", "qlsd/synthetic_small_independent"),
        _memory,
        "memory.png",
    ),
    Finding(
        "Smaller steps save bits where there is a bias, and cost them elsewhere",
        "Shrink steps to take a bias away, not to save bits.",
        ("qlsd/gaussian",),
        _small_steps,
        "budget.png",
    ),
    Finding(
        "Average predictions, not networks",
        "Keep draws and average what they predict, not their weights.",
        ("qlsd/mnist_gpu",),
        _mean_network,
        "calibration.png",
    ),
    Finding(
        "FedBE's place beside other methods depends on the start",
        "Say where chains start, and compare methods from more than one start.",
        ("qlsd/mnist_small_random", "qlsd/mnist_small_warm"),
        _starts,
        "calibration.png",
    ),
    Finding(
        "FedBE slows down where one label dominates each client's rows",
        "Give FedBE more rounds where one label dominates each client's rows.",
        ("qlsd/fed_be_small",),
        _alike,
        "rounds.png",
    ),
)
