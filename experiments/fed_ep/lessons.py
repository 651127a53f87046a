"""What a user of FedEP should know: its part of ``docs/findings.md``."""

from experiments.claims import Finding, Given
from experiments.fed_ep.findings import difference_noise
from experiments.fed_ep.hyperparameters import best, groups
from experiments.fed_ep.image_figures import smooth
from experiments.fed_ep.linear import lead

__all__ = ["FINDINGS"]


def _one_shot(toy: Given) -> str:
    distance = {row["method"]: row["distance"] for row in toy["table"]}
    rounds = next(i for i, d in enumerate(toy["by_round"]["FedEP"], 1) if d < 0.01)
    return (
        "For pairs of Gaussian clients and diagonal approximations, the product of each client's "
        f"own Gaussian (FedPA) misses the mean by {distance['FedPA']:.2f} on average, the mean of "
        f"optima (FedAvg) by {distance['FedAvg']:.2f}, however many rounds are run; expectation "
        f"propagation is within 0.01 after {rounds} rounds."
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


def _fed_sep(mnist: Given, pulled: Given) -> str:
    column = f"accuracy in {mnist['settings']['checkpoints'][-1]} rounds"
    rows = {row["method"]: row[column] for row in mnist["table"]}
    base = max(rows["FedAvg"], rows["FedPA"])
    gaps = [v - base for n, v in rows.items() if n.startswith("FedSEP ")]
    (of,) = groups(pulled).values()
    (plain,) = [r for r in pulled["table"] if r["method"] == "FedAvg"]
    scan = {float(value): row for value, row in of.items()}
    listed = "; ".join(
        f"{best(pulled, scan[a]):.1f} % with {a:g}" for a in sorted(scan, reverse=True)
    )
    top, hard = max(scan, key=lambda a: best(pulled, scan[a])), max(scan)
    away = (
        f"{-max(gaps):.1f} to {-min(gaps):.1f} points behind"
        if max(gaps) < 0
        else f"{min(gaps):+.1f} to {max(gaps):+.1f} points from"
    )
    left = best(pulled, scan[top]) - best(pulled, plain)
    wide = [scan[a]["accuracy, marginal"] for a in (hard, top)]
    return (
        f"On MNIST FedSEP, which keeps nothing at the clients, is {away} the better of FedAvg and "
        f"FedPA in accuracy ({mnist['settings']['num_seeds']} seed). How hard clients are pulled "
        "to the global mean is the larger part of it: the best accuracy of FedSEP (I) is "
        f"{listed} per row, FedAvg's {best(pulled, plain):.1f} %; {left:+.1f} points remain, "
        "with a noise of "
        f"{difference_noise(pulled, best(pulled, plain)):.1f} points from the test images. The "
        f"same number is the precision of the approximation, though: the accuracy of averages over "
        f"its draws is {wide[0]:.0f} % with {hard:g} and {wide[1]:.0f} % with {top:g}. So one "
        "number cannot give clients room and draws of a sensible width."
    )


FINDINGS = (
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
