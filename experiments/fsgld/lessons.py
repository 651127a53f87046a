"""What a user of FSGLD should know: its part of ``docs/findings.md``."""

import numpy as np

from experiments.claims import Finding, Given, paired
from experiments.fsgld import alpha, metric_scores, mlp_scores, spreads
from experiments.fsgld.gaussian_law import fsgld_width, one_machine
from experiments.output import percent

__all__ = ["FINDINGS"]


def _width(gaussian: Given) -> str:
    rows = {m: [r for r in gaussian["table"] if r["method"] == m] for m in ("DSGLD", "FSGLD")}
    wide = rows["FSGLD"][-1]["variance / posterior's"]
    bias = max(row["exact bias"] for row in gaussian["table"])
    config = gaussian["config"]
    last, here = rows["DSGLD"][-1], one_machine(config)
    smaller = [
        f"{fsgld_width(config, step=1 / by):.2f} with {by} times smaller" for by in (10, 100)
    ]
    sizes = [by * config["batch_size"] for by in (5, 10, 20)]
    larger = [f"{fsgld_width(config, batch_size=num):.2f} with {num}" for num in sizes]
    return (
        f"On a Gaussian mean with the paper's settings, FSGLD's draws have {wide:.3g} times the "
        "posterior's variance for every number of local steps, by the noise of minibatches. That "
        "is not the price of a federation: SGLD on one machine that holds all rows, with the same "
        f"step size and minibatches as large, has {here['minibatches']:.0f} times, since its "
        "minibatches see the scatter between the shards as well. With all rows at every step both "
        f"have {here['all rows']:.3g} times. FSGLD's mean is right. DSGLD's mean is right there, "
        f"too: the exact bias of both is {bias:.0e} at most, so that the plateau of DSGLD's error "
        "that the paper reports is no bias. What DSGLD lacks is precision: the variance of its "
        f"draws is {last['exact variance']:.3g} at T = {last['T']}, that between the shards' means "
        f"{gaussian['shard_means_variance']:.3g}. By the exact law FSGLD's {wide:.3g} becomes "
        f"{' and '.join(smaller)} steps, or {', '.join(larger)} rows in a minibatch, "
        f"which has {config['batch_size']} there. Take a smaller step or larger minibatches if "
        "widths matter."
    )


def _surrogates(sampled: Given, taylor: Given, laplace: Given) -> str:
    # Repetitions of the same number have the same pairs.
    num = min(len(of["methods"]["FSGLD"]["learn"]) for of in (sampled, taylor, laplace))
    off = {}
    for name, of in (("sampled", sampled), ("taylor", taylor)):
        each = np.array(of["methods"]["FSGLD"]["mean_off_sds"], float)[:num]
        mean, error = paired(each, np.zeros(len(each)))
        off[name] = f"{mean:.2g} (s.e. {error:.1g})"
    lost = num - int(np.isfinite(np.array(laplace["methods"]["FSGLD"]["learn"], float))[:num].sum())
    better, error = paired(sampled["methods"]["FSGLD"]["test"], sampled["methods"]["DSGLD"]["test"])
    return (
        f"In metric learning, on the same pairs in {num} repetitions, with the same step size and "
        f"local steps, the worst posterior mean is off by {off['sampled']} posterior standard "
        f"deviations with surrogates from local samples, as in the paper, and by {off['taylor']} "
        "with second-order expansions at the common mode. With Laplace's, each at its client's own "
        f"mode, {lost} of {num} runs diverged. FSGLD is better than DSGLD on held-out pairs even "
        f"with sampled ones, by {better:.3f} nats (s.e. {error:.3f}). Use `surrogates.taylor` at "
        "the mode that `surrogates.mode` finds, which needs no proper local likelihood. It has a "
        "price that the paper's surrogates do not have, which are sent once: the mode is that of "
        "all pairs, and each evaluation on the way to it is a round of all clients. FedEP's sites, "
        "which take rounds as well, were not tried on this model."
    )


def _metric_spreads(sampled: Given) -> str:
    of = {m: values for m, values in sampled["methods"].items() if m in ("DSGLD", "FSGLD", "NUTS")}
    found = {k: spreads.compare(of["FSGLD"][k], of["DSGLD"][k]) for k in ("learn", "test")}
    nuts = {k: spreads.compare(of["FSGLD"][k], of["NUTS"][k]) for k in found}
    gaps = {
        k: spreads.compare(gap["FSGLD"], gap["DSGLD"])
        for k, gap in metric_scores.from_pooled(sampled).items()
    }
    bars = metric_scores.bars(sampled)
    drawn = " and ".join(
        f"at {percent(bar.smaller)} of the points on {metric_scores.WHERE[k]} "
        f"({bar.FSGLD / bar.DSGLD:.2f} times DSGLD's on average)"
        for k, bar in bars.items()
    )
    return (
        "The paper's Figure 5 has less spread with FSGLD overall. So have our curves of single "
        f"samples: after burn-in FSGLD's error bars are the smaller ones {drawn}. But the bars of "
        "neighbouring points are of the same few repetitions, so that their number is no test, and "
        "a bar holds a chain's own noise beside what repetitions differ in. Of averages over a "
        "chain the standard deviation of FSGLD's log likelihood over "
        f"{len(of['FSGLD']['learn'])} repetitions, over that of DSGLD's, is "
        f"{found['learn']} on learning pairs and {found['test']} on pairs held out, by Pitman and "
        "Morgan's test for pairs. Our repetitions have "
        "pairs of their own, and most of the spread is theirs: FSGLD's over that of pooled NUTS is "
        f"{nuts['learn']} and {nuts['test']}. Without it, in differences from pooled NUTS on the "
        f"same pairs, FSGLD's over DSGLD's is {gaps['learn']} and {gaps['test']}. Those of DSGLD "
        "are of a larger bias, which varies more: the standard deviations are "
        f"{metric_scores.of_their_gaps(sampled)}. Ten repetitions tell little of a standard "
        "deviation: test it, on differences within repetitions where you can, and look at how "
        "large these are."
    )


def _visits(shorter: Given, short: Given, dense: Given, diagonal: Given, sampled: Given) -> str:
    told, lengths = [], set()
    for of in (dense, short, shorter):
        lost = _lost(of)
        local, size = of["config"]["num_local_steps"], of["config"]["step_size"]
        lengths.add(f"{of['config']['num_rounds'] * local * size:.3g}")
        told.append(
            f"{local} steps of size {size:g} it diverged in {lost['iid']} on IID and in "
            f"{lost['non_iid']} on non-IID shards"
        )
    gaps = [
        paired(*(shorter["values"][f"{split} {name}"]["test"] for name in ("FSGLD", "DSGLD")))
        for split in ("iid", "non_iid")
    ]
    ignoring, right, other = (
        np.nanmean(np.array(of["values"]["non_iid FSGLD"][name], float))
        for of, name in ((diagonal, "constant"), (diagonal, "accuracy"), (sampled, "accuracy"))
    )
    gain, error = paired(*(sampled["values"][f"non_iid {m}"]["test"] for m in ("FSGLD", "DSGLD")))
    local, size = diagonal["config"]["num_local_steps"], diagonal["config"]["step_size"]
    numbers = [of["config"]["num_repetitions"] for of in (sampled, diagonal)]
    same = f"The step sizes of every chain add up to {' or '.join(sorted(lengths))}. "
    return (
        f"FSGLD sampled a network from {shorter['config']['num_shards']} shards, with dense "
        "expansions at a trained network as surrogates, "
        f"{shorter['config']['num_repetitions']} times on each kind of shards. "
        f"With visits of {'; with visits of '.join(told)}. {same}{_smaller(short, shorter)}"
        "Why is unexplained: a visit multiplies what the surrogate gets wrong of its shard by the "
        "number of shards, and how much that is was not measured. So these runs do not tell "
        "whether the method fails on networks or these surrogates do. In the run with the smallest "
        "steps FSGLD less DSGLD on held-out rows is "
        f"{gaps[0][0]:+.3f} nats (s.e. {gaps[0][1]:.3f}) on IID and "
        f"{gaps[1][0]:+.3f} (s.e. {gaps[1][1]:.3f}) on non-IID shards. Diagonal surrogates are "
        f"another matter: with visits of {local} steps of size {size:g} on non-IID shards FSGLD "
        f"diverged in {_lost(sampled)['non_iid']} of {numbers[0]} repetitions with those of local "
        f"samples and in {_lost(diagonal)['non_iid']} of {numbers[1]} with the diagonals of the "
        f"expansions. Of the latter's networks {percent(ignoring)} ignore their input, and they "
        f"are right for {percent(right)} of held-out rows. The former are right for "
        f"{percent(other)} and gain nothing on DSGLD ({gain:+.3f} nats, s.e. {error:.3f}). "
        "Where a chain of FSGLD turns non-finite, take fewer local steps, and then smaller ones."
    )


def _lost(of: Given) -> dict[str, int]:
    """Return in how many repetitions FSGLD diverged, by kind of shards."""
    return {r["split"]: r["diverged"] for r in of["table"] if r["method"] == "FSGLD"}


def _smaller(one: Given, other: Given) -> str:
    """Return where steps that are smaller, not fewer, kept chains from diverging."""
    if one["config"]["num_local_steps"] != other["config"]["num_local_steps"]:
        return ""
    lost = [_lost(of) for of in (one, other)]
    helped = [mlp_scores.SPLITS[split] for split in lost[0] if lost[0][split] > lost[1][split]]
    if not helped:
        return ""
    return (
        f"On {' and '.join(helped)} shards it was smaller steps that helped, not fewer, so that "
        "nothing is told there of the length of visits at one step size. "
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

    rounds = refresh["ep_rounds"]
    tried = [str(num) for num in refresh["config"]["local_steps"]]
    names = {
        f"FedEP's sites after {rounds[-1]} rounds": f"FedEP, {rounds[-1]} rounds",
        "expansions at the common mode": "Taylor at the common mode",
        "Laplace's at each client's own mode": "Laplace, each client's own",
        "no surrogates (DSGLD)": "none (DSGLD)",
    }
    listed = "; ".join(f"{said} {longest(name)}" for said, name in names.items())
    early = [
        f"{longest(name)} after {num} round{'s' * (num > 1)}"
        for num, name in ((n, f"FedEP, {n} round{'s' * (n > 1)}") for n in rounds[:2])
    ]
    reached = [longest(f"FedEP, {n} round{'s' * (n > 1)}") for n in rounds[:2]]
    no_longer = ", no longer than DSGLD" if max(reached) <= longest("none (DSGLD)") else ""
    rows = {(r["surrogates"], r["local steps"]): r["error of sds"] for r in refresh["table"]}
    lengths = {num for _, num in rows}
    fail = {
        num: [said for said, name in names.items() if rows.get((name, num), 0.0) is None]
        for num in sorted(lengths)
    }
    first = next((num for num, lost in fail.items() if lost), None)
    ran_off = ""
    if first is not None and rows.get(("none (DSGLD)", first)) is not None:
        ran_off = (
            f" At {first} steps {' and '.join(fail[first])} diverge, where DSGLD stays finite, "
            f"with an error of the standard deviations of {rows['none (DSGLD)', first]:.2f}: in "
            "visits as long they are worse than none."
        )
    return (
        f"On {refresh['num_rows']} rows of {refresh['num_clients']} clients, the longest visits of "
        f"those tried ({', '.join(tried)} local steps) whose standard deviations are within a "
        f"tenth: {listed}. It takes rounds: FedEP's sites reach {' and '.join(early)}{no_longer}."
        f"{ran_off} "
        "One data set, one seed."
    )


def _multiple(multiples: Given) -> str:
    one = {r["error of surrogates"]: r[alpha.NAME] for r in multiples["table"] if r["alpha"] == 1.0}
    none = {r["error of surrogates"]: r[alpha.NAME] for r in multiples["table"] if r["alpha"] == 0}
    tried, told = alpha.best(multiples), []
    for row in multiples["least"]:
        error = row["error of surrogates"]
        text = (
            f"{row['best alpha']:.3f} (s.e. {row['its s.e.']:.3f}; {row['theory']:.3f}) where e is "
            f"{error:g}"
        )
        if tried[error]["alpha"] != 1.0:
            share = tried[error][alpha.NAME] / one[error]
            text += (
                f" (with {tried[error]['alpha']:g} the variance is {share:.2g} times that with 1)"
            )
        told.append(text)
    right, worst = min(one), max(one)
    row = multiples["least"][-1]
    return (
        "The multiple of the conducive gradient with the least variance is, by the exact law on "
        f"Gaussian shards with visits of {multiples['num_local_steps']} local steps, averaged over "
        f"{multiples['num_draws_of_errors']} draws of what surrogates' means are off by (in "
        f"brackets the theory's, 1 / (1 + e^2)): {'; '.join(told)}. Here e is how far means are "
        "off, in units of the scatter of the shards' own means. One draw tells little: at "
        f"e = {worst:g} single ones have their best from {row['lowest of a draw']:.2f} to "
        f"{row['highest of a draw']:.2f}. No multiple mends bad surrogates: with 1 the variance "
        f"grows {one[worst] / one[right]:.0f}-fold from right ones to the worst, to "
        f"{one[worst] / none[worst]:.2f} times what it is without surrogates (DSGLD)."
    )


def _coin(paper_step: Given) -> str:
    rows = {(r["split"], r["method"]): r for r in mlp_scores.shown(paper_step)}
    dsgld, values = rows["non_iid", "DSGLD"], paper_step["values"]["non_iid DSGLD"]
    lost = [rows[split, "FSGLD"]["diverged"] for split in ("iid", "non_iid")]
    num = paper_step["config"]["num_repetitions"]
    published = [mlp_scores.TABLE_1[f"DSGLD, {name}"][1] for name in ("train", "test")]
    above, error = mlp_scores.papers_above_a_coin()
    stability = paper_step["step_size_times_rows"]
    return (
        "At the paper's step size, networks of DSGLD that ignore their input are "
        f"{rows['iid', 'DSGLD']['ignores input']} on IID shards of covertype and "
        f"{dsgld['ignores input']} on non-IID ones, over {num} repetitions. On "
        "non-IID shards DSGLD's networks have a median log likelihood (and range: one repetition "
        f"decides a mean) of {_median(values['visited'])} on the shard that the chain is at "
        f"and of {_median(values['test'])} on held-out rows; the paper's Table 1 has the means "
        f"{published[0]} (train, presumably of that shard) and {published[1]} (test), on SUSY. "
        "Whoever knows the shards' "
        f"label proportions and nothing else has {1 - 2 * np.log(2):.3f}, a coin toss "
        f"{-np.log(2):.3f}, and the IID column of that table, of both methods, is {_iid()}. So "
        "these numbers are consistent with chains that have not learned to classify. They prove "
        "nothing: the step size times the number of rows "
        f"is {mlp_scores.PAPERS_STABILITY / stability:.0f} times larger in the "
        f"paper's run ({mlp_scores.PAPERS_STABILITY:.0f}) than in ours ({stability:.3g}). FSGLD's "
        "non-IID cell is another matter. The held-out shard has half of its rows of each label, so "
        "that a network that ignores its input is at most a coin toss there; the paper's "
        f"{mlp_scores.TABLE_1['FSGLD, test'][1]} over {mlp_scores.PAPERS_REPETITIONS} repetitions "
        f"is {above:+.3f} (s.e. {error:.4f}) from one, {above / error:.1f} standard errors, or "
        f"{mlp_scores.least_by_rounding():.1f} if rounding was kind to it. Of "
        f"FSGLD our runs tell nothing: it diverged in {lost[0]} of {num} on IID and in {lost[1]} "
        f"of {num} on non-IID shards. Compare with a coin toss before comparing methods."
    )


def _median(values: list[float | None]) -> str:
    """Return the median of repetitions and their range, without those that were lost."""
    kept = [value for value in values if value is not None]
    return f"{np.median(kept):.2f} ({min(kept):.2f} to {max(kept):.2f})"


def _iid() -> str:
    """Return the range of the means in Table 1 on IID shards."""
    means = [
        mlp_scores.papers(method, "iid", rows)[0]
        for method in ("DSGLD", "FSGLD")
        for rows in ("train", "test")
    ]
    return f"{min(means):.2f} to {max(means):.2f}"


FINDINGS = (
    Finding(
        "FSGLD at its published settings finds the mean; the width takes a smaller step or larger "
        "minibatches",
        "Take smaller steps or larger minibatches with FSGLD where widths matter.",
        ("fsgld/gaussian",),
        _width,
        "mse.png",
    ),
    Finding(
        "FSGLD is as good as its surrogates",
        "Make FSGLD's surrogates with `surrogates.taylor`, at the mode of `surrogates.mode`.",
        ("fsgld/metric", "fsgld/metric_taylor", "fsgld/metric_laplace"),
        _surrogates,
        "log_likelihood.png",
    ),
    Finding(
        "A smaller spread over ten repetitions takes a test",
        "Test a difference of spreads, in differences within repetitions.",
        ("fsgld/metric",),
        _metric_spreads,
        "log_likelihood.png",
    ),
    Finding(
        "With dense expansions as surrogates FSGLD needs shorter visits or smaller steps the more "
        "its shards differ",
        "Where a chain of FSGLD turns non-finite, take fewer local steps, then smaller ones.",
        (
            "fsgld/mlp_small_fisher_dense_shorter",
            "fsgld/mlp_small_fisher_dense_short",
            "fsgld/mlp_small_fisher_dense",
            "fsgld/mlp_small_fisher",
            "fsgld/mlp_small",
        ),
        _visits,
        "log_likelihood.png",
    ),
    Finding(
        "Surrogates that were refitted where the posterior lies serve longer visits",
        "For long visits of FSGLD refit surrogates where the posterior lies.",
        ("fed_ep/refresh",),
        _refreshed,
        "refresh.png",
    ),
    Finding(
        "The best multiple of the conducive gradient is 1 / (1 + e^2), and mends no bad surrogates",
        "Mend bad surrogates before tuning the multiple of the conducive gradient.",
        ("fsgld/alpha",),
        _multiple,
        "alpha.png",
    ),
    Finding(
        "DSGLD's rows of FSGLD's Table 1 are like those of networks that ignore their input",
        "Compare a classifier with a coin toss before comparing methods.",
        ("fsgld/mlp_small_paper_step",),
        _coin,
        "log_likelihood.png",
    ),
)
