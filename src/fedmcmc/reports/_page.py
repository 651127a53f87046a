"""Self-contained HTML page, built part by part; all text is escaped."""

import html
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
div{overflow-x:auto}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .7rem;
text-align:right;border-bottom:1px solid #ddd;vertical-align:top}td.text,th.text{text-align:left}
.verdict{padding:1rem;border-left:.5rem solid #888;background:#f6f6f6}.good{border-color:#0072b2}
.poor{border-color:#d55e00}.bad{background:#fbe3d6;font-weight:600}th{white-space:nowrap}.text{min-width:7rem}
.text:last-child{min-width:14rem}svg{max-width:100%;height:auto}dt{font-weight:600}
li{margin:.5rem 0}
""".strip()


class Page:
    """HTML page to which parts are added in order.

    Parameters
    ----------
    title
        Title and main heading.

    Examples
    --------
    >>> page = Page("A run")
    >>> page.paragraph("5 < 6")
    >>> "<p>5 &lt; 6</p>" in str(page)
    True
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def paragraph(self, text: str) -> None:
        """Add a paragraph."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def verdict(self, advice: str, details: str = "", *, tone: str = "") -> None:
        """Add a box with advice in bold and details; `tone` is ``"good"``, ``"poor"`` or empty."""
        lines = [f"<strong>{html.escape(advice)}</strong>"]
        lines += [html.escape(line) for line in details.splitlines()]
        self.parts.append(f"<p class='verdict {tone}'>{'<br>'.join(lines)}</p>")

    def items(self, texts: Iterable[str]) -> None:
        """Add a list of texts."""
        self.parts.append("<ul>" + "".join(f"<li>{html.escape(x)}</li>" for x in texts) + "</ul>")

    def words(self, meanings: Iterable[tuple[str, str]]) -> None:
        """Add a glossary of ``(word, meaning)``."""
        items = (f"<dt>{html.escape(w)}</dt><dd>{html.escape(text)}</dd>" for w, text in meanings)
        self.parts.append(f"<dl>{''.join(items)}</dl>")

    def table(
        self,
        header: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        texts: Sequence[str] = (),
        marked: Container[tuple[int, int]] = (),
    ) -> None:
        """Add a table and highlight its `marked` cells ``(row, column)``.

        Column 0 and the columns with headers in `texts` hold text; the others hold numbers.
        """

        def row(tag: str, cells: Sequence[str], number: int = -1) -> str:
            inside = ""
            for i, (name, cell) in enumerate(zip(header, cells, strict=True)):
                kinds = ["text"] * (i == 0 or name in texts) + ["bad"] * ((number, i) in marked)
                kind = f" class='{' '.join(kinds)}'" * bool(kinds)
                inside += f"<{tag}{kind}>{html.escape(cell).replace(chr(10), '<br>')}</{tag}>"
            return f"<tr>{inside}</tr>"

        body = "".join(row("td", cells, number) for number, cells in enumerate(rows))
        self.parts.append(
            f"<div><table><thead>{row('th', header)}</thead><tbody>{body}</tbody></table></div>"
        )

    def figure(self, svg: str, about: str = "") -> None:
        """Add an SVG element, which is not escaped, and its caption."""
        caption = f"<figcaption>{html.escape(about)}</figcaption>" * bool(about)
        self.parts.append(f"<figure>{svg}{caption}</figure>")

    @property
    def body(self) -> str:
        """Parts of the page without title and heading, for a notebook."""
        return "\n".join(self.parts)

    def __str__(self) -> str:
        """Return the page as HTML."""
        title = html.escape(self.title)
        return "\n".join(
            [
                "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
                "<meta name='viewport' content='width=device-width, initial-scale=1'>",
                f"<title>fedmcmc: {title}</title><style>{STYLE}</style></head><body>",
                f"<h1>{title}</h1>",
                self.body,
                "</body></html>\n",
            ]
        )

    def save(self, path: str | Path) -> Path:
        """Write the page, create missing folders, and return its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(self), encoding="utf-8")
        return path
