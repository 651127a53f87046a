"""Kernels whose law hangs on log densities keep all digits of products, on every device."""

import jax
import jax.numpy as jnp
import pytest

import fedmcmc
from fedmcmc import hierarchy, inference
from fedmcmc.kernels import Points, evaluations
from tests.contracts import kernels
from tests.contracts.model import DATA, POSITIONS, POSTERIOR, Given

KEY = jax.random.key(0)
VECTOR = POSITIONS["vector"]


class Traced:
    """A posterior whose log densities note with which precision of products they are traced."""

    def __init__(self, posterior=POSTERIOR):
        self.rows, self.prior = set(), set()

        def loglikelihood_fn(position, rows):
            self.rows.add(jax.config.jax_default_matmul_precision)
            return posterior.loglikelihood_fn(position, rows)

        def logprior_fn(position):
            self.prior.add(jax.config.jax_default_matmul_precision)
            return posterior.logprior_fn(position)

        self.posterior = fedmcmc.Posterior(logprior_fn, loglikelihood_fn)

    def of_a_round(self, kernel, position=VECTOR):
        """Return what a round noted of the rows and of the prior."""
        init, step = fedmcmc.simulate(kernel, DATA)
        state = jax.eval_shape(init, position)
        self.rows.clear()
        self.prior.clear()
        jax.eval_shape(step, KEY, state)
        return self.rows, self.prior


@pytest.mark.parametrize(
    "build",
    [
        kernels.build_hmc,
        kernels.build_mala,
        kernels.build_gaussian_mh,
        kernels.build_multiple_try,
        kernels.build_gibbs,
        kernels.build_gibbs_of_rows,
    ],
    ids=lambda build: build.__name__.removeprefix("build_"),
)
def test_adjusted_kernels(build):
    traced = Traced()
    kernel = build(VECTOR, Given(traced.posterior))
    assert traced.of_a_round(kernel) == ({"highest"}, {"highest"})


def test_questions():
    traced = Traced()
    asked = Points(VECTOR[None], VECTOR)
    assert traced.of_a_round(evaluations(traced.posterior), asked)[0] == {"highest"}


@pytest.mark.parametrize(
    "build",
    [
        kernels.build_joint,
        pytest.param(kernels.build_fed_ep_of_latents, marks=pytest.mark.slow),
    ],
    ids=lambda build: build.__name__.removeprefix("build_"),
)
def test_kernels_whose_clients_accept_moves_of_latents(build):
    traced = Traced()
    assert traced.of_a_round(build(VECTOR, Given(traced.posterior)))[0] == {"highest"}


@pytest.mark.parametrize("fit", [inference.exact_gaussian(), inference.importance(32)])
def test_fits_that_expand_or_weigh(fit):
    posterior = fedmcmc.Posterior(
        POSTERIOR.logprior_fn, lambda at, rows: -jnp.sum((rows["x"] - at) ** 2, -1)
    )
    traced = Traced(posterior)
    assert traced.of_a_round(fedmcmc.fed_ep(traced.posterior, inference=fit))[0] == {"highest"}


def test_surrogates_that_are_refitted():
    traced = Traced()
    kernel = kernels.build_refreshed(VECTOR, Given(traced.posterior))
    assert traced.of_a_round(kernel)[0] == {None, "highest"}  # visits, and expansions


@pytest.mark.slow
def test_latents_that_are_integrated_out_or_drawn_afterwards():
    traced = Traced()
    posterior = kernels.with_latents(traced.posterior)
    integrated = hierarchy.marginal(posterior)
    kernel = fedmcmc.lsd(integrated, step_size=0.01)
    assert traced.of_a_round(kernel)[0] == {"highest"}
    traced.rows.clear()
    hierarchy.local_draws(posterior, DATA, VECTOR[None, None], rng_key=KEY)
    assert traced.rows == {"highest"}
    traced.rows.clear()
    hierarchy.new_group(posterior, DATA, VECTOR[None, None], rng_key=KEY)
    assert traced.rows == {"highest"}


def test_others_have_the_precision_that_the_user_chose():
    traced = Traced()
    kernel = fedmcmc.lsd(traced.posterior, step_size=0.1)
    assert traced.of_a_round(kernel) == ({None}, {None})


def test_importance_weights_at_clients_and_server():
    traced = Traced()
    far = fedmcmc.Gaussian.from_moments(VECTOR + 3, variance=jnp.full(3, 0.01))
    with pytest.warns(fedmcmc.SamplingWarning, match="correct: failed") as said:
        fedmcmc.correct(KEY, traced.posterior, DATA, far, num_draws=100, adapt=False)
    assert (traced.rows, traced.prior) == ({"highest"}, {"highest"})
    assert [warning.filename for warning in said] == [__file__]
