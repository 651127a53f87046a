"""The deployed demo, shortened: five processes, one of which is killed."""

import re
import signal

import pytest

from examples import deploy_demo
from fedmcmc import deploy


@pytest.mark.slow
def test_hospitals_as_processes_draw_what_the_simulation_does(tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    try:
        deploy_demo.main(["--out", f"{tmp_path}/demo", "--num-rounds=400", "--killed-rounds=300"])
    finally:
        signal.signal(signal.SIGTERM, before)
    told = capsys.readouterr().out
    apart = [float(text) for text in re.findall(r"(?:fit|FSGLD)  .* (\S+e[+-]\d+)\n", told)]
    assert len(apart) == 8 and max(apart) < 1e-4, told
    assert "All 50 draws per chain with and without the kill are equal, bit by bit." in told
    folder = tmp_path / "demo" / "consortium"
    log = folder / "UM" / "audit.log"
    assert deploy.verify_log(log).num_answers > 300
    assert "for the owner of the site 'UM'" in (folder / "UM.approved.txt").read_text()
