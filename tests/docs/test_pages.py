"""The snippets of the pages in docs/, in their order; those that take half a minute are slow."""

import dataclasses
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest

import fedmcmc.deploy
from experiments.claims import claims_of, judge
from fedmcmc import rounds
from fedmcmc.__main__ import main as fedmcmc_command
from fedmcmc.data import Column, Dictionary, Rules
from fedmcmc.data._dictionary_columns import TYPES
from fedmcmc.deploy._columns import KEYS as COLUMN_KEYS
from fedmcmc.deploy._config import run_over
from fedmcmc.deploy._limits import LIMITS
from fedmcmc.deploy._masks import KNOWN_KEYS
from tests.support.processes import environment

pytestmark = pytest.mark.filterwarnings("error::fedmcmc.DiagnosisWarning")
"""Draws of pages are judged, in whatever lane; see `tests.conftest`."""
DOCS = Path(__file__).parents[2] / "docs"


def page(name):
    """Return the text of a page in one of the folders of docs/."""
    (path,) = [DOCS.parent / name] if name == "README.md" else DOCS.rglob(name)
    return path.read_text()


def run_page(name, **names):
    """Run the page's snippets, which know `names`; return what they define."""
    for snippet in re.findall(r"```python\n(.*?)```", page(name), re.DOTALL):
        exec(textwrap.dedent(snippet), names)
    return names


@pytest.mark.check
def test_every_page_with_snippets_has_a_test():
    tests = Path(__file__).read_text()
    pages = [path for path in DOCS.rglob("*.md") if "```python" in path.read_text()]
    assert pages and not [path.name for path in pages if f'{path.name}"' not in tests]


def test_the_readme_runs():
    names = run_page("README.md")
    assert names["fitted"].verdict.startswith("passed (importance)")
    assert names["fitted"].samples.constrained["slope"].mean() == pytest.approx(0.7, abs=0.15)


def test_the_readme_counts_the_verdicts_on_the_papers_claims():
    counts = Counter(
        judge(claim)
        for paper in ("fsgld", "qlsd", "fa_hmc", "fed_ep")
        for claim in claims_of(paper)
        if not claim.is_ours
    )
    (sentence,) = re.findall(r"Of \d+ claims about .*?\(`pytest", page("README.md"), re.DOTALL)
    verdicts = ("reproduced", "partly", "contradicted", "inconclusive", "drawn", "not run")
    expected = [counts.total(), *(counts[verdict] for verdict in verdicts)]
    assert [int(number) for number in re.findall(r"\b\d+\b", sentence)] == expected


def words_and_numbers(printed):
    """Return a printed fit without its seconds: its words, and its numbers."""
    lines = printed.strip().splitlines()
    (header,) = [line for line in lines if line.startswith("stage ")]
    first, last = (header.index(name) for name in ("seconds", "verdict"))
    table = range(lines.index(header) + 1, lines.index("", lines.index(header)))
    for i in table:
        lines[i] = lines[i][:first] + lines[i][last:]
    number = r"-?\d[\d,]*\.?\d*"
    numbers = [float(x.replace(",", "")) for x in re.findall(number, "\n".join(lines))]
    return re.sub(number, "#", " ".join(" ".join(lines).split())), numbers


def test_the_quickstart_runs():
    names = run_page("quickstart.md")
    (shown,) = re.findall(r"```text\n(passed .*?)```", page("quickstart.md"), re.DOTALL)
    (words, numbers), (wanted, those) = map(words_and_numbers, (str(names["fitted"]), shown))
    assert words == wanted
    # Other versions of JAX round in other ways.
    np.testing.assert_allclose(numbers, those, rtol=0.05, atol=0.05)
    assert names["data"].coding == {"arm": ("control", "drug")}
    assert names["fitted"].verdict.startswith("passed (importance)")
    assert names["samples"].diagnosis.findings == ()
    shift = names["samples"].constrained["log_odds"].mean() - names["draws"]["log_odds"].mean()
    assert abs(shift) < 0.1 * names["draws"]["log_odds"].std()


def test_the_page_of_how_to_runs():
    names = run_page("howto.md")
    assert names["swept"].diverged.max() == -1
    assert names["samples"].num_draws == 300


@pytest.mark.slow
def test_the_tutorial_on_composed_samplers_runs():
    names = run_page("composed_sampler.md")  # it compares draws with exact distributions
    shown = re.search(r"sampler: (\[.*?\])", page("composed_sampler.md"))[1]
    assert str(names["exact_sd"].round(3)) == shown


def test_the_page_on_compression_runs():
    names = run_page("compression.md")
    (shown,) = re.findall(r"([\d.]+) bits per number instead", page("compression.md"))
    assert names["bits"] / (3 * 50) == pytest.approx(float(shown), abs=0.02)


def test_the_page_on_own_kernels_runs():
    names = run_page("extend.md")  # it compares draws with exact distributions
    assert names["samples"].totals["bits_up"][0] < 50 * 4 * 64


def test_the_page_on_exact_distributions_runs():
    names = run_page("exact_distributions.md")
    exact, target = names["z_scores"](names["mean"], names["variance"]), names["target"]
    assert max(map(abs, exact)) < 3
    assert max(map(abs, names["z_scores"](target, 1 / names["precision"]))) > 8
    np.testing.assert_allclose(names["predicted"].covariance, 0.55787, rtol=1e-3)


def test_the_page_on_diagnostics_runs():
    names = run_page("diagnostics.md")
    checked = names["checked"]
    np.testing.assert_allclose(names["mean"], 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(checked.spread, names["x"].std() * 3, rtol=1e-3)
    np.testing.assert_allclose(checked.bias, (names["x"].mean() - 1 / 3) * 3, rtol=1e-3)


@pytest.mark.slow
def test_the_page_on_choosing_runs():
    names = run_page("choosing.md")
    assert names["best"].prediction.slowest < 10
    assert names["samples"].diagnosis.findings == ()


@pytest.mark.slow
def test_the_page_on_effects_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("random_effects.md")
    shown = re.findall(r"```text\n(.*?)```", page("random_effects.md"), re.DOTALL)
    assert shown[0].strip() == str(names["data"])
    (words, numbers), (wanted, those) = map(words_and_numbers, (str(names["fitted"]), shown[1]))
    assert words == wanted
    # Other versions of JAX round in other ways.
    np.testing.assert_allclose(numbers, those, rtol=0.2, atol=0.1)
    assert (tmp_path / "hospitals.png").exists()
    assert names["effects"].draws["effect"].shape == (1, 500, 12, 1)
    unpooled = names["alone"].draws["effect"][0, 0, :, 0]
    assert [names["data"].labels[i] for i in np.flatnonzero(np.isnan(unpooled))] == ["Glarus"]
    assert (names["effects"].acceptance > 0.9).all()
    drug_a = np.quantile(names["log_odds_ratio"], [0.025, 0.975], axis=(0, 1))[:, 0]
    np.testing.assert_allclose(drug_a, [-0.97, -0.02], atol=0.1)
    np.testing.assert_allclose(names["check"].p_values, [0.3, 0.4], atol=0.1)
    assert names["check"].observed.tolist() == [154, 38]
    assert names["patients"].num_groups.tolist() == [2, 1]
    patients = fedmcmc.from_numpyro(names["model"], example=names["patients"])
    slopes = fedmcmc.from_numpyro(names["slopes_model"], example=names["data"])
    assert list(patients.local.like.tree) == ["effect_decentered"]
    assert slopes.local.like.tree["effect"].shape == (2,)


@pytest.mark.slow
def test_the_page_on_kernels_of_effects_runs():
    names = run_page("random_effect_kernels.md")
    assert names["fitted"].verdict.startswith("passed")
    exact = names["fitted"].samples.constrained
    assert names["gibbs"].local_mask.shape == (15, 1)
    sampled = names["gibbs"].constrained
    for site in ("mu", "slope", "tau"):
        shift = (np.mean(exact[site]) - np.mean(sampled[site])) / np.std(exact[site])
        assert abs(shift) < 0.25  # the error of some hundred effective draws
    names["kernel"].init(jax.random.key(0), names["mode"], names["data"])
    draws = jax.tree.map(lambda leaf: leaf[:, ::8], names["fitted"].samples.draws)
    effects = fedmcmc.local_draws(
        names["posterior"], names["data"], draws, rng_key=jax.random.key(1)
    ).draws["effect"]
    gap = effects.mean((0, 1)) - names["gibbs"].constrained_local["effect"].mean((0, 1))
    assert np.abs(gap).max() < 0.1  # sds are about 0.5


def test_the_page_on_exact_draws_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("exactness.md")
    assert names["fitted"].verdict.startswith("passed (importance)")
    corrected = names["corrected"]
    assert abs(names["log_z"] - corrected.log_evidence) < 1e-3
    assert abs(1 / (names["weights"] ** 2).sum() / corrected.ess - 1) < 0.01
    assert (tmp_path / "fit.html").exists()


@pytest.mark.slow
def test_the_page_on_formulas_runs():
    names = run_page("formulas.md")
    assert all(names[fit].verdict.kind == "passed" for fit in ("fit", "rates", "nested"))
    (shown,) = re.findall(r"```text\n(Intercept.*?)\n```", page("formulas.md"), re.DOTALL)
    assert repr(names["model"].priors) == shown


@pytest.mark.slow
def test_the_page_on_survival_runs():
    rng = np.random.default_rng(0)
    causes = rng.choice(["relapse", "death", "none"], 200)
    columns = {"time": rng.exponential(300, 200), "cause": causes, "age": rng.normal(60, 9, 200)}
    names = run_page("survival.md", tables=[pd.DataFrame(columns)])
    assert names["fit"].verdict.kind == "passed"
    ratios = names["fit"].summary(exponentiate=True)["mean"]
    np.testing.assert_allclose(ratios["sex[female]"], 0.58, atol=0.02)
    np.testing.assert_allclose(names["alive"].mean(0), [[0.68, 0.36], [0.80, 0.55]], atol=0.02)
    assert names["curves"]["male"].quantile() == (273, 231, 322)
    assert round(names["test"].statistic, 1) == 10.0
    assert names["shares"].shape == (1000, 2, 2)


@pytest.mark.slow
def test_the_page_on_criticism_runs():
    names = run_page("criticism.md")
    assert names["fitted"].corrected.verdict.kind == "passed"
    assert next(iter(names["comparison"].models)) == "dose"
    p_values = names["conflicts"].p_values
    assert p_values.argmin() == 4 and p_values[4] < 1e-4
    assert names["left_out"].reliable.all() and names["left_out"].refitted[4]
    assert names["calibration"].p_values.min() > 1e-3


@pytest.mark.slow
def test_the_tutorial_on_a_network_runs():
    names = run_page("network.md")
    (shown,) = re.findall(r"```text\n +accuracy.*?\n(.*?)```", page("network.md"), re.DOTALL)
    table = {line[:15].strip(): line[15:].split() for line in shown.splitlines()}
    assert list(table) == list(names["scores"])
    for name, printed in table.items():
        np.testing.assert_allclose(names["scores"][name], [float(x) for x in printed], atol=0.03)
    assert all(samples.info["num_lost"].sum() == 0 for samples in names["fits"].values())


@pytest.mark.slow
def test_the_page_on_a_multi_site_study_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dictionary = re.search(r"```toml\n(.*?)```", page("multi_site_study.md"), re.DOTALL)[1]
    (tmp_path / "study.toml").write_text(dictionary)
    names = run_page("multi_site_study.md")
    assert (tmp_path / "readmissions.html").exists()
    assert names["calibrated"].p_values.min() > 1e-3
    assert names["found"].p_values.argmin() == 3 and names["found"].p_values[3] < 1e-3
    assert names["without"].reliable.all()
    exact = -0.8
    effect = names["final"].samples.constrained["log_odds"]
    assert abs(effect.mean() - exact) < 2 * effect.std()
    bern = names["simulate"](0, dict.fromkeys(names["levels"]["hospital"], 200))["Bern"]
    with pytest.raises(ValueError, match=r"\(and 199 more values\), outside of .* 0.2 to 20 mg/dL"):
        names["federate"]({"Bern": names["prepare"](bern, "umol/L")})
    # The rows of the study file have the columns and the codes of the page's data.
    (tmp_path / "model.py").write_text("def posterior(settings):\n    pass\n")
    header = 'name = "readmissions"\nposterior = "model.py:posterior"\n'
    sites = "[sites]\nAarau = 300\n"
    (tmp_path / "study.toml").write_text(header + dictionary + sites)
    study = fedmcmc.deploy.Study.read(tmp_path / "study.toml")
    assert study.rows.keys() == names["data"].rows.keys()
    assert {name: tuple(levels) for name, levels in study.levels.items()} == names["data"].coding


@pytest.mark.slow
def test_the_page_that_compares_with_methods_of_statistics_runs():
    names = run_page("compared_statistics.md")
    small, large = names["results"][30], names["results"][1000]
    assert (small[:, 1] - small[:, 0]).mean() > 0.04
    assert abs(large[:, 1] - large[:, 0]).max() < 0.03


@pytest.mark.slow
def test_the_page_that_compares_with_other_samplers_runs():
    names = run_page("compared_samplers.md")
    exact = names["fitted"].samples.constrained["theta"]
    for draws in (
        names["steps"][1_000:],
        names["central"].draws,
        names["federated"].draws,
        names["mcmc"].get_samples()["theta"],
    ):
        draws = np.reshape(draws, (-1, 2))
        assert abs(draws.mean(0) - exact.mean((0, 1))).max() < 0.05  # sds are about 0.15
        np.testing.assert_allclose(draws.std(0), exact.std((0, 1)), rtol=0.15)


@pytest.mark.slow
def test_the_page_on_fed_ep_runs():
    names = run_page("guides/fed_ep.md")
    assert names["samples"].info["num_lost"].sum() == 0
    assert names["marginal"].shape == names["point"].shape == (300, 2)
    hits = (names["point"].argmax(1) == names["rows"]["y"]).mean()
    assert hits > 0.7


def test_the_page_on_rounds_runs():
    names = run_page("rounds.md")  # it holds its draws against the simulation's
    assert names["num_bytes"] > 0


def test_the_page_on_privacy_runs():
    names = run_page("privacy.md")
    first = names["samples"].draws.shape
    state, key = names["state"], names["key"]
    received = rounds.initialize_received(names["kernel"], 0, state.broadcast)
    for index in range(3):
        code, _, _ = rounds.client_step(
            names["kernel"], 0, key, state.broadcast, (), names["data"].client(index)
        )
        received = rounds.receive(names["kernel"], 0, received, code, index, 1.0)
    moved, _, _ = rounds.server_step(
        names["kernel"], 0, key, state.broadcast, state.server, received
    )
    np.testing.assert_array_equal(names["broadcast"].position, moved.position)
    assert first == (1, 300, 2) and (moved.position != state.broadcast.position).all()
    assert all((words != 0).all() for words in names["arrived"])


TUTORIAL = "deployed_federation.md"
CONTINUED = "model.py, continued"


def blocks(kind, name):
    return re.findall(rf"```{kind}\n(.*?)```", page(name), re.DOTALL)


def start_study(folder, port):
    """Write the tutorial's first files, with another port; return its limits and commands."""
    (study, _, limits, *_), commands = blocks("toml", TUTORIAL), "".join(blocks("sh", TUTORIAL))
    (folder / "study.toml").write_text(study)
    for script, snippet in scripts_of(TUTORIAL).items():
        if script != CONTINUED:
            (folder / script).write_text(snippet)
    return limits, commands.replace("7443", str(port)).splitlines()


def add_kernel(folder):
    """Change the tutorial's study and the server's run as the page describes."""
    _, _, _, kernel, run = blocks("toml", TUTORIAL)
    for name, text in (("study.toml", kernel), ("model.py", scripts_of(TUTORIAL)[CONTINUED])):
        with (folder / name).open("a") as file:
            file.write("\n\n" + text)
    settings = folder / "consortium" / "server" / "server.toml"
    line = 'kernel = "fit"\n'
    assert line in settings.read_text()
    settings.write_text(settings.read_text().replace(line, run))


def set_limits(kit, limits):
    settings, _, written = (kit / "site.toml").read_text().partition("[limits]")
    assert "min_sites = 3" in written  # as the page says
    (kit / "site.toml").write_text(settings + limits)


def test_the_tutorial_on_real_sites_shows_what_an_owner_is_shown(tmp_path, monkeypatch, capsys):
    """From the page's files and commands; to renew the page, paste the output in the assertion."""
    limits, commands = start_study(tmp_path, 7443)
    init, approve, verify = (
        shlex.split(line)[1:] for line in commands if line.startswith("fedmcmc deploy")
    )
    monkeypatch.chdir(tmp_path)
    assert fedmcmc_command(init) == 0
    kit = tmp_path / "consortium" / "bern"
    set_limits(kit, limits)
    server = (kit.parent / "server" / "server.toml").read_text()
    assert "0.0.0.0:7443" in server and blocks("toml", TUTORIAL)[1] in server
    monkeypatch.chdir(kit)
    answers = iter(["yes", "yes"])
    monkeypatch.setattr("builtins.input", lambda question: next(answers))
    capsys.readouterr()
    assert fedmcmc_command(approve) == 0
    shown = capsys.readouterr().out
    for block in blocks("text", TUTORIAL):
        assert block in shown, shown
    fedmcmc.deploy.AuditLog("audit.log").close()
    assert fedmcmc_command(verify) == 0


@pytest.mark.slow
def test_the_tutorial_on_real_sites_runs(tmp_path):
    """All its commands, in processes; a site and the server are interrupted and started again."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    limits, commands = start_study(tmp_path, port)
    env = {**environment(), "JAX_PLATFORMS": "cpu"}
    kits = tmp_path / "consortium"
    modules = {"fedmcmc": "", "fedmcmc-site": ".site", "fedmcmc-server": ".server"}
    processes = {}

    def argv(command):
        name, *arguments = shlex.split(command)
        program = ["-P", "-m", f"fedmcmc{modules[name]}"] if name in modules else []
        return [sys.executable, *program, *arguments]

    def start(folder, command):
        return subprocess.Popen(argv(command), cwd=folder, env=env)

    def run(folder, begin):
        command = commands.pop(0)
        assert command.startswith(begin)
        done = subprocess.run(
            argv(command), cwd=folder, env=env, stdout=subprocess.PIPE, text=True, timeout=400
        )
        assert done.returncode == 0, command
        return done.stdout

    del commands[:3]  # the installation, and a folder
    run(tmp_path, "python make_rows.py")
    assert run(tmp_path, "python rehearse.py").startswith("passed (importance)")
    run(tmp_path, "fedmcmc deploy init")
    settings = kits / "server" / "server.toml"
    settings.write_text(settings.read_text().replace("0.0.0.0", "127.0.0.1"))
    run(tmp_path, "python to_npz.py bern.csv")
    run(tmp_path, "python to_npz.py basel.csv")
    approve, site, serve, read, *copies, again, serve_again, read_again, verify, own = commands
    assert len(copies) == 3
    for name in ("bern", "basel"):
        set_limits(kits / name, limits)
        commands[:] = [f"{approve} --yes"]
        run(kits / name, "fedmcmc deploy approve")

    def interrupt(name, status):
        processes[name].send_signal(signal.SIGINT)
        assert processes[name].wait(timeout=60) == status

    try:
        for name in ("bern", "basel"):
            processes[name] = start(kits / name, site)
        commands[:] = [serve, read]
        run(kits / "server", "fedmcmc-server")
        printed = run(tmp_path, "python read_draws.py")
        assert printed.count("odds ratio of") == 2

        add_kernel(tmp_path)
        for name in ("bern", "basel"):
            interrupt(name, 0)
        for copy in copies:
            program, *files, folder = shlex.split(copy)
            assert program == "cp"
            for file in files:
                shutil.copy(tmp_path / file, tmp_path / folder)
        for name in ("bern", "basel"):
            commands[:] = [f"{approve} --yes"]
            assert "kernels.main is new" in run(kits / name, "fedmcmc deploy approve")
            processes[name] = start(kits / name, site)
        log = kits / "basel" / "audit.log"
        size = log.stat().st_size
        processes["server"] = start(kits / "server", serve)
        deadline = time.monotonic() + 300
        while log.read_bytes()[size:].count(b'"answer"') < 2_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        interrupt("basel", 0)
        time.sleep(2)
        assert processes["server"].poll() is None  # it waits
        processes["basel"] = start(kits / "basel", again)
        size = log.stat().st_size
        while log.read_bytes()[size:].count(b'"answer"') < 2_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        interrupt("server", 130)
        commands[:] = [serve_again, read_again, verify, own]
        run(kits / "server", "fedmcmc-server")
        with np.load(kits / "server" / "draws.npz") as stored:
            assert stored["slope"].shape == (4, 20_000)
        later = run(tmp_path, "python read_draws.py")
        assert "form a valid chain" in run(kits / "bern", "fedmcmc deploy verify-log")
        assert "4 x 1,000 draws" in run(tmp_path, "python server.py")
        assert not commands
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(timeout=60)
    with np.load(kits / "server" / "hmc.npz") as other:
        ratios = np.median(other["odds_ratios"], (0, 1))
    (shown,) = re.findall(r"```\n(odds ratio .*?)```", page(TUTORIAL), re.DOTALL)
    for lines in (printed, later, shown):
        medians = [float(x) for x in re.findall(r": (\d+\.\d+),", lines)]
        np.testing.assert_allclose(ratios, medians, rtol=0.1)


@pytest.mark.slow
def test_the_page_on_masks_runs():
    names = run_page("masks.md")  # it compares its draws with a simulation
    assert np.isnan(names["simulated"].info["gradient_norm"]).sum() == 0
    assert names["samples"].num_draws == 10


def test_the_page_on_the_study_dictionary_runs(tmp_path, capsys):
    run_page("study_dictionary.md")
    text = page("study_dictionary.md")
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert capsys.readouterr().out == printed
    (tmp_path / "study.toml").write_text(re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1])
    dictionary = Dictionary.read(tmp_path / "study.toml")
    listed = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    assert {column.type for column in dictionary.columns.values()} == {*TYPES} <= listed
    for kind in (Dictionary, Column, Rules):
        assert {field.name for field in dataclasses.fields(kind)} <= listed


def test_the_page_of_settings_lists_all_keys(tmp_path):
    text = page("deployment_settings.md")
    listed = set(re.findall(r"`\"?(\w+)\"?`", text))
    keys = {field.name for field in dataclasses.fields(fedmcmc.deploy.Study)}
    keys -= {"folder", "row_ranges"}
    keys |= {*COLUMN_KEYS, *LIMITS, *KNOWN_KEYS}

    def known_keys(run, name, content):
        """Return the keys in the error about an unknown key."""
        path = tmp_path / name
        path.write_text(content)
        with pytest.raises(ValueError, match="which is unknown") as caught:
            run(path)
        expected = str(caught.value).partition("must hold ")[2].partition("; it holds")[0]
        return set(re.findall(r"\w+", expected)) - {"and", "may", "hold"}

    start_study(tmp_path, 7443)
    keys |= known_keys(fedmcmc.deploy.run_site, "site.toml", "unknown = 1")
    keys |= known_keys(fedmcmc.deploy.run_server, "server.toml", "unknown = 1")
    run = 'study = "study.toml"\n[run]\nkernel = "main"\nunknown = 1'
    keys |= known_keys(lambda path: run_over(path, None), "run.toml", run)
    assert {"max_norm", "server_name", "num_burnin", "minimum", "approved", "levels"} <= keys
    assert not keys - listed
    for name in (*fedmcmc.deploy.FIT, *fedmcmc.deploy.SETUP):
        assert f"`{name}`" in text


def scripts_of(name):
    """Return the snippets of a page that start with a comment of their file's name."""
    snippets = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    return {re.match(r"# (\w+\.py.*)\n", snippet)[1]: snippet for snippet in snippets}


@pytest.mark.slow
def test_the_page_on_runs_runs():
    names = run_page("runs.md")
    assert names["more"].num_draws == 3_000 and names["streamed"].num_draws == 0
    assert "turned non-finite" in names["page"].read_text()
    assert names["streamed"].streams["thinned"].draws.shape[1] > 100


def test_the_sweep_of_the_page_on_processes_is_gathered(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scripts = scripts_of("processes.md")
    for index in (0, 11):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(index))
        exec(scripts["point.py"], {})
    exec(scripts["gather.py"], {})
    header, first, second = (tmp_path / "rows.csv").read_text().split()
    assert header == "index,step_size,seed,sd"
    assert first.startswith("0,0.001,0,") and second.startswith("11,0.01,3,")
    assert capsys.readouterr().out == f"missing: {list(range(1, 11))}\n"


@pytest.mark.slow
def test_the_page_on_processes_runs_in_two_and_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(scripts_of("processes.md")["script.py"])
    env = {**environment(), "JAX_PLATFORMS": "cpu"}
    alone, two = (
        subprocess.run(
            [sys.executable, *launcher, str(script)],
            env=env,
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        ).stdout
        for launcher in ((), ("-m", "experiments.launch", "-n", "2"))
    )
    assert alone.startswith("[") and f"[0] {alone}" in two, two
