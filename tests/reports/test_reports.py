"""Pages about runs: one file each, with all parameters and warnings, for all kinds of runs."""

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

VOID_TAGS = {"meta", "br"}


class ParsedPage(HTMLParser):
    """Page whose tags must nest; `text` is its visible text."""

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
        if tag not in VOID_TAGS:
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
    parsed = ParsedPage(page)
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


def test_the_page_of_a_run_has_names_numbers_warnings_and_settings(samples, tmp_path):
    path = samples.report(tmp_path / "new" / "report.html")
    assert path == tmp_path / "new" / "report.html"
    page = read(path)
    for name in NAMES:
        assert page.text.count(name) >= 3  # the table, the forest plot, the traces
    (warned,) = samples.warnings
    assert warned in page.text
    assert "A warning: read below before you use these numbers." in page.text
    m0 = samples.constrained["m"][..., 0].astype(float)
    for number in (m0.mean(), m0.std()):
        assert f"{number:.4g}" in page.text
    assert "300 rounds in each of 3 chains" in page.words and "0.1728 Mbit" in page.words
    for text in ("Langevin(", "step_size=0.02", "2 clients, 5 rows", jax.__version__):
        assert text in page.words, text
    assert "rng_key" not in page.words  # with the key, a reader can remove the noise of the draws
    assert "lsd" in page.text
    assert path.read_text().count("<svg") == 3 and "Ranks" in page.text


@pytest.mark.slow
def test_pickled_samples_write_the_same_page(samples, tmp_path):
    copy = pickle.loads(pickle.dumps(replace(samples, constrain_fn=scaled)))
    pages = [x.report(tmp_path / "page.html").read_text() for x in (samples, copy)]
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_stored_draws_have_a_page(tmp_path):
    stored = run(record=fedmcmc.Record(draws_to=tmp_path / "draws.zarr"), num_rounds=100)
    page = read(stored.report(tmp_path / "report.html"))
    assert "From 100 draws of each of 3 chains." in page.text and "m[1]" in page.text


def test_a_run_without_warnings_has_no_findings(samples, tmp_path):
    draws = jax.random.normal(jax.random.key(1), (4, 500))
    diagnosis = fedmcmc.diagnostics.diagnose(draws)
    good = replace(samples, draws=draws, constrain_fn=None, diagnosis=diagnosis, warnings=())
    page = read(good.report(tmp_path / "report.html"))
    assert "None." in page.text and "Nothing was found wrong" in page.words
    # A finding without a warning is shown as a warning.
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
def test_clients_codes_outcome_and_method_are_named(tmp_path):
    data = clinics()
    posterior = fedmcmc.from_numpyro(linear, example=data)
    kernel = fedmcmc.dsgld(posterior, step_size=1e-3, num_local_steps=2)
    samples = fedmcmc.sample(
        jax.random.key(0), kernel, data, posterior.init_fn, num_rounds=50, progress=False
    )
    page = read(samples.report(tmp_path / "report.html"))
    values = dict(itertools.pairwise(text for text in page.text if text))
    assert values["clients"] == "Bern (60 rows), Jura <b> (20 rows)"
    assert values["outcome"] == "recovered"
    assert "arm: 0 is 'drug', 1 is 'placebo'" in page.text
    assert values["method"] == "dsgld"


@pytest.mark.slow
def test_the_page_of_a_fit_has_names_and_the_cost_of_all_stages(tmp_path):
    fitted = fedmcmc.fit(linear, clinics(), rng_key=jax.random.key(0), progress=False)
    fit_page = read(fitted.report.save(tmp_path / "fit.html"))
    draws_page = read(fitted.samples.report(tmp_path / "draws.html"))
    for page in (fit_page, draws_page):
        assert "Bern (60 rows), Jura <b> (20 rows)" in page.text and "recovered" in page.text
        assert "arm: 0 is 'drug', 1 is 'placebo'" in page.text
    assert f"The whole fit took {fitted.report.rounds} rounds" in draws_page.words
    assert "stage 1: modes" in draws_page.text


def test_the_page_has_the_cost_of_the_chains_and_of_the_fit():
    totals = {"rounds": np.full(2, 50), "bits_up": np.full(2, 800), "bits_down": np.full(2, 8)}
    info = {"num_active": np.ones((2, 50))}
    cost = {"rounds": 70, "bits_up": 2000.0, "bits_down": 40.0}
    facts = RunFacts(np.zeros((2, 50)), info, totals, stopped={"cost": cost})
    page = ParsedPage(str(run_page(facts)))
    assert "The whole fit took 70 rounds: all clients together sent 2,000 bits" in page.words
    assert "50 rounds in each of 2 chains, kept or not. All clients together sent 1,600 bits" in (
        page.words
    )


def find_marked_cells(page):
    return re.findall(r"<td class='[^']*\bbad\b[^']*'>([^<]*)", page)


def facts_of(draws):
    totals = {name: np.zeros(4) for name in ("rounds", "bits_up", "bits_down")}
    return RunFacts(draws, {}, totals)


def test_bad_rows_are_marked_and_good_rows_are_not():
    draws = np.array(jax.random.normal(jax.random.key(2), (4, 500, 3)))
    draws[3, :, 1] += 1.0  # a chain with a different mean
    draws[..., 2] = np.repeat(draws[:, ::25, 2], 25, axis=1)  # hardly moves
    page = str(run_page(facts_of({"t": draws})))
    cells = find_marked_cells(page)
    assert [cell for cell in cells if cell.startswith("t[")] == ["t[1]", "t[2]"]
    result = fedmcmc.diagnostics.mixing(draws)
    assert f"{result.rhat[1]:.3f}" in cells and result.rhat[1] > 1.05
    assert f"{result.ess_bulk[2]:,.0f}" in cells
    assert f"{result.ess_bulk[0]:,.0f}" not in cells
    assert "Marked: chains that disagree" in page
    page = str(run_page(facts_of({"t": draws[..., :1]})))
    assert not find_marked_cells(page) and "Marked:" not in page


def test_ranks_show_a_chain_with_a_different_mean():
    even = np.linspace(0, 1, 101)
    draws = np.array(jax.random.normal(jax.random.key(3), (4, 5000)))
    off = off_even(draws, draws, even)
    assert np.abs(off).max() < 3.5 * np.sqrt(0.25 / 5000)
    np.testing.assert_allclose(off.mean(0), 0, atol=1e-3)
    draws[2] += 10
    off = off_even(draws, draws, even)
    np.testing.assert_allclose(off[2, 75], -0.75, atol=1e-3)
    np.testing.assert_allclose(off[0, 75], 0.25, atol=1e-3)


def test_a_constant_parameter_has_no_ranks(tmp_path):
    draws = np.array(jax.random.normal(jax.random.key(2), (4, 100, 2)))
    draws[..., 1] = 1.0
    page = read(run_page(facts_of({"t": draws})).save(tmp_path / "page.html"))
    assert "Ranks" in page.text and page.text.count("t[0]") == page.text.count("t[1]") + 1


def test_a_diverged_run_has_a_page_with_the_error(tmp_path):
    with pytest.raises(fedmcmc.NonFiniteError) as caught:
        run(step_size=30.0, num_rounds=200)
    samples = caught.value.samples
    assert samples.warnings == (str(caught.value),)
    page = read(samples.report(tmp_path / "report.html"))
    assert str(caught.value) in page.text and "step_size=30" in page.words


def test_draws_that_are_not_finite_are_named(samples, tmp_path):
    draws = {"m": samples.draws["m"].copy(), "s": np.full((3, 300), np.nan, np.float32)}
    draws["m"][1, 7:, 0] = np.inf
    page = read(replace(samples, draws=draws).report(tmp_path / "report.html"))
    assert "2 of the 3 parameters shown here have draws that are not finite" in page.words
    assert "the first of them m[0]" in page.words
    assert "Without 2 parameters whose draws are not all finite." in page.words


@pytest.mark.parametrize(("num", "num_chains"), [(0, 3), (1, 3), (2, 3), (9, 1)])
def test_runs_with_hardly_any_draws_have_a_page(num, num_chains, samples, tmp_path):
    draws, info = jax.tree.map(lambda x: x[:num_chains, :num], (samples.draws, dict(samples.info)))
    few = replace(
        samples,
        draws=draws,
        info=info,
        diagnosis=None,
        reason_not_judged="too few to judge (fewer than 400)",
        warnings=(),
    )
    page = read(few.report(tmp_path / "report.html"))
    assert ("No draws were kept." in page.text) == (num == 0)
    assert "Too few to judge (fewer than 400)." in page.text
    if num_chains == 1:
        assert "From 9 draws of one chain." in page.text


@pytest.mark.slow
def test_the_page_of_a_network_has_a_subset_of_its_weights():
    rng = np.random.default_rng(0)
    draws = {
        "bias": rng.normal(size=(2, 100, 3)).astype(np.float32),
        "weights": rng.normal(size=(2, 100, 30, 90)).astype(np.float32),
    }
    page = str(run_page(facts_of(draws)))
    parsed = ParsedPage(page)
    assert "40 of 2,703 parameters are shown here" in parsed.words
    rows = re.findall(r"<td class='text[^']*'>(\w+)\[", page)
    assert rows.count("bias") == 3 and rows.count("weights") == 37  # small groups are complete
    for name in ("weights[0, 0]", "weights[29, 89]"):  # evenly spaced
        assert name in parsed.text
    assert "8 parameters are shown, those with the fewest effective draws" in parsed.words
    assert len(page) < 2e6


def test_summaries_of_sites_have_means_and_names():
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
    parsed = ParsedPage(str(page))
    for letter in "iabcdefghjk":
        assert f"<{letter}>" in parsed.words


def test_a_missing_package_is_named(samples, tmp_path, monkeypatch):
    def import_without_plots(name, *args, _real=builtins.__import__, **kwargs):
        if name.startswith(("arviz_plots", "matplotlib")):
            raise ImportError(name)
        return _real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_without_plots)
    with pytest.raises(ImportError, match=r"pip install \"arviz-plots>="):
        samples.report(tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_notebooks_show_a_table(samples):
    page = ParsedPage(samples._repr_html_())
    assert "m[0]" in page.text and "R-hat" in page.words
    wide = replace(samples, draws=np.zeros((3, 4, 50)), constrain_fn=None)
    assert "and 40 more" in ParsedPage(wide._repr_html_()).text
