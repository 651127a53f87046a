"""What runs of the Gaussian mean say about Figures 1, S1 and S2."""

import numpy as np

from experiments.claims import (
    CONTRADICTED,
    DRAWN,
    PARTLY,
    REPRODUCED,
    TIMES,
    UNTESTABLE,
    Given,
    Verdict,
    first_that_holds,
    rows_of,
    with_lost_settings,
)
from experiments.qlsd.gaussian_figures import rows_of_clients
from experiments.qlsd.gaussian_findings import as_released, final_ratio, small_over_large

__all__ = [
    "bits_saved",
    "client_sizes",
    "clients_apart",
    "less_compression",
    "outperforms",
    "small_steps",
]


def clients_apart(metrics: Given, config: Given) -> Verdict:
    """Tell how far clients' means are apart, over a client's rows (Figure 1, top)."""
    del config
    rows, _ = rows_of_clients(metrics)
    means = np.array([own.mean(axis=0) for own in rows])
    within = np.sqrt(np.mean([own.var(axis=0, ddof=1) for own in rows]))
    ratio = float(means.std(axis=0, ddof=1).mean() / within)
    return Verdict(
        DRAWN,
        f"the clients' means are {ratio:.2g} times as far spread as a client's rows",
    )


def bits_saved(metrics: Given, config: Given) -> Verdict:
    """Judge the bits that QLSD* with the most levels saves to the error of LSD* (Figure 1)."""
    del config
    best = rows_of(metrics, "algorithm", "QLSD*")[-1]
    error, noise = final_ratio(metrics, best["algorithm"], "LSD*")
    saved = best["fewer bits than LSD*"]
    word = first_that_holds(
        (error > 1.25 or saved < 1.1, CONTRADICTED), (saved < 2.2, PARTLY), otherwise=REPRODUCED
    )
    (plain,) = rows_of(metrics, "algorithm", "LSD*")
    return Verdict(
        word,
        f"{error:.2f} (s.e. {noise:.2f}; by the law {best['MSE, law'] / plain['MSE, law']:.2f}) "
        f"times the error with {saved:.2f} times fewer bits in real messages "
        f"({best['by bound, ln']:.2f} as the paper counts)",
    )


def outperforms(metrics: Given, config: Given) -> Verdict:
    """Compare the curves wherever both have sent as many bits, as the figure does."""
    del config
    found = [
        _error_over(metrics["curves"][plain["algorithm"]], metrics["curves"][star["algorithm"]])
        for plain in rows_of(metrics, "algorithm", "QLSD,")
        for star in rows_of(metrics, "algorithm", "QLSD*")
    ]
    ratio, noise = min(found)
    word = first_that_holds(
        (ratio - TIMES * noise > 1, REPRODUCED),
        (ratio + TIMES * noise < 1, CONTRADICTED),
        otherwise=UNTESTABLE,
    )
    return Verdict(
        word,
        f"for the same bits at least {ratio:.2g} (s.e. {noise:.1g}) times the error of QLSD*, "
        "whatever the bits and the levels",
    )


def _error_over(plain: Given, star: Given) -> tuple[float, float]:
    """Return the least ratio of two curves' errors at the same bits, and its standard error."""
    bits = np.log(star["bits"])
    own = np.log(plain["bits"])
    both = (own >= bits[0]) & (own <= bits[-1])
    error, error_sd = (np.asarray(plain[name])[both] for name in ("error", "error_sd"))
    log_ratio = np.log(error) - np.interp(own[both], bits, np.log(star["error"]))
    relative = np.divide(star["error_sd"], star["error"])
    noise = np.hypot(error_sd / error, np.interp(own[both], bits, relative))
    at = int(log_ratio.argmin())
    ratio = float(np.exp(log_ratio[at]))
    return ratio, ratio * float(noise[at])


def less_compression(metrics: Given, config: Given) -> Verdict:
    """Judge whether QLSD is as wide with more levels (Figure 1, bottom)."""
    del config
    plain = rows_of(metrics, "algorithm", "QLSD,")
    coarse, fine = plain[0], plain[-1]
    right = metrics["dim"] * metrics["posterior_variance"]
    wide, noise = (
        [row[name] / right for row in (coarse, fine)] for name in ("E |theta - mean|^2", "its s.e.")
    )
    falls = wide[0] - 1.5 * wide[1] > TIMES * np.hypot(noise[0], 1.5 * noise[1])
    listed = " and ".join(
        f"{factor:.3g} (s.e. {own:.1g}) with {row['algorithm'][6:]}"
        for factor, own, row in zip(wide, noise, (coarse, fine), strict=True)
    )
    released = " and ".join(f"{as_released(metrics, r['algorithm']):.3g}" for r in (coarse, fine))
    told = "it falls: " if falls else ""
    return with_lost_settings(
        CONTRADICTED if falls else REPRODUCED,
        f"{told}squared distance from the mean over the posterior's {listed}; by the law "
        f"{released} with the released notebook's step size and batches; the average of theta "
        "itself has no bias",
    )


def client_sizes(metrics: Given, config: Given) -> Verdict:
    """Tell the clients' numbers of rows (Figure S1)."""
    del config
    sizes = np.array(metrics["sizes"])
    return Verdict(DRAWN, f"{sizes.min()} to {sizes.max()} rows, {len(sizes)} clients")


def small_steps(metrics: Given, config: Given) -> Verdict:
    """Judge the errors of a smaller step for the same bits (Figure S2)."""
    del config
    budget = metrics["budget"]
    factors, errors = budget["factors"], np.asarray(budget["error"])
    mean, square = small_over_large(metrics)
    relative = np.asarray(budget["error_sd"]) / errors
    noise = mean * np.hypot(*(relative[:, pick(factors)] for pick in (np.argmin, np.argmax)))
    both = np.concatenate([mean, square])
    word = first_that_holds(
        (both.max() < 1, REPRODUCED), (both.min() < 1, PARTLY), otherwise=CONTRADICTED
    )
    return Verdict(
        word,
        f"with {min(factors):g} / L, over {max(factors):g} / L for the same bits, the measured "
        f"squared error of the average of theta is {mean.min():.2g} to {mean.max():.2g} times as "
        f"large (s.e. at most {noise.max():.1g}), that of the average squared distance "
        f"from the mean {square.min():.1g} to {square.max():.1g} times (by an "
        "approximate law: states are taken as Gaussian)",
    )
