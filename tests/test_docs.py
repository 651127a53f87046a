"""The snippets of docs/fed_ep.md, in their order."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "fed_ep.md"


@pytest.mark.slow
def test_the_page_on_fed_ep_runs():
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(snippet, names)
    assert names["samples"].info["num_lost"].sum() == 0
    assert names["marginal"].shape == names["point"].shape == (300, 2)
    hits = (names["point"].argmax(1) == names["rows"]["y"]).mean()
    assert hits > 0.7
