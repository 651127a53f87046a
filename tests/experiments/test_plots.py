"""Figures of the pages are drawn from the rows of their studies."""

import pytest
import yaml

from experiments import plots

ENTRIES = plots.entries()
ONE_OF_EACH_KIND = (
    "fed_ep-toy-toy.png",  # curves, a scatter and ellipses
    "qlsd-gaussian_small-clients.png",  # bars
    "qlsd-label_split-labels.png",  # a heat map
)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_figure_has_rows(name):
    for panel in ENTRIES[name]["panels"]:
        assert all(len(plots.series(layer)) > 0 for layer in plots.layers(panel))


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_every_kind_is_drawn(name, tmp_path):
    assert 0 < plots.draw(name, ENTRIES[name], tmp_path).stat().st_size < 120_000


def test_every_figure_is_drawn_or_kept():
    kept = yaml.safe_load((plots.NOTES / "figures.yaml").read_text())["kept"]
    assert {path.name for path in plots.FIGURES.glob("*.png")} == {*ENTRIES, *kept}
