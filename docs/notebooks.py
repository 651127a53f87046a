"""How the site reads the examples, which are scripts in jupytext's percent format."""

from typing import Any

import jupytext


def read(text: str) -> Any:
    """Return a script as a notebook that says that it is Python, also where nothing runs it."""
    notebook = jupytext.reads(text, fmt="py:percent")
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    return notebook
