"""``docs/findings.md``: what a user of the papers' methods should know before choosing one.

Every number comes from a record in ``docs/results/runs``. A finding whose record is missing is not
told; the page names it at its end.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments import output
from experiments.claims import Given, paired
from experiments.fa_hmc.dimension_findings import with_logarithm
from experiments.fa_hmc.drift import agreement, compared
from experiments.fa_hmc.image_findings import ranking
from experiments.fa_hmc.logistic_findings import best, gain, said
from experiments.fed_ep.findings import difference_noise
from experiments.fed_ep.hyperparameters import best as best_of
from experiments.fed_ep.hyperparameters import groups
from experiments.fed_ep.image_figures import smooth
from experiments.fed_ep.linear import lead
from experiments.fsgld.alpha import best as best_multiples
from experiments.qlsd.consistency import power

__all__ = ["FINDINGS", "Finding", "page"]


class Finding(NamedTuple):
    """What was found, the runs that show it, and a figure of the first of them."""

    title: str
    runs: tuple[str, ...]
    tell: Callable[..., str]  # of the metrics of each run, with its settings as ``config``
    figure: str | None = None


def page(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page as Markdown; `records` are those of all runs, by name."""
    parts, missing = [INTRODUCTION], []
    for finding in FINDINGS:
        lacking = [name for name in finding.runs if name not in records]
        if lacking:
            listed = ", ".join(f"`{name}`" for name in lacking)
            missing.append(f"- {finding.title} ({listed})")
            continue
        given = [
            records[name]["metrics"] | {"config": records[name]["config"]} for name in finding.runs
        ]
        text = finding.tell(*given)
        parts += [f"## {finding.title}", text, _evidence(finding)]
    parts.append(_released())
    if missing:
        parts.append(
            "## Not told\n\nThese have no committed run, so that nothing is said of them here:\n\n"
            + "\n".join(missing)
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _evidence(finding: Finding) -> str:
    commands = "; ".join(f"`python -m experiments.run experiment={name}`" for name in finding.runs)
    pages = sorted({name.split("/")[0] for name in finding.runs})
    links = [f"[{paper}](results/{paper}.md)" for paper in pages]
    if finding.figure is not None:
        name = finding.runs[0].replace("/", "-")
        links.append(f"[figure](results/figures/{name}-{finding.figure})")
    return f"{commands}. {', '.join(links)}."


INTRODUCTION = """
# Findings

What the reproductions of four papers show that a user of these methods should know before choosing
one. `make docs` computes the numbers from the records of runs in [results/runs](results/runs); the
pages in [results](results) say how each run differs from its paper's. How to choose a kernel is in
[choosing.md](choosing.md), what the exact laws are in [laws.md](laws.md).
"""

RELEASED = (
    (
        "QLSD, Tables 3 and S1",
        'the "99 %" region is that of probability 0.4975 (element 99 of a grid of 200 levels)',
        "errors are those of a quantile near the median",
    ),
    (
        "QLSD, Figure 1, Table 3",
        "bits are a bound with natural logarithms, not base 2",
        "savings look larger than real messages give",
    ),
    (
        "QLSD, Figure 1",
        "QLSD* quantizes each client's whole gradient, not its difference from that at the mode",
        "the curves may not be those of the text's QLSD*",
    ),
    (
        "QLSD, Figure 1",
        "step size 0.01 / L and batches of one row, where the text has 1 / L and a tenth",
        "other curves than the text's settings give",
    ),
    (
        "QLSD, Table 3",
        "the gradient leaves out rows of other classes; the snapshot of the control variate "
        "follows the position",
        "another posterior, for the reference too; minibatches without noise",
    ),
    (
        "QLSD, Figure S3, Table S1",
        "MALA evaluates the reverse proposal with the wrong gradient",
        'the "truth" has variances that are too large',
    ),
    (
        "QLSD, Figure S3",
        "the seed is set anew for each client",
        "clients share all noise",
    ),
    (
        "QLSD, Table S2",
        "messages are quantized twice, memories begin at the weights, the prior has half the "
        "variance",
        "other algorithms than the text's",
    ),
    (
        "QLSD, Table 4",
        "a network with batch normalization beside an HMC with filter response normalization",
        "predictions differ for reasons besides sampling",
    ),
    (
        "FSGLD, Figure 1",
        "the smallest of the means of a coin's shards is printed as -0.1",
        "none; 0.1 is meant, as 30 tosses of a fair coin are split",
    ),
)
"""Of a paper: where, what its released code (or its text) does, and what follows."""


def _released() -> str:
    names = ("where", "what the released code, or the text, does", "what follows")
    return (
        "## What the released code does otherwise than its paper\n\n"
        "As read when the experiments were written; the code itself is not in this repository. "
        "FedEP's differences are in [fed_ep.md](fed_ep.md#what-the-released-code-does).\n\n"
        + output.markdown_table([dict(zip(names, row, strict=True)) for row in RELEASED])
    )


def _width(gaussian: Given) -> str:
    rows = {m: [r for r in gaussian["table"] if r["method"] == m] for m in ("DSGLD", "FSGLD")}
    wide = rows["FSGLD"][-1]["variance / posterior's"]
    bias = max(row["exact bias"] for row in gaussian["table"])
    return (
        f"On a Gaussian mean with the paper's settings, FSGLD's draws have {wide:.3g} times the "
        "posterior's variance for every number of local steps, since the weight 1 / f of a visit "
        "multiplies the noise of its minibatch. Its mean is right. DSGLD's mean is right there, "
        f"too: the exact bias of both is {bias:.0e} at most, so the plateau of DSGLD's error that "
        "the paper reports is none. What DSGLD lacks is precision: the variance of its draws is "
        f"that between the shards' means ({rows['DSGLD'][-1]['variance']:.3g} at T = "
        f"{rows['DSGLD'][-1]['T']}). Use larger minibatches, or all rows, if widths matter."
    )


def _surrogates(sampled: Given, taylor: Given, laplace: Given) -> str:
    off = {
        name: np.nanmean(np.array(of["methods"]["FSGLD"]["mean_off_sds"], float))
        for name, of in (("sampled", sampled), ("taylor", taylor))
    }
    (row,) = [r for r in laplace["table"] if r["method"] == "FSGLD"]
    num = len(laplace["methods"]["FSGLD"]["learn"])
    better, error = paired(sampled["methods"]["FSGLD"]["test"], sampled["methods"]["DSGLD"]["test"])
    return (
        "In metric learning, with the same step size and local steps, the worst posterior mean is "
        f"off by {off['sampled']:.1f} posterior standard deviations with surrogates from local "
        f"samples, as in the paper, and by {off['taylor']:.2f} with second-order expansions at the "
        f"common mode. With Laplace's, each at its client's own mode, {row['diverged']} of {num} "
        "runs diverged. FSGLD is better than DSGLD on held-out pairs even with sampled ones, by "
        f"{better:.3f} nats (s.e. {error:.3f}). Use `surrogates.taylor` at the mode that "
        "`surrogates.mode` finds, which needs no proper local likelihood, or FedEP's sites."
    )


def _visits(*runs: Given) -> str:
    told = []
    for of in runs:
        lost = {r["split"]: r["diverged"] for r in of["table"] if r["method"] == "FSGLD"}
        told.append(
            f"{of['config']['num_local_steps']} steps of size {of['config']['step_size']:g} it "
            f"diverged in {lost['iid']} on IID and in {lost['non_iid']} on non-IID shards"
        )
    last = runs[-1]
    gaps = [
        paired(*(last["values"][f"{split} {name}"]["test"] for name in ("FSGLD", "DSGLD")))
        for split in ("iid", "non_iid")
    ]
    return (
        f"FSGLD sampled a network from {last['config']['num_shards']} shards, with dense "
        "expansions at a trained network as surrogates, "
        f"{last['config']['num_repetitions']} times on each kind of shards. "
        f"With visits of {'; with visits of '.join(told)}. All chains cover the "
        "same sum of step sizes. A visit multiplies what the surrogate gets wrong of its shard by "
        "the number of shards, and away from where it was made an expansion of a network's "
        "likelihood gets much wrong. With the shortest visits FSGLD less DSGLD on held-out rows is "
        f"{gaps[0][0]:+.3f} nats (s.e. {gaps[0][1]:.3f}) on IID and {gaps[1][0]:+.3f} (s.e. "
        f"{gaps[1][1]:.3f}) on non-IID shards. Where a chain of FSGLD turns non-finite, take fewer "
        "local steps."
    )


def _refreshed(refresh: Given) -> str:
    def longest(name: str) -> int:
        kept = [
            row["local steps"]
            for row in refresh["table"]
            if row["surrogates"] == name
            and row["error of sds"] is not None
            and row["error of sds"] < 0.1
        ]
        return max(kept, default=0)

    rounds = refresh["ep_rounds"][-1]
    names = {
        f"FedEP's sites after {rounds} rounds": f"FedEP, {rounds} rounds",
        "expansions at the common mode": "Taylor at the common mode",
        "Laplace's at each client's own mode": "Laplace, each client's own",
        "no surrogates (DSGLD)": "none (DSGLD)",
    }
    listed = "; ".join(f"{said} {longest(name)}" for said, name in names.items())
    return (
        f"On {refresh['num_rows']} rows of {refresh['num_clients']} clients, the longest visits "
        f"(local steps) whose standard deviations are within a tenth: {listed}. One data set, one "
        "seed."
    )


def _multiple(multiples: Given) -> str:
    name = "variance over the posterior's"
    one = {r["error of surrogates"]: r[name] for r in multiples["table"] if r["alpha"] == 1.0}
    told = []
    for error, row in best_multiples(multiples).items():
        text = f"{row['alpha']:g} where means are off by {error:g}"
        if row["alpha"] != 1.0:
            text += f" (the variance is {row[name] / one[error]:.2g} times that with 1)"
        told.append(text)
    right, worst = min(one), max(one)
    return (
        "Of the multiples of the conducive gradient tried, that with the least variance is "
        f"{'; '.join(told)}, in units of the scatter of the shards' own means, by the exact law on "
        f"Gaussian shards with visits of {multiples['num_local_steps']} local steps. Bad "
        f"surrogates cost far more than any multiple saves: with 1 the variance grows "
        f"{one[worst] / one[right]:.0f}-fold from right ones to the worst."
    )


def _coin(paper_step: Given) -> str:
    rows = {(r["split"], r["method"]): r for r in paper_step["table"]}
    dsgld = rows["non_iid", "DSGLD"]
    return (
        "At the paper's step size, networks of DSGLD that ignore their input are "
        f"{rows['iid', 'DSGLD']['ignores input']} on IID shards of covertype and "
        f"{dsgld['ignores input']} on non-IID ones. They have a log likelihood of "
        f"{dsgld['visited']} on the shard that the chain is at and of {dsgld['test']} on held-out "
        "rows; the paper's Table 1 has -0.44 (train, presumably of that shard) and -1.11 (test). "
        "Whoever knows the shards' "
        f"label proportions and nothing else has {1 - 2 * np.log(2):.3f}, a coin toss "
        f"{-np.log(2):.3f}. So that table is consistent with chains that have not learned to "
        "classify: compare with a coin toss before comparing methods."
    )


def _noise(digits: Given) -> str:
    rows = {row["algorithm"]: row for row in digits["table"]}
    ours = [row for name, row in rows.items() if name.startswith("QLSD++")]
    again = rows["LSD++, another key"]
    largest = max(ours, key=lambda row: row["HPD error"])
    return (
        "Compression with memory alone changes the threshold of the 99 % region by at most "
        f"{largest['HPD error']:.0e} ({largest['algorithm'][8:]}), as runs that share all other "
        "noise show. Two runs of the uncompressed sampler with other keys differ by "
        f"{again['HPD error']:.1e} (s.e. {again['s.e.']:.0e}), which is what errors in Table 3 "
        "have to be held against. Compare compressed with uncompressed chains of the same key."
    )


def _real_bits(gaussian: Given) -> str:
    (best_,) = [row for row in gaussian["table"] if row["algorithm"] == "QLSD*, 16 bits"]
    return (
        f"QLSD* with 16 bits reaches LSD*'s error with {best_['fewer bits than LSD*']:.2f} times "
        f"fewer bits in real messages; the published bound gives {best_['by bound, log2']:.2f} "
        f"with logarithms to base 2 and {best_['by bound, ln']:.2f} as the paper counts. "
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
        "says, fine ones longer."
    )


def _memory(synthetic: Given, independent: Given) -> str:
    without, with_ = _by_memory(synthetic)
    ratios, apart = (_cut_by_memory(*_by_memory(given)) for given in (synthetic, independent))
    plain = synthetic["table"][0]["variance over MALA"]
    return (
        f"Memory cuts the variance that compression adds {min(ratios):.0f}- to {max(ratios):.0f}"
        f"-fold where clients share all noise, as in the paper's code, and {min(apart):.0f}- to "
        f"{max(apart):.0f}-fold in a shorter run where they do not. It costs no bits "
        f"({with_[0]['bits per message']:.1f} and {without[0]['bits per message']:.1f} per message "
        f"at {with_[0]['algorithm'][8:]}). The "
        f"step size of the experiment costs more than either: without compression the variance is "
        f"{100 * (plain - 1):.0f} % too large already."
    )


def _by_memory(given: Given) -> tuple[list[Any], list[Any]]:
    rows = [r for r in given["table"] if r["algorithm"].startswith("QLSD++")]
    without, with_ = ([r for r in rows if r["memory"] == kind] for kind in ("no", "yes"))
    return without, with_


def _cut_by_memory(without: list[Any], with_: list[Any]) -> list[float]:
    return [
        a["added by compression"] / b["added by compression"]
        for a, b in zip(without, with_, strict=True)
        if b["added by compression"] > 2 * b["s.e. of that"]
    ]


def _small_steps(gaussian: Given) -> str:
    grid = gaussian["budget"]
    factors, error = np.array(grid["factors"]), np.array(grid["error"])
    order = np.argsort(factors)
    ratio = error[:, order[0]] / error[:, order[-1]]
    return (
        f"For the same {grid['budget']:g} bits per client, the step size {factors[order[0]]:g} / L "
        f"has {ratio.min():.2g} to {ratio.max():.2g} times the error of {factors[order[-1]]:g} / L "
        "for the posterior mean, at every number of levels; section S5.1 of the paper concludes "
        "the opposite. Smaller steps reduce biases, of which a Gaussian's mean has none, and slow "
        "the chain down."
    )


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
        f"its expectation: {listed}. Center the messages (`qlsd_star`) or let clients remember "
        "(`qlsd_pp`); the factor of LSD* is the price of the step size."
    )


def _rows(consistency: Given) -> str:
    rows = [row for row in consistency["table"] if row["varied"] == "rows"]
    shares = [row["QLSD, relative"] for row in (rows[0], rows[-1])]
    powers = {name: power(consistency, "rows", name) for name in ("QLSD", "QLSD*")}
    return (
        "With a step size of a tenth over the number of rows and minibatches of one row the "
        "squared distance of the stationary law from the posterior goes as the number of rows to "
        f"the power {powers['QLSD']:+.2f} with QLSD and {powers['QLSD*']:+.2f} with QLSD*, by the "
        f"law on Gaussian clients: over the posterior's size QLSD's grows from {shares[0]:.0f} to "
        f"{shares[1]:.0f} with {rows[-1]['value']:g} times the rows. Section S4 of the paper says "
        "so, too."
    )


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
        (first,) = [r for r in of["results"] if (r["L"], r["T"]) == (1, 10)]
        (other,) = [r for r in of["results"] if (r["L"], r["T"]) == (10, 1)]
        a, b = (r["scores"]["accuracy"]["mean"] for r in (other, first))
        order = ranking(of["results"], "L", "accuracy")
        told.append(f"{name}: {100 * (a - b):+.1f} (best L at equal rounds: {order[0][0]})")
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


def _fed_ep(cifar10: Given) -> str:
    column = f"accuracy in {cifar10['settings']['checkpoints'][-1]} rounds"
    rows = {row["method"]: row for row in cifar10["table"]}
    own = [r for n, r in rows.items() if n.startswith("FedEP ")]
    gains = [r[column] - max(rows[b][column] for b in ("FedAvg", "FedPA")) for r in own]
    ece = [r["ECE, point"] for r in own]
    base = min(rows[b]["ECE, point"] for b in ("FedAvg", "FedPA"))
    return (
        f"On CIFAR-10 with {cifar10['num_parameters']:,} parameters FedEP is {min(gains):.1f} to "
        f"{max(gains):.1f} points of accuracy ahead of FedAvg and FedPA, and its point estimate "
        f"has a calibration error of {min(ece):.0f} to {max(ece):.0f} %, theirs {base:.0f} % at "
        f"best ({cifar10['settings']['num_seeds']} seed)."
    )


def _diagonal(linear: Given, scaled: Given) -> str:
    (early, error), (last, error_last) = (lead(linear, part) for part in ("early", "best"))
    settings, others = linear["settings"], scaled["settings"]
    plain, natural = (
        float(smooth(scaled["by_round"][f"FedEP ({x})"], others["window"])[others["num_burnin"]])
        for x in "IV"
    )
    return (
        "A linear model on principal components of CIFAR-10 gains from a diagonal where the "
        "components keep their variances, so that the Fisher informations of the weights of 80 % "
        f"of them lie within a factor of {linear['information']:.3g}: natural gradients are "
        f"{early:.2f} points of accuracy (s.e. {error:.2f}) ahead of a scaled identity in the "
        f"first {settings['window']} rounds and {last:.2f} (s.e. {error_last:.2f}) at their best, "
        f"{settings['num_seeds']} seeds. With components scaled to variance one it is "
        f"{natural - plain:+.1f} points in those rounds ({others['num_seeds']} seeds), with a "
        f"noise of {difference_noise(scaled, plain, natural):.1f} from the test images. So scale "
        "features, or pay for a diagonal."
    )


def _fed_sep(mnist: Given, pulled: Given) -> str:
    column = f"accuracy in {mnist['settings']['checkpoints'][-1]} rounds"
    rows = {row["method"]: row[column] for row in mnist["table"]}
    base = max(rows["FedAvg"], rows["FedPA"])
    gaps = [v - base for n, v in rows.items() if n.startswith("FedSEP ")]
    (of,) = groups(pulled).values()
    (plain,) = [r for r in pulled["table"] if r["method"] == "FedAvg"]
    scan = {float(value): row for value, row in of.items()}
    listed = "; ".join(
        f"{best_of(pulled, scan[a]):.1f} % with {a:g}" for a in sorted(scan, reverse=True)
    )
    top, hard = max(scan, key=lambda a: best_of(pulled, scan[a])), max(scan)
    away = (
        f"{-max(gaps):.1f} to {-min(gaps):.1f} points behind"
        if max(gaps) < 0
        else f"{min(gaps):+.1f} to {max(gaps):+.1f} points from"
    )
    left = best_of(pulled, scan[top]) - best_of(pulled, plain)
    wide = [scan[a]["accuracy, marginal"] for a in (hard, top)]
    return (
        f"On MNIST FedSEP, which keeps nothing at the clients, is {away} the better of FedAvg and "
        f"FedPA in accuracy ({mnist['settings']['num_seeds']} seed). How hard clients are pulled "
        "to the global mean is the larger part of it: the best accuracy of FedSEP (I) is "
        f"{listed} per row, FedAvg's {best_of(pulled, plain):.1f} %; {left:+.1f} points remain, "
        "with a noise of "
        f"{difference_noise(pulled, best_of(pulled, plain)):.1f} points from the test images. The "
        f"same number is the precision of the approximation, though: the accuracy of averages over "
        f"its draws is {wide[0]:.0f} % with {hard:g} and {wide[1]:.0f} % with {top:g}. So one "
        "number cannot give clients room and draws of a sensible width."
    )


def _one_shot(toy: Given) -> str:
    distance = {row["method"]: row["distance"] for row in toy["table"]}
    rounds = next(i for i, d in enumerate(toy["by_round"]["FedEP"], 1) if d < 0.01)
    return (
        "For pairs of Gaussian clients and diagonal approximations, the product of each client's "
        f"own Gaussian (FedPA) misses the mean by {distance['FedPA']:.2f} on average, the mean of "
        f"optima (FedAvg) by {distance['FedAvg']:.2f}, however many rounds are run; expectation "
        f"propagation is within 0.01 after {rounds} rounds."
    )


FINDINGS = (
    Finding(
        "FSGLD at its published settings finds the mean, not the width",
        ("fsgld/gaussian",),
        _width,
        "mse.png",
    ),
    Finding(
        "FSGLD is as good as its surrogates",
        ("fsgld/metric", "fsgld/metric_taylor", "fsgld/metric_laplace"),
        _surrogates,
        "log_likelihood.png",
    ),
    Finding(
        "FSGLD needs shorter visits the more its shards differ",
        (
            "fsgld/mlp_small_fisher_dense",
            "fsgld/mlp_small_fisher_dense_short",
            "fsgld/mlp_small_fisher_dense_shorter",
        ),
        _visits,
    ),
    Finding(
        "Surrogates that were refitted where the posterior lies serve longer visits",
        ("fed_ep/refresh",),
        _refreshed,
        "refresh.png",
    ),
    Finding(
        "A multiple of the conducive gradient below one saves little",
        ("fsgld/alpha",),
        _multiple,
        "alpha.png",
    ),
    Finding(
        "FSGLD's table of network likelihoods is like that of networks that ignore their input",
        ("fsgld/mlp_small_paper_step",),
        _coin,
    ),
    Finding(
        "QLSD's messages have to vanish at the mode",
        ("qlsd/gaussian",),
        _centered,
        "squares.png",
    ),
    Finding(
        "More rows cure the bias of QLSD*, not that of QLSD",
        ("qlsd/consistency",),
        _rows,
        "bias.png",
    ),
    Finding(
        "Real messages save fewer bits than bounds do",
        ("qlsd/gaussian",),
        _real_bits,
        "mse.png",
    ),
    Finding(
        "With coarse levels they save more", ("qlsd/digits_small",), _real_efficiency, "hpd.png"
    ),
    Finding(
        "Compression errors are far below Monte Carlo errors",
        ("qlsd/digits_small",),
        _noise,
        "hpd.png",
    ),
    Finding(
        "Memory is worth having",
        ("qlsd/synthetic", "qlsd/synthetic_small_independent"),
        _memory,
        "memory.png",
    ),
    Finding("Smaller steps do not save bits", ("qlsd/gaussian",), _small_steps, "budget.png"),
    Finding(
        "Long trajectories let clients drift, which control variates mend",
        ("fa_hmc/logistic_small", "fa_hmc/drift"),
        _fa_hmc,
        "errors.png",
    ),
    Finding(
        "At equal work, leapfrog steps and local steps are about the same",
        ("fa_hmc/fashion_mnist_small", "fa_hmc/kmnist_small", "fa_hmc/cifar2_small"),
        _equal_work,
        "curves_L.png",
    ),
    Finding(
        "FA-HMC's rounds grow a little faster than the root of the dimension",
        ("fa_hmc/dimension",),
        _dimension,
        "rounds.png",
    ),
    Finding("One-shot products miss the posterior", ("fed_ep/toy",), _one_shot, "toy.png"),
    Finding(
        "A diagonal beats a scaled identity where features differ in variance",
        ("fed_ep/cifar10_components_raw_small", "fed_ep/cifar10_components_small"),
        _diagonal,
        "rounds.png",
    ),
    Finding(
        "FedEP's gain holds for a small network", ("fed_ep/cifar10_small",), _fed_ep, "rounds.png"
    ),
    Finding(
        "A scaled identity cannot give FedSEP speed and width at once",
        ("fed_ep/mnist_small", "fed_ep/hyperparameters_mnist_small"),
        _fed_sep,
        "rounds.png",
    ),
)
