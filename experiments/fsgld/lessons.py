"""What a user of FSGLD should know: its part of ``docs/findings.md``."""

import numpy as np

from experiments.claims import Finding, Given, paired
from experiments.fsgld.alpha import best as best_multiples

__all__ = ["FINDINGS"]


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
)
