"""The snippets of the pages in docs/, in their order; those that take half a minute are slow."""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import numpy as np
import pytest

import fedmcmc.deploy
from fedmcmc import rounds
from fedmcmc.__main__ import main as fedmcmc_command
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


def test_the_readme_runs():
    names = run_page("README.md")
    assert names["fitted"].verdict.startswith("passed (importance)")
    assert names["fitted"].samples.constrained["slope"].mean() == pytest.approx(0.7, abs=0.15)


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


def test_the_page_on_own_kernels_runs():
    names = run_page("extend.md")  # it holds its kernels against their laws
    assert names["samples"].totals["bits_up"][0] < 50 * 4 * 64


@pytest.mark.slow
def test_the_page_on_choosing_runs():
    names = run_page("choosing.md")
    assert names["best"].prediction.slowest < 10
    assert names["samples"].diagnosis.findings == ()


@pytest.mark.slow
def test_the_page_on_effects_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("random_effects.md")
    assert (tmp_path / "hospitals.png").exists()
    assert names["fitted"].verdict.startswith("passed")
    assert names["own"].draws["effect"].shape == (1, 500, 15, 1)
    assert names["patients"].num_groups.tolist() == [2, 1]
    exact = names["fitted"].samples.constrained
    assert names["gibbs"].local_mask.shape == (15, 1)
    sampled = names["gibbs"].constrained
    for site in ("mu", "slope", "tau"):
        shift = (np.mean(exact[site]) - np.mean(sampled[site])) / np.std(exact[site])
        assert abs(shift) < 0.25  # the error of some hundred effective draws
    names["kernel"].init(jax.random.key(0), names["mode"], names["data"])
    start = names["levels"].init_fn(jax.random.key(0))
    names["by_levels"].init(jax.random.key(0), start, names["patients"])
    gap = names["own"].draws["effect"] - names["gibbs"].constrained_local["effect"].mean((0, 1))
    assert np.abs(gap.mean((0, 1))).max() < 0.1  # sds are about 0.5


def test_the_page_on_exact_draws_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("exactness.md")
    assert names["fitted"].verdict.startswith("passed (importance)")
    corrected = names["corrected"]
    assert abs(names["log_z"] - corrected.log_evidence) < 1e-3
    assert abs(1 / (names["weights"] ** 2).sum() / corrected.ess - 1) < 0.01
    assert (tmp_path / "fit.html").exists()


@pytest.mark.slow
def test_the_page_on_criticism_runs():
    names = run_page("criticism.md")
    assert names["fitted"].corrected.verdict.kind == "passed"
    assert next(iter(names["compared"].models)) == "dose"
    assert names["found"].p_values.argmin() == 4 and names["found"].p_values[4] < 1e-4
    assert names["without"].reliable.all() and names["without"].refitted[4]
    assert names["calibrated"].p_values.min() > 1e-3


@pytest.mark.slow
def test_the_page_on_a_multi_site_study_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run_page("multi_site_study.md")
    assert (tmp_path / "readmissions.html").exists()
    assert names["calibrated"].p_values.min() > 1e-3
    assert names["found"].p_values.argmin() == 3 and names["found"].p_values[3] < 1e-3
    assert names["without"].reliable.all()
    exact = -0.8
    effect = names["final"].samples.constrained["log_odds"]
    assert abs(effect.mean() - exact) < 2 * effect.std()
    with pytest.raises(ValueError, match="creatinine: 200 values outside"):
        names["prepare"](
            names["simulate"](0, dict.fromkeys(names["levels"]["hospital"], 200))["Bern"], "umol/L"
        )
    # The rows of the study file have the columns and the codes of the page's data.
    (tmp_path / "model.py").write_text("def posterior(settings):\n    pass\n")
    rows = re.search(r"```toml\n(.*?)```", page("multi_site_study.md"), re.DOTALL)[1]
    header = 'name = "readmissions"\nposterior = "model.py:posterior"\n[sites]\nAarau = 300\n'
    (tmp_path / "study.toml").write_text(header + rows)
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
    names = run_page("fed_ep.md")
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


@pytest.mark.slow
def test_the_page_on_real_sites_runs():
    text = page("deployment.md")
    study = re.search(r"```toml\n(.*?)```", text, re.DOTALL)[1]
    model = re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]
    # It holds its draws against the simulation's.
    names = run_page("deployment.md", study_toml=study, model_py=model)
    for name, rows in names["rows"].items():
        with np.load(names["consortium"] / name / "rows.npz") as stored:
            assert stored["x"].tolist() == rows["x"].tolist()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", page("deployment.md"), re.DOTALL)


def test_the_page_on_real_sites_shows_what_an_owner_is_shown(tmp_path, monkeypatch, capsys):
    """From the page's own files and commands; to renew the page, paste what this says it is."""
    (tmp_path / "study.toml").write_text(blocks("toml")[0])
    (tmp_path / "model.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    commands = [
        line for line in "".join(blocks("sh")).splitlines() if line.startswith("fedmcmc deploy")
    ]
    init, approve, verify = (shlex.split(line)[1:] for line in commands)
    assert fedmcmc_command(init) == 0
    kit = tmp_path / "consortium" / "bern"
    monkeypatch.chdir(kit)
    settings = (kit / "site.toml").read_text().partition("[limits]")[0]
    limits = next(block for block in blocks("toml") if block.startswith("[limits]"))
    (kit / "site.toml").write_text(settings + limits)
    versions = {"fedmcmc": "0.2.0", "jax": "0.10.1"}  # whatever they are today
    monkeypatch.setattr("fedmcmc.deploy._account.software", lambda: versions)
    monkeypatch.setattr("builtins.input", lambda question: "yes")
    capsys.readouterr()
    assert fedmcmc_command(approve) == 0
    told = capsys.readouterr().out
    for block in blocks("text"):
        assert block in told, told
    fedmcmc.deploy.AuditLog("audit.log").close()
    assert fedmcmc_command(verify) == 0


@pytest.mark.slow
def test_the_page_on_runs_runs():
    names = run_page("runs.md")
    assert names["more"].num_draws == 3_000 and names["found"].num_draws == 0
    assert "turned non-finite" in names["page"].read_text()
    assert names["found"].streams["some"].draws.shape[1] > 100


def scripts_of(name):
    """Return the snippets of a page that start with a comment of their file's name."""
    snippets = re.findall(r"```python\n(.*?)```", page(name), re.DOTALL)
    return {re.match(r"# (\w+\.py)\n", snippet)[1]: snippet for snippet in snippets}


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
