"""Columns of a study have levels that code text, and studies have no unknown keys."""

import jax.numpy as jnp
import numpy as np
import pandas as pd
import polars
import pytest

from fedmcmc import deploy
from fedmcmc.deploy._account import describe_files

MODEL = """
import jax.numpy as jnp
import fedmcmc


def posterior(settings):
    return fedmcmc.Posterior(
        lambda t: -0.5 * jnp.sum(t**2),
        lambda t, rows: -0.5 * (rows["y"] - t[rows["arm"]]) ** 2,
        init_fn=lambda key: jnp.zeros(3),
    )
"""
LEVELS = ["placebo", "drug", "surgery"]
STUDY = """
name = "arms"
posterior = "model.py:posterior"
asks = ["Evaluations"]
[sites]
A = 3
B = 2
[rows]
arm = { dtype = "int32", levels = ["placebo", "drug", "surgery"] }
y = { dtype = "float32" }
"""


def study_in(folder, text=STUDY):
    (folder / "model.py").write_text(MODEL)
    (folder / "study.toml").write_text(text)
    return deploy.Study.read(folder / "study.toml")


def open_site(study, folder, rows, name="A"):
    return deploy.Site(study, name, rows, folder=folder / name, min_rows=1)


def columns(*values):
    return {"arm": list(values), "y": [float(i) for i in range(len(values))]}


def test_every_site_codes_text_by_the_levels_of_the_study(tmp_path):
    study = study_in(tmp_path)
    values, codes = ("surgery", "placebo", "surgery"), [2, 0, 2]
    categories = pd.Categorical(values, ["surgery", "placebo"])
    tables = {
        "pandas": pd.DataFrame(columns(*values)),
        "polars": polars.DataFrame(columns(*values)),
        "own categories": pd.DataFrame(columns(*values)).assign(arm=categories),
        "arrays": {name: np.array(column) for name, column in columns(*values).items()},
        "codes": {"arm": np.array(codes, np.int8), "y": np.arange(3.0)},
    }
    for name, table in tables.items():
        rows = open_site(study, tmp_path / name, table).client.rows
        assert rows["arm"].dtype == jnp.int32 and rows["arm"].tolist() == codes, name
    # A site without one of the levels has the same codes for the others.
    rows = open_site(study, tmp_path, pd.DataFrame(columns("drug", "surgery")), "B").client.rows
    assert rows["arm"][:2].tolist() == [1, 2]


@pytest.mark.parametrize(
    "values, message",
    [
        (
            ["drug", "Drug", "placebo"],
            "holds 'Drug' in row 1, which is none of .*'drug'",
        ),
        (["drug", "drug ", "placebo"], "'arm' of A holds 'drug ' in row 1"),
        (["drug", None, "placebo"], "'arm' of A has 1 missing value, the first in row 1"),
        ([0, 1, 3], "'arm' of A holds 3 in row 2, which is neither.*code from 0 to 2"),
        ([0, 1, -1], "'arm' of A holds -1 in row 2"),
        ([0, 1, 0.5], "'arm' of A holds 0.5 in row 2"),
        (
            pd.Categorical(["drug"] * 3, ["drug", "placebo"], ordered=True),
            "'arm' of A has ordered categories 'drug' < 'placebo', in another order",
        ),
    ],
)
def test_a_site_refuses_what_is_no_level(tmp_path, values, message):
    table = pd.DataFrame({"arm": values, "y": [0.0, 1.0, 2.0]})
    with pytest.raises(ValueError, match=message):
        open_site(study_in(tmp_path), tmp_path, table)


def test_a_site_refuses_text_without_levels(tmp_path):
    study = study_in(tmp_path, STUDY.replace(f", levels = {LEVELS!r}".replace("'", '"'), ""))
    message = "'arm' of A is text without known levels.*add levels = .*study.toml"
    with pytest.raises(ValueError, match=message):
        open_site(study, tmp_path, pd.DataFrame(columns("drug", "drug", "placebo")))
    rows = {name: np.array(column) for name, column in columns("drug", "drug", "drug").items()}
    with pytest.raises(ValueError, match=message):
        open_site(study, tmp_path, rows)


def test_a_site_names_columns_that_the_study_lacks_before_their_text(tmp_path):
    study, table = study_in(tmp_path), columns("drug", "drug", "placebo")
    for extra in (["p1", "p2", "p3"], [1, 2, 3]):
        message = "column 'id', which is not in \\[rows\\] of the study 'arms': remove the column"
        with pytest.raises(ValueError, match=message):
            open_site(study, tmp_path, pd.DataFrame(table | {"id": extra}))
        arrays = {name: np.array(column) for name, column in (table | {"id": extra}).items()}
        with pytest.raises(ValueError, match=message):
            open_site(study, tmp_path, arrays)
    with pytest.raises(ValueError, match="columns 'id', 'day', which are not in"):
        open_site(study, tmp_path, pd.DataFrame(table | {"id": extra, "day": extra}))
    with pytest.raises(ValueError, match=r"column 'z', .* The rows lack 'y', which the study"):
        open_site(study, tmp_path, {"arm": np.arange(3), "z": np.arange(3.0)})
    with pytest.raises(ValueError, match="The rows of A lack 'arm', which the study 'arms' has"):
        open_site(study, tmp_path, {"y": np.arange(3.0)})


def test_levels_are_part_of_what_an_owner_approves(tmp_path):
    study = study_in(tmp_path)
    assert study.levels == {"arm": tuple(LEVELS)}
    text = " ".join(describe_files(study, "A").split())
    assert "Text in arm becomes codes: 0 is 'placebo', 1 is 'drug', 2 is 'surgery'." in text
    approval = deploy.Approval.of(study, "A")
    reordered = study_in(tmp_path, STUDY.replace('"placebo", "drug"', '"drug", "placebo"'))
    assert reordered.digest != study.digest
    (difference,) = approval.differences(reordered)
    assert difference.startswith("levels of arm: ")
    without = study_in(tmp_path, STUDY.replace(', levels = ["placebo", "drug", "surgery"]', ""))
    assert "levels" not in without.to_dict()


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("levels =", "level =", "column 'arm' of rows must hold dtype.*level, which is unknown.*"
         "Is levels meant"),
        ('y = { dtype', 'y = { type', "column 'y' of rows .*holds type, which is unknown"),
        ('"float32"', '"flot32"', "column 'y' of rows has the dtype 'flot32'.*Is float32 meant"),
        ('"float32"', '"str"', "column 'y' of rows has the dtype 'str', which is unknown"),
        ('"float32"', '"float32", shape = [-1]', r"column 'y' of rows has the shape \[-1\]"),
        ('"float32"', '"float32", shape = 3', "column 'y' of rows has the shape 3, which must be"),
        ("[sites]", "[sites", r"study.toml is not a valid TOML file: .*line 5"),
        ('A = 3', 'A = "3"', "of at least 1, got '3' for 'A'"),
        ("[sites]", "[site]", "must hold .*holds site, which is unknown. Is sites meant"),
        ("asks =", "ask =", "holds ask, which is unknown. Is asks meant"),
        ('"placebo", ', '"drug", ', "must differ, got 'drug' twice"),
        ('"placebo", ', '"drug ", ', "differ only in white space"),
        ('"placebo", ', "1, ", "must be a list of texts"),
        ('dtype = "int32"', 'dtype = "float32"', "need the dtype int32"),
        ('dtype = "int32"', 'dtype = "int32", shape = [2]', "need the dtype int32 and no shape"),
        ("[sites]", "[secure]\nround = 3\n[sites]", "secure must hold .*Is rounds meant"),
        ("A = 3", "A = 2147483648", "at most 2,147,483,647"),
        ('"float32"', '">f4"', "dtype '>f4', which is unknown"),
        ('"float32"', '"float128"', "dtype 'float128', which is unknown"),
        ("[sites]", "[settings]\nday = 2026-11-28\n[sites]", "write dates as texts"),
    ],
)  # fmt: skip
def test_a_study_that_no_site_could_use_is_refused(tmp_path, old, new, message):
    assert old in STUDY
    with pytest.raises(ValueError, match=message):
        study_in(tmp_path, STUDY.replace(old, new))


def test_integers_of_a_study_are_wide(tmp_path):
    text = STUDY.replace('dtype = "int32", levels', "levels").replace("float32", "int8")
    study = study_in(tmp_path, text)
    assert study.rows["arm"].dtype == study.rows["y"].dtype == jnp.int32
    rows = {"arm": np.zeros(3, np.int8), "y": np.full(3, 100, np.int8)}
    y = open_site(study, tmp_path, rows).client.rows["y"]
    assert (y * y).tolist() == [10_000] * 3


def test_unknown_keys_of_a_site_are_refused(tmp_path):
    (tmp_path / "site.toml").write_text(
        'name = "A"\nstudy = "study.toml"\nrows = "A.npz"\nfolder = "A"\napproval = "a.json"\n'
        "limits = { most_number = 3 }\n"
    )
    with pytest.raises(ValueError, match=r"limits.*most_number, which is unknown. Is max_numbers"):
        deploy._config.site_settings(tmp_path / "site.toml", dials=False)


def test_rows_of_a_site_are_read_from_arrays_alone(tmp_path):
    read = deploy._config.read_rows
    np.savez(tmp_path / "rows.npz", arm=np.array(["a", "b"]), y=np.ones(2))
    assert read(tmp_path / "rows.npz")["arm"].tolist() == ["a", "b"]
    np.savez(tmp_path / "objects.npz", arm=np.array(["a", None], object))
    with pytest.raises(
        ValueError, match=r"'arm' of .*objects.npz contains Python objects.*dtype=str"
    ):
        read(tmp_path / "objects.npz")
    (tmp_path / "rows.csv").write_text("arm,y\na,1\n")
    with pytest.raises(ValueError, match=r"rows.csv is not an .npz file.*numpy.savez"):
        read(tmp_path / "rows.csv")


@pytest.mark.parametrize("address", ["hub", "hub:99999", "hub:-1", ":80", 7443])
def test_an_address_has_a_host_and_a_port(address, tmp_path):
    study_in(tmp_path)
    message = f"'host:port' with a port of at most 65535, got {address!r}"
    with pytest.raises(ValueError, match=f"server must be {message}"):
        deploy.make_consortium(tmp_path / "study.toml", tmp_path / "made", address)
    with pytest.raises(ValueError, match=f"address must be {message}"):
        deploy.GrpcServer(address, None, {})
    with pytest.raises(ValueError, match=f"server must be {message}"):
        deploy.serve_site(None, address, None)
