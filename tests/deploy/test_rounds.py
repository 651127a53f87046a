"""A run at real sites draws the numbers of a simulation."""

import platform
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy, streaming
from fedmcmc.deploy._rounds import Rounds
from tests.contracts.model import DATA, KEY
from tests.contracts.tables import KERNELS
from tests.support import studies
from tests.support.lanes import fast_and_slow
from tests.support.processes import environment
from tests.support.site_runs import ADAPTING, POSITION, at_sites, run_both

MEMORY = "compress: lsd_pp, memory: per client"
# A phase before the last.
FAST = ("fa_hmc",)
OF_CLIENTS = [
    name for name in KERNELS if not studies.study_of(name).kernel("main").participation.pooled
]


@ADAPTING
@pytest.mark.parametrize("row", fast_and_slow(OF_CLIENTS, FAST))
def test_sites_draw_what_a_simulation_does(row, tmp_path):
    run_both(row, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="the flag that leaves out fused arithmetic is for x86",
)
@pytest.mark.parametrize("part", range(4))
def test_sites_draw_the_same_to_the_last_bit(part):
    # Instructions up to AVX have no fused multiply-add; see tests/contracts/test_kernels.py.
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.site_runs", *OF_CLIENTS[part::4]],
        env=environment(devices=1, flags="--xla_cpu_max_isa=AVX"),
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0 and "same" in done.stdout, done.stdout + done.stderr[-3000:]


@pytest.mark.slow
def test_chains_burn_in_thinning_and_accumulators_equal_a_simulation(tmp_path):
    samples = run_both(
        MEMORY,
        tmp_path,
        num_rounds=9,
        num_chains=3,
        num_burnin=2,
        thinning=2,
        record=fedmcmc.Record(streams={"m": streaming.moments()}),
    )
    assert samples.draws["a"].shape == (3, 3) and samples.streams["m"].num_draws == 3


@pytest.mark.slow
def test_a_rule_ends_a_run(tmp_path):
    study = studies.study_of("fed_ep: expansions")
    samples = at_sites(study, tmp_path, until=fedmcmc.at_rest(0.5), max_rounds=30)
    assert samples.stopped["reached"] and samples.totals["rounds"] < 30


@pytest.mark.slow
def test_a_run_continues_from_its_checkpoint_with_more_rounds(tmp_path):
    study = studies.study_of(MEMORY)
    expected = at_sites(study, tmp_path / "expected", num_rounds=9)
    checkpoint = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=2)
    for num_rounds in (3, 9):
        samples = at_sites(study, tmp_path / "sites", num_rounds=num_rounds, checkpoint=checkpoint)
    chex.assert_trees_all_equal(samples.draws, expected.draws)
    chex.assert_trees_all_equal(samples.info, expected.info)


class Bug(Exception):
    """Something that no part of a run expects."""


def test_a_run_whose_server_fails_continues(tmp_path, monkeypatch):
    """Between two checkpoints, within a segment, to whose first round sites return.

    With two chains and cohorts a site's answer counts in only one of the chains. Sites without
    their states cannot continue.
    """
    study = studies.study_of(MEMORY)
    settings = dict(num_rounds=9, num_chains=2)
    expected = at_sites(study, tmp_path / "expected", **settings)
    settings["checkpoint"] = fedmcmc.Checkpoint(tmp_path / "checkpoint", every_rounds=5)
    real = Rounds.round

    def fail(rounds, state, number):
        if number == 7:
            raise Bug
        return real(rounds, state, number)

    with monkeypatch.context() as patched, pytest.raises(Bug):
        patched.setattr(Rounds, "round", fail)
        at_sites(study, tmp_path / "sites", **settings)
    samples = at_sites(study, tmp_path / "sites", **settings)
    chex.assert_trees_all_equal(samples.draws, expected.draws)
    with pytest.raises(deploy.SiteError, match="no state of round 9"):
        at_sites(study, tmp_path / "others", **settings | dict(num_rounds=10))


def test_cohorts_of_a_subclass_of_full_participation_change(tmp_path):
    study = studies.study_of(kernels={"main": f"{studies.HERE}:half"})
    num_active = at_sites(study, tmp_path, num_rounds=8).info["num_active"]
    assert len(np.unique(num_active)) > 1


def test_a_chain_that_turns_non_finite_ends_a_run_with_the_draws_before(tmp_path):
    study = studies.study_of("lsd_star", settings={"row": "lsd_star", "step_size": 1e30})
    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        at_sites(study, tmp_path, num_rounds=20)
    error = caught.value
    assert error.samples.num_draws == error.round == error.samples.totals["rounds"][0] > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(error.samples.draws))
    with pytest.raises(fedmcmc.NonFiniteError) as simulated:
        fedmcmc.sample(KEY, study.kernel("main"), DATA, POSITION, num_rounds=20, progress=False)
    assert simulated.value.round == error.round
