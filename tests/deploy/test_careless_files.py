"""A wrong file of an author, an owner or an editor causes one clear error, and nothing runs."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._config import read_rows, site_settings
from fedmcmc.deploy._grpc import Credentials
from fedmcmc.deploy._pki import make_authority, make_party
from fedmcmc.deploy._settings import read_toml

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


def test_an_error_names_a_source_that_cannot_be_a_model(tmp_path):
    with pytest.raises(ValueError, match=r"not valid Python: .*m\.py, line 2: "):
        study_with(tmp_path, b"X = 1\ndef (:\n").found("m.py:X")
    study = study_with(tmp_path, b"X = 1\n")
    with pytest.raises(ValueError, match=r"m\.py:X must be a Posterior"):
        _ = study.model
    study = study_with(tmp_path, b"X = 1\n")
    (tmp_path / "m.py").unlink()
    (tmp_path / "m.py").symlink_to("m.py")  # a circle of links
    with pytest.raises(ValueError, match="cannot be read"):
        _ = study.digest
    (tmp_path / "m.py").unlink()  # hypothesis resolves the files of all loaded modules


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
    (tmp_path / "a.toml").write_bytes(b'\xef\xbb\xbfname = "s"\r\n')
    assert read_toml(tmp_path / "a.toml") == {"name": "s"}


@pytest.mark.parametrize("line", ["folder = 3", "log = 3", 'server_name = ["a"]', 'name = ""'])
def test_settings_of_a_site_are_texts(line, tmp_path):
    name = line.partition(" ")[0]
    lines = [text for text in SITE.splitlines() if not text.startswith(f"{name} =")]
    (tmp_path / "site.toml").write_text("\n".join([*lines, line]))
    with pytest.raises(ValueError, match=rf"site\.toml: {name} must be a text in quotes"):
        site_settings(tmp_path / "site.toml")


def test_a_damaged_file_of_rows_is_refused(tmp_path):
    path = tmp_path / "rows.npz"
    np.savez(path, x=np.zeros(1000))
    content = path.read_bytes()
    for size in (0, 50, -40):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"is not an \.npz file of arrays"):
            read_rows(path)
    path.write_bytes(content[:1000] + bytes([content[1000] ^ 1]) + content[1001:])
    with pytest.raises(ValueError, match=r"Column 'x' of .* is damaged"):
        read_rows(path)


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b", "a.b.c")])
def test_a_column_within_a_column_is_refused(names, tmp_path):
    np.savez(tmp_path / "rows.npz", **dict.fromkeys(names, np.zeros(3)))
    with pytest.raises(ValueError, match="a dot separates"):
        read_rows(tmp_path / "rows.npz")


@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"study": [1]}', "ok"])
def test_a_file_that_is_no_approval_is_refused(content, tmp_path):
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
    for name in ("b.key", "ca.crt"):
        (tmp_path / name).chmod(0o600)
        with pytest.raises(ValueError, match="is not the private key of the certificate"):
            Credentials(tmp_path / name, *files).read()
