"""The claims of El Mekkaoui et al. (2021), in the paper's order."""

from experiments.claims import Claim
from experiments.fsgld import gaussian_verdicts, metric_verdicts, network_verdicts

__all__ = ["CLAIMS"]

STABLE = ("fsgld/mlp", "fsgld/mlp_small")
OURS = {
    "fsgld/mlp_small_fisher": "diagonal expansions at a trained network as surrogates",
    "fsgld/mlp_small_fisher_dense": "dense expansions as surrogates",
    "fsgld/mlp_small_fisher_dense_short": "dense expansions and a tenth as many steps a visit",
    "fsgld/mlp_small_fisher_dense_shorter": "dense expansions and a tenth as many steps a visit, "
    "each a tenth as large",
}
"""Runs with surrogates that the paper does not have, and in what they differ."""
SAMPLED = ("fsgld/metric", "fsgld/metric_small")


def _table_1(text: str, better: bool, runs: tuple[str, ...], ours: bool = False) -> Claim:
    split = "non_iid" if better else "iid"
    figure = "log_likelihood.png"
    return Claim(
        "Table 1", text, "fsgld/mlp", network_verdicts.network(split, better), figure, runs, ours
    )


CLAIMS = (
    Claim(
        "Figure 1",
        "Gradient estimates from non-IID shards vary more than those from all data.",
        "fsgld/gaussian",
        gaussian_verdicts.coin,
        "gradients.png",
    ),
    Claim(
        "Remark 1",
        "A multiple of the conducive gradient controls how far a visit explores.",
        "fsgld/alpha",
        gaussian_verdicts.exploration,
        "alpha.png",
    ),
    Claim(
        "Sections 3.1, 5",
        "A conducive gradient costs about one more evaluation of the prior, a negligible share, "
        "however many shards there are.",
        "fsgld/cost",
        gaussian_verdicts.price,
    ),
    Claim(
        "Lemma 1",
        "With conducive gradients the gradient estimator is unbiased and of finite variance.",
        "fsgld/gaussian",
        gaussian_verdicts.unbiased,
    ),
    Claim(
        "Theorems 1, 2",
        "Bounds on the squared error of averages (with a constant that is not given, so that no "
        "run can exceed them; `tests/laws` has the exact laws on Gaussian shards).",
    ),
    Claim(
        "Figures 2, 3a",
        "With more local updates DSGLD turns into a mixture of local posteriors; FSGLD stays at "
        "the posterior.",
        "fsgld/gaussian",
        gaussian_verdicts.draws,
        "draws.png",
    ),
    Claim(
        "Figure 3b",
        "FSGLD's error of the mean is far smaller, whatever the number of local updates.",
        "fsgld/gaussian",
        gaussian_verdicts.mse,
        "mse.png",
    ),
    Claim(
        "Figure 3b",
        "DSGLD with a hundred local updates converges as fast as FSGLD.",
        "fsgld/gaussian",
        gaussian_verdicts.as_fast,
        "mse.png",
    ),
    Claim(
        "Figure 3b",
        "Its error plateaus higher: only FSGLD converges to the mean.",
        "fsgld/gaussian",
        gaussian_verdicts.plateau,
        "mse.png",
    ),
    Claim(
        "Figure 4",
        "The constants of FSGLD's bound are much smaller than those of DSGLD's.",
        "fsgld/gaussian",
        gaussian_verdicts.constants,
        "constants.png",
    ),
    Claim(
        "Figure 5",
        "Metric learning: FSGLD's samples have the higher likelihood on learning and held-out "
        "pairs.",
        "fsgld/metric",
        metric_verdicts.better,
        "log_likelihood.png",
        SAMPLED,
    ),
    Claim(
        "Figure 5",
        "FSGLD converges faster.",
        "fsgld/metric",
        metric_verdicts.faster,
        "log_likelihood.png",
        ("fsgld/metric_start",),
    ),
    Claim(
        "Figure 5",
        "FSGLD varies less overall.",
        "fsgld/metric",
        metric_verdicts.spread,
        "log_likelihood.png",
        SAMPLED,
    ),
    Claim(
        "Appendix F.2",
        "Additional results with Laplace approximations as surrogates.",
        "fsgld/metric",
        metric_verdicts.laplace,
        "log_likelihood.png",
        ("fsgld/metric_laplace",),
    ),
    _table_1("Networks on non-IID shards: FSGLD is far better on held-out rows.", True, STABLE),
    Claim(
        "Section 5.3",
        "On non-IID shards DSGLD does not generalise: its log likelihood is far higher in training "
        "(we take its row train to be of the shard visited) than on held-out rows.",
        "fsgld/mlp",
        network_verdicts.generalises,
        "log_likelihood.png",
        STABLE,
    ),
    _table_1("On IID shards both perform alike.", False, STABLE),
    Claim(
        "Table 1",
        "FSGLD's standard deviations are far smaller everywhere.",
        "fsgld/mlp",
        network_verdicts.deviations,
        "log_likelihood.png",
        STABLE,
    ),
    Claim(
        "Table 1",
        "All of it at the step size 1e-4.",
        "fsgld/mlp",
        network_verdicts.paper_step,
        "log_likelihood.png",
        ("fsgld/mlp", "fsgld/mlp_small_paper_step"),
    ),
    Claim(
        "Remark 1",
        "The multiple with the least variance is 1 / (1 + e^2), where e is how far surrogates' "
        "means are off, in the scatter of the shards' own.",
        "fsgld/alpha",
        gaussian_verdicts.best_multiple,
        "alpha.png",
        ours=True,
    ),
    *(
        _table_1(f"On {kind} shards, with {text}: FSGLD {claimed}.", better, (name,), ours=True)
        for kind, better, claimed in (
            ("non-IID", True, "is far better than DSGLD on held-out rows"),
            ("IID", False, "and DSGLD perform alike"),
        )
        for name, text in OURS.items()
    ),
)
