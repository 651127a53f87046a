"""Densities that decide about moves or weights keep all digits of matrix products."""

import jax
import jax.numpy as jnp
import pytest

import fedmcmc
from fedmcmc import hierarchy, inference
from fedmcmc.kernels import Points, evaluations
from fedmcmc.types import _compiled as programs
from tests.contracts import kernels
from tests.contracts.model import DATA, POSITIONS, POSTERIOR, Given

KEY = jax.random.key(0)
VECTOR = POSITIONS["vector"]
EXACT = {"highest"}
PLAIN = {None}


class TracedPosterior:
    """Posterior whose densities record the precision of products in which they are traced."""

    def __init__(self, loglikelihood_fn=POSTERIOR.loglikelihood_fn):
        self.rows, self.prior = set(), set()

        def loglikelihood(position, rows):
            self.rows.add(jax.config.jax_default_matmul_precision)
            return loglikelihood_fn(position, rows)

        def logprior(position):
            self.prior.add(jax.config.jax_default_matmul_precision)
            return POSTERIOR.logprior_fn(position)

        self.posterior = fedmcmc.Posterior(logprior, loglikelihood)

    def precisions_of_a_round(self, kernel, position=VECTOR):
        """Return the precisions with which a round computes likelihood and prior."""
        init, step = fedmcmc.simulate(kernel, DATA)
        state = jax.eval_shape(init, position)
        self.forget()
        jax.eval_shape(step, KEY, state)
        return self.rows, self.prior

    def forget(self):
        """Forget the precisions, and the programs, which are otherwise not traced again."""
        programs._PROGRAMS.clear()
        self.rows.clear()
        self.prior.clear()


@pytest.mark.parametrize(
    ("build", "rows", "prior"),
    [
        (kernels.build_hmc, EXACT, EXACT),
        (kernels.build_mala, EXACT, EXACT),
        (kernels.build_gaussian_mh, EXACT, EXACT),
        (kernels.build_multiple_try, EXACT, EXACT),
        (kernels.build_gibbs, EXACT, EXACT),
        (kernels.build_gibbs_of_rows, EXACT, EXACT),
        # Clients accept moves of latents.
        (kernels.build_joint, EXACT, None),
        pytest.param(kernels.build_fed_ep_of_latents, EXACT, None, marks=pytest.mark.slow),
        # Visits are plain, and expansions of surrogates exact.
        (kernels.build_refreshed, PLAIN | EXACT, None),
        (kernels.build_lsd, PLAIN, PLAIN),
    ],
    ids=lambda x: x.__name__.removeprefix("build_") if callable(x) else "",
)
def test_kernels_use_the_precision_that_they_need(build, rows, prior):
    traced = TracedPosterior()
    precisions = traced.precisions_of_a_round(build(VECTOR, Given(traced.posterior)))
    assert precisions[0] == rows
    assert prior is None or precisions[1] == prior


@pytest.mark.parametrize("fit", [inference.exact_gaussian(), inference.importance(32)])
def test_fits_that_expand_or_weigh_are_exact(fit):
    traced = TracedPosterior(lambda theta, rows: -jnp.sum((rows["x"] - theta) ** 2, -1))
    kernel = fedmcmc.fed_ep(traced.posterior, inference=fit)
    assert traced.precisions_of_a_round(kernel)[0] == EXACT


def test_questions_are_answered_exactly():
    traced, points = TracedPosterior(), Points(VECTOR[None], VECTOR)
    assert traced.precisions_of_a_round(evaluations(traced.posterior), points)[0] == EXACT


@pytest.mark.slow
def test_latents_are_integrated_out_and_drawn_exactly():
    traced = TracedPosterior()
    posterior = kernels.with_latents(traced.posterior)
    kernel = fedmcmc.lsd(hierarchy.marginal(posterior), step_size=0.01)
    assert traced.precisions_of_a_round(kernel)[0] == EXACT
    for draw in (hierarchy.local_draws, hierarchy.new_group):
        traced.forget()
        draw(posterior, DATA, VECTOR[None, None], rng_key=KEY)
        assert traced.rows == EXACT


def test_importance_weights_are_exact_at_clients_and_server():
    traced = TracedPosterior()
    far = fedmcmc.Gaussian.from_moments(VECTOR + 3, variance=jnp.full(3, 0.01))
    with pytest.warns(fedmcmc.SamplingWarning, match="correct: failed") as records:
        fedmcmc.correct(KEY, traced.posterior, DATA, far, num_draws=100, adapt=False)
    assert (traced.rows, traced.prior) == (EXACT, EXACT)
    assert [record.filename for record in records] == [__file__]
