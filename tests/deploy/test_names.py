"""Names that owners read, and text of other parties: none of it controls a terminal."""

import json
import logging
import threading
import tomllib
import unicodedata
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.__main__ import main
from fedmcmc.deploy._commands import _PrintableFormatter
from fedmcmc.deploy._config import open_configured_site, site_settings
from fedmcmc.deploy._frames import Frame, Tag, printable
from fedmcmc.deploy._links import Links
from fedmcmc.deploy._names import toml_key, toml_text
from fedmcmc.deploy._pki import make_request
from tests.support import studies
from tests.support.commands import MODEL, Consortium, free_port

EVIL = "x\x1b[2K\r\u202e\u200b\n\x07"
NAMES = ("Zürich", 'St. "Gallen"', "Val d'Isère 東京 🏥")
NUM_ROWS = 30


def test_text_of_others_is_one_printable_line():
    shown = printable(EVIL * 3)
    assert shown.isprintable() and "\\x1b[2K\\r\\u202e\\u200b\\n\\x07" in shown
    assert printable("Zürich 東京 🏥") == "Zürich 東京 🏥"
    assert printable("\ud800") == "\\ud800" and printable(None) == "None"
    assert len(printable("a" * 10_000)) == len(printable("\x1b" * 10_000)) == 501
    assert printable("a" * 10_000, None) == "a" * 10_000


def column(dtype=jnp.float32):
    return jax.ShapeDtypeStruct((), dtype)


PRINTABLE = "must be printable text"
"""An error that every name with characters for terminals causes, except for unknown classes."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(name=EVIL), PRINTABLE),
        (dict(name="targets\nThe study is harmless."), PRINTABLE),
        (dict(name="targets\u202e"), PRINTABLE),
        (dict(posterior=f"{EVIL}.py:posterior"), PRINTABLE),
        (dict(posterior=f"model.py:{EVIL}"), PRINTABLE),
        (dict(sites={EVIL: 5}), PRINTABLE),
        (dict(sites={"bern\u200b": 5}), PRINTABLE),
        (dict(rows={EVIL: column()}), PRINTABLE),
        (dict(rows={"b": {EVIL: column()}}), PRINTABLE),
        (dict(rows={"x": column(jnp.int32)}, levels={"x": ["a", EVIL]}), PRINTABLE),
        (dict(kernels={EVIL: "model.py:kernel"}), PRINTABLE),
        (dict(asks=[EVIL]), "is unknown"),
        (dict(settings={EVIL: 1}), PRINTABLE),
        (dict(settings={"a": [{"b": {EVIL: 1}}]}), PRINTABLE),
        (dict(sites={"Bern": 5, "bern": 5}), "differ by case or by Unicode form alone"),
        (dict(sites={"Zürich": 5, unicodedata.normalize("NFD", "Zürich"): 5}), "form alone"),
        (dict(sites={"bern ": 5}), "spaces around it"),
        (dict(sites={"": 5}), "sites must"),
    ],
    ids=ascii,
)
def test_names_in_a_study_are_printable(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        studies.study_of(**changes)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ü" * 33, "has 66 bytes"),
        ("a/b", "hold a slash"),
        ("../bern", "'../bern' becomes that of a folder"),
        ("a\\b", "hold a slash or a backslash"),
        (".bern", "start with a dot"),
        ("..", "start with a dot"),
        (" bern", "spaces around"),
        ("bern\n", "printable text"),
        ("", "must not be empty"),
    ],
)
def test_names_that_folders_and_certificates_cannot_have_are_refused(name, message, tmp_path):
    deploy.make_authority(tmp_path)
    path = write_study(tmp_path, [name, "basel"])
    for call in (
        lambda: deploy.make_party(tmp_path, tmp_path / "keys", name),
        lambda: make_request(tmp_path / "keys", name),
        lambda: deploy.make_consortium(path, tmp_path / "consortium", "hub:1"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert not (tmp_path / "keys").exists() and not (tmp_path / "consortium").exists()


@pytest.mark.parametrize("name", ["server", "Server", "study", "authority", "parties.toml"])
def test_names_that_a_consortium_reserves_are_refused(name, tmp_path):
    path = write_study(tmp_path, [name, "basel"])
    with pytest.raises(ValueError, match="No site can be called"):
        deploy.make_consortium(path, tmp_path / "consortium", "hub:1")


@pytest.mark.parametrize("text", [*NAMES, EVIL, "\x7f", '"""', "\\", "a.b", "", "#", "a-b_1"])
def test_toml_reads_what_is_written(text):
    assert tomllib.loads(f"{toml_key(text)} = {toml_text(text)}") == {text: text}


def write_study(folder, sites, name="hospitals"):
    """Write a study; return its path."""
    folder = folder / "source"
    folder.mkdir()
    (folder / "model.py").write_text(f"{MODEL}\n{KERNEL}")
    table = "\n".join(f"{toml_text(name)} = {NUM_ROWS}" for name in sites)
    (folder / "study.toml").write_text(
        f"""
name = {toml_text(name)}
posterior = "model.py:posterior"
rows = {{ dtype = "float32", shape = [2] }}
[sites]
{table}
[kernels]
"Kürze" = "model.py:simple"
""",
        encoding="utf-8",
    )
    return folder / "study.toml"


KERNEL = """
def simple(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=0.01)
"""


def test_sites_with_any_printable_name_run(tmp_path, capsys):
    """Folders, settings, certificates, approvals, connections and logs."""
    study = write_study(tmp_path, NAMES, name="Krankenhäuser " * 10 + "🏥")
    folder = tmp_path / "consortium"
    deploy.make_consortium(study, folder, f"localhost:{free_port()}")
    parties = tomllib.loads((folder / "parties.toml").read_text(encoding="utf-8"))
    assert set(parties["identities"]) == {*NAMES}
    stop, threads = threading.Event(), []

    def run_site(path):
        settings, base = site_settings(path)
        keys = deploy.Credentials(
            *(base / settings[x] for x in ("key", "certificate", "authority"))
        )
        with open_configured_site(settings, base) as site:
            deploy.serve_site(site, settings["server"], keys, stop=stop)

    try:
        for name in NAMES:
            np.savez(folder / name / "rows.npz", rows=np.ones((NUM_ROWS, 2), np.float32))
            path = folder / name / "site.toml"
            assert main(["deploy", "approve", "--yes", "--settings", str(path)]) == 0
            assert name in capsys.readouterr().out
            threads.append(threading.Thread(target=run_site, args=(path,)))
            threads[-1].start()
        path = folder / "server" / "server.toml"
        text = path.read_text(encoding="utf-8")
        text = text.replace("num_rounds = 2000", "num_rounds = 3\nprogress = false")
        path.write_text(text.replace("num_burnin = 200", "num_burnin = 0"), encoding="utf-8")
        assert tomllib.loads(text)["run"]["kernel"] == "Kürze"
        samples = deploy.run_server(path)
    finally:
        stop.set()
        for thread in threads:
            thread.join(timeout=30)
    assert np.isfinite(samples.draws).all()
    for name in NAMES:
        (log,) = (folder / name).rglob("audit.log")
        assert f'"site": {json.dumps(name)}' in log.read_text()


class ScriptedNetwork:
    """Server's end of a network; each site answers with the same bytes."""

    def __init__(self, answer):
        self.answer, self.news = answer, []

    def send(self, site, data):
        self.news.append((site, self.answer))

    def limit(self, site, num_bytes):
        """Accept messages of any length, as `deploy.LocalTransport` does."""

    def receive(self, timeout):
        return self.news.pop(0) if self.news else None


def is_plain(text):
    """Return whether a text consists of lines of printable characters."""
    return all(line.isprintable() for line in text.splitlines())


@pytest.mark.parametrize("kind", ["declined", "error"])
def test_a_sites_reason_is_escaped(kind, caplog):
    """Otherwise it erases or forges lines on the terminal of whoever runs the server."""
    tag = Tag("run", 0, 0, 0)
    answer = Frame(kind, {"tag": list(tag), "reason": EVIL * 1_000}).to_bytes()
    links = Links(studies.study_of(), ScriptedNetwork(answer), 1.0)
    links.joined.add("bern")
    with pytest.raises(deploy.SiteError, match="bern: x") as caught:
        links.exchange({"bern": b""}, "answer", tag, lambda site, body: body)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 3000
    assert is_plain(caplog.text)


@pytest.mark.parametrize("field", ["software", "site", "study", "versions"])
def test_text_about_a_site_is_escaped(field, caplog):
    study = studies.study_of()
    header = {"site": "bern", "study": study.digest, "software": {"fedmcmc": EVIL * 1_000}}
    header["process"] = "one"
    if field == "versions":
        header["versions"] = 1
    elif field != "software":
        header[field] = EVIL * 1_000
    links = Links(study, ScriptedNetwork(b""), 1.0)
    with pytest.warns(RuntimeWarning, match="bern was not accepted") as caught:
        links._admit("bern", Frame("hello", header).to_bytes(), {})
    warning = str(caught[0].message)
    assert warning.isprintable() and len(warning) < 2000 and links.refusals["bern"].isprintable()
    assert is_plain(caplog.text)


def test_the_servers_text_is_escaped_at_a_site(tmp_path, caplog):
    log = deploy.AuditLog(tmp_path / "audit.log")
    site = studies.site_of(studies.study_of(), "bern", tmp_path, log=log)
    with pytest.raises(deploy.Refused) as caught:
        refusal = {"process": site.process, "reason": EVIL * 1_000}
        site.answer(Frame("refused", refusal).to_bytes())
    assert str(caught.value).isprintable() and len(str(caught.value)) < 3000
    for kind in (EVIL * 100, "begin"):
        reply = site.answer(Frame(kind, {"tag": [EVIL * 100, 0, 0, 0]}).to_bytes())
        assert Frame.parse(reply).kind == "error"
    log.close()
    assert caplog.records and all(record.getMessage().isprintable() for record in caplog.records)
    text = (tmp_path / "audit.log").read_text()
    assert text.isascii() and is_plain(text)


def test_a_command_escapes_what_it_shows(tmp_path, monkeypatch, capsys):
    Consortium(tmp_path)
    path = tmp_path / "study.toml"
    settings = tmp_path / "bern.toml"
    settings.write_text(settings.read_text().replace("approved =", "approval = 'a.json' #"))
    approve = ["deploy", "approve", "--yes", "--settings", str(settings)]
    text, value = path.read_text(), toml_text(EVIL)
    path.write_text(text + f"note = {value}\n")
    assert main(approve) == 0
    path.write_text(text + "note = 'other'\n")
    assert main(approve) == 0  # this shows the previous approval, too
    for old, new in (
        ('"three clinics"', value),
        ("bern = 5", f"bern = 5\n{value} = 5"),
        ("step_size =", f"{value} = 1\nstep_size ="),
        ("main =", f"{value} ="),
        ("rows = { ", f"rows = {{ {value} = 3, "),
        ("asks =", f"{value} ="),
        ("[kernels]", f"[kernels.{value}]"),
    ):
        path.write_text(text.replace(old, new))
        assert main(approve) == 1, old
    shown = capsys.readouterr()
    assert "note" in shown.out and "three clinics" in shown.out and shown.err.count("Error") == 7
    assert is_plain(shown.out) and is_plain(shown.err)


def test_a_commands_log_is_escaped_also_in_tracebacks(tmp_path):
    path = tmp_path / "log"
    handler = logging.FileHandler(path)
    handler.setFormatter(_PrintableFormatter("%(message)s"))
    try:
        raise RuntimeError("\x1b[2K\u202e")
    except RuntimeError as error:
        info = (type(error), error, error.__traceback__)
    handler.handle(logging.LogRecord("x", 40, "x", 1, "one\x1b[2K", (), info))
    handler.close()
    text = path.read_text()
    assert len(text.splitlines()) > 3 and is_plain(text)


def test_an_error_about_an_approval_is_printable():
    study = studies.study_of()
    approval = replace(
        deploy.Approval.of(study, "bern"),
        study={"name": EVIL, "settings": {EVIL: EVIL}},
        time=EVIL,
        digest="0" * 64,
    )
    with pytest.raises(deploy.Refused) as caught:
        approval.check(study, "bern")
    assert str(caught.value).isprintable()
