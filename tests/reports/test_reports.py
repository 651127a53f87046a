"""Pages about runs: one file each, with every parameter and warning, for any run there can be."""

import builtins
import itertools
import pickle
import re
from dataclasses import replace
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest

import fedmcmc
from fedmcmc.reports import Page, RunFacts, off_even, run_page, summarize

WITHOUT_END = {"meta", "br"}


class Parsed(HTMLParser):
    """A page, whose tags must nest; `text` is what a reader sees."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.ids = [], [], []
        self.feed(page)
        assert not self.open
        self.words = " ".join(self.text)

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.ids += [named["id"]] if "id" in named else []
        assert tag not in ("script", "link", "img", "iframe")
        for value in named.values():
            assert "//" not in (value or "").replace("http://www.w3.org/", "")
        if tag not in WITHOUT_END:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(" ".join(data.split()))


def read(path):
    page = path.read_text()
    parsed = Parsed(page)
    assert len(set(parsed.ids)) == len(parsed.ids)
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert used <= set(parsed.ids)
    assert "@import" not in page and "url(http" not in page
    return parsed


def scaled(position):
    return {"m": position["m"], "scale <b>&$": jnp.exp(position["s"])}


POSTERIOR = fedmcmc.Posterior(
    lambda p: -0.5 * jnp.sum(p["m"] ** 2) - 0.5 * p["s"] ** 2,
    lambda p, x: -0.5 * (x - p["m"][0] - p["m"][1]) ** 2,
    constrain_fn=scaled,
)
DATA = fedmcmc.FederatedData.from_clients([np.ones(3), np.zeros(2)])
NAMES = ("m[0]", "m[1]", "scale <b>&$")


def run(step_size=0.02, **settings):
    return fedmcmc.sample(
        jax.random.key(0),
        fedmcmc.lsd(POSTERIOR, step_size=step_size),
        DATA,
        {"m": jnp.zeros(2), "s": 0.0},
        progress=False,
        **{"num_rounds": 300, "num_chains": 3, **settings},
    )


@pytest.fixture(scope="module")
def samples():
    with pytest.warns(fedmcmc.DiagnosisWarning, match="too short"):
        return run()


def test_the_page_of_a_run_has_everything(samples, tmp_path):
    path = samples.report(tmp_path / "new" / "report.html")
    assert path == tmp_path / "new" / "report.html"
    page = read(path)
    for name in NAMES:
        assert page.text.count(name) >= 3  # the table, the forest plot, the traces
    (warned,) = samples.warnings
    assert warned in page.text
    assert "A warning: read below before you use these numbers." in page.text
    first = samples.constrained["m"][..., 0].astype(float)
    for number in (first.mean(), first.std()):
        assert f"{number:.4g}" in page.text
    assert "300 rounds in each of 3 chains" in page.words and "0.1728 Mbit" in page.words
    for told in ("Langevin(", "step_size=0.02", "2 clients, 5 rows", jax.__version__):
        assert told in page.words, told
    assert "rng_key" not in page.words  # who has the key can take the noise out of the draws
    assert "lsd" in page.text  # what the user called
    assert path.read_text().count("<svg") == 3 and "Ranks" in page.text


@pytest.mark.slow
def test_samples_from_a_disk_write_the_same_page(samples, tmp_path):
    back = pickle.loads(pickle.dumps(replace(samples, constrain_fn=scaled)))
    first, again = samples.report(tmp_path / "a.html"), back.report(tmp_path / "b.html")
    assert first.read_text() == again.read_text()


@pytest.mark.slow
def test_draws_in_a_store(tmp_path):
    stored = run(record=fedmcmc.Record(draws_to=tmp_path / "draws.zarr"), num_rounds=100)
    page = read(stored.report(tmp_path / "report.html"))
    assert "From 100 draws of each of 3 chains." in page.text and "m[1]" in page.text


def test_a_run_without_a_warning_says_so(samples, tmp_path):
    draws = jax.random.normal(jax.random.key(1), (4, 500))
    diagnosis = fedmcmc.diagnostics.diagnose(draws)
    good = replace(samples, draws=draws, constrain_fn=None, diagnosis=diagnosis, warnings=())
    page = read(good.report(tmp_path / "report.html"))
    assert "None." in page.text and "Nothing was found wrong" in page.words
    # A finding that no warning was made of is a warning here.
    worse = replace(diagnosis, findings=("They are odd.",))
    page = read(replace(good, diagnosis=worse).report(tmp_path / "worse.html"))
    assert "They are odd." in page.text and "Nothing was found wrong" not in page.words


def linear(arm, x, recovered=None):
    slope = numpyro.sample("slope", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", len(x)):
        logits = slope[0] * x + slope[1] * (arm == 0)
        numpyro.sample("recovered", dist.Bernoulli(logits=logits), obs=recovered)


def clinics():
    rng = np.random.default_rng(0)
    return fedmcmc.FederatedData.from_clients(
        {
            name: pd.DataFrame(
                {
                    "arm": ["drug", "placebo"] * (size // 2),
                    "x": rng.normal(size=size),
                    "recovered": rng.integers(0, 2, size),
                }
            )
            for name, size in (("Bern", 60), ("Jura <b>", 20))
        }
    )


@pytest.mark.slow
def test_clients_codes_outcome_and_method_have_their_names(tmp_path):
    data = clinics()
    posterior = fedmcmc.from_numpyro(linear, example=data)
    kernel = fedmcmc.dsgld(posterior, step_size=1e-3, num_local_steps=2)
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, data, posterior.init_fn, num_rounds=50, progress=False
    )
    page = read(samples.report(tmp_path / "report.html"))
    told = [text for text in page.text if text]
    after = dict(itertools.pairwise(told))
    assert after["clients"] == "Bern (60 rows), Jura <b> (20 rows)"
    assert after["outcome"] == "recovered"
    assert "arm: 0 is 'drug', 1 is 'placebo'" in page.text
    assert after["method"] == "dsgld"


@pytest.mark.slow
def test_the_page_of_a_fit_has_the_names_and_the_cost_of_all_stages(tmp_path):
    fitted = fedmcmc.fit(linear, clinics(), rng_key=jax.random.key(0), progress=False)
    of_fit = read(fitted.report.save(tmp_path / "fit.html"))
    of_draws = read(fitted.samples.report(tmp_path / "draws.html"))
    for page in (of_fit, of_draws):
        assert "Bern (60 rows), Jura <b> (20 rows)" in page.text and "recovered" in page.text
        assert "arm: 0 is 'drug', 1 is 'placebo'" in page.text
    assert f"The whole fit took {fitted.report.rounds} rounds" in of_draws.words
    assert "stage 1: modes" in of_draws.text


def test_what_chains_cost_is_beside_what_the_fit_cost():
    totals = {"rounds": np.full(2, 50), "bits_up": np.full(2, 800), "bits_down": np.full(2, 8)}
    info = {"num_active": np.ones((2, 50))}
    cost = {"rounds": 70, "bits_up": 2000.0, "bits_down": 40.0}
    facts = RunFacts(np.zeros((2, 50)), info, totals, stopped={"cost": cost})
    page = Parsed(str(run_page(facts)))
    assert "The whole fit took 70 rounds: all clients together sent 2,000 bits" in page.words
    assert "50 rounds in each of 2 chains, kept or not. All clients together sent 1,600 bits" in (
        page.words
    )


class Marked(HTMLParser):
    """The text of cells that are marked."""

    def __init__(self, page):
        super().__init__()
        self.inside, self.cells = False, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.inside = tag == "td" and "bad" in (dict(attributes).get("class") or "").split()

    def handle_data(self, data):
        self.cells += [data] if self.inside else []

    def handle_endtag(self, tag):
        self.inside = False


def test_bad_rows_are_marked_and_good_ones_are_not():
    draws = np.array(jax.random.normal(jax.random.key(2), (4, 500, 3)))
    draws[3, :, 1] += 1.0  # a chain elsewhere
    draws[..., 2] = np.repeat(draws[:, ::25, 2], 25, axis=1)  # that hardly moves
    totals = {name: np.zeros(4) for name in ("rounds", "bits_up", "bits_down")}
    page = str(run_page(RunFacts({"t": draws}, {}, totals)))
    assert [x for x in Marked(page).cells if x.startswith("t[")] == ["t[1]", "t[2]"]
    result = fedmcmc.diagnostics.mixing(draws)
    assert f"{result.rhat[1]:.3f}" in Marked(page).cells and result.rhat[1] > 1.05
    assert f"{result.ess_bulk[2]:,.0f}" in Marked(page).cells
    assert f"{result.ess_bulk[0]:,.0f}" not in Marked(page).cells
    assert "Marked: chains that disagree" in page
    good = str(run_page(RunFacts({"t": draws[..., :1]}, {}, totals)))
    assert not Marked(good).cells and "Marked:" not in good


def test_a_chain_elsewhere_is_seen_by_its_ranks():
    even = np.linspace(0, 1, 101)
    draws = np.array(jax.random.normal(jax.random.key(3), (4, 5000)))
    off = off_even(draws, draws, even)
    assert np.abs(off).max() < 3.5 * np.sqrt(0.25 / 5000)
    np.testing.assert_allclose(off.mean(0), 0, atol=1e-3)  # chains together are all draws
    draws[2] += 10
    off = off_even(draws, draws, even)
    np.testing.assert_allclose(off[2, 75], -0.75, atol=1e-3)
    np.testing.assert_allclose(off[0, 75], 0.25, atol=1e-3)


def test_a_parameter_that_never_moves(tmp_path):
    draws = np.array(jax.random.normal(jax.random.key(2), (4, 100, 2)))
    draws[..., 1] = 1.0
    totals = {name: np.zeros(4) for name in ("rounds", "bits_up", "bits_down")}
    page = read(run_page(RunFacts({"t": draws}, {}, totals)).save(tmp_path / "page.html"))
    assert "Ranks" in page.text and page.text.count("t[0]") == page.text.count("t[1]") + 1


def test_a_chain_that_diverged(tmp_path):
    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run(step_size=30.0, num_rounds=200)
    samples = caught.value.samples
    assert samples.warnings == (str(caught.value),)
    page = read(samples.report(tmp_path / "report.html"))
    assert str(caught.value) in page.text and "step_size=30" in page.words


def test_draws_that_are_not_finite(samples, tmp_path):
    draws = {"m": samples.draws["m"].copy(), "s": np.full((3, 300), np.nan, np.float32)}
    draws["m"][1, 7:, 0] = np.inf
    page = read(replace(samples, draws=draws).report(tmp_path / "report.html"))
    assert "2 of the 3 parameters shown here have draws that are not finite" in page.words
    assert "the first of them m[0]" in page.words
    assert "Without 2 parameters whose draws are not all finite." in page.words


def test_one_short_chain(tmp_path):
    page = read(run(num_chains=1, num_rounds=9).report(tmp_path / "report.html"))
    assert (
        "From 9 draws of one chain." in page.text
        and "Too few to judge (fewer than 400)." in page.text
    )


def test_many_chains_of_one_draw_are_not_judged():
    samples = run(num_chains=500, num_rounds=20, num_burnin=19)
    assert samples.warnings == () and samples.diagnosis is None


@pytest.mark.parametrize("num", [0, 1, 2])
def test_hardly_any_draws(num, samples, tmp_path):
    draws = jax.tree.map(lambda leaf: leaf[:, :num], samples.draws)
    info = {name: x[:, :num] for name, x in samples.info.items()}
    few = replace(samples, draws=draws, info=info)
    page = read(few.report(tmp_path / "report.html"))
    assert ("No draws were kept." in page.text) == (num == 0)


@pytest.mark.slow
def test_a_network_shows_some_of_its_weights():
    rng = np.random.default_rng(0)
    draws = {
        "bias": rng.normal(size=(2, 100, 3)).astype(np.float32),
        "weights": rng.normal(size=(2, 100, 30, 90)).astype(np.float32),
    }
    totals = {name: np.zeros(2) for name in ("rounds", "bits_up", "bits_down")}
    page = str(run_page(RunFacts(draws, {}, totals)))
    parsed = Parsed(page)
    assert "40 of 2,703 parameters are shown here" in parsed.words
    rows = re.findall(r"<td class='text[^']*'>(\w+)\[", page)
    assert rows.count("bias") == 3 and rows.count("weights") == 37  # small groups whole
    for last in ("weights[0, 0]", "weights[29, 89]"):  # evenly spaced, of the first to the last
        assert last in parsed.text
    assert "8 parameters are shown, those with the fewest effective draws" in parsed.words
    assert len(page) < 2e6


def test_shares_of_sites_and_their_names():
    draws = {
        "z": np.arange(6.0).reshape(1, 3, 2),
        "a": {"k": np.ones((1, 3))},
        "a-": np.ones((1, 3)),
    }
    rows = summarize(draws)
    assert {name: row["mean"] for name, row in rows.items()} == {
        "a.k": 1.0,
        "a-": 1.0,
        "z[0]": 2.0,
        "z[1]": 3.0,
    }
    assert len(summarize({"w": np.zeros((1, 3, 500))})) == 200


def test_text_is_escaped():
    page = Page("<i>")
    page.verdict("<a>", "<b>\n<c>")
    page.items(["<d>"])
    page.words([("<e>", "<f>")])
    page.table(("<g>",), [("<h>",)])
    page.heading("<j>")
    page.figure("<svg></svg>", "<k>")
    parsed = Parsed(str(page))
    for letter in "iabcdefghjk":
        assert f"<{letter}>" in parsed.words


def test_what_is_missing_is_named(samples, tmp_path, monkeypatch):
    def without(name, *args, _real=builtins.__import__, **kwargs):
        if name.startswith(("arviz_plots", "matplotlib")):
            raise ImportError(name)
        return _real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install \"arviz-plots>="):
        samples.report(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_notebooks_show_a_table(samples):
    shown = Parsed(samples._repr_html_())
    assert "m[0]" in shown.text and "R-hat" in shown.words
    wide = replace(samples, draws=np.zeros((3, 4, 50)), constrain_fn=None)
    assert "and 40 more" in Parsed(wide._repr_html_()).text
