"""Limits of a site's owner hold for all requests of a server and all faults of the site's disk."""

import contextlib
import json
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc
from fedmcmc import deploy
from fedmcmc.deploy._audit import LogError
from fedmcmc.deploy._config import site_settings
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy._frames import Frame
from fedmcmc.deploy._limits import numbers_per_message, smallest_batch
from fedmcmc.deploy._shapes import shapes_of_run
from fedmcmc.deploy._words import askable_estimators, askable_kernels, to_words
from fedmcmc.gradients import Minibatch
from tests.contracts.model import KEY, POSTERIOR
from tests.contracts.tables import ESTIMATORS
from tests.support import studies
from tests.support.recorded_sites import record_run
from tests.support.site_runs import POSITION

HERE = __name__
STUDY = studies.study_of(kernels={"main": f"{HERE}:everyone"})
MODEL = studies.straight({})
NUM_ROWS = 24
SIZE = 10
"""Parameters of the wide model, which needs more rows than its sites have."""


@pytest.fixture(autouse=True, scope="module")
def shared_model():
    """Give all studies one model, so that their runs share compiled programs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(studies, "straight", lambda settings: MODEL)
        yield


def wide(settings):
    """Return a model of more parameters than a third of the rows."""
    return fedmcmc.Posterior(
        lambda theta: -0.5 * jnp.sum(theta**2),
        lambda theta, rows: rows["x"] @ theta[:3],
        init_fn=lambda key: jnp.zeros(SIZE),
    )


def everyone(posterior, settings):
    """Return a kernel in whose rounds all sites take part."""
    return fedmcmc.lsd(posterior, step_size=0.01)


def batched(posterior, settings):
    """Return a kernel of minibatches, under masks if the settings have ``masked``."""
    kernel = fedmcmc.lsd(posterior, step_size=0.01, batch_size=settings["batch_size"])
    return fedmcmc.secure_sum(kernel) if settings.get("masked") else kernel


def rows_of(num_rows=NUM_ROWS):
    return {"x": np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)}


def study_of(num_rows=NUM_ROWS, masked=False, **changes):
    settings = dict(
        posterior=f"{studies.HERE}:straight",
        sites=dict.fromkeys(studies.NAMES, num_rows),
        kernels={},
    )
    return (studies.masked_study if masked else studies.study_of)("lsd", **(settings | changes))


def site_of(study, folder, name="bern", **limits):
    """Return a site with the default limits, except for those given."""
    settings = dict(folder=folder / name, rows=rows_of(study.sites[name]))
    if study.secure:
        settings["identity"] = studies.identity_of(name)
    return deploy.Site(study, name, **(settings | limits))


def run_at(sites, study, num_rounds=1, position=POSITION, kernel="main", **settings):
    local = deploy.LocalTransport()
    for site in sites:
        local.join(site)
    consortium = deploy.Sites(study, local)
    with contextlib.closing(consortium):
        kernel = study.kernel(kernel) if isinstance(kernel, str) else kernel
        settings = dict(num_rounds=num_rounds, progress=False) | settings
        return consortium.sample(KEY, kernel, position, **settings)


def sites_of(study, folder, **changes):
    return [studies.site_of(study, name, folder, **changes) for name in study.sites]


def per_round(study):
    """Return how many numbers leave a site per chain and round."""
    (exchange,) = shapes_of_run(study.kernel("main"), study, POSITION).phases
    masked = bool(study.secure)
    return numbers_per_message(exchange.code, exchange.report, masked=masked)


# How much leaves


def test_each_chain_counts(tmp_path):
    """One round of 400 chains is 400 messages."""
    num = per_round(STUDY)
    assert num == 3 + 3  # the gradient; bits, its norm, whether it was of use
    sites = sites_of(STUDY, tmp_path / "free")
    run_at(sites, STUDY, num_chains=400)
    totals = [site._outflow.total for site in sites]
    np.testing.assert_array_equal(totals, 400 * num)
    sites = sites_of(STUDY, tmp_path / "limited", max_numbers=400 * num - 1)
    with pytest.raises(deploy.SiteError, match=r"2,400 more .* limit of 2,399 .*max_numbers"):
        run_at(sites, STUDY, num_chains=400)
    assert [site._outflow.total for site in sites] == [0] * 3


@pytest.mark.parametrize("masked", [False, True])
def test_set_ups_and_rounds_count(masked, tmp_path):
    study = studies.masked_study("lsd_star") if masked else studies.study_of("lsd_star")
    shapes = shapes_of_run(study.kernel("main"), study, POSITION)
    expected = 3 * per_round(study) + numbers_per_message(shapes.setup[0], masked=masked)
    sites = sites_of(study, tmp_path)
    run_at(sites, study, num_rounds=3, num_chains=2)
    assert [site._outflow.total for site in sites] == [2 * expected] * 3
    for site in sites_of(study, tmp_path):  # as after a kill
        assert site._outflow.total == 2 * expected


def test_a_clean_restart_takes_nothing_from_the_limit(tmp_path):
    limit = 8 * per_round(STUDY)
    for num_rounds in (2, 6):
        run_at(sites_of(STUDY, tmp_path, max_numbers=limit), STUDY, num_rounds=num_rounds)
    sites = sites_of(STUDY, tmp_path, max_numbers=limit)
    assert [site._outflow.total for site in sites] == [limit] * 3
    with pytest.raises(deploy.SiteError, match="has sent 48 numbers, and 6 more would exceed"):
        run_at(sites, STUDY)


def logged_site(study, folder, log, **changes):
    return studies.site_of(study, "bern", folder, log=log, **changes)


def run_logged(study, folder, log, **settings):
    """Run a study whose site bern has an audit log."""
    others = [studies.site_of(study, name, folder) for name in ("basel", "chur")]
    run_at([logged_site(study, folder, log), *others], study, **settings)


@pytest.mark.parametrize("how", ["removed", "restored"])
def test_a_count_outlives_the_folder(how, tmp_path):
    with contextlib.closing(deploy.AuditLog(tmp_path / "bern.log")) as log:
        run_logged(STUDY, tmp_path, log, num_rounds=2)
        shutil.copytree(tmp_path / "bern", tmp_path / "backup")
        run_logged(STUDY, tmp_path, log, num_rounds=3)
    shutil.rmtree(tmp_path / "bern")
    if how == "restored":
        shutil.copytree(tmp_path / "backup", tmp_path / "bern")
    num = 5 * per_round(STUDY)
    lines = [json.loads(line) for line in (tmp_path / "bern.log").read_bytes().splitlines()]
    assert lines[-1]["numbers"] == num and lines[0]["numbers"] == 0
    with contextlib.closing(deploy.AuditLog(tmp_path / "bern.log")) as log:
        site = logged_site(STUDY, tmp_path, log, max_numbers=num + 5)
        np.testing.assert_array_equal(site._outflow.total, num)
        others = [studies.site_of(STUDY, name, tmp_path) for name in ("basel", "chur")]
        with pytest.raises(deploy.SiteError, match=f"has sent {num} numbers"):
            run_at([site, *others], STUDY)


def test_the_first_answer_after_a_restart_counts_again(tmp_path):
    """A server can make a site restart, so nothing that is kept may excuse an answer."""
    pairs, _ = record_run(STUDY, tmp_path, num_rounds=1)
    requests = [request for request, _ in pairs["bern"]]
    assert Frame.parse(requests[-1]).kind == "step"
    for limit, kind in ((per_round(STUDY), "declined"), (2 * per_round(STUDY), "answer")):
        site = studies.site_of(STUDY, "bern", tmp_path, max_numbers=limit)
        answers = [site.answer(data) for data in (*requests, requests[-1])]
        assert [Frame.parse(answer).kind for answer in answers[-2:]] == [kind, kind]
        assert site._outflow.total == limit


def test_a_count_continues_in_a_file_that_replaced_its_file(tmp_path):
    """A site without an audit log has no other count."""
    disk = Disk(tmp_path)
    disk.count_numbers(10)
    shutil.copy(tmp_path / "numbers", tmp_path / "copy")
    disk.count_numbers(20)
    (tmp_path / "copy").replace(tmp_path / "numbers")
    assert disk.num_numbers == 10
    disk.count_numbers(30)
    assert disk.num_numbers == Disk(tmp_path).num_numbers == 30
    (tmp_path / "numbers").unlink()
    disk.count_numbers(40)
    assert disk.num_numbers == Disk(tmp_path).num_numbers == 40


def test_a_damaged_count_is_named(tmp_path):
    run_at(sites_of(STUDY, tmp_path), STUDY)
    path = tmp_path / "bern" / "numbers"
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(OSError, match="numbers is damaged"):
        sites_of(STUDY, tmp_path)


def test_a_backup_is_noticed_under_masks(tmp_path):
    """The folder then records fewer answers than the log."""
    study = studies.masked_study("lsd")
    with contextlib.closing(deploy.AuditLog(tmp_path / "bern.log")) as log:
        run_logged(study, tmp_path, log, num_rounds=2)
        shutil.copytree(tmp_path / "bern", tmp_path / "backup")
        run_logged(study, tmp_path, log, num_rounds=3)
        logged_site(study, tmp_path, log)  # the latest folder
        shutil.rmtree(tmp_path / "bern")
        shutil.copytree(tmp_path / "backup", tmp_path / "bern")
        with pytest.raises(deploy.Refused, match=r"By its log bern has answered .* a backup"):
            logged_site(study, tmp_path, log)


def test_sites_do_not_share_an_audit_log(tmp_path):
    with (
        contextlib.closing(deploy.AuditLog(tmp_path / "audit.log")),
        pytest.raises(LogError, match="Each site needs its own audit log"),
    ):
        deploy.AuditLog(tmp_path / "audit.log")


# Rows, minibatches, sites


@pytest.mark.parametrize("num_rows", [1, 19])
def test_few_rows_are_refused_by_default(num_rows, tmp_path):
    study = study_of(num_rows)
    with pytest.raises(deploy.Refused, match=f"bern has {num_rows} rows .* at least 20"):
        site_of(study, tmp_path)
    site_of(study, tmp_path, min_rows=num_rows)
    site_of(study_of(20), tmp_path)


def test_rows_are_three_per_parameter_by_default(tmp_path):
    kernels = dict(main=f"{studies.HERE}:kernel")
    study = study_of(posterior=f"{HERE}:wide", kernels=kernels)
    names, start = study.sites, jnp.zeros(SIZE)
    with pytest.raises(deploy.SiteError, match="a model of 10 parameters needs at least 30"):
        run_at([site_of(study, tmp_path, name) for name in names], study, position=start)
    sites = [site_of(study, tmp_path, name, min_rows=24, min_batch=1) for name in names]
    run_at(sites, study, position=start)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("estimator", ["minibatch", "svrg"])
def test_a_server_needs_permission_for_minibatches(masked, estimator, tmp_path):
    """A minibatch of one row, chosen by the server, would be that row's gradient."""
    study = study_of(masked=masked, asks=["Langevin"])
    inner = fedmcmc.minibatch(1)
    inner = fedmcmc.svrg(inner, refresh_every=2) if estimator == "svrg" else inner
    kernel = fedmcmc.langevin(study.model, inner, step_size=0.01)
    words, body = to_words(kernel, study.functions)
    with pytest.raises(deploy.Refused, match="holds the gradient estimator 'Minibatch'"):
        study.kernel_of(words, body)
    with pytest.raises(deploy.Refused, match="full gradients only"):
        run_at([], study, kernel=study.adapt_kernel(kernel), position=jnp.zeros(3))


def test_minibatches_of_a_server_are_not_small(tmp_path):
    study = study_of(asks=["Langevin", "Minibatch"])
    names, start = study.sites, jnp.zeros(3)
    for batch_size, message in ((1, "of 1 rows"), (0.5, "of 12 rows"), (19, "of 19 rows")):
        inner = fedmcmc.minibatch(batch_size)
        kernel = fedmcmc.langevin(study.model, inner, step_size=0.01)
        sites = [site_of(study, tmp_path, name) for name in names]
        with pytest.raises(deploy.SiteError, match=f"minibatches {message} at .*min_batch"):
            run_at(sites, study, kernel=kernel, position=start)
    kernel = fedmcmc.langevin(study.model, fedmcmc.minibatch(20), step_size=0.01)
    run_at(sites, study, kernel=kernel, position=start)


@pytest.mark.parametrize("masked", [False, True])
def test_minibatches_of_the_study_are_not_small(masked, tmp_path):
    """From many sums over four rows a server could compute the rows."""
    study = study_of(
        masked=masked, kernels=dict(main=f"{HERE}:batched"), settings={"batch_size": 4}
    )
    names, start = study.sites, jnp.zeros(3)
    with pytest.raises(deploy.SiteError, match=r"minibatches of 4 rows at .* at least 20 rows"):
        run_at([site_of(study, tmp_path, name) for name in names], study, position=start)
    sites = [site_of(study, tmp_path, name, min_batch=4) for name in names]
    run_at(sites, study, position=start)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_smallest_minibatch_of_an_estimator_is_found(name):
    build, _ = ESTIMATORS[name]
    expected = 25 if "fraction" in name else 2
    estimator = build()
    if "full" in name or name == "conducive":
        assert smallest_batch(estimator, 50) is None
    else:
        assert smallest_batch(estimator, 50) == expected
        assert smallest_batch(estimator, 1) == 1


def test_the_smallest_minibatch_of_a_kernel_is_found():
    step = dict(step_size=0.01)
    kernel = fedmcmc.lsd(POSTERIOR, batch_size=4, **step)
    full = fedmcmc.lsd(POSTERIOR, **step)
    kernels = (
        kernel,
        fedmcmc.secure_sum(kernel),
        fedmcmc.faults(fedmcmc.compress(kernel, fedmcmc.quantize(4)), drop=0.1),
        fedmcmc.sequence(full, kernel),
        fedmcmc.langevin(POSTERIOR, Minibatch(np.int64(4), replace=True), **step),
    )
    assert [smallest_batch(each, 50) for each in kernels] == [4] * len(kernels)
    assert smallest_batch(full, 50) is None
    assert smallest_batch(fedmcmc.minibatch(0.1), 190) == 19
    assert smallest_batch(fedmcmc.minibatch(0.001), 190) == 1


def test_sums_under_masks_have_three_sites(tmp_path):
    two = study_of(sites={"bern": NUM_ROWS, "chur": NUM_ROWS})
    site_of(two, tmp_path)
    with pytest.raises(deploy.Refused, match=r"has 2 sites, .* only in studies of at least 3 "):
        site_of(two, tmp_path, min_sites=3)
    object.__setattr__(two, "secure", {"rounds": 1})  # as for a study under masks
    with pytest.raises(deploy.Refused, match="at least 3 "):
        deploy.Limits().check_study(two, "bern")


def test_a_site_refuses_columns(tmp_path, caplog):
    with pytest.raises(deploy.Refused, match=r"refuses the columns \['x'\]"):
        site_of(STUDY, tmp_path, min_rows=1, refused_columns=["x"])
    nested = study_of(rows={"a": {"b": jax.ShapeDtypeStruct((3,), jnp.float32)}})
    with pytest.raises(deploy.Refused, match=r"columns \['a.b'\]"):
        deploy.Limits(refused_columns=["a"]).check_study(nested, "bern")
    with (
        contextlib.closing(deploy.AuditLog(tmp_path / "audit.log")) as log,
        caplog.at_level(logging.WARNING, "fedmcmc.deploy"),
    ):
        site_of(study_of(), tmp_path, refused_columns=["postcod"], log=log)
    assert "bern refuses columns that 'contract' lacks: ['postcod']" in caplog.text
    (line,) = (tmp_path / "audit.log").read_bytes().splitlines()
    assert json.loads(line)["unknown_columns"] == ["postcod"]


# Limits and studies that are wrong


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (dict(refused_columns="postcode"), "a list of column names, such as .*got 'postcode'"),
        (dict(refused_columns=[3]), r"a list of column names.*got \[3\]"),
        (dict(max_numbers=-1), "max_numbers must be a whole number of at least 1, got -1"),
        (dict(max_numbers="5"), "max_numbers must be a whole number of at least 1, got '5'"),
        (dict(min_rows=True), "min_rows .* got True"),
        (dict(min_batch=2.5), "min_batch .* got 2.5"),
        (dict(min_sites=0), "min_sites .* got 0"),
        (dict(max_bytes=None), "max_bytes .* got None"),
    ],
    ids=str,
)
def test_bad_limits_are_refused(limits, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        site_of(study_of(), tmp_path, **limits)
    if None in limits.values():
        return
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in limits.items())
    path = tmp_path / "site.toml"
    path.write_text(
        f'name = "A"\nstudy = "s"\nrows = "r"\nfolder = "f"\napproval = "a"\nlimits = {{ {table} }}'
    )
    with pytest.raises(ValueError, match=f"site.toml: .*{message}"):
        site_settings(path, dials=False)


def test_a_study_lists_kernels_and_estimators_that_exist():
    names = {*askable_kernels(), *askable_estimators()}
    tables = {name for name, each in askable_kernels().items() if "table with a row" in each.reason}
    assert tables == {"CommonExpansions", "OwnExpansions", "ScoreCovariances", "WithoutClient"}
    assert {*deploy.SETUP, *deploy.FIT, *deploy.SUMS, *tables} <= names
    assert {"Minibatch", "Epochs", "Svrg"} <= names
    assert not names & {"FullGradient", "Question", "EstimatorKernel", "Derived"}
    studies.study_of(asks=sorted(names))
    with pytest.raises(ValueError, match=r"holds 'Langevins', which is unknown. Is Langevin meant"):
        studies.study_of(asks=["Langevins"])
    with pytest.raises(
        ValueError, match=r"asks of the study 'contract' must be a list.*'Langevin'"
    ):
        studies.study_of(asks="Langevin")


def test_a_kernel_within_another_needs_permission():
    study = study_of(asks=["Compressed"])
    kernel = fedmcmc.compress(fedmcmc.lsd(study.model, step_size=0.1), fedmcmc.quantize(4))
    with pytest.raises(deploy.Refused, match="does not allow the kernel 'Langevin'"):
        study.words_of(kernel)
