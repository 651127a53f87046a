"""Settings with which the Gaussian experiment takes a moment."""

import hydra

from experiments import settings_run as run

TINY = (
    "num_clients=3",
    "rows_per_client=40",
    "step_size=1e-3",
    "num_local_steps=[20]",
    "num_burnin=100",
    "thinning=10",
    "num_draws=400",
    "num_chains=16",
)


def compose(*overrides):
    """Return the settings that a command line gives."""
    with hydra.initialize_config_dir(str(run.CONFIGS), version_base="1.3"):
        return hydra.compose("settings", list(overrides))
