"""Kernels and their parts that pages and examples write out: right in two dimensions, on trees.

Draws are compared with the exact stationary distribution at the step size: mean and covariance.
"""

import ast
import dataclasses
import gc
import itertools
import re
import textwrap
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedmcmc

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(3)
LARGEST = 4.5
"""Standard errors by which a right sampler may be off."""


def source_of(page):
    """Return the Python code of a page."""
    (path,) = (ROOT / "docs").rglob(page)
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    return "\n".join(map(textwrap.dedent, blocks))


def definitions(source, without):
    """Run the source, except for prints, assertions and assignments to the names `without`."""

    def is_kept(node):
        if isinstance(node, ast.Assign):
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            assigned = {name for name in names if name in without}
            return not assigned
        return not isinstance(node, ast.Assert | ast.Expr)

    module = ast.parse(source)
    module.body = [node for node in module.body if is_kept(node)]
    names = {}
    exec(compile(module, "page", "exec"), names)
    return names


WITHOUT = ("kernel", "predicted", "samples", "gaussians", "own", "lazy", "minibatches")
PAGE = definitions(source_of("extend.md"), WITHOUT)
POSTERIOR, DATA, TABLES = PAGE["posterior"], PAGE["data"], PAGE["tables"]
PRECISION, MEAN = PAGE["precision"], PAGE["mean"]
VECTOR = jnp.zeros(2)
TREE = {"a": jnp.zeros(()), "b": jnp.zeros((1, 1))}


def as_vector(tree):
    return jnp.concatenate([tree["a"][None], tree["b"][0]])


ON_TREES = fedmcmc.Posterior(
    lambda tree: POSTERIOR.logprior_fn(as_vector(tree)),
    lambda tree, rows: POSTERIOR.loglikelihood_fn(as_vector(tree), rows),
)
POSITIONS = {"vector": (POSTERIOR, VECTOR), "tree": (ON_TREES, TREE)}
SLOW_VECTOR = pytest.param("vector", marks=pytest.mark.slow)
vector_and_tree = pytest.mark.parametrize("kind", [SLOW_VECTOR, "tree"])
"""Trees in the fast tests, vectors in the slow ones: for tests that take long to compile."""


def drawn(kernel, position, **settings):
    """Return the draws of a short run, ``[num_chains, num_draws, 2]``."""
    settings = {"num_rounds": 12, "progress": False, **settings}
    samples = fedmcmc.sample(KEY, kernel, DATA, position, **settings)
    leaves = jax.tree.leaves(samples.draws)
    return np.concatenate([leaf.reshape(*leaf.shape[:2], -1) for leaf in leaves], axis=2)


def plain(kind="vector", estimator=None, participation=None, step_size=0.02, page=PAGE):
    estimator = fedmcmc.full_gradient() if estimator is None else estimator
    participation = fedmcmc.full() if participation is None else participation
    return page["Plain"](POSITIONS[kind][0], estimator, participation, step_size)


def exact_covariance(step_size):
    return np.linalg.inv(PRECISION - step_size / 2 * PRECISION @ PRECISION)


def stationary(step_size, added_noise):
    """Return the stationary covariance, where rounds add noise that depends on it."""
    shrinking = np.eye(2) - step_size * PRECISION
    covariance = np.linalg.inv(PRECISION)
    for _ in range(2_000):
        noise = 2 * step_size * np.eye(2) + step_size**2 * added_noise(covariance)
        covariance = shrinking @ covariance @ shrinking + noise
    return covariance


# Kernels of the page.


def test_the_kernel_is_exact_on_trees():
    """The page itself compares the draws of a vector."""
    assert PAGE["largest_error"](plain("tree"), MEAN, exact_covariance(0.02), TREE) < LARGEST


@vector_and_tree
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "fedmcmc.random.normals_like(rng_key, like.position)",
            "jax.tree.map(lambda leaf: jnp.full(leaf.shape, jax.random.normal(rng_key)), "
            "like.position)",
        ),
        ("jnp.sqrt(2 * self.step_size)", "jnp.sqrt(self.step_size)"),
        (
            "trees.add(total, jax.grad(self.posterior.logprior_fn)(position))",
            "trees.add_scaled(total, 2, jax.grad(self.posterior.logprior_fn)(position))",
        ),
    ],
    ids=["all coordinates share their noise", "noise off by sqrt(2)", "the prior counts twice"],
)
def test_the_comparison_finds_mistakes(kind, right, wrong):
    source = source_of("extend.md")
    assert source.count(right) == 1
    page = definitions(source.replace(right, wrong), WITHOUT)  # which defines the class again
    kernel = plain(kind, page=page)
    error = PAGE["largest_error"](kernel, MEAN, exact_covariance(0.02), POSITIONS[kind][1])
    assert error > 2 * LARGEST


def test_the_kernel_is_exact_with_minibatches():
    batch_size, step_size = 2, 0.01

    def noise_of_batches(covariance):
        added = np.zeros((2, 2))
        for table in TABLES:
            num, rows = len(table["y"]), table["x"]
            slopes = rows * (table["y"] - rows @ MEAN)[:, None]
            curvatures = rows[:, :, None] * rows[:, None, :]
            varying = curvatures - curvatures.mean(0)
            of_rows = np.cov(slopes.T, ddof=0) + (varying @ covariance @ varying).mean(0)
            added += num**2 / batch_size * of_rows
        return added

    exact = stationary(step_size, noise_of_batches)
    assert np.abs(exact / exact_covariance(step_size) - 1).max() > 0.2
    kernel = plain("tree", fedmcmc.minibatch(batch_size), step_size=step_size)
    assert PAGE["largest_error"](kernel, MEAN, exact, TREE) < LARGEST


ESTIMATORS = {
    "minibatch": lambda position: fedmcmc.minibatch(2),
    "svrg": lambda position: fedmcmc.svrg(fedmcmc.minibatch(2), refresh_every=5),
    "fixed point": lambda position: fedmcmc.fixed_point(fedmcmc.minibatch(0.5), position),
    "noisy": lambda position: fedmcmc.noisy(fedmcmc.epochs(2), 0.5),
}
PARTICIPATIONS = {
    "minibatch": fedmcmc.uniform(3),
    "svrg": fedmcmc.bernoulli(0.5),
    "fixed point": fedmcmc.full(),
    "noisy": fedmcmc.uniform(2),
}


@vector_and_tree
@pytest.mark.parametrize(
    "name",
    [
        name if name == "noisy" else pytest.param(name, marks=pytest.mark.slow)
        for name in ESTIMATORS
    ],
)
def test_the_kernel_draws_what_the_packages_own_draws(name, kind):
    posterior, position = POSITIONS[kind]
    estimator, participation = ESTIMATORS[name](position), PARTICIPATIONS[name]
    wanted = fedmcmc.langevin(posterior, estimator, step_size=0.02, participation=participation)
    own = plain(kind, estimator, participation)
    np.testing.assert_allclose(drawn(own, position), drawn(wanted, position), rtol=1e-4, atol=1e-5)


@vector_and_tree
def test_the_kernel_is_compressed_as_the_packages_own(kind):
    posterior, position = POSITIONS[kind]
    estimator = fedmcmc.svrg(fedmcmc.minibatch(2), refresh_every=5)
    compressor = fedmcmc.memory(fedmcmc.quantize(4))
    wanted = fedmcmc.langevin(
        posterior, estimator, step_size=0.02, participation=fedmcmc.uniform(3)
    )
    wanted = fedmcmc.compress(wanted, compressor)
    own = fedmcmc.compress(plain(kind, estimator, fedmcmc.uniform(3)), compressor)
    np.testing.assert_allclose(drawn(own, position), drawn(wanted, position), rtol=1e-4, atol=1e-5)


def test_an_estimator_that_the_kernel_cannot_use_is_named():
    with pytest.raises(ValueError, match="needs the sum of all clients' gradients"):
        plain(estimator=fedmcmc.scaffold(fedmcmc.full_gradient())).init(KEY, VECTOR, DATA)


def test_draws_are_in_the_users_parameters():
    kernel = plain("tree")
    moved = ON_TREES._replace(
        position_fn=lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree),
        constrain_fn=lambda tree: {"rate": jnp.exp(tree["a"])},
    )
    other = dataclasses.replace(kernel, posterior=moved)
    np.testing.assert_allclose(drawn(other, TREE), drawn(kernel, TREE) + 1, rtol=1e-5)
    assert other.model.constrain_fn is moved.constrain_fn


def test_a_long_run_of_the_kernel_is_judged():
    with pytest.warns(fedmcmc.DiagnosisWarning, match="not the posterior's"):
        samples = fedmcmc.sample(
            KEY, plain("tree", step_size=0.04), DATA, TREE, num_rounds=3_000, progress=False
        )
    spread = np.sqrt(np.diag(exact_covariance(0.04)) / np.diag(np.linalg.inv(PRECISION)))
    np.testing.assert_allclose(samples.diagnosis.moments.spread, spread, rtol=0.1)


def test_the_kernel_with_memory_takes_trees():
    kernels = [
        PAGE["Lazy"](posterior, fedmcmc.minibatch(2), fedmcmc.full(), 0.005, every=4)
        for posterior, _ in POSITIONS.values()
    ]
    starts = (VECTOR, TREE)
    vector, tree = (drawn(*pair) for pair in zip(kernels, starts, strict=True))
    np.testing.assert_allclose(vector, tree, rtol=1e-5, atol=1e-6)


def defined_again(base, added):
    @fedmcmc.types.register_dataclass
    @dataclasses.dataclass(frozen=True, eq=False)
    class Part(base):
        scale: float

        def apply(self, x):
            return self.scale * x + added

    return Part(2.0)


BASES = (
    fedmcmc.FederatedKernel,
    fedmcmc.types.GradientEstimator,
    fedmcmc.Compressor,
    fedmcmc.types.Participation,
    fedmcmc.types.Reference,
    fedmcmc.dynamics.Integrator,
)


def test_a_class_that_is_defined_again_has_another_structure_and_runs_its_new_code():
    """JAX keeps programs by the structure of their arguments: a structure must not come back."""
    run = jax.jit(lambda part, x: part.apply(x))
    structures, values = {base: [] for base in BASES}, []
    for i in range(20):
        for base in BASES:
            structures[base].append(jax.tree.structure(defined_again(base, float(i))))
        values.append(float(run(defined_again(fedmcmc.FederatedKernel, float(i)), jnp.ones(()))))
        if i % 3 == 0:
            gc.collect()
    assert values == [2.0 + i for i in range(20)]
    for base in BASES:
        assert not any(a == b for a, b in itertools.combinations(structures[base], 2)), base


def test_classes_whose_fields_have_the_same_names_are_apart():
    """Also such as differ in their own names, like two compressors of one fraction."""

    def named(name, factor):
        body = {"__annotations__": {"scale": float}, "apply": lambda part, x: factor * x}
        return fedmcmc.types.register_dataclass(dataclasses.dataclass(type(name, (), body)))

    run = jax.jit(lambda part, x: part.apply(x))
    parts = [named(f"Part{i}", float(i))(2.0) for i in range(300)]
    structures = [jax.tree.structure(part) for part in parts]
    assert not any(one == structures[0] for one in structures[1:])
    assert [float(run(part, jnp.ones(()))) for part in parts[:60]] == [float(i) for i in range(60)]


# Kernels that lack something.


@fedmcmc.types.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Bare(fedmcmc.FederatedKernel):
    """A kernel that forgets what its estimator keeps and draws."""

    posterior: fedmcmc.Posterior
    estimator: fedmcmc.types.GradientEstimator
    participation: fedmcmc.types.Participation = dataclasses.field(default_factory=fedmcmc.full)

    def server_init(self, rng_key, position, federation, totals):
        return fedmcmc.types.Broadcast(jnp.int32(0), position), ()

    def step(self, draws, broadcast, client_state, client):
        likelihood, position = self.posterior.loglikelihood_fn, broadcast.position
        context, client_state = self.estimator.start(likelihood, broadcast, client_state, client)
        message = self.estimator.estimate(likelihood, draws, position, context, client)
        return (
            message,
            client_state,
            fedmcmc.types.StepInfo(jnp.int32(0), fedmcmc.trees.norm(message)),
        )


@fedmcmc.types.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WithState(Bare):
    """The same, which remembers the estimator's state."""

    def client_init(self, broadcast, client):
        return self.estimator.init(self.posterior.loglikelihood_fn, broadcast.position, client)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (Bare(ON_TREES, fedmcmc.minibatch(2)), "minibatch received no draws"),
        (Bare(ON_TREES, fedmcmc.epochs(2)), "epochs received no draws"),
        (Bare(ON_TREES, fedmcmc.noisy(fedmcmc.full_gradient(), 1.0)), "noisy received no draws"),
        (Bare(ON_TREES, fedmcmc.svrg(fedmcmc.full_gradient(), 5)), "Svrg received no state"),
        (
            WithState(ON_TREES, fedmcmc.svrg(fedmcmc.full_gradient(), 5)),
            "svrg received no snapshot",
        ),
        (Bare(ON_TREES, fedmcmc.full_gradient()), "Bare does not define the method aggregate"),
        (
            fedmcmc.compress(plain("tree"), fedmcmc.memory(PAGE["Grid"](0.5))),
            "Grid does not define the method omega",
        ),
    ],
)
def test_what_a_kernel_lacks_is_named(kernel, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        fedmcmc.sample(KEY, kernel, DATA, TREE, num_rounds=1, progress=False)


def part_with(base, **methods):
    """Return a part of a kernel whose class `Own` has these methods."""
    cls = dataclasses.dataclass(frozen=True, eq=False)(type("Own", (base,), methods))
    return fedmcmc.types.register_dataclass(cls)()


def estimator_with(**methods):
    full = {"estimate": lambda self, fn, draws, position, context, client: position}
    return part_with(fedmcmc.types.GradientEstimator, **full | methods)


def rule_with(num_ids, num_weights, size=None):
    def prepare(self, rng_key, num_clients):
        ids = jnp.arange(num_ids, dtype=jnp.int32)
        return fedmcmc.types.Cohort(ids, jnp.ones(num_weights), jnp.ones(num_ids, bool))

    rule = part_with(fedmcmc.types.Participation, prepare=prepare)
    return dataclasses.replace(rule, cohort_size=size)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"estimator": estimator_with(prepare=lambda *_: jnp.zeros(3))},
            r"Own\.prepare must return draws with a first axis of length num_calls.*\[\(3,\)\]",
        ),
        (
            {"estimator": estimator_with(estimate=lambda *_: {"a": jnp.zeros(()), "b": 0.0})},
            r"Own\.estimate must return a gradient with the shapes .*'b': \(1, 1\).*'b': \(\)",
        ),
        (
            {"participation": rule_with(2, 2)},
            r"Own\.prepare must return a Cohort of arrays of shape \(4,\), the number of clients",
        ),
        ({"participation": rule_with(2, 2, size=3)}, r"of shape \(3,\), cohort_size; got"),
        ({"participation": rule_with(4, 1)}, r"the number of clients.*got {'weight': \(1,\)}"),
    ],
)
def test_arrays_of_other_shapes_are_named_before_a_run(parts, message):
    with pytest.raises(ValueError, match=message):
        fedmcmc.sample(KEY, plain("tree", **parts), DATA, TREE, num_rounds=1, progress=False)


def with_methods(**methods):
    """Return the page's kernel with other methods."""
    cls = type("Other", (PAGE["Plain"],), methods)
    cls = fedmcmc.types.register_dataclass(dataclasses.dataclass(frozen=True, eq=False)(cls))
    return cls(ON_TREES, fedmcmc.full_gradient(), fedmcmc.full(), 0.1)


def short_message(kernel, draws, broadcast, client_state, client):
    return jnp.zeros(7), client_state, fedmcmc.types.StepInfo(jnp.int32(0), jnp.zeros(()))


def new_client_state(kernel, draws, broadcast, client_state, client):
    message, _, info = PAGE["Plain"].step(kernel, draws, broadcast, client_state, client)
    return message, message, info


def new_server_state(kernel, noise, broadcast, server_state, total):
    return *PAGE["Plain"].aggregate(kernel, noise, broadcast, server_state, total)[:1], total, ()


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"step": short_message}, "A message of Other has the structure.*define message_like"),
        ({"step": new_client_state}, "A client's state of Other.*that client_init returns"),
        ({"step": lambda *_: 0}, "Other.step must return a message, the client's state and a"),
        ({"aggregate": new_server_state}, "The server's state of Other.*of its initial value"),
    ],
)
def test_values_of_other_structures_are_named(methods, message):
    with pytest.raises(TypeError, match=message):
        fedmcmc.sample(KEY, with_methods(**methods), DATA, TREE, num_rounds=1, progress=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Unregistered(PAGE["Plain"]):
    """Forgets that a subclass is registered, too."""


@dataclasses.dataclass(frozen=True)
class UnregisteredCompressor(fedmcmc.Compressor):
    """Is only a part of a kernel that is registered."""


@pytest.mark.parametrize(
    "kernel",
    [
        Unregistered(ON_TREES, fedmcmc.full_gradient(), fedmcmc.full(), 0.1),
        fedmcmc.compress(plain("tree"), UnregisteredCompressor()),
    ],
)
def test_a_class_that_is_not_registered_is_named(kernel):
    with pytest.raises(TypeError, match=r"class Unregistered\w* is not registered with JAX"):
        fedmcmc.sample(KEY, kernel, DATA, TREE, num_rounds=1, progress=False)


def test_only_dataclasses_are_registered():
    with pytest.raises(TypeError, match="needs a dataclass, but Part is not"):
        fedmcmc.types.register_dataclass(type("Part", (), {}))


def test_a_kernel_need_not_define_what_is_random_in_one_call():
    own = plain("tree", fedmcmc.minibatch(2))
    given = (KEY, fedmcmc.types.Broadcast(jnp.int32(0), TREE), DATA.client(0))
    default = fedmcmc.kernels.EstimatorKernel.prepare(own, *given)
    chex.assert_trees_all_equal(own.prepare(*given), default)


# Its compressor.


@pytest.mark.parametrize("kind", POSITIONS)
def test_the_compressor_is_unbiased_and_independent_over_numbers(kind):
    message = {
        "vector": jnp.array([0.3, -1.25]),
        "tree": {"a": jnp.array(0.3), "b": jnp.array([[-1.25]])},
    }[kind]
    width, num = 0.5, 20_000
    compressor = PAGE["Grid"](width)

    def decoded(key):
        code, _ = compressor.encode(compressor.prepare(key, message, None), message, (), None)
        return fedmcmc.trees.ravel(compressor.decode(code, None))

    values = np.asarray(jax.vmap(decoded)(jax.random.split(KEY, num)), float)
    np.testing.assert_allclose(values / width, np.round(values / width), atol=1e-6)
    up = np.array([0.6, 0.5])  # probabilities of rounding up
    variances = width**2 * up * (1 - up)
    errors = np.abs(values.mean(0) - [0.3, -1.25]) / np.sqrt(variances / num)
    assert errors.max() < LARGEST
    assert abs(np.corrcoef(values.T)[0, 1]) < LARGEST / np.sqrt(num)


def test_the_compressor_takes_trees_within_a_run():
    draws = [
        drawn(fedmcmc.compress(plain(kind), PAGE["Grid"](0.5)), position)
        for kind, (_, position) in POSITIONS.items()
    ]
    np.testing.assert_allclose(*draws, rtol=1e-4, atol=1e-5)
    assert np.abs(draws[0] - drawn(plain(), VECTOR)).max() > 1e-3


# Its estimator.


@pytest.mark.parametrize("bound", [1.0, 1e6])
@pytest.mark.parametrize("kind", POSITIONS)
def test_the_estimator_limits_each_rows_norm(kind, bound):
    posterior, position = POSITIONS[kind]
    position = jax.tree.map(lambda leaf: leaf + 0.5, position)
    rows = TABLES[1]
    slopes = rows["x"] * (rows["y"] - rows["x"] @ [0.5, 0.5])[:, None]
    norms = np.linalg.norm(slopes, axis=1, keepdims=True)
    wanted = (slopes * np.minimum(1, bound / norms)).sum(0)
    client = DATA.client(1)
    own = np.arange(len(DATA.rows["y"]))
    own = (own >= client.start) & (own < client.start + client.size)
    hidden = {  # no other client's rows are read
        "x": jnp.where(own[:, None], client.rows["x"], jnp.nan),
        "y": jnp.where(own, client.rows["y"], jnp.nan),
    }
    estimate = PAGE["Clipped"](bound).estimate(
        posterior.loglikelihood_fn, (), position, (), dataclasses.replace(client, rows=hidden)
    )
    np.testing.assert_allclose(fedmcmc.trees.ravel(estimate), wanted, rtol=1e-5)


# Its participation rule, which the page itself compares with the exact covariance.


def test_the_participation_rule_checks_the_number_of_clients():
    rule = PAGE["OneRegion"](jnp.array([0, 1, 1]), num_regions=2)
    rule.check(3)
    with pytest.raises(ValueError, match="Got 3 regions for 4 clients"):
        rule.check(4)


# Other pages, and examples.


def noisy_cohorts():
    """Return the sampler of examples/new_sampler.py."""
    module = ast.parse((ROOT / "examples" / "new_sampler.py").read_text())
    kept = (ast.FunctionDef, ast.Import, ast.ImportFrom)
    module.body = [node for node in module.body if isinstance(node, kept)]
    names = {}
    exec(compile(module, "new_sampler", "exec"), names)
    return names["noisy_cohorts"]


@vector_and_tree
def test_the_sampler_of_the_example_is_exact(kind):
    num, cohort, noise, step_size = len(TABLES), 2, 3.0, 0.005
    slopes = np.array([t["x"].T @ (t["y"] - t["x"] @ MEAN) for t in TABLES])
    curvatures = np.array([t["x"].T @ t["x"] for t in TABLES])
    varying = curvatures - curvatures.mean(0)

    def noise_of_cohorts(covariance):
        of_clients = np.cov(slopes.T) + (varying @ covariance @ varying).sum(0) / (num - 1)
        chosen = num**2 * (1 - cohort / num) / cohort * of_clients
        return chosen + num / cohort * num * noise**2 * np.eye(2)

    posterior, position = POSITIONS[kind]
    kernel = noisy_cohorts()(posterior, step_size=step_size, cohort_size=cohort, noise=noise)
    exact = stationary(step_size, noise_of_cohorts)
    assert PAGE["largest_error"](kernel, MEAN, exact, position) < LARGEST


def test_transformed_rows_keep_their_shapes_and_change_as_the_page_says():
    module = ast.parse(source_of("howto.md"))
    module.body = [node for node in module.body if getattr(node, "name", "") == "jittered"]
    names = {"jax": jax}
    exec(compile(module, "howto", "exec"), names)
    rows = {"x": jnp.zeros((5_000, 2)), "y": jnp.ones(5_000)}
    changed = names["jittered"](KEY, rows)
    np.testing.assert_array_equal(changed["y"], rows["y"])
    covariance = np.cov(np.asarray(changed["x"]).T)
    np.testing.assert_allclose(covariance, 0.01 * np.eye(2), atol=0.001)


def test_rounds_by_hand_take_trees():
    source = source_of("rounds.md")
    names = {}
    kept = ast.parse(source)
    kept.body = [
        node
        for node in kept.body
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)
        and getattr(node, "name", "") != "last_draw"
    ]
    exec(compile(kept, "rounds", "exec"), names)
    names["hospitals"] = [{k: v.astype(np.float32) for k, v in t.items()} for t in TABLES]
    names["sizes"] = [len(table["y"]) for table in TABLES]
    by_hand, num_bytes = names["run_by_hand"](
        plain("tree"), jax.random.fold_in(KEY, 0), TREE, num_rounds=3
    )
    found = np.concatenate([by_hand["a"][:, None], by_hand["b"][:, 0]], axis=1)
    np.testing.assert_allclose(found, drawn(plain("tree"), TREE, num_rounds=3)[0], rtol=1e-5)
    assert num_bytes == 3 * len(TABLES) * 2 * 4
