"""The compiler underneath computes what it is asked to."""

import jax
import jax.numpy as jnp
import numpy as np


def test_gradients_of_vmapped_products_with_reductions():
    # jaxlib 0.10.2 is off by hundreds here from 512 chains on, on CPU (jax-ml/jax#39103). A law
    # test of a kernel would then fail for a reason that is not the kernel's.
    rng = np.random.default_rng(0)
    rows, factors = rng.normal(size=(24, 3)), rng.normal(size=(24, 3, 3))
    positions = rng.normal(size=(512, 3))

    def loglikelihood(position, rows_, factors_):
        gap = rows_ - position[None]
        return -0.5 * jnp.sum(jnp.sum(factors_ * gap[:, None, :], axis=-1) ** 2)

    gradient = jax.jit(jax.vmap(jax.grad(loglikelihood), in_axes=(0, None, None)))
    found = gradient(*(jnp.asarray(x, jnp.float32) for x in (positions, rows, factors)))
    precisions = np.einsum("nki,nkj->nij", factors, factors)
    exact = np.einsum("nij,cnj->ci", precisions, rows[None] - positions[:, None])
    np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-3)
