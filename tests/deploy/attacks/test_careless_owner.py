"""An owner who sets little, sets it wrongly, loses files, restores them, or stops at any time."""

import contextlib
import os
import shutil
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._config import open_configured_site, run_over, site_settings
from fedmcmc.deploy._frames import Frame
from tests.deploy.attacks.support import (
    KEY,
    NAMES,
    PERMISSIVE,
    POSITION,
    Network,
    make_study,
    open_site,
    rows_of,
    run,
    sent,
    write_study,
)
from tests.support.commands import NAMES as SITES
from tests.support.commands import Consortium

# Few rows


def test_a_site_of_one_row_takes_no_part_by_default(tmp_path):
    """Its message is that row's; nobody had to set anything for it to leave."""
    study = make_study(sites={"bern": 1, "basel": 30, "chur": 30})
    rows = {"x": np.ones((1, 3), np.float32)}
    with pytest.raises(deploy.Refused, match=r"bern .*(fewer than 20 rows|min_rows)"):
        open_site(study, "bern", tmp_path, rows=rows, limits={})


def test_a_site_of_few_rows_for_its_parameters_takes_no_part_by_default(tmp_path):
    """25 rows follow from 25 sums, and a position has 12 numbers."""
    sizes = dict(zip(NAMES, (25, 40, 40), strict=True))
    study = make_study(sites=sizes, rows={"x": jax.ShapeDtypeStruct((12,), jnp.float32)})
    network = deploy.LocalTransport()
    for name, num in sizes.items():
        rows = {"x": np.ones((num, 12), np.float32)}
        network.join(open_site(study, name, tmp_path, rows=rows, limits={}))
    with pytest.raises(deploy.SiteError, match=r"bern: .*(36|min_rows)"):
        deploy.run(
            study, KEY, "main", jnp.zeros(12), transport=network, num_rounds=1, progress=False
        )


def test_two_sites_are_too_few_under_masks_by_default(tmp_path):
    """Each can compute the other's message: the total less its own."""
    study = make_study("masked", masked=True)
    two = dict(list(study.sites.items())[:2])
    secure = study.secure | {"identities": {n: study.secure["identities"][n] for n in two}}
    with pytest.raises((deploy.Refused, ValueError), match=r"2 sites|fewer than 3|at least 3"):
        open_site(
            make_study("masked", sites=two, secure=secure),
            "bern",
            tmp_path,
            limits=dict(min_rows=1),
        )


# Limits that are none

WRONG = {
    "min_rows": ("5", -1, 2.5, True, [5], float("nan")),
    "min_batch": ("5", -1, 2.5, True, [5]),
    "min_sites": ("3", -1, 2.5, True),
    "max_numbers": ("5", -1, 2.5, True, float("inf")),
    "max_bytes": ("5", -1, 2.5, True),
    "refused_columns": ("postcode", "x", [1], {"x": 1}),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_limit_of_the_wrong_type_limits_nothing(name, value, tmp_path):
    """The owner believes in a limit that is never reached."""
    with pytest.raises((ValueError, TypeError, deploy.Refused), match=name):
        open_site(make_study(), "bern", tmp_path, limits=PERMISSIVE | {name: value})


def test_a_refused_column_that_does_not_exist_is_in_the_log(tmp_path):
    """It may be misspelled, or one that this study does not use."""
    log = deploy.AuditLog(tmp_path / "bern.log")
    open_site(make_study(), "bern", tmp_path, log=log, refused_columns=["postcode"])
    log.close()
    assert "postcode" in (tmp_path / "bern.log").read_text()


def test_a_limit_of_an_unknown_name_limits_nothing(tmp_path):
    """An earlier version had `most_rounds`."""
    with pytest.raises((ValueError, TypeError), match="most_rounds"):
        open_site(make_study(), "bern", tmp_path, most_rounds=5)
    path = site_toml(tmp_path, "bern")
    path.write_text(path.read_text().replace("min_rows", "most_rounds"))
    with pytest.raises(ValueError, match="most_rounds"):
        site_settings(path)


# Lost and restored folders


def run_once(study, folder, log_path, place, **limits):
    """Run one round after all sites have started again; return how many numbers left bern."""
    network = Network(study, folder)
    with contextlib.closing(deploy.AuditLog(log_path)) as log:
        network.enter(open_site(study, "bern", folder, log=log, **limits))
        try:
            run(study, network, position=POSITION + place)
        except deploy.SiteError as error:
            assert "bern" in str(error)
        return sent(study, network, "bern")


def test_a_count_does_not_start_again_with_another_folder(tmp_path):
    """The server could repeat all requests: the log, which lies elsewhere, has the count.

    A clean restart uses up no limit: all numbers that the owner allows can leave.
    """
    study, folder, log = make_study("noisy"), tmp_path / "sites", tmp_path / "audit.log"
    num = run_once(study, folder, log, 1)
    assert num > 0
    shutil.copytree(folder, tmp_path / "backup")
    assert run_once(study, folder, log, 2, max_numbers=2 * num) == num
    assert run_once(study, folder, log, 3, max_numbers=2 * num) == 0
    shutil.rmtree(folder)
    assert run_once(study, folder, log, 4, max_numbers=2 * num) == 0
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    assert run_once(study, folder, log, 5, max_numbers=2 * num) == 0
    assert run_once(study, tmp_path / "moved", log, 6, max_numbers=2 * num) == 0


def test_a_backup_is_restored_under_masks(tmp_path):
    """The site no longer has its last answer, and could answer the same round again."""
    study, folder, path = make_study("masked", masked=True), tmp_path / "sites", tmp_path / "log"

    def answer(key):
        with contextlib.closing(deploy.AuditLog(path)) as log:
            network = Network(study, folder)
            network.enter(open_site(study, "bern", folder, log=log))
            run(study, network, key=jax.random.key(key))

    answer(1)
    shutil.copytree(folder / "bern", tmp_path / "backup")
    answer(2)
    shutil.rmtree(folder / "bern")
    shutil.copytree(tmp_path / "backup", folder / "bern")
    with pytest.raises((deploy.Refused, deploy.SiteError), match=r"(?i)log|backup"):
        answer(3)


# Two sites, one folder


def site_toml(folder, name, state="state"):
    """Write settings of a site on a machine that has several; return their path."""
    write_study(folder)
    np.savez(folder / f"{name}.npz", **rows_of(name))
    path = folder / f"{name}.toml"
    path.write_text(f"""
name = "{name}"
study = "study.toml"
approved = "{deploy.Study.read(folder / "study.toml").digest}"
rows = "{name}.npz"
folder = "{state}"
server = "localhost:1"
key = "{name}.key"
certificate = "{name}.crt"
authority = "ca.crt"
log = "{name}.log"
[limits]
min_rows = 1
""")
    return path


def test_two_sites_of_one_machine_share_a_folder(tmp_path):
    """Each would answer with the other's state and secret, and count the other's numbers."""
    bern, chur = (site_settings(site_toml(tmp_path, name)) for name in ("bern", "chur"))
    with (
        open_configured_site(*bern),
        pytest.raises((deploy.Refused, ValueError, OSError), match="state"),
        open_configured_site(*chur),
    ):
        pass


def test_a_site_is_given_the_folder_of_another_that_stopped(tmp_path):
    """The same, one after the other."""
    bern, chur = (site_settings(site_toml(tmp_path, name)) for name in ("bern", "chur"))
    with open_configured_site(*bern):
        pass
    with (
        pytest.raises((deploy.Refused, ValueError, OSError), match="bern"),
        open_configured_site(*chur),
    ):
        pass


def test_one_site_runs_twice(tmp_path):
    """Two processes would drive each other out, and write one state."""
    bern = site_settings(site_toml(tmp_path, "bern"))
    with (
        open_configured_site(*bern),
        pytest.raises((deploy.Refused, ValueError, OSError), match=r"in use|state"),
        open_configured_site(*bern),
    ):
        pass


# Stops


class Interrupted(Network):
    """A server that somebody stops with Ctrl-C in a round."""

    def __init__(self, study, folder, round_):
        super().__init__(study, folder)
        self.round = round_

    def receive(self, timeout):
        news = super().receive(timeout)
        if news is not None and news[1] is not None:
            frame = Frame.parse(news[1])
            if frame.kind == "answer" and frame.tag.round == self.round:
                self.round = -1  # once
                signal.raise_signal(signal.SIGINT)
        return news


@pytest.mark.filterwarnings("ignore::fedmcmc.SamplingWarning")
def test_an_interrupt_before_the_first_draw_writes_no_draws(tmp_path):
    """A file of no draws over the one of the last run."""
    study = deploy.Study.read(write_study(tmp_path))
    (tmp_path / "draws.npz").write_bytes(b"of the last run")
    with contextlib.suppress(KeyboardInterrupt, SystemExit, deploy.SiteError):
        run_over(tmp_path / "server.toml", lambda: Interrupted(study, tmp_path / "sites", 0))
    assert (tmp_path / "draws.npz").read_bytes() == b"of the last run"


@pytest.mark.filterwarnings("ignore::fedmcmc.SamplingWarning")
def test_an_interrupt_keeps_the_rounds_before_it(tmp_path):
    """The next checkpoint would have been a thousand rounds later."""
    study = deploy.Study.read(write_study(tmp_path))
    with contextlib.suppress(KeyboardInterrupt, SystemExit, deploy.SiteError):
        run_over(tmp_path / "server.toml", lambda: Interrupted(study, tmp_path / "sites", 7))
    network = Network(study, tmp_path / "sites")
    run_over(tmp_path / "server.toml", lambda: network)
    assert min(exchange.request.tag.round for exchange in network.steps("bern")) == 7


@pytest.mark.slow
def test_ctrl_c_at_a_server_is_no_success(tmp_path):
    """Scripts that continue after exit status 0 would take what is there for the draws."""
    run = dict(kernel="main", seed=3, draws="draws.npz", position="model.py:start")
    run |= dict(checkpoint="checkpoint", every_rounds=5, progress=False, num_rounds=10**6)
    clinics = Consortium(tmp_path, run=run)
    try:
        with clinics.in_threads(SITES):
            clinics.start("server")
            end = time.monotonic() + 120
            while not clinics.round:
                assert time.monotonic() < end and clinics.processes["server"].poll() is None
                time.sleep(0.1)
            os.kill(clinics.processes["server"].pid, signal.SIGINT)
            assert clinics.processes["server"].wait(timeout=60) == 130
        assert "Traceback" not in clinics.log("server")
    finally:
        clinics.end()
