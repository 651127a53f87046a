"""`python -m fedmcmc` without a command, for reports of bugs."""

import platform
from pathlib import Path

import pytest

import fedmcmc
from fedmcmc import __main__ as program


def test_it_prints_versions_devices_and_placements(capsys):
    assert program.main([]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["fedmcmc"] == fedmcmc.__version__
    assert lines["python"].startswith(platform.python_version())
    assert lines["devices"].endswith("(cpu)")
    assert lines["placement"] == str(fedmcmc.Placement.over_devices())
    assert "numpyro 0." in lines["packages"]
    assert {"extra arviz", "extra deploy", "extra zarr"} < set(lines)
    assert "extra test" not in lines


def test_it_says_nothing_of_whose_machine_it_is(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/home/someone/cache")
    told = program.about()
    for secret in filter(None, (platform.node(), str(Path.home()), "/home/someone")):
        assert secret not in told


def test_it_names_what_is_missing(monkeypatch):
    installed = program.version

    def version(name):
        if name == "zarr":
            raise program.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(program, "version", version)
    assert "extra zarr: zarr missing\n" in program.about()


def test_a_command_that_does_not_exist_is_refused(capsys):
    with pytest.raises(SystemExit):
        program.main(["deplyo"])
    assert "invalid choice: 'deplyo'" in capsys.readouterr().err
