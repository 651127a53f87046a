"""Compilation of the programs of a fit, several at a time and ahead of their first calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import jax
import numpy as np

from fedmcmc.exact import CorrectionTarget, draw_uniform
from fedmcmc.fitting._modes import NUM_CANDIDATES, NUM_STARTS, draw_starts, log_priors
from fedmcmc.fitting._stages import Problem
from fedmcmc.gaussian import defensive, from_covariance
from fedmcmc.kernels import Points, evaluations, expansions
from fedmcmc.pytrees import trees
from fedmcmc.runs import SimulatedConsortium
from fedmcmc.surrogates import NEWTON_DIMENSIONS, Structure, expanded_prior
from fedmcmc.types import ArrayTree, as_functions, bound, cancel_compilations, vmap_axes


@contextmanager
def compiling_ahead(problem: Problem) -> Iterator[None]:
    """Compile the programs of the first stages in other threads.

    Almost every fit needs these programs, and XLA compiles several at the same time. Compilations
    that have not started at the end are cancelled.
    """
    try:
        if isinstance(problem.consortium, SimulatedConsortium):
            _start(problem, problem.consortium)
        yield
    finally:
        cancel_compilations()


def _start(problem: Problem, consortium: SimulatedConsortium) -> None:
    posterior, key, num_draws = problem.posterior, problem.key(0), problem.num_draws
    if problem.position is not None:
        like = trees.shapes_of(trees.as_floats(problem.position, "position"))
    elif posterior.init_fn is not None:
        starts = draw_starts.compile_ahead(bound(posterior.init_fn), key, num=NUM_CANDIDATES - 1)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), starts)
    else:
        return
    centre = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    candidates, starts = _repeated(like, NUM_CANDIDATES), _repeated(like, NUM_STARTS)
    size = trees.num_elements(like)
    by_newton = size <= NEWTON_DIMENSIONS
    # First of all, because a question checks the model and explains its errors.
    consortium.compile_ahead(evaluations(posterior), Points(candidates))
    if by_newton and problem.effort != "approximate":
        target = CorrectionTarget(posterior, consortium, centre)
        target.compile_ahead(key, defensive(np.zeros(size), np.eye(size)), num_draws)
    log_priors.compile_ahead(posterior, candidates)
    structure: Structure = "dense" if by_newton else "none"
    consortium.compile_ahead(expansions(posterior, curvature=structure), Points(starts, centre))
    expanded_prior.compile_ahead(posterior, starts, centre, structure=structure)
    draw_uniform.compile_ahead(key)
    if by_newton:
        from_covariance.compile_ahead(centre, np.eye(size, dtype=np.float32), batched=False)
    if posterior.constrain_fn is not None:
        draws = _repeated(_repeated(like, num_draws), 1)
        vmap_axes.compile_ahead(as_functions(posterior.constrain_fn), draws, num_axes=2)
    # The weights of draws need this package. Its import takes most of a second, during which the
    # programs compile.
    import_module("arviz_stats.base")


def _repeated(like: ArrayTree, num: int) -> ArrayTree:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num, *leaf.shape), leaf.dtype), like)
