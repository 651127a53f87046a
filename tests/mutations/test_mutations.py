"""The mutation guard: a copy of the source with one seeded bug must fail the test of its law."""

import ast
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from tests.mutations.mutants import LostAnchorError, Mutant

ROOT = Path(__file__).parents[2]
RELAY = "laws/test_fsgld_law.py::test_law_after_six_and_twelve_rounds"
FSGLD = f"{RELAY}[fsgld-dense-half]"
DISTINCT = f"{RELAY}[fsgld-exact-distinct-rows]"
HOT = f"{RELAY}[dsgld-hot]"
OWN = f"{RELAY}[fsgld-own-steps]"
SUM = "laws/test_qlsd_law.py::test_law_of_every_round"
LSD = f"{SUM}[lsd-split-minibatch]"
COHORT = f"{SUM}[lsd-cohort-distinct-rows]"
SPARSE = f"{SUM}[qlsd-sparse-realised]"
STAR = f"{SUM}[star-off-the-mode]"
MEMORY = f"{SUM}[pp-memory-of-all]"
ACTIVE = f"{SUM}[pp-memory-of-the-active]"
CONSENSUS = "laws/test_dg_sgld.py::test_joint_law_after_seven_rounds_is_exact[one per client]"
QUANTISED = "laws/test_qlsd_law.py::test_law_of_two_quantised_rounds[forgetful]"
OPERATORS = f"{SUM}[pp-operators-per-client]"
REFRESHED = "laws/test_refreshed_law.py::test_law_while_surrogates_are_refitted_and_after[flat]"
AUGMENTED = (
    "gradients/test_augmented.py"
    "::test_chains_have_the_exact_distribution_over_transformations[False]"
)
FAILED_COMPARISON = re.compile(
    r"^FAILED .* - (AssertionError|assert |Failed: DID NOT)", re.MULTILINE
)
"""Line of pytest's summary for a test that a comparison failed, and not an error of the program."""
MUTATIONS = {
    "dynamics/_integrators.py::overdamped_langevin": {
        "noise off by sqrt 2": ("2 * jnp.asarray(step_size) -> jnp.asarray(step_size)", FSGLD),
    },
    "kernels/_shared.py::LocalLangevin.move": {
        "temperature ignored": ("temperature -> 1.0", HOT),
        "local steps of the slowest client for all": ("drawn[0] < num_active -> drawn[0] < 1", OWN),
        "one key for all local steps": (
            "drawn.noise -> jax.tree.map(lambda z: z[0], draws.noise)",
            FSGLD,
        ),
    },
    "kernels/_relay.py::Relay.visit": {
        "visits that weigh alike however long they are": (
            "self.step_count_weights -> jnp.ones_like(self.step_count_weights)",
            OWN,
        ),
        "prior counted once per client": (
            "trees.add(prior, importance(client, gradient))"
            " -> trees.add(importance(client, prior), importance(client, gradient))",
            FSGLD,
        ),
    },
    "kernels/_relay.py::relay_settings": {
        "a visit weighted twice": (
            "replace(participation, weighted=False) -> replace(participation, weighted=True)",
            FSGLD,
        ),
    },
    "algorithms/_fsgld.py::_shares": {
        "surrogates that count visits where steps count": (
            "jnp.asarray(steps) -> jnp.ones(num)",
            OWN,
        ),
    },
    "random/_streams.py::client_key": {
        "one key for all rounds": ("jax.random.fold_in(rng_key, round_) -> rng_key", FSGLD),
        "one client's randomness for all": (
            "jax.random.fold_in(jax.random.fold_in(rng_key, round_), index)"
            " -> jax.random.fold_in(rng_key, round_)",
            SPARSE,
        ),
    },
    "runs/_sample.py::sample": {
        "one key for all chains": ("jnp.arange(num_chains) -> 0 * jnp.arange(num_chains)", FSGLD),
    },
    "gradients/_scaling.py::importance": {
        "importance weight dropped": ("trees.scale(client.weight, gradient) -> gradient", FSGLD),
    },
    "gradients/_scaling.py::rows_over_batch": {
        "minibatch not scaled to the client's rows": (
            "trees.scale(size / jnp.asarray(batch_size).astype(size.dtype), gradient) -> gradient",
            FSGLD,
        ),
    },
    "gradients/_scaling.py::prior_share": {
        "all of the prior at every client": (
            "trees.scale(client.share, gradient) -> gradient",
            LSD,
        ),
    },
    "participation/_participation.py::Categorical.prepare": {
        "probabilities ignored where the client is drawn": (
            "jnp.searchsorted(self.edges, word, side='right') -> word % jnp.uint32(p.shape[0])",
            FSGLD,
        ),
    },
    "participation/_participation.py::Bernoulli.prepare": {
        "messages not divided by the probability": (
            "1 / probability -> jnp.ones_like(probability)",
            LSD,
        ),
    },
    "participation/_participation.py::_equal_cohort": {
        "a cohort that stands for itself alone": ("num_clients / size -> 1.0", COHORT),
    },
    "participation/_participation.py::Realised.prepare": {
        "the number of active clients ignored": (
            "num_clients / jnp.sum(active.astype(p.dtype)) -> 1 / p",
            SPARSE,
        ),
    },
    "compression/_per_client.py::PerClientCompressor.encode": {
        "all clients compress by the first operator": (
            "self.which.of(client) -> jnp.zeros((), jnp.int32)",
            OPERATORS,
        ),
    },
    "kernels/_refreshed_relay.py::RefreshedRelay.aggregate": {
        "refitted surrogates not in the product": (
            "broadcast.extra * symmetric(total.change) -> broadcast.extra",
            REFRESHED,
        ),
    },
    "gradients/_augmented.py::Augmented.prepare": {
        "one transformation of rows for all local steps": (
            "jax.random.split(augmentation_key(rng_key), num_calls)"
            " -> jax.numpy.stack([augmentation_key(rng_key)] * num_calls)",
            AUGMENTED,
        ),
    },
    "gradients/_corrections.py::zero_sum_correction": {
        "alpha ignored": (
            "(product ** share / surrogate) ** alpha -> product ** share / surrogate",
            FSGLD,
        ),
        "conducive term divided by f twice": (
            "product ** share / surrogate -> product ** share / surrogate ** (1 / share)",
            FSGLD,
        ),
    },
    "gradients/_corrections.py::Snapshot.update": {
        "a snapshot one round late": (
            "round_ % self.period == 0 -> round_ % self.period == 1",
            MEMORY,
        ),
    },
    "gradients/_corrections.py::Svrg.correction": {
        "the gradient of an old snapshot": ("cached.round != latest -> cached.round < 0", MEMORY),
    },
    "gradients/_minibatches.py::Minibatch._offsets": {
        "distinct rows drawn with replacement": (
            "distinct_integers(rng_key, client.size, (num_calls, max_rows), num_rows)"
            " -> integers_below(rng_key, client.size, (num_calls, max_rows))",
            DISTINCT,
        ),
    },
    "kernels/_langevin.py::Langevin.aggregate": {
        "noise of the server off by sqrt 2": (
            "overdamped_langevin(position, gradient, noise, step_size, temperature, self.metric)"
            " -> overdamped_langevin(position, gradient, noise, step_size, temperature / 2,"
            " self.metric)",
            LSD,
        ),
    },
    "kernels/_langevin.py::Langevin.init_server_state": {
        "the prior's gradient at the centre missing": (
            "jax.grad(self.posterior.logprior_fn) -> trees.zeros_like",
            STAR,
        ),
        "the rows' gradient at the centre missing": (
            "trees.add(gradient, jax.grad(self.posterior.logprior_fn)(self.centre))"
            " -> jax.grad(self.posterior.logprior_fn)(self.centre)",
            STAR,
        ),
    },
    "compression/_sparsify.py::Sparsify.encode": {
        "what is sent not divided by its probability": ("x / trees.cast(fraction, x) -> x", SPARSE),
    },
    "transforms/_compressed.py::_Coded.step": {
        "compressed twice": (
            "return WithExact(code, exact), client_state, info"
            " -> exact_free = _without_exact(message)\n"
            "again = trees.cast_like(compressor.decode(code, client), exact_free)\n"
            "code, _ = compressor.encode(draws.compressor, again, state, client)\n"
            "return WithExact(code, exact), client_state, info",
            QUANTISED,
        ),
    },
    "transforms/_compressed.py::_Coded.aggregate": {
        "memory of the server not moved": ("trees.add(memory, total.change) -> memory", MEMORY),
    },
    "transforms/_compressed.py::_Coded.decode": {
        "memory of the server moved by weighted messages": (
            "_Pooled(importance(sender, message), change)"
            " -> _Pooled(importance(sender, message), importance(sender, change))",
            MEMORY,
        ),
        "memory of the active clients not added": (
            "decoded = trees.add(memory, decoded) -> pass",
            ACTIVE,
        ),
    },
    "compression/_quantize.py::_round": {
        "rounded to the nearest level": (
            "words < ((exact - below) * 2.0 ** 32).astype(jnp.uint32) -> exact - below > 0.5",
            QUANTISED,
        ),
    },
    "compression/_memory.py::Memory.change": {
        "memory that is not moved by its rate": (
            "trees.scale(self._rate(decoded, sender), decoded) -> decoded",
            ACTIVE,
        ),
    },
    "kernels/_consensus.py::Consensus.aggregate": {
        "noise of the server's draw off by sqrt 2": (
            "variance * temperature -> 2 * variance * temperature",
            CONSENSUS,
        ),
        "one client's tolerance for the server": (
            "1 / jnp.sum(1 / tolerance.values) -> tolerance.values[0] / server_state",
            CONSENSUS,
        ),
    },
    "kernels/_consensus.py::Consensus.step": {
        "tolerance counted twice": (
            "1 / _value(self.tolerance, broadcast.round, client)"
            " -> 2 / _value(self.tolerance, broadcast.round, client)",
            CONSENSUS,
        ),
        "a client that starts at the server's position": (
            "client_state.position -> broadcast.position",
            CONSENSUS,
        ),
    },
    "rounds/_messages.py::where_active": {
        "a silent client that remembers what it did not send": (
            "isinstance(a, RecomputableState) -> True",
            MEMORY,
        ),
    },
}
FAMILIES = (
    "adjusted averaging criticism deployed exact faults hierarchy judging natural runs secure "
    "tuning"
)
MODULES = [import_module(f"tests.mutations.{name}") for name in FAMILIES.split()]
TABLES = [MUTATIONS, *(module.MUTATIONS for module in MODULES)]
MUTANTS = {
    bug: Mutant(place, *row)
    for table in TABLES
    for place, rows in table.items()
    for bug, row in rows.items()
}
TESTS = sorted({mutant.test for mutant in MUTANTS.values()})


def run_law_test(folder, test):
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "400"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, f"tests/{test}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def copy(tmp_path):
    """Return a copy of the source and of the tests."""
    for part in ("src", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tmp_path / part, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.check
def test_mutants_have_their_anchors():
    """A renamed function, or a rewritten expression, needs a new anchor for its mutant."""
    parse = cache(lambda path: ast.parse(path.read_text()))
    lost = {}
    for bug, mutant in MUTANTS.items():
        try:
            mutant.find_anchor(parse(mutant.path))
        except (LostAnchorError, OSError) as error:
            lost[bug] = str(error)
    assert lost == {}
    assert len(MUTANTS) == sum(len(rows) for table in TABLES for rows in table.values())


@pytest.mark.check
def test_tests_of_mutants_have_their_functions():
    lost = set()
    for test in TESTS:
        path, name = test.partition("[")[0].split("::")
        file = ROOT / "tests" / path
        if not file.exists() or f"\ndef {name}(" not in file.read_text():
            lost.add(test)
    assert lost == set()


@pytest.mark.slow
def test_tests_of_mutants_have_their_parameters():
    files = sorted({f"tests/{test.partition('::')[0]}" for test in TESTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    cases = set(done.stdout.splitlines())
    cases |= {case.partition("[")[0] for case in cases}  # without parameters, all cases run
    assert {f"tests/{test}" for test in TESTS} - cases == set()


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_the_copy_without_a_bug_passes(copy, test):
    done = run_law_test(copy, test)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("bug", MUTANTS)
def test_a_seeded_bug_is_noticed(copy, bug):
    mutant = MUTANTS[bug]
    path = copy / mutant.path.relative_to(ROOT)
    path.write_text(mutant.source())
    done = run_law_test(copy, mutant.test)
    assert done.returncode == 1, done.stdout[-2000:]
    assert FAILED_COMPARISON.search(done.stdout), done.stdout[-2000:]
