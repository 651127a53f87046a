"""Bias against step size, and rounds against bits: ``python docs/figures/choosing.py``.

It draws ``docs/figures/choosing.png``. The left panel samples the three clinics of
docs/explanation/choosing.md; the right panel reads the table of docs/explanation/exactness.md.
"""

from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from exactness import ROOT, clinics, model, moments_on_a_grid, sample_without_warnings

import fedmcmc

STEPS = (0.1, 0.2, 0.4, 0.8)
CHAINS, BURN_IN, DRAWS_PER_CHAIN = 128, 200, 4_000
METHODS = {"fit": "*", "hmc": "s", "fsgld": "o", "qlsd_pp": "^", "fa_hmc": "D", "fed_ep": "P"}


def excess(
    data: fedmcmc.FederatedData,
    white: fedmcmc.surrogates.Whitened,
    kernel: fedmcmc.FederatedKernel,
    sds: np.ndarray,
) -> float:
    """Return how much too wide the sds of long chains are, in percent: the mean over both."""
    counts = dict(num_rounds=BURN_IN + DRAWS_PER_CHAIN, num_burnin=BURN_IN, num_chains=CHAINS)
    draws = sample_without_warnings(kernel, data, white, **counts)
    spread = draws.std((0, 1)) / sds
    return float(100 * (spread.mean() - 1))


def rounds_and_megabits() -> Iterator[tuple[str, float, float]]:
    """Yield the method, rounds and megabits of each cell of the table that met the limits."""
    page = (ROOT / "docs" / "explanation" / "exactness.md").read_text()
    table = page[page.index("*Rounds; megabits.") :].split("\n\n")[1].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]
    for row in rows[2:]:
        for name, cell in zip(rows[0][1:], row[1:], strict=True):
            if cell and not cell.startswith("no"):
                rounds, megabits = cell.replace(",", "").split(";")
                yield name, float(rounds), float(megabits)


def main() -> None:
    """Sample with each step size, and draw both panels."""
    data = fedmcmc.FederatedData.from_clients(list(clinics()))
    posterior = fedmcmc.from_numpyro(model, example=data)
    white = fedmcmc.whiten(posterior, data)
    mode = white.posterior.position_fn(white.position)["b"]
    sds = moments_on_a_grid(posterior, data, mode, np.sqrt(np.diag(white.metric)))[1]

    plt.style.use(ROOT / "experiments" / "figures.mplstyle")
    _, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.1))
    steps = np.geomspace(0.08, 1, 50)
    left.plot(steps, 100 * (1 / np.sqrt(1 - steps / 2) - 1), color="black", label="formula")
    kernels = {
        "lsd": lambda h: fedmcmc.lsd(white.posterior, step_size=h),
        "fsgld, 10 local steps": lambda h: fedmcmc.fsgld(
            white.posterior, white.surrogates, step_size=h, num_local_steps=10
        ),
    }
    for (name, build), marker in zip(kernels.items(), "ox", strict=True):
        wide = [excess(data, white, build(step), sds) for step in STEPS]
        print(name, dict(zip(STEPS, np.round(wide, 2), strict=True)))
        left.plot(STEPS, wide, marker, label=name)
    left.set(xscale="log", yscale="log", xlabel="step size", ylabel="sds too wide by, percent")
    left.set(title="Bias", xticks=STEPS, xticklabels=[f"{step:g}" for step in STEPS])
    left.set(yticks=(2, 5, 10, 20, 40), yticklabels=("2", "5", "10", "20", "40"))
    left.minorticks_off()
    left.legend()

    rows = list(rounds_and_megabits())
    for method, marker in METHODS.items():
        points = [(rounds, bits) for name, rounds, bits in rows if name == method]
        if points:
            right.loglog(*zip(*points, strict=True), marker, label=method, alpha=0.8)
    right.set(title="Cost of small errors", xlabel="rounds", ylabel="megabits, all clients")
    right.legend(ncols=2)
    plt.savefig(Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
