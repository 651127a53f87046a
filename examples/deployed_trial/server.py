"""Server of the deployed demo's FSGLD: ``python server.py fsgld.toml``.

The server finds the mode with the hospitals, requests their expansions at the mode, and runs FSGLD
with these. It never has a row.
"""

import logging
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np

import fedmcmc
from fedmcmc import deploy


def main(path):
    """Run FSGLD with the settings in the file at `path`, and write the draws."""
    with path.open("rb") as file:
        run = tomllib.load(file)["run"]
    sites = deploy.connect(path)
    try:
        posterior, key = sites.study.model, jax.random.key(run["seed"])
        start = posterior.init_fn(jax.random.split(key)[1])
        mode = fedmcmc.surrogates.mode(posterior, sites, start).position
        surrogates = fedmcmc.surrogates.taylor(posterior, sites, mode)
        kernel = fedmcmc.fsgld(
            posterior,
            surrogates,
            step_size=run["step_size"],
            num_local_steps=run["num_local_steps"],
        )
        samples = sites.sample(
            key,
            kernel,
            mode,
            num_rounds=run["num_rounds"],
            num_burnin=run["num_burnin"],
            thinning=run["thinning"],
            num_chains=run["num_chains"],
            progress=False,
        )
    finally:
        sites.close()
    np.savez(path.parent / run["draws"], **samples.draws)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    main(Path(sys.argv[1]))
