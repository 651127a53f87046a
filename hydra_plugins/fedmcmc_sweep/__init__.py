"""``hydra/launcher=sweep``: all jobs of a multirun in one process, and their results as one.

Hydra finds launchers in the namespace package ``hydra_plugins``, wherever that is on the path; it
imports this file at every start, so what the launcher needs is imported when it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn

__all__ = ["SweepLauncher"]


@dataclass
class SweepLauncherConf:
    """Config of ``hydra/launcher=sweep``."""

    _target_: str = "hydra_plugins.fedmcmc_sweep.SweepLauncher"


ConfigStore.instance().store(
    group="hydra/launcher", name="sweep", node=SweepLauncherConf, provider="fedmcmc"
)


class SweepLauncher(BasicLauncher):
    """Runs all jobs in this process, where they share what is compiled."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run all jobs; see `experiments.sweeping`."""
        from experiments.sweeping import launch

        launch(self, job_overrides)
        return []
