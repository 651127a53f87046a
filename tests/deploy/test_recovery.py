"""How many messages are enough to compute rows: the counts that an owner reads, checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.special import expit

import fedmcmc
from fedmcmc import random, rounds
from fedmcmc.deploy._recovery import default_min_rows, messages_to_recover

NUM_STARTS = 20
FEW_MESSAGES = 40
"""What the text calls tens of messages, for one row."""


@pytest.mark.parametrize(
    "rows, per_row, per_message, num",
    [(413, 6, 5, 496), (4, 3, 2, 6), (20, 1, 30, 1), (1, 6, 5, 2), (7, 3, 1, 21)],
)
def test_rows_are_unknowns_and_numbers_in_messages_are_equations(rows, per_row, per_message, num):
    assert messages_to_recover(rows, per_row, per_message) == num
    assert num * per_message >= rows * per_row > (num - 1) * per_message


def test_fewer_than_three_rows_per_parameter_call_for_a_warning():
    assert [default_min_rows(num) for num in (1, 6, 7, 100)] == [20, 20, 21, 300]


def gradients(rows, positions):
    """Return the gradients of a logistic regression without intercept, ``[num_positions, d]``.

    A row is its covariates times 1 or -1, by the outcome: the likelihood depends on nothing else.
    """
    return expit(-positions @ rows.T) @ rows


def solutions(positions, messages, shape):
    """Return all sets of rows that agree with the messages, from random starts."""
    generator = np.random.default_rng(1)
    for _ in range(NUM_STARTS):
        found = least_squares(
            lambda x: (gradients(x.reshape(shape), positions) - messages).ravel(),
            generator.normal(size=shape).ravel(),
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=200,
        )
        if np.abs(found.fun).max() < 1e-9:
            yield found.x.reshape(shape)


def is_recovered(rows, solution):
    distances = np.abs(rows[:, None] - solution).max(-1)
    return distances.min(1).max() < 1e-4


def test_all_rows_follow_from_as_many_messages_as_the_count_says_and_not_from_fewer():
    shape = num_rows, dimension = 4, 2
    generator = np.random.default_rng(0)
    rows = generator.normal(size=shape)
    enough = messages_to_recover(num_rows, dimension + 1, dimension)  # with the outcome
    positions = generator.normal(0, 3, (enough, dimension))
    messages = gradients(rows, positions)
    found = list(solutions(positions, messages, shape))
    assert len(found) >= NUM_STARTS // 4 and all(is_recovered(rows, x) for x in found)

    # The outcome is binary: without it, `num_rows` messages are as many equations as unknowns.
    few = num_rows - 1
    found = list(solutions(positions[:few], messages[:few], shape))
    assert len(found) >= NUM_STARTS // 2 and not any(is_recovered(rows, x) for x in found)


@pytest.fixture
def site():
    """The rows of a site with an intercept, and what it sends at a position, as a function."""
    num_rows, dimension = 413, 5
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_rows, dimension)).astype(np.float32)
    x[:, 0] = 1
    y = (generator.random(num_rows) < 0.3).astype(np.float32)

    def loglikelihood_fn(theta, rows):
        logits = rows["x"] @ theta
        return rows["y"] * logits - jnp.logaddexp(0.0, logits)

    posterior = fedmcmc.Posterior(lambda theta: 0.0, loglikelihood_fn)
    data = fedmcmc.FederatedData.from_clients([{"x": x, "y": y}])
    kernel = fedmcmc.lsd(posterior, step_size=0.01)
    first = kernel.init(random.init_key(jax.random.key(0)), jnp.zeros(dimension), data)

    @jax.jit
    def message(position):
        broadcast = first.broadcast._replace(position=position)
        client = data.client(0)
        return rounds.client_step(kernel, kernel, jax.random.key(0), broadcast, (), client)[0]

    return x, lambda position: np.asarray(message(jnp.asarray(position, jnp.float32)), float)


def test_a_server_that_chooses_positions_computes_a_row_from_tens_of_messages(site):
    """Nothing prevents it: the text for owners and docs/threats.md say so, with this number.

    At a large multiple of a position the model is certain of each outcome. As the position turns,
    the gradient jumps by a row where the model changes its mind about that row.
    """
    x, message = site
    asked = []

    def ask(angle):
        asked.append(angle)
        return message(1e8 * np.array([np.cos(angle), np.sin(angle), 0, 0, 0]))

    low, high = 0.0, np.pi / 2
    at_low, at_high = ask(low), ask(high)
    for _ in range(FEW_MESSAGES):
        jump = at_high - at_low
        if abs(abs(jump[0]) - 1) < 1e-3:  # the intercept counts the rows in between
            break
        middle = (low + high) / 2
        at_middle = ask(middle)
        if abs(at_middle[0] - at_low[0]) > 0.5:
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    assert len(asked) <= FEW_MESSAGES
    row = jump / jump[0]
    assert np.abs(x - row).max(1).min() < 1e-3
