"""Pages of the site in a browser without a network: make test-site."""

import functools
import http.server
import threading
import urllib.parse
from pathlib import Path
from typing import NamedTuple

import pytest

websocket = pytest.importorskip("websocket", reason="make test-site installs websocket-client")
from tests.site import browser  # noqa: E402

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
PROGRAM = browser.find()

pytestmark = [
    pytest.mark.skipif(not PAGES, reason="there is no built site: make docs-site"),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (apt install chromium)"),
]

# Content of a page after its scripts. Figures load lazily, so the script loads all of them.
CONTENT = """(async () => {
    const figures = [...document.images];
    figures.forEach(figure => { figure.loading = "eager"; });
    await Promise.all(figures.map(figure => figure.decode().catch(() => null)));
    return {
        links: [...document.querySelectorAll("a[href]")].map(link => link.href),
        anchors: [...document.querySelectorAll("[id]")].map(element => element.id),
        missing: figures.filter(figure => figure.naturalWidth === 0).map(figure => figure.src),
        figures: figures.length,
        formulas: [...document.querySelectorAll("math")].map(formula => (
            {width: formula.getBoundingClientRect().width, text: formula.textContent}
        )),
        title: document.title,
        address: document.location.href,
    };
})()"""


class Visit(NamedTuple):
    """Content, requests and problems of a page in the browser."""

    content: dict
    requests: list
    problems: list


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Server for files that prints no line per request."""

    def log_message(self, *args):
        """Print nothing."""


@pytest.fixture(scope="module")
def address():
    serve = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def page():
    with browser.browser(PROGRAM) as page:
        yield page


@pytest.fixture(scope="module")
def visits(page, address):
    """Return the visits of all pages except for redirections."""
    visited = {}
    for name in PAGES:
        if name != "index.html":
            page.open(address + name)
            content = page.run(CONTENT)
            visited[name] = Visit(content, list(page.requests), list(page.problems))
    return visited


def test_a_page_asks_nothing_of_the_network(visits, address):
    external = {
        (name, request)
        for name, visit in visits.items()
        for request in visit.requests
        if not request.startswith((address, "data:"))
    }
    assert not external
    assert all(visit.requests for visit in visits.values())


def test_pages_log_no_error(visits):
    assert {name: visit.problems for name, visit in visits.items() if visit.problems} == {}


def test_figures_load(visits):
    assert not [figure for visit in visits.values() for figure in visit.content["missing"]]
    assert visits["docs/explanation/design.html"].content["figures"] > 0
    assert visits["docs/results/fsgld.html"].content["figures"] > 3


def test_formulas_are_shown(visits):
    """Formulas are MathML, which browsers display without scripts, and contain no TeX command."""
    formulas = [(name, x) for name, visit in visits.items() for x in visit.content["formulas"]]
    assert "docs/reference/conventions.html" in {name for name, _ in formulas}
    assert not [x for x in formulas if x[1]["width"] < 5 or "\\" in x[1]["text"]]


def test_links_within_the_site_resolve(visits, address):
    broken = []
    count = 0
    for name, visit in visits.items():
        for link in visit.content["links"]:
            if not link.startswith(address):
                continue
            count += 1
            target, _, anchor = link.removeprefix(address).partition("#")
            target, anchor = urllib.parse.unquote(target), urllib.parse.unquote(anchor)
            exists = target in visits or target in ("", "index.html") or (SITE / target).is_file()
            if not exists or (anchor and anchor not in visits[target].content["anchors"]):
                broken.append((name, link.removeprefix(address)))
    assert not broken
    assert count > 1000


def test_every_page_is_reached_from_the_home_page(visits, page, address):
    page.open(address)
    page.wait_for("document.location.pathname == '/docs/index.html'")
    reached, queue = set(), ["docs/index.html"]
    while queue:
        name = queue.pop()
        if name in visits and name not in reached:
            reached.add(name)
            queue += [
                link.removeprefix(address).partition("#")[0]
                for link in visits[name].content["links"]
                if link.startswith(address)
            ]
    assert set(visits) - reached <= {"search.html"}  # only a form leads to it


def test_search_finds_a_kernel(page, address):
    page.open(address + "docs/index.html")
    # Submit after the script ends, because a submission closes the script's page.
    page.run("""(() => {
        const field = document.querySelector("input[name=q]");
        field.value = "fsgld";
        setTimeout(() => field.form.requestSubmit());
    })()""")
    results = """[...document.querySelectorAll("#search-results li a")].map(link => link.href)"""
    page.wait_for("document.location.pathname == '/search.html'")
    page.wait_for(
        """/finished|found/.test(document.querySelector("#search-results p")?.innerText)"""
    )
    links = page.run(results)
    assert any("docs/api/algorithms.html#fedmcmc.fsgld" in link for link in links), links
    assert any("docs/explanation/choosing.html" in link for link in links)
    assert not page.problems
