"""Models for ``model=``: functions that return a `fedmcmc.Posterior`, and flax modules.

A function whose first parameter is `data` receives the federation; others are NumPyro models.
Modules are without state, batch statistics and dropout: every row is seen alone.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from jax import Array
from jax.tree_util import Partial

import fedmcmc

Method = Literal["lax", "patches", "banded"]
"""How convolutions are computed, with the same values up to rounding.

``"lax"``, XLA's convolution, is several times slower on CPU inside of loops (jax-ml/jax#12868).
``"patches"`` multiplies patches by the kernel, ``"banded"`` rows of narrow images by a matrix that
holds the kernel once for every place in a row.
"""


class Mlp(nn.Module):
    """Dense layers of `widths` and one of `num_outputs`; rows of any shape are flattened."""

    widths: tuple[int, ...] = ()
    num_outputs: int = 10
    activation: Callable[[Array], Array] = nn.relu

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        x = x.reshape(x.shape[0], -1)
        for width in self.widths:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


def _conv(method: Method) -> Callable[..., nn.Conv]:
    function = {"lax": None, "patches": _patches, "banded": _banded}[method]
    return functools.partial(nn.Conv, conv_general_dilated=function)


def _patches(x: Array, kernel: Array, strides: Sequence[int], padding: Any, **_: Any) -> Array:
    height, width, _, features = kernel.shape
    x = _pad(x, kernel, strides, padding)
    x = jnp.concatenate(_slices(x, 2, width, strides[1]), axis=-1)
    x = jnp.concatenate(_slices(x, 1, height, strides[0]), axis=-1)
    return x @ kernel.reshape(-1, features)


def _banded(x: Array, kernel: Array, strides: Sequence[int], padding: Any, **_: Any) -> Array:
    height, width, _, features = kernel.shape
    x = _pad(x, kernel, strides, padding)
    size = x.shape[2]
    places = np.arange((size - width) // strides[1] + 1)
    select = np.zeros((width, size, places.size), np.float32)
    for j in range(width):
        select[j, places * strides[1] + j, places] = 1
    band = jnp.einsum("jvw,ijco->ivcwo", select.astype(kernel.dtype), kernel)
    x = jnp.concatenate(_slices(x.reshape(*x.shape[:2], -1), 1, height, strides[0]), axis=-1)
    flat = x.reshape(-1, x.shape[-1]) @ band.reshape(x.shape[-1], -1)
    return flat.reshape(*x.shape[:2], places.size, features)


def _pad(x: Array, kernel: Array, strides: Sequence[int], padding: Any) -> Array:
    if isinstance(padding, str):
        padding = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    return jnp.pad(x, ((0, 0), *padding, (0, 0)))


def _slices(x: Array, axis: int, kernel: int, strides: int) -> list[Array]:
    """Return what each position of the kernel along `axis` meets, one array per position."""
    num = (x.shape[axis] - kernel) // strides + 1
    stop = (num - 1) * strides + 1
    return [jax.lax.slice_in_dim(x, i, i + stop, strides, axis) for i in range(kernel)]


class LeNet5(nn.Module):
    """LeNet-5 (LeCun et al. 1998) with rectifiers and maxima: 61706 numbers for MNIST."""

    num_outputs: int = 10
    method: Method = "banded"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        conv = _conv(self.method)
        x = nn.relu(_max_of_four(conv(6, (5, 5))(x)))
        x = nn.relu(_max_of_four(conv(16, (5, 5), padding="VALID")(x)))
        x = x.reshape(x.shape[0], -1)
        for width in (120, 84):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_outputs)(x)


class SmallCnn(nn.Module):
    """Two convolutions that halve the image, and a dense layer."""

    num_outputs: int = 10
    width: int = 16
    method: Method = "patches"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        for features in (self.width, 2 * self.width):
            x = nn.relu(_conv(self.method)(features, (3, 3), 2)(x))
        return nn.Dense(self.num_outputs)(x.reshape(x.shape[0], -1))


def _max_of_four(x: Array) -> Array:
    # A reshape and a maximum, because the gradient of a pooling window is slow on CPU.
    num, height, width, channels = x.shape
    return x.reshape(num, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class FilterResponseNorm(nn.Module):
    """Scale channels by root mean squares; thresholded (Singh and Krishnan 2020, eqs. 1-3)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return an array of the shape of `x`, ``[n, height, width, channels]``."""
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:])
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:])
        threshold = self.param("threshold", nn.initializers.zeros, x.shape[-1:])
        square = jnp.mean(jnp.square(x), axis=(1, 2), keepdims=True)
        return jnp.maximum(x * jax.lax.rsqrt(square + 1e-6) * scale + bias, threshold)


class ResNet(nn.Module):
    """Residual network of Izmailov et al. (2021), with `FilterResponseNorm` and swish.

    The depth is ``6 * num_blocks + 2``; depth 20 has 274042 parameters for 3 channels.
    """

    num_blocks: int = 3
    num_outputs: int = 10
    width: int = 16
    method: Method = "lax"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""

        def layer(x: Array, features: int, size: int = 3, strides: int = 1) -> Array:
            conv = _conv(self.method)
            init = nn.initializers.he_normal()
            return FilterResponseNorm()(conv(features, (size,) * 2, strides, kernel_init=init)(x))

        x = nn.swish(layer(x, self.width))
        for stage in range(3):
            features = self.width * 2**stage
            for block in range(self.num_blocks):
                strides = 2 if stage > 0 and block == 0 else 1
                y = layer(nn.swish(layer(x, features, strides=strides)), features)
                skip = layer(x, features, 1, strides) if strides == 2 else x
                x = nn.swish(skip + y)
        return nn.Dense(self.num_outputs)(jnp.mean(x, axis=(1, 2)))


class ResNet18(nn.Module):
    """ResNet-18 with group normalization of Reddi et al. (2021): 11.2 million numbers."""

    num_outputs: int = 100
    width: int = 64
    num_groups: int = 2

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        init = nn.initializers.he_normal()
        conv = functools.partial(nn.Conv, use_bias=False, kernel_init=init)

        def activate(x: Array) -> Array:
            return nn.relu(nn.GroupNorm(self.num_groups)(x))

        x = conv(self.width, (3, 3))(x)
        for stage in range(4):
            features = self.width * 2**stage
            for block in range(2):
                strides = 2 if stage > 0 and block == 0 else 1
                y = activate(x)
                skip = conv(features, (1, 1), 2)(y) if strides == 2 else x
                y = conv(features, (3, 3), strides)(y)
                x = skip + conv(features, (3, 3))(activate(y))
        return nn.Dense(self.num_outputs)(jnp.mean(activate(x), axis=(1, 2)))


class EmnistCnn(nn.Module):
    """Convolutions and dense layers of Reddi et al. (2021), no dropout: 1.2 million numbers."""

    num_outputs: int = 62

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3), padding="VALID")(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_outputs)(x)


def num_classes(data: fedmcmc.FederatedData) -> int:
    """Return how many classes the column `label` has, counted from zero."""
    return int(np.max(np.asarray(column(data, "label")))) + 1


def column(data: fedmcmc.FederatedData, name: str) -> Any:
    """Return a column of the rows, or raise ``ValueError``."""
    columns = data.rows if isinstance(data.rows, dict) else {}
    if name not in columns:
        names = ", ".join(columns) or "not named"
        raise ValueError(f"this model needs the column {name!r}; the columns are {names}.")
    return columns[name]


def flat_logprior(position: Any) -> Array:
    """Return the log of an improper uniform density."""
    return jnp.zeros((), jax.tree.leaves(position)[0].dtype)


def _posterior(
    terms: Callable[..., Array],
    shape: tuple[int, ...],
    precision: float,
    resample: Callable[..., Any] | None = None,
    start: Callable[..., Any] | None = None,
) -> fedmcmc.Posterior:
    """Return the posterior under a normal prior; chains start at normal draws by default."""
    return fedmcmc.Posterior(
        Partial(_normal_logprior, jnp.float32(precision)),
        Partial(terms),
        None if resample is None else Partial(resample),
        init_fn=Partial(start or _normal_start, jnp.zeros(shape)),
    )


def _normal_logprior(precision: Array, position: Any) -> Array:
    return -0.5 * precision * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))


def _normal_start(zeros: Array, rng_key: Array) -> Array:
    return jax.random.normal(rng_key, zeros.shape)


def _num_features(data: fedmcmc.FederatedData) -> int:
    shape = column(data, "features").shape
    if len(shape) != 2:
        raise ValueError("this model needs flat features, [rows, features]; use data.flat=true.")
    return int(shape[1])


def logistic(data: fedmcmc.FederatedData, prior_precision: float = 1.0) -> fedmcmc.Posterior:
    """Return the logistic regression of labels 0 and 1, without an intercept."""
    if num_classes(data) > 2:
        raise ValueError(
            f"labels must be 0 or 1, got 0 to {num_classes(data) - 1}; use model=multinomial."
        )
    return _posterior(_binary_terms, (_num_features(data),), prior_precision, _resample_binary)


def _binary_terms(theta: Array, rows: dict[str, Array]) -> Array:
    score = rows["features"] @ theta
    return jnp.where(rows["label"] == 1, score, 0) - jax.nn.softplus(score)


def _resample_binary(rng_key: Array, theta: Array, rows: dict[str, Array]) -> dict[str, Array]:
    label = jax.random.bernoulli(rng_key, jax.nn.sigmoid(rows["features"] @ theta))
    return {**rows, "label": label.astype(rows["label"].dtype)}


def multinomial(
    data: fedmcmc.FederatedData, prior_precision: float = 1.0, by_class: bool = False
) -> fedmcmc.Posterior:
    """Return the multinomial regression; positions are ``[features, classes]``.

    With `by_class` they are a vector per class; then `fedmcmc.quantize` uses a norm per class.
    """
    shape = (_num_features(data), num_classes(data))
    start = _class_start if by_class else None
    return _posterior(_class_terms, shape, prior_precision, _resample_class, start)


def _class_start(zeros: Array, rng_key: Array) -> tuple[Array, ...]:
    return tuple(_normal_start(zeros, rng_key).T)


def _class_scores(theta: Any, rows: dict[str, Array]) -> Array:
    return rows["features"] @ (jnp.stack(theta, axis=1) if isinstance(theta, tuple) else theta)


def _class_terms(theta: Any, rows: dict[str, Array]) -> Array:
    scores = jax.nn.log_softmax(_class_scores(theta, rows))
    return jnp.take_along_axis(scores, rows["label"][:, None], axis=1)[:, 0]


def _resample_class(rng_key: Array, theta: Any, rows: dict[str, Array]) -> dict[str, Array]:
    label = jax.random.categorical(rng_key, _class_scores(theta, rows))
    return {**rows, "label": label.astype(rows["label"].dtype)}


def network(
    data: fedmcmc.FederatedData, module: Callable[..., nn.Module], prior_scale: float = 1.0
) -> fedmcmc.Posterior:
    """Return a classifying network; ``module(num_outputs=...)`` makes its flax module."""
    column(data, "features")
    return fedmcmc.from_flax(
        module(num_outputs=num_classes(data)),
        example=data,
        prior_scale=prior_scale,
        likelihood="categorical",
        inputs="features",
        outcome="label",
    )


def mlp(
    data: fedmcmc.FederatedData,
    widths: tuple[int, ...] = (20,),
    prior_scale: float = 1.0,
    activation: Literal["relu", "tanh"] = "relu",
) -> fedmcmc.Posterior:
    """Return a multilayer perceptron with hidden layers of these widths."""
    module = functools.partial(Mlp, tuple(widths), activation=getattr(nn, activation))
    return network(data, module, prior_scale)


def gaussian(data: fedmcmc.FederatedData, prior_precision: float = 1.0) -> fedmcmc.Posterior:
    """Return the mean of rows `y` with unit covariance; a precision of zero is the flat prior."""
    return _posterior(_gaussian_terms, column(data, "y").shape[1:], prior_precision)


def _gaussian_terms(theta: Array, rows: dict[str, Array]) -> Array:
    return -0.5 * jnp.sum((rows["y"] - theta) ** 2, axis=-1)


def quadratic(data: fedmcmc.FederatedData) -> fedmcmc.Posterior:
    """Return the posterior of Gaussian clients: rows are their `mean` and `curvature`."""
    return _posterior(_quadratic_terms, column(data, "mean").shape[1:], 0)


def _quadratic_terms(theta: Array, rows: dict[str, Array]) -> Array:
    return -0.5 * jnp.sum(rows["curvature"] * (theta - rows["mean"]) ** 2, axis=-1)


def pair_metric(data: fedmcmc.FederatedData, prior_scale: float = 1.0) -> fedmcmc.Posterior:
    """Return the metric of pairs, columns `features` and `sign` (El Mekkaoui et al. 2021)."""
    shape = column(data, "features").shape[1:]
    return _posterior(_pair_terms, shape, prior_scale**-2, start=_pair_start)


def _pair_start(zeros: Array, rng_key: Array) -> dict[str, Array]:
    return {"gamma": _normal_start(zeros, rng_key), "mu": jnp.zeros(())}


def _pair_terms(position: dict[str, Array], rows: dict[str, Array]) -> Array:
    excess = rows["features"] @ position["gamma"] - position["mu"]
    return jax.nn.log_sigmoid(-rows["sign"] * excess)


def trial(treated: Any, risk: Any, pancreatitis: Any = None) -> None:
    """Regress the indomethacin trial's outcome; a NumPyro model of one hospital's rows."""
    coefficients = numpyro.sample("coefficients", dist.Normal(0, 2.5).expand([3]).to_event(1))
    logits = coefficients[0] + coefficients[1] * treated + coefficients[2] * risk
    with numpyro.plate("patients", len(risk)):
        numpyro.sample("pancreatitis", dist.Bernoulli(logits=logits), obs=pancreatitis)


def random_effects(
    data: fedmcmc.FederatedData, marginal_nodes: int | None = None, centered: float = 0.0
) -> fedmcmc.Posterior:
    """Return effects of groups, one client per group, with common slopes.

    Columns are `z` (whose coefficients are the group's own), `x` and `y`, binary if whole numbers.
    A quadrature of `marginal_nodes` nodes integrates over a group's effects (`fedmcmc.marginal`);
    ``None`` leaves them with the clients.
    """
    binary = np.issubdtype(np.asarray(column(data, "y")[:1]).dtype, np.integer)
    model = functools.partial(effects_of_groups, binary=bool(binary))
    posterior = fedmcmc.from_numpyro(model, example=data, centered=centered)
    return posterior if marginal_nodes is None else fedmcmc.marginal(posterior, marginal_nodes)


def shared_by_groups(z: Array, x: Array) -> tuple[Array, Array, Array]:
    """Sample what groups share: mean and spread of their effects, and slopes."""
    num_effects = z.shape[1]
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([num_effects]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([num_effects]).to_event(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    return mu, tau, slopes


def effects_of_groups(z: Any, x: Any, y: Any = None, binary: bool = False) -> None:
    """Give one group's rows normal or binary outcomes; a NumPyro model."""
    mu, tau, slopes = shared_by_groups(z, x)
    effect = numpyro.sample("effect", dist.Normal(mu, tau).to_event(1), infer={"local": True})
    eta = z @ effect + x @ slopes
    sigma = None if binary else numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(eta)):
        outcome = dist.Bernoulli(logits=eta) if binary else dist.Normal(eta, sigma)
        numpyro.sample("y", outcome, obs=y)


def group_means(data: fedmcmc.FederatedData, marginal_nodes: int | None = None) -> Any:
    """Return means of groups with unit noise, of rows `y` alone."""
    column(data, "y")
    posterior = fedmcmc.from_numpyro(means_of_groups, example=data, centered=1.0)
    return posterior if marginal_nodes is None else fedmcmc.marginal(posterior, marginal_nodes)


def means_of_groups(y: Any = None) -> None:
    """Give one group's rows a common mean; a NumPyro model."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)
