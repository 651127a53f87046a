"""The mutation guard: a copy of the source with one seeded bug must fail a law test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import (
    adjusted,
    averaging,
    criticism,
    deployed,
    exact,
    faults,
    hierarchy,
    judging,
    natural,
    runs,
    secure,
    tuning,
)

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
    "::test_chains_follow_the_likelihoods_averaged_over_transformations[False]"
)
LAWS = ("< LIMIT", "Not equal to tolerance", "Arrays are not equal", "DID NOT RAISE")
MUTATIONS = {
    "noise off by sqrt 2": (
        "dynamics/_integrators.py",
        "jnp.sqrt(2 * jnp.asarray(step_size)",
        "jnp.sqrt(jnp.asarray(step_size)",
        FSGLD,
    ),
    "temperature ignored": (
        "kernels/_shared.py",
        "position, gradient, noise, step_size, temperature, metric",
        "position, gradient, noise, step_size, 1.0, metric",
        HOT,
    ),
    "local steps of the slowest client for all": (
        "kernels/_shared.py",
        "drawn[0] < num_active, lambda c",
        "drawn[0] < 1, lambda c",
        OWN,
    ),
    "visits that weigh alike however long they are": (
        "kernels/_relay.py",
        "client.weight * self.step_count_weights[client.index]",
        "client.weight * jnp.ones_like(self.step_count_weights)[client.index]",
        OWN,
    ),
    "surrogates that count visits where steps count": (
        "algorithms/_fsgld.py",
        "num_steps = jnp.asarray(shares) * jnp.asarray(steps)",
        "num_steps = jnp.asarray(shares) * jnp.ones(num)",
        OWN,
    ),
    "prior counted once per client": (
        "kernels/_relay.py",
        "trees.add(prior, importance(client, gradient))",
        "trees.add(importance(client, prior), importance(client, gradient))",
        FSGLD,
    ),
    "one key for all rounds": (
        "random/_streams.py",
        "return jax.random.fold_in(jax.random.fold_in(rng_key, round_), index)",
        "return jax.random.fold_in(rng_key, index)",
        FSGLD,
    ),
    "one key for all local steps": (
        "kernels/_shared.py",
        "noise = noise_fn(drawn.noise, position)",
        "noise = noise_fn(jax.tree.map(lambda z: z[0], draws.noise), position)",
        FSGLD,
    ),
    "one key for all chains": (
        "runs/_sample.py",
        "jax.random.fold_in(as_key(rng_key), c))(jnp.arange(num_chains))",
        "jax.random.fold_in(as_key(rng_key), c))(0 * jnp.arange(num_chains))",
        FSGLD,
    ),
    "importance weight dropped": (
        "gradients/_scaling.py",
        "return trees.scale(client.weight, gradient)",
        "return gradient",
        FSGLD,
    ),
    "a visit weighted twice": (
        "kernels/_relay.py",
        "replace(participation, weighted=False)",
        "replace(participation, weighted=True)",
        FSGLD,
    ),
    "probabilities ignored where the client is drawn": (
        "participation/_participation.py",
        'jnp.searchsorted(self.edges, word, side="right")',
        "(word % jnp.uint32(p.shape[0]))",
        FSGLD,
    ),
    "all clients compress by the first operator": (
        "compression/_per_client.py",
        "index = self.which.of(client)",
        "index = jnp.zeros((), jnp.int32)",
        OPERATORS,
    ),
    "refitted surrogates not in the product": (
        "kernels/_refreshed_relay.py",
        "broadcast.extra * symmetric(total.change)",
        "broadcast.extra",
        REFRESHED,
    ),
    "one transformation of rows for all local steps": (
        "gradients/_augmented.py",
        "jax.random.split(augmentation_key(rng_key), num_calls)",
        "jax.numpy.stack([augmentation_key(rng_key)] * num_calls)",
        AUGMENTED,
    ),
    "alpha ignored": (
        "gradients/_corrections.py",
        "(product**share / surrogate) ** alpha",
        "(product**share / surrogate)",
        FSGLD,
    ),
    "conducive term divided by f twice": (
        "gradients/_corrections.py",
        "(product**share / surrogate) ** alpha",
        "(product**share / surrogate ** (1 / share)) ** alpha",
        FSGLD,
    ),
    "minibatch not scaled to the client's rows": (
        "gradients/_scaling.py",
        "return trees.scale(size / jnp.asarray(batch_size).astype(size.dtype), gradient)",
        "return gradient",
        FSGLD,
    ),
    "distinct rows drawn with replacement": (
        "gradients/_minibatches.py",
        "distinct_integers(rng_key, client.size, (num_calls, max_rows), num_rows)",
        "integers_below(rng_key, client.size, (num_calls, max_rows))",
        DISTINCT,
    ),
    "noise of the server off by sqrt 2": (
        "kernels/_langevin.py",
        "position, gradient, noise, step_size, temperature, self.metric",
        "position, gradient, noise, step_size, temperature / 2, self.metric",
        LSD,
    ),
    "all of the prior at every client": (
        "gradients/_scaling.py",
        "return trees.scale(client.share, gradient)",
        "return gradient",
        LSD,
    ),
    "messages not divided by the probability": (
        "participation/_participation.py",
        "1 / probability, active)",
        "jnp.ones_like(probability), active)",
        LSD,
    ),
    "a cohort that stands for itself alone": (
        "participation/_participation.py",
        "weight = jnp.full(size, num_clients / size, jnp.result_type(float))",
        "weight = jnp.full(size, 1.0, jnp.result_type(float))",
        COHORT,
    ),
    "the number of active clients ignored": (
        "participation/_participation.py",
        "weight = num_clients / jnp.sum(active.astype(p.dtype))",
        "weight = 1 / p",
        SPARSE,
    ),
    "what is sent not divided by its probability": (
        "compression/_sparsify.py",
        "x / trees.cast(fraction, x), 0)",
        "x, 0)",
        SPARSE,
    ),
    "one client's randomness for all": (
        "random/_streams.py",
        "return jax.random.fold_in(jax.random.fold_in(rng_key, round_), index)",
        "return jax.random.fold_in(rng_key, round_)",
        SPARSE,
    ),
    "compressed twice": (
        "transforms/_compressed.py",
        "return WithExact(code, exact), client_state, info",
        "again = trees.cast_like(compressor.decode(code, client), _without_exact(message))\n"
        "        code, _ = compressor.encode(draws.compressor, again, state, client)\n"
        "        return WithExact(code, exact), client_state, info",
        QUANTISED,
    ),
    "rounded to the nearest level": (
        "compression/_quantize.py",
        "up = words < ((exact - below) * 2.0**32).astype(jnp.uint32)",
        "up = exact - below > 0.5",
        QUANTISED,
    ),
    "the prior's gradient at the centre missing": (
        "kernels/_langevin.py",
        "trees.add(gradient, jax.grad(self.posterior.logprior_fn)(self.centre))",
        "trees.add(gradient, trees.zeros_like(self.centre))",
        STAR,
    ),
    "the rows' gradient at the centre missing": (
        "kernels/_langevin.py",
        "trees.add(gradient, jax.grad(self.posterior.logprior_fn)(self.centre))",
        "jax.grad(self.posterior.logprior_fn)(self.centre)",
        STAR,
    ),
    "memory of the active clients alone": (
        "transforms/_compressed.py",
        'pooled = of != "active"',
        'pooled = of == "no one"',
        MEMORY,
    ),
    "memory of the server not moved": (
        "transforms/_compressed.py",
        "trees.add(memory, total.change)",
        "memory",
        MEMORY,
    ),
    "memory of the server moved by weighted messages": (
        "transforms/_compressed.py",
        "return _Pooled(importance(sender, message), change)",
        "return _Pooled(importance(sender, message), importance(sender, change))",
        MEMORY,
    ),
    "memory of the active clients not added": (
        "transforms/_compressed.py",
        "decoded = trees.add(memory, decoded)\n        message",
        "pass\n        message",
        ACTIVE,
    ),
    "memory that is not moved by its rate": (
        "compression/_memory.py",
        "return trees.scale(self._rate(decoded, sender), decoded)",
        "return decoded",
        ACTIVE,
    ),
    "noise of the server's draw off by sqrt 2": (
        "kernels/_consensus.py",
        "jnp.sqrt(variance * temperature)",
        "jnp.sqrt(2 * variance * temperature)",
        CONSENSUS,
    ),
    "tolerance counted twice": (
        "kernels/_consensus.py",
        "pull = 1 / _value(self.tolerance, broadcast.round, client)",
        "pull = 2 / _value(self.tolerance, broadcast.round, client)",
        CONSENSUS,
    ),
    "one client's tolerance for the server": (
        "kernels/_consensus.py",
        "variance = 1 / jnp.sum(1 / tolerance.values)",
        "variance = tolerance.values[0] / server_state",
        CONSENSUS,
    ),
    "a client that starts at the server's position": (
        "kernels/_consensus.py",
        "client_state.position,\n            step_size,",
        "broadcast.position,\n            step_size,",
        CONSENSUS,
    ),
    "a silent client that remembers what it did not send": (
        "rounds/_messages.py",
        "return a if isinstance(a, RecomputableState) else",
        "return a if True else",
        MEMORY,
    ),
    "one client's randomness for all own chains": (
        "random/_streams.py",
        "return jax.random.fold_in(jax.random.fold_in(rng_key, round_), index)",
        "return jax.random.fold_in(rng_key, round_)",
        CONSENSUS,
    ),
    "a snapshot one round late": (
        "gradients/_corrections.py",
        "trees.select(round_ % self.period == 0, position, previous)",
        "trees.select(round_ % self.period == 1, position, previous)",
        MEMORY,
    ),
    "the gradient of an old snapshot": (
        "gradients/_corrections.py",
        "cached.round != latest,",
        "cached.round < 0,",
        MEMORY,
    ),
    **adjusted.MUTATIONS,
    **averaging.MUTATIONS,
    **criticism.MUTATIONS,
    **deployed.MUTATIONS,
    **exact.MUTATIONS,
    **hierarchy.MUTATIONS,
    **faults.MUTATIONS,
    **judging.MUTATIONS,
    **natural.MUTATIONS,
    **runs.MUTATIONS,
    **tuning.MUTATIONS,
    **secure.MUTATIONS,
}
TESTS = list(dict.fromkeys(test for _, _, _, test in MUTATIONS.values()))


def run_law_test(folder, test):
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
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


@pytest.mark.slow
@pytest.mark.parametrize("test", TESTS)
def test_the_copy_without_a_bug_passes(copy, test):
    done = run_law_test(copy, test)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.check
def test_every_bug_has_its_place_in_the_source():
    for bug, (file, before, _, _) in MUTATIONS.items():
        found = (ROOT / "src" / "fedmcmc" / file).read_text().count(before)
        assert found == 1, f"{bug}: {file} has changed, renew this mutation"


@pytest.mark.slow
def test_every_test_that_is_named_here_exists():
    named = {f"tests/{test}" for test in TESTS}
    files = sorted({test.partition("::")[0] for test in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert not named - set(done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("bug", MUTATIONS)
def test_a_seeded_bug_is_noticed(copy, bug):
    file, before, after, test = MUTATIONS[bug]
    path = copy / "src" / "fedmcmc" / file
    source = path.read_text()
    assert source.count(before) == 1, f"{file} has changed: renew this mutation"
    path.write_text(source.replace(before, after))
    done = run_law_test(copy, test)
    assert done.returncode == 1, done.stdout[-2000:]
    # The law itself must be what failed, not a program that no longer runs.
    said = any(words in done.stdout for words in LAWS)
    assert said and "1 failed" in done.stdout, done.stdout[-2000:]
    others = done.stdout.replace("AssertionError", "").replace("SiteError", "")
    assert "Error" not in others, done.stdout[-2000:]
