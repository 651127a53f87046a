"""Errors of `from_flax` for modules, rows and settings that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from fedmcmc import from_flax
from fedmcmc.interop.flax import predictive

ROWS = {"x": np.ones((4, 3), np.float32), "y": np.array([0, 1, 2, 1])}


class LinenBatchNorm(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x))


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(nn.Dense(3)(x))


class NnxWith(nnx.Module):
    def __init__(self, layer, *, rngs):
        self.dense, self.layer = nnx.Linear(3, 3, rngs=rngs), layer(rngs)

    def __call__(self, x):
        return self.layer(self.dense(x))


class Centered(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3)(x)
        return x - x.mean(axis=0)


class Nothing(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x


def nnx_batch_norm(rngs):
    return NnxWith(lambda r: nnx.BatchNorm(3, rngs=r), rngs=rngs)


def nnx_dropout(rngs):
    return NnxWith(lambda r: nnx.Dropout(0.5, rngs=r), rngs=rngs)


def build(module=None, **kwargs):
    kwargs = dict(example=ROWS, prior_scale=1.0, likelihood="categorical", check=False) | kwargs
    return from_flax(nn.Dense(3) if module is None else module, **kwargs)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (LinenBatchNorm(), r"state besides its parameters.*batch_stats.*other rows"),
        (nnx_batch_norm, r"state besides its parameters.*layer\.mean: BatchStat.*other rows"),
        (LinenDropout(), r"draws random numbers.*dropout.*deterministic=True"),
        (nnx_dropout, r"stream of random numbers.*layer\.rngs.*deterministic=True"),
        (Nothing(), "no parameters"),
    ],
)
def test_modules_with_state_or_noise_raise(module, message):
    with pytest.raises(ValueError, match=message):
        build(module)


def test_modules_whose_rows_depend_on_each_other_raise():
    with pytest.raises(ValueError, match="depends on the other rows of its batch"):
        build(Centered(), check=True)
    single = jax.tree.map(lambda leaf: leaf[:1], ROWS)
    with pytest.raises(ValueError, match="depends on the other rows of its batch"):
        build(Centered(), example=single, check=True)

    def averaged(outputs, batch):
        return outputs[:, 0] / len(batch["x"])

    with pytest.raises(ValueError, match="depends on the other rows of its batch"):
        build(likelihood=averaged, check=True)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Dense, r"linen class; pass an instance, Dense\(\.\.\.\)"),
        (nnx.Linear(3, 3, rngs=nnx.Rngs(0)), r"already has its parameters.*functools\.partial"),
        (lambda rngs: nn.Dense(3), r"module\(rngs=\.\.\.\) must return a flax\.nnx module"),
        ("Dense", "must be a flax.linen module or the constructor"),
    ],
)
def test_objects_that_are_no_modules_raise(module, message):
    with pytest.raises(TypeError, match=message):
        build(module)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(inputs="image"), r"inputs='image' is not among the keys of the rows, \['x', 'y'\]"),
        (dict(outcome="label"), "outcome='label' is not among the keys"),
        (dict(example=tuple(ROWS.values())), r"inputs='x' is not among the keys.*\[0, 1\]"),
        (dict(example={**ROWS, "y": np.zeros(3, int)}), "same number of rows"),
        (dict(example={**ROWS, "y": np.array([0, 1, 3, 1])}), "integers from 0 to 2.*to 3"),
        (dict(example={**ROWS, "y": np.zeros(4)}), "integers from 0 to 2"),
        (dict(example={**ROWS, "y": np.zeros((4, 1), int)}), r"shape \(4, 1, 'num_classes'\)"),
        (dict(likelihood="poisson"), "must be one of .*'poisson'"),
        (dict(likelihood="gaussian"), "needs a noise_scale"),
        (dict(likelihood="gaussian", noise_scale=0.0), "noise_scale must be positive and finite"),
        (dict(likelihood="gaussian", noise_scale=1.0), r"one number for each outcome.*\(4, 1\)"),
        (dict(noise_scale=1.0), "noise_scale belongs to likelihood='gaussian'"),
        (dict(likelihood="bernoulli", module=nn.Dense(1)), "must be 0 or 1"),
        (dict(likelihood=lambda outputs, batch: outputs), r"one real term per row, shape \(4,\)"),
        (dict(prior_scale=-1.0), "prior_scale must be positive and finite, got -1.0"),
        (dict(prior_scale=np.inf), "prior_scale must be positive and finite"),
        (dict(prior_scale=np.ones(2)), r"broadcast to the shape \(3,\), got shape \(2,\)"),
        (dict(prior_scale={"kernel": 1.0}), "tree prefix of the position"),
        (dict(prior_scale=lambda path, leaf: 0.0), "prior_scale must be positive"),
    ],
)
def test_invalid_settings_raise(kwargs, message):
    with pytest.raises(ValueError, match=message):
        build(**kwargs)


def test_rows_are_a_dict_or_a_tuple():
    with pytest.raises(TypeError, match=r"must be a dict or a tuple of arrays.*ndarray"):
        build(example=np.ones((4, 3)))


def test_predictions_need_a_supported_likelihood():
    with pytest.raises(ValueError, match="must be one of"):
        predictive(nn.Dense(3), likelihood="poisson")


def test_a_scale_may_be_traced():
    position = {"kernel": jnp.zeros((3, 3)), "bias": jnp.zeros(3)}
    density = jax.jit(lambda scale: build(prior_scale=scale).logprior_fn(position))
    np.testing.assert_allclose(density(2.0), -12 * (np.log(2) + 0.5 * np.log(2 * np.pi)), rtol=1e-6)
