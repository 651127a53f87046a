"""Tables of names and texts for notebooks."""

import html
from collections.abc import Mapping


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a title above a table of two columns as HTML, with all text escaped.

    Examples
    --------
    >>> html_table("Data", {"rows": "5 < 6"})
    "<strong>Data</strong><table><tr><th style='text-align:left'>rows</th>\
<td style='text-align:left'>5 &lt; 6</td></tr></table>"
    """
    left = "style='text-align:left'"
    lines = [
        f"<tr><th {left}>{html.escape(name)}</th><td {left}>{html.escape(text)}</td></tr>"
        for name, text in rows.items()
    ]
    return f"<strong>{html.escape(title)}</strong><table>{''.join(lines)}</table>"
