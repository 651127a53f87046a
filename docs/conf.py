"""Settings of the documentation's site, which ``make docs-site`` builds without a network.

Pages link to each other, to the README and to other files as on GitHub, so Sphinx reads them from
the repository's root. The side bar has the lists of links in ``index.md``. `reference.py` writes
the pages of ``api/`` and reads examples.
"""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.addnodes import pending_xref
from sphinx.domains.python import PyObject
from sphinx.util.nodes import make_refnode

import fedmcmc

sys.path.append(str(Path(__file__).parent))
import citations
import reference

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/fedmcmc/fedmcmc"

project = "fedmcmc"
release = version = fedmcmc.__version__
project_copyright = "the fedmcmc authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["*.md", "*/README.md", "docs/**.md", "docs/api/*.rst", "examples/*.py"]
exclude_patterns = [
    *(".*", "build", "dist", "outputs", "multirun", "notes", "records", "results", "src", "tests"),
]
exclude_patterns += ["examples/*demo.py"]  # programs, not pages
default_role = "py:obj"  # `name` in a docstring is a link where it is a public name
nitpicky = True
# Arguments, names of other packages, and annotations by the module that something is written in.
nitpick_ignore_regex = [("py:.*", r"(?!fedmcmc\.).*|fedmcmc\.\w+\._.*")]

myst_heading_anchors = 4
myst_fence_as_directive = ["math"]  # display formulas are written as on GitHub
myst_enable_extensions = ["dollarmath"]
nb_custom_formats = {".py": "reference.example"}
nb_execution_mode = "cache"  # an example runs again when it changes
nb_execution_cache_path = str(ROOT / "build" / "examples")
nb_execution_timeout = 900  # seconds per cell, on a busy machine too
nb_execution_raise_on_error = True
# That notebooks lack a widget for progress bars is of no interest to who reads an example.
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have types and shapes
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"fedmcmc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_favicon = "_static/favicon.svg"
html_show_sphinx = False
html_use_index = html_domain_indices = False  # the search finds names
html_copy_source = False
html_math_renderer = "mathml"  # which browsers show by themselves: no script and no network


def write_reference(app: Any) -> None:
    """Write the pages of ``api/``."""
    reference.write(Path(app.confdir) / "api")


def add_toctrees(app: Any, page: str, source: list[str]) -> None:
    """Add to an index the lists of pages that Sphinx shows in the side bar."""
    if page == "docs/reference/api":
        source[0] += reference.index()
    elif page != "docs/index":
        return
    for section in re.split(r"^(?=##? )", source[0], flags=re.MULTILINE):
        links = re.findall(r"^- \[(.*?)\]\(([^:)#]+)\.(?:md|rst|py)\)", section, re.MULTILINE)
        caption = re.match(r"#+ (.*)", section)
        if links and caption:
            pages = "\n".join(f"{title} <{page}>" for title, page in links)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption[1]}\n\n{pages}\n```\n"


def add_appendices(app: Any, page: str, source: list[str]) -> None:
    """Add to a page of results the appendices of its studies, which the side bar omits."""
    folder = ROOT / "docs" / "results" / "runs" / page.rpartition("/")[2]
    if page.startswith("docs/results/") and "/runs/" not in page and any(folder.glob("*.md")):
        pages = f"runs/{folder.name}/*"
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"


def link_repository(app: Any, document: nodes.document) -> None:
    """Point links to folders and programs, which have no page, at the repository."""
    for link in list(document.findall(pending_xref)):
        path = (ROOT / app.env.docname).parent / link["reftarget"]
        if link["refdomain"] == "doc" and link["reftarget"] not in app.env.found_docs:
            path = ROOT / f"{link['reftarget']}.py"
        elif not path.is_dir():
            continue
        address = f"{REPOSITORY}/tree/main/{path.resolve().relative_to(ROOT)}"
        link.replace_self(nodes.reference("", "", *link.children, refuri=address))


def find_name(app: Any, env: Any, link: Any, shown: nodes.Element) -> nodes.reference | None:
    """Return the link for a name in a docstring without its package, or for a field."""
    if link.get("refdomain") != "py":
        return None
    name = reference.find_name(link["reftarget"], link["refdoc"].rpartition("/")[2])
    entry = env.domains["py"].objects.get(name)
    if entry is None:
        return None
    return make_refnode(app.builder, link["refdoc"], entry.docname, entry.node_id, shown, name)


def skip_field(app: Any, what: str, name: str, thing: Any, skip: bool, options: Any) -> bool | None:
    """Leave out fields of named tuples, which their class describes."""
    return True if (inspect.getdoc(thing) or "").startswith("Alias for field number") else None


def join_fields(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Keep fields that share a description together; Sphinx splits them at spaces."""
    for i, line in enumerate(lines):
        if fields := re.match(r":ivar ([\w, ]+):", line):
            lines[i] = line.replace(fields[1], fields[1].replace(" ", ""), 1)


def link_citations(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Link citations in docstrings to the bibliography."""
    lines[:] = _with_links(app, app.env.docname, "\n".join(lines)).split("\n")


def link_citations_of_modules(app: Any, page: str, source: list[str]) -> None:
    """Link citations in docstrings of modules, which `reference.py` copies to their pages."""
    if page.startswith("docs/api/"):
        source[0] = _with_links(app, page, source[0])


def _with_links(app: Any, page: str, text: str) -> str:
    bibliography = app.builder.get_relative_uri(page, "docs/reference/bibliography")
    return citations.link(text, lambda anchor: f"{bibliography}#{anchor}")


def redirect(app: Any, error: Exception | None) -> None:
    """Redirect the site's address to its home page."""
    page = f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><title>fedmcmc</title>'
    (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{page}")


def visit_math(self: Any, node: nodes.Element) -> None:
    """Write a formula as MathML."""
    as_block = isinstance(node, nodes.math_block)
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=as_block))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Register the functions above."""
    app.connect("builder-inited", write_reference)
    app.connect("source-read", add_toctrees)
    app.connect("source-read", add_appendices)
    app.connect("source-read", link_citations_of_modules)
    app.connect("doctree-read", link_repository)
    app.connect("missing-reference", find_name)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-docstring", join_fields, priority=900)  # after napoleon
    app.connect("autodoc-process-docstring", link_citations, priority=900)
    app.connect("build-finished", redirect)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.rolename = ""  # fields are described there, and link to nothing
