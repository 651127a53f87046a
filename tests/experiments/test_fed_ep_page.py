"""FedEP's claims, and the page that is rendered from them."""

import pytest

from experiments import render, verdicts

PAPER = "fed_ep"
CLAIMS = verdicts.claims_of(PAPER)


@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.id for claim in CLAIMS])
def test_every_claim_has_its_verdict_and_its_figure(claim):
    assert verdicts.judge(claim) == claim.expect
    assert claim.run() and (not claim.figure or (render.DOCS / "figures" / claim.figure).is_file())


def test_the_committed_page_is_that_of_the_template():
    page = render.Page(PAPER).fill((verdicts.NOTES / f"{PAPER}.md").read_text())
    assert page == (render.DOCS / f"{PAPER}.md").read_text()
