"""The counts of messages that suffice to compute rows, which an owner reads, are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.special import expit

import fedmcmc
from fedmcmc import random, rounds
from fedmcmc.deploy._risks import messages_to_recover

NUM_STARTS = 20
FEW_MESSAGES = 20
"""Largest number of messages for a row that the text calls tens of messages."""


@pytest.mark.parametrize(
    "rows, per_row, per_message, num",
    [(413, 6, 5, 496), (4, 3, 2, 6), (20, 1, 30, 1), (1, 6, 5, 2), (7, 3, 1, 21)],
)
def test_rows_are_unknowns_and_numbers_in_messages_are_equations(rows, per_row, per_message, num):
    assert messages_to_recover(rows, per_row, per_message) == num
    assert num * per_message >= rows * per_row > (num - 1) * per_message


def gradients(rows, positions):
    """Return the gradients of a logistic regression without intercept, ``[num_positions, d]``.

    A row is its covariates times 1 or -1, by the outcome: the likelihood depends on nothing else.
    """
    return expit(-positions @ rows.T) @ rows


def solutions(positions, messages, shape):
    """Return all sets of rows that agree with the messages, from random starts."""
    generator = np.random.default_rng(1)
    for _ in range(NUM_STARTS):
        fit = least_squares(
            lambda x: (gradients(x.reshape(shape), positions) - messages).ravel(),
            generator.normal(size=shape).ravel(),
            xtol=1e-15,
            ftol=1e-15,
            gtol=1e-15,
            max_nfev=200,
        )
        if np.abs(fit.fun).max() < 1e-9:
            yield fit.x.reshape(shape)


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
    solved = list(solutions(positions, messages, shape))
    assert len(solved) >= NUM_STARTS // 4 and all(is_recovered(rows, x) for x in solved)

    # The outcome is binary: without it, `num_rows` messages are as many equations as unknowns.
    few = num_rows - 1
    solved = list(solutions(positions[:few], messages[:few], shape))
    assert len(solved) >= NUM_STARTS // 2 and not any(is_recovered(rows, x) for x in solved)


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


@pytest.mark.parametrize("is_unusual, most_messages", [(True, 10), (False, FEW_MESSAGES)])
def test_a_server_that_chooses_positions_computes_a_row_from_tens_of_messages(
    is_unusual, most_messages, site
):
    """Nothing prevents it: the text for owners and docs/explanation/threats.md have these numbers.

    At a large multiple of a position the model is certain of each outcome. As the position turns,
    the gradient jumps by a row where the model changes its mind about that row. Rows whose second
    covariate is unusual change first; to find another, follow the half that holds more rows.
    """
    x, message = site

    def ask(angle):
        return message(1e8 * np.array([np.cos(angle), np.sin(angle), 0, 0, 0]))

    def num_rows(low, high):
        return round(abs(high[0] - low[0]))  # that change in between: the intercept counts them

    angles = np.array([0.0, np.pi / 2])
    low, high = (ask(angle) for angle in angles)
    num_messages = 2
    while num_rows(low, high) > 1:
        middle = ask(angles.mean())
        num_messages += 1
        first, second = num_rows(low, middle), num_rows(middle, high)
        if first > (0 if is_unusual else second):
            angles[1], high = angles.mean(), middle
        else:
            angles[0], low = angles.mean(), middle
    assert num_messages <= most_messages
    row = (high - low) / (high - low)[0]
    assert np.abs(x - row).max(1).min() < 1e-3
