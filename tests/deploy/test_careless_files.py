"""Files that an author, an owner or an editor got wrong: one clear sentence, and nothing runs."""

import dataclasses
import json
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._account import describe_files
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._config import read_rows, site_settings
from fedmcmc.deploy._grpc import Credentials
from fedmcmc.deploy._pki import make_authority, make_party
from fedmcmc.deploy._settings import read_toml

TOML = 'name = "s"\nposterior = "m.py:X"\n[sites]\na = 30\n[rows]\ny = { dtype = "float32" }\n'
SITE = """name = "a"
study = "study.toml"
approval = "approval.json"
rows = "rows.npz"
folder = "state"
server = "localhost:7443"
key = "a.key"
certificate = "a.crt"
authority = "ca.crt"
"""


def study_with(folder, source):
    (folder / "m.py").write_bytes(source)
    rows = jax.ShapeDtypeStruct((), jnp.float32)
    return deploy.Study("s", "m.py:X", {"a": 30}, rows, folder=folder)


@pytest.mark.parametrize(
    "encoding, hidden",
    [("unicode_escape", b"\\nX = 2"), ("utf7", b"+AAo-X = 2")],
)
def test_an_encoding_does_not_turn_a_comment_into_code(encoding, hidden, tmp_path):
    source = b"# coding: " + encoding.encode() + b"\nX = 1\n# a comment " + hidden + b"\n"
    names = {}
    exec(compile(source, "m.py", "exec"), names)
    assert names["X"] == 2  # as Python would run the file
    study = study_with(tmp_path, source)
    assert study.found("m.py:X") == 1


@pytest.mark.parametrize(
    "source, message",
    [
        (b"X = 1\n# a comment\rX = 2\n", r"Line 2 of .* the character \\r"),
        ("X = 1  # \u202e\n".encode(), r"Line 1 of .* the character \\u202e"),
        (b"X = 1\n#\0\n", r"Line 2 of .* the character \\x00"),
        ("X = 'é'\n".encode("latin1"), "is not UTF-8 text"),
        ("X = 1\n".encode("utf-16"), "is not UTF-8 text"),
    ],
    ids=["return", "direction", "null", "latin1", "utf-16"],
)
def test_a_source_that_editors_show_in_another_way_is_refused(source, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        _ = study_with(tmp_path, source).digest


def test_a_source_of_windows_is_read(tmp_path):
    assert study_with(tmp_path, b"\xef\xbb\xbfX = 'caf\xc3\xa9'\r\n").found("m.py:X") == "café"


def test_a_source_that_is_no_python_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"not valid Python: .*m\.py, line 2: "):
        study_with(tmp_path, b"X = 1\ndef (:\n").found("m.py:X")


def test_a_circle_of_links_is_refused(tmp_path):
    study = study_with(tmp_path, b"X = 1\n")
    (tmp_path / "m.py").unlink()
    (tmp_path / "m.py").symlink_to("m.py")
    with pytest.raises(ValueError, match="cannot be read"):
        _ = study.digest


def test_a_model_that_is_no_posterior_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"m\.py:X must be a Posterior"):
        _ = study_with(tmp_path, b"X = 1\n").model


def test_a_pipe_or_a_folder_is_no_settings_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is a folder, a pipe or a device"):
            read_toml(path)


@pytest.mark.parametrize("depth", [100, 20000])
def test_settings_that_are_too_deep_are_refused(depth, tmp_path):
    (tmp_path / "a.toml").write_text("k = " + "[" * depth + "]" * depth)
    with pytest.raises(ValueError, match="more than 64 tables or lists"):
        read_toml(tmp_path / "a.toml")


def test_a_settings_file_of_windows_is_read(tmp_path):
    (tmp_path / "study.toml").write_bytes(b"\xef\xbb\xbf" + TOML.replace("\n", "\r\n").encode())
    assert deploy.Study.read(tmp_path / "study.toml").name == "s"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("a = 30", "a = 2147483648", "at most 2,147,483,647"),
        ('"float32"', '">f4"', "dtype '>f4', which is unknown"),
        ('"float32"', '"float128"', "dtype 'float128', which is unknown"),
        ("[sites]", "[settings]\nday = 2026-11-28\n[sites]", "write dates as texts"),
    ],
)
def test_a_study_says_what_no_site_could_compute_with(old, new, message, tmp_path):
    (tmp_path / "study.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        deploy.Study.read(tmp_path / "study.toml")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rounds": -5}, "secure.rounds must be at least 0, got -5"),
        ({"identities": dict.fromkeys("abc", "0" * 64)}, "also the identity of another site"),
    ],
)
def test_a_study_under_masks_has_an_identity_per_site(changes, message, tmp_path):
    study = dataclasses.replace(study_with(tmp_path, b""), sites=dict.fromkeys("abc", 30))
    secure = {"rounds": 5, "identities": {name: f"{name}" * 64 for name in "abc"}}
    dataclasses.replace(study, secure=secure)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(study, secure=secure | changes)


def test_a_setting_does_not_add_lines_that_a_terminal_shows(tmp_path):
    study = study_with(tmp_path, b"X = 1\n")
    study = dataclasses.replace(study, settings={"k": "x" + " " * 200 + "No code runs here."})
    assert max(map(len, describe_files(study, "a").splitlines()[:20])) <= 120


@pytest.mark.parametrize("line", ["folder = 3", "log = 3", 'server_name = ["a"]', 'name = ""'])
def test_settings_of_a_site_are_texts(line, tmp_path):
    name = line.partition(" ")[0]
    kept = [text for text in SITE.splitlines() if not text.startswith(f"{name} =")]
    (tmp_path / "site.toml").write_text("\n".join([*kept, line]))
    with pytest.raises(ValueError, match=rf"site\.toml: {name} must be a text in quotes"):
        site_settings(tmp_path / "site.toml")


@pytest.mark.parametrize("size", [0, 50, -40])
def test_rows_that_are_cut_short_are_refused(size, tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros(1000))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"is not an \.npz file of arrays"):
        read_rows(path)


def test_rows_with_a_damaged_column_are_refused(tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros(1000))
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"Column 'x' of .* is damaged"):
        read_rows(path)


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b", "a.b.c")])
def test_a_column_within_a_column_is_refused(names, tmp_path):
    np.savez(tmp_path / "rows.npz", **dict.fromkeys(names, np.zeros(3)))
    with pytest.raises(ValueError, match="a dot separates"):
        read_rows(tmp_path / "rows.npz")


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"study": [1]}', "ok"])
def test_what_is_no_approval_is_refused(content, tmp_path):
    entries = {"site": "a", "digest": "", "study": [1], "software": 3, "time": None}
    data = json.dumps(entries).encode() if content == "ok" else content
    (tmp_path / "approval.json").write_bytes(data)
    with pytest.raises(deploy.Refused, match="is not an approval"):
        Approval.read(tmp_path / "approval.json")


def test_a_key_of_another_certificate_is_refused(tmp_path):
    make_authority(tmp_path)
    for name in "ab":
        make_party(tmp_path, tmp_path, name)
    files = [tmp_path / name for name in ("a.crt", "ca.crt")]
    Credentials(tmp_path / "a.key", *files).read()
    for other in ("b.key", "ca.crt"):
        (tmp_path / other).chmod(0o600)
        with pytest.raises(ValueError, match="is not the private key of the certificate"):
            Credentials(tmp_path / other, *files).read()
