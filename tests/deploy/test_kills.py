"""Processes of sites and of the server are killed, and the draws do not change."""

import random
import time

import numpy as np
import pytest

from fedmcmc import deploy
from tests.support.commands import NAMES, SETTINGS, Consortium

PATIENCE = 240.0


@pytest.fixture
def clinics(tmp_path):
    consortium = Consortium(tmp_path)
    with consortium.in_threads(NAMES[1:]):
        yield consortium
    consortium.end()


def wait_until(is_true, clinics):
    end = time.monotonic() + PATIENCE
    while not is_true():
        alive = {name: process.poll() for name, process in clinics.processes.items()}
        logs = "\n".join(clinics.log(name)[-2000:] for name in alive)
        assert time.monotonic() < end and not any(alive.values()), (alive, logs)
        time.sleep(0.005)


def run_killing(clinics, victims, longest, seed):
    """Run to the end, killing each of `victims` in turn; return how many were running."""
    rng, kills = random.Random(seed), 0
    clinics.start("bern")
    clinics.start("server")
    for victim in victims:
        round_ = clinics.round
        wait_until(
            lambda round_=round_: clinics.round > round_ or (clinics.folder / "draws.npz").exists(),
            clinics,
        )
        time.sleep(rng.uniform(0, longest))
        if (clinics.folder / "draws.npz").exists():
            break
        kills += clinics.kill(victim)
        clinics.start(victim)
    wait_until(lambda: (clinics.folder / "draws.npz").exists(), clinics)
    assert clinics.processes["server"].wait(timeout=60) == 0
    return kills


def check_draws(clinics):
    deploy.verify_log(clinics.folder / "bern.audit.log")  # of all its processes
    expected = clinics.undisturbed()
    with np.load(clinics.folder / "draws.npz") as stored:
        np.testing.assert_array_equal(stored["theta"], expected.draws)
    assert expected.draws.shape == (2, SETTINGS["num_rounds"] // 2, 2)


@pytest.mark.slow
def test_a_killed_site_and_a_killed_server_change_no_draw(clinics):
    assert run_killing(clinics, ["bern", "server"], 0.2, seed=0) == 2
    check_draws(clinics)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_many_kills_change_no_draw(clinics, seed):
    victims = random.Random(seed).choices(["bern", "server"], k=4)
    assert run_killing(clinics, victims, 0.2, seed) == 4
    check_draws(clinics)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_kills_in_rounds_under_masks_change_no_draw(tmp_path, seed):
    clinics = Consortium(tmp_path, masked=True)
    try:
        with clinics.in_threads(NAMES[1:]):
            assert run_killing(clinics, ["bern", "server", "bern", "bern"], 0.2, seed) == 4
            check_draws(clinics)
    finally:
        clinics.end()


@pytest.mark.slow
def test_all_processes_are_killed_at_once(tmp_path):
    clinics, everybody = Consortium(tmp_path), (*NAMES, "server")
    try:
        for name in everybody:
            clinics.start(name)
        for _ in range(2):
            round_ = clinics.round
            wait_until(lambda round_=round_: clinics.round > round_, clinics)
            assert not (tmp_path / "draws.npz").exists()
            for name in everybody:
                assert clinics.kill(name)
            for name in everybody:
                clinics.start(name)
        wait_until(lambda: (tmp_path / "draws.npz").exists(), clinics)
        check_draws(clinics)
    finally:
        clinics.end()
