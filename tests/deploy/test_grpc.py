"""Sites over gRPC on loopback draw the same, and the server refuses strangers."""

import chex
import pytest

from fedmcmc import deploy
from tests.support import studies
from tests.support.consortium import Threads, credentials, keys, make_keys
from tests.support.lanes import fast_and_slow
from tests.support.recorded_sites import run_over
from tests.support.site_runs import MASKED, at_sites

__all__ = ["keys"]


@pytest.fixture
def server(keys):
    folder, pins = keys
    grpc_server = deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), pins)
    yield grpc_server
    grpc_server.close()


@pytest.fixture
def threads(server):
    sites = Threads(server.port)
    yield sites
    sites.end()


def test_a_port_in_use_is_refused(keys, server):
    folder, pins = keys
    with pytest.raises(OSError, match=f"cannot wait at 127.0.0.1:{server.port}: another process"):
        deploy.GrpcServer(f"127.0.0.1:{server.port}", credentials(folder, "server"), pins)


@pytest.mark.parametrize(
    "row",
    # One per family; those that keep states, of which the server has copies, first.
    fast_and_slow(
        (
            "compress: lsd_pp, memory: per client",
            MASKED + "lsd_pp",
            "compress: fa_ld, per_client",
            "fsgld",
            "dg_sgld",
            "fed_be",
            "fa_hmc",
            "pseudo_gradients",
            "fed_ep",
            "hmc",
            "multiple_try",
            "faults: compress: lsd, memory",
            MASKED + "fed_ep: expansions",
        ),
        ("compress: lsd_pp, memory: per client", MASKED + "lsd_pp"),
    ),
)
def test_sites_over_the_network_draw_the_numbers_of_sites_in_threads(
    row, keys, server, threads, tmp_path
):
    masked = row.startswith(MASKED)
    study = (studies.masked_study if masked else studies.study_of)(row.removeprefix(MASKED))
    for name in study.sites:
        threads.join(study, name, tmp_path, credentials(keys[0], name))
    samples = run_over(server, study, num_rounds=4)
    expected = at_sites(study, tmp_path / "local", num_rounds=4)
    chex.assert_trees_all_equal(samples.draws, expected.draws)
    chex.assert_trees_all_equal(samples.state.server, expected.state.server)
    assert samples.totals["bits_up"] == expected.totals["bits_up"]


def test_an_unregistered_certificate_is_refused(keys, server, threads, tmp_path):
    folder, _ = keys
    deploy.make_party(folder, tmp_path / "other", "bern")  # of the same authority
    other = credentials(tmp_path / "other", "bern")
    threads.join(studies.study_of(), "bern", tmp_path, other).join(timeout=20)
    assert "not registered" in threads.errors["bern"]
    assert server.receive(0.2) is None


def test_a_site_of_another_authority_cannot_join(server, threads, tmp_path):
    make_keys(tmp_path / "rogue", ["bern"])
    threads.join(studies.study_of(), "bern", tmp_path, credentials(tmp_path / "rogue", "bern"))
    assert server.receive(1.0) is None
    assert threads.errors == {}  # it tries again: its certificate may be replaced


def test_a_site_under_another_name_is_refused(keys, server, threads, tmp_path):
    study = studies.study_of()
    sites = deploy.Sites(study, server)
    mine = credentials(keys[0], "bern")
    thread = threads.join(study, "bern", tmp_path, mine, claims="chur")
    with pytest.warns(RuntimeWarning, match="registered as 'bern' but its name is 'chur'"):
        sites._links._admit(*server.receive(20.0), {})
    thread.join(timeout=20)
    assert "but its name is" in threads.errors["bern"]


def test_two_names_with_one_certificate_are_refused(keys):
    folder, pins = keys
    twice = {"bern": pins["bern"], "basel": pins["bern"]}
    with pytest.raises(ValueError, match="same certificate"):
        deploy.GrpcServer("127.0.0.1:0", credentials(folder, "server"), twice)


def test_keys_are_readable_by_their_owner_alone_and_not_replaced(keys):
    folder, _ = keys
    assert (folder / "bern.key").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError, match="would replace it"):
        deploy.make_party(folder, folder, "bern")
