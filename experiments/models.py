"""Models for ``model=``: functions that return a `fedmcmc.Posterior`, and flax modules.

A function whose first parameter is `data` receives the federation; others are NumPyro models.
Modules are without state: every row is seen alone.

LeNet-5 (LeCun et al. 1998, with rectifiers and maxima), the ResNet-20 of Izmailov et al. (2021),
which has filter response normalisation instead of batch statistics, and multilayer perceptrons.
"""

import functools
from collections.abc import Callable
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

__all__ = [
    "Conv",
    "FilterResponseNorm",
    "LeNet5",
    "Mlp",
    "ResNet",
    "SmallCnn",
    "flat_logprior",
    "gaussian",
    "group_means",
    "logistic",
    "mlp",
    "multinomial",
    "network",
    "pair_metric",
    "quadratic",
    "random_effects",
    "resnet20",
    "shared_by_groups",
    "trial",
]

Method = Literal["lax", "patches", "banded"]
Padding = Literal["SAME", "VALID"]


class Mlp(nn.Module):
    """Dense layers of `widths` and one of `num_outputs`; without widths a linear model.

    Rows of any shape are flattened.
    """

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


class Conv(nn.Module):
    """A convolution of images ``[n, height, width, channels]``, computed in one of three ways.

    All have the parameters of `flax.linen.Conv` and agree with it up to rounding.

    - ``"lax"``: XLA's convolution. On CPU it is several times slower inside of loops
      (jax-ml/jax#12868), and again where each member of a `jax.vmap` has a kernel of its own.
    - ``"patches"``: a product of the patches under the kernel with the kernel as a matrix
      ``[height * width * channels, features]``.
    - ``"banded"``: a product of rows of the image with a matrix that holds the kernel once for
      every place in a row. It does ``image width / kernel width`` times the arithmetic in
      products large enough to be fast; for narrow images with few channels the fastest.
    """

    features: int
    kernel_size: tuple[int, int]
    strides: int = 1
    padding: Padding = "SAME"
    method: Method = "lax"
    kernel_init: Callable[..., Array] = nn.initializers.lecun_normal()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, height', width', features]``."""
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape)
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        x, kernel, bias = nn.dtypes.promote_dtype(x, kernel, bias)
        pads = [_pads(x.shape[1 + i], shape[i], self.strides, self.padding) for i in range(2)]
        x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
        return _METHODS[self.method](x, kernel, self.strides) + bias.reshape(1, 1, 1, -1)


def _pads(size: int, kernel: int, strides: int, padding: Padding) -> tuple[int, int]:
    if padding == "VALID":
        return 0, 0
    total = max((-(-size // strides) - 1) * strides + kernel - size, 0)
    return total // 2, total - total // 2


def _lax(x: Array, kernel: Array, strides: int) -> Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (strides,) * 2, "VALID", dimension_numbers=axes)


def _slices(x: Array, axis: int, kernel: int, strides: int) -> list[Array]:
    """Return what each position of the kernel along `axis` meets, one array a position."""
    num = (x.shape[axis] - kernel) // strides + 1
    stop = (num - 1) * strides + 1
    return [jax.lax.slice_in_dim(x, i, i + stop, strides, axis) for i in range(kernel)]


def _patches(x: Array, kernel: Array, strides: int) -> Array:
    height, width, _, features = kernel.shape
    x = jnp.concatenate(_slices(x, 2, width, strides), axis=-1)
    x = jnp.concatenate(_slices(x, 1, height, strides), axis=-1)
    flat = x.reshape(-1, x.shape[-1]) @ kernel.reshape(-1, features)
    return flat.reshape(*x.shape[:3], features)


def _banded(x: Array, kernel: Array, strides: int) -> Array:
    height, width, _, features = kernel.shape
    size = x.shape[2]
    places = np.arange((size - width) // strides + 1)
    select = np.zeros((width, size, places.size), np.float32)
    for j in range(width):
        select[j, places * strides + j, places] = 1
    band = jnp.einsum("jvw,ijco->ivcwo", select.astype(kernel.dtype), kernel)
    x = jnp.concatenate(_slices(x.reshape(*x.shape[:2], -1), 1, height, strides), axis=-1)
    flat = x.reshape(-1, x.shape[-1]) @ band.reshape(x.shape[-1], -1)
    return flat.reshape(*x.shape[:2], places.size, features)


_METHODS: dict[str, Callable[[Array, Array, int], Array]] = {
    "lax": _lax,
    "patches": _patches,
    "banded": _banded,
}


class LeNet5(nn.Module):
    """LeNet-5 for images ``[n, height, width, channels]``, 61706 parameters for 28 x 28 x 1."""

    num_outputs: int = 10
    method: Method = "banded"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""
        x = nn.relu(_max_of_four(Conv(6, (5, 5), method=self.method)(x)))
        x = nn.relu(_max_of_four(Conv(16, (5, 5), padding="VALID", method=self.method)(x)))
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
            x = nn.relu(Conv(features, (3, 3), 2, method=self.method)(x))
        return nn.Dense(self.num_outputs)(x.reshape(x.shape[0], -1))


def _max_of_four(x: Array) -> Array:
    # A reshape and a maximum, because the gradient of a pooling window is slow on CPU.
    num, height, width, channels = x.shape
    return x.reshape(num, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class FilterResponseNorm(nn.Module):
    """Divide each channel of each image by its root mean square, scale and shift it.

    With `threshold` the result is at least a third parameter ``tau`` a channel (the thresholded
    linear unit). Source: Singh and Krishnan (2020), Filter response normalization layer, eqs. 1-3.
    """

    epsilon: float = 1e-6
    threshold: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return an array of the shape of `x`, ``[n, height, width, channels]``."""
        shape = (1, 1, 1, x.shape[-1])
        names = ["scale", "bias", "threshold"][: 3 if self.threshold else 2]
        starts = [nn.initializers.ones, nn.initializers.zeros, nn.initializers.zeros]
        given = [self.param(n, start, shape[3:]) for n, start in zip(names, starts, strict=False)]
        scale, bias, *threshold = (leaf.reshape(shape) for leaf in given)
        square = jnp.mean(jnp.square(x), axis=(1, 2), keepdims=True)
        x = x * jax.lax.rsqrt(square + self.epsilon) * scale + bias
        return jnp.maximum(x, threshold[0]) if threshold else x


class ResNet(nn.Module):
    """Residual network for small images, with `FilterResponseNorm` and swish.

    Three stages of `num_blocks` blocks with two 3 x 3 convolutions each, whose width doubles and
    whose images halve from one stage to the next; projections where shapes change; a mean over
    all places. Source: Izmailov et al. (2021), What are Bayesian neural network posteriors really
    like?, with the depth ``6 * num_blocks + 2``.
    """

    num_blocks: int
    num_outputs: int = 10
    width: int = 16
    activation: Callable[[Array], Array] = nn.swish
    threshold: bool = True
    method: Method = "lax"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Return ``[n, num_outputs]``."""

        def layer(x: Array, features: int, size: int = 3, strides: int = 1) -> Array:
            init = nn.initializers.he_normal()
            x = Conv(features, (size,) * 2, strides, method=self.method, kernel_init=init)(x)
            return FilterResponseNorm(threshold=self.threshold)(x)

        x = self.activation(layer(x, self.width))
        for stage in range(3):
            features = self.width * 2**stage
            for block in range(self.num_blocks):
                halves = stage > 0 and block == 0
                strides = 2 if halves else 1
                y = self.activation(layer(x, features, strides=strides))
                y = layer(y, features)
                if halves:
                    x = layer(x, features, size=1, strides=strides)
                x = self.activation(x + y)
        return nn.Dense(self.num_outputs)(jnp.mean(x, axis=(1, 2)))


def resnet20(num_outputs: int = 10, **kwargs: object) -> ResNet:
    """Return the `ResNet` of depth 20 (274042 parameters for 10 outputs and 3 channels)."""
    return ResNet(3, num_outputs, **kwargs)


def num_classes(data: fedmcmc.FederatedData) -> int:
    """Return how many classes the column `label` has, counted from zero."""
    return int(np.max(np.asarray(column(data, "label")))) + 1


def column(data: fedmcmc.FederatedData, name: str) -> Any:
    """Return a column of the rows.

    Raises
    ------
    ValueError
        If the rows have no such column.
    """
    if not isinstance(data.rows, dict) or name not in data.rows:
        names = ", ".join(data.rows) if isinstance(data.rows, dict) else "not named"
        raise ValueError(f"this model needs the column {name!r}; the columns are {names}.")
    return data.rows[name]


def _regression(
    data: fedmcmc.FederatedData,
    terms: Callable[[Array, Array, Array], Array],
    resample: Callable[[Array, Array, dict[str, Array]], dict[str, Array]],
    shape: tuple[int, ...],
    prior_precision: float,
) -> fedmcmc.Posterior:
    if column(data, "features").ndim != 2:
        raise ValueError("this model needs flat features, [rows, features]; use data.flat=true.")
    return fedmcmc.Posterior(
        logprior_fn=Partial(_normal_logprior, jnp.float32(prior_precision)),
        loglikelihood_fn=Partial(_of_columns, Partial(terms)),
        resample_fn=Partial(resample),
        init_fn=Partial(_normal_start, jnp.zeros(shape)),
    )


def _normal_logprior(precision: Array, position: Any) -> Array:
    return -0.5 * precision * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(position))


def flat_logprior(position: Any) -> Array:
    """Return the log of an improper uniform density."""
    return jnp.zeros((), jax.tree.leaves(position)[0].dtype)


def _normal_start(zeros: Array, rng_key: Array) -> Array:
    return jax.random.normal(rng_key, zeros.shape)


def _of_columns(terms: Any, theta: Array, rows: dict[str, Array]) -> Array:
    return terms(theta, rows["features"], rows["label"])


def _binary_terms(theta: Array, features: Array, label: Array) -> Array:
    score = features @ theta
    return jnp.where(label == 1, score, 0) - jax.nn.softplus(score)


def _multinomial_terms(theta: Array, features: Array, label: Array) -> Array:
    scores = jax.nn.log_softmax(features @ theta)
    return jnp.take_along_axis(scores, label[:, None], axis=1)[:, 0]


def _resample_binary(rng_key: Array, theta: Array, rows: dict[str, Array]) -> dict[str, Array]:
    label = jax.random.bernoulli(rng_key, jax.nn.sigmoid(rows["features"] @ theta))
    return {**rows, "label": label.astype(rows["label"].dtype)}


def _resample_class(rng_key: Array, theta: Array, rows: dict[str, Array]) -> dict[str, Array]:
    label = jax.random.categorical(rng_key, rows["features"] @ theta)
    return {**rows, "label": label.astype(rows["label"].dtype)}


def logistic(data: fedmcmc.FederatedData, prior_precision: float = 1.0) -> fedmcmc.Posterior:
    """Return the logistic regression of labels 0 and 1, without an intercept of its own."""
    if num_classes(data) > 2:
        raise ValueError(
            f"labels must be 0 or 1, got 0 to {num_classes(data) - 1}; use model=multinomial."
        )
    shape = column(data, "features").shape[1:]
    return _regression(data, _binary_terms, _resample_binary, shape, prior_precision)


def multinomial(
    data: fedmcmc.FederatedData, prior_precision: float = 1.0, by_class: bool = False
) -> fedmcmc.Posterior:
    """Return the multinomial regression; positions are ``[features, classes]``.

    With `by_class` they are a vector per class, to each of which `fedmcmc.quantize` can give a
    norm of its own.
    """
    shape = (column(data, "features").shape[-1], num_classes(data))
    posterior = _regression(data, _multinomial_terms, _resample_class, shape, prior_precision)
    if not by_class:
        return posterior
    return fedmcmc.Posterior(
        posterior.logprior_fn,
        loglikelihood_fn=Partial(_of_classes, posterior.loglikelihood_fn),
        resample_fn=Partial(_of_classes, posterior.resample_fn),
        init_fn=Partial(_by_class, posterior.init_fn),
    )


def _of_classes(function: Callable[..., Any], theta: tuple[Array, ...], *arguments: Any) -> Any:
    return function(jnp.stack(theta, axis=1), *arguments)


def _by_class(init_fn: Callable[[Array], Array], rng_key: Array) -> tuple[Array, ...]:
    return tuple(init_fn(rng_key).T)


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
    return fedmcmc.Posterior(
        logprior_fn=Partial(_normal_logprior, jnp.float32(prior_precision)),
        loglikelihood_fn=Partial(_gaussian_terms),
        init_fn=Partial(_normal_start, jnp.zeros(column(data, "y").shape[1:])),
    )


def _gaussian_terms(theta: Array, rows: dict[str, Array]) -> Array:
    return -0.5 * jnp.sum((rows["y"] - theta) ** 2, axis=-1)


def quadratic(data: fedmcmc.FederatedData) -> fedmcmc.Posterior:
    """Return the posterior of Gaussian clients: rows are their `mean` and `curvature`."""
    return fedmcmc.Posterior(
        logprior_fn=Partial(_normal_logprior, jnp.float32(0)),
        loglikelihood_fn=Partial(_quadratic_terms),
        init_fn=Partial(_normal_start, jnp.zeros(column(data, "mean").shape[1:])),
    )


def _quadratic_terms(theta: Array, rows: dict[str, Array]) -> Array:
    return -0.5 * jnp.sum(rows["curvature"] * (theta - rows["mean"]) ** 2, axis=-1)


def pair_metric(data: fedmcmc.FederatedData, prior_scale: float = 1.0) -> fedmcmc.Posterior:
    """Return the metric of pairs, columns `features` and `sign` (El Mekkaoui et al. 2021)."""
    return fedmcmc.Posterior(
        logprior_fn=Partial(_normal_logprior, jnp.float32(prior_scale**-2)),
        loglikelihood_fn=Partial(_pair_terms),
        init_fn=Partial(_pair_start, jnp.zeros(column(data, "features").shape[1:])),
    )


def _pair_start(zeros: Array, rng_key: Array) -> dict[str, Array]:
    return {"gamma": jax.random.normal(rng_key, zeros.shape), "mu": jnp.zeros(())}


def _pair_terms(position: dict[str, Array], rows: dict[str, Array]) -> Array:
    distance = rows["features"] @ position["gamma"]
    return jax.nn.log_sigmoid(-rows["sign"] * (distance - position["mu"]))


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

    Parameters
    ----------
    data
        Columns `z` (whose coefficients are the group's own), `x` and `y`; whole numbers `y` are
        binary outcomes.
    marginal_nodes
        Nodes of the quadrature over a group's effects (`fedmcmc.marginal`); ``None`` leaves the
        effects with the clients, for `fedmcmc.fed_gibbs` and ``lsd(refresh=...)``.
    centered
        As in `fedmcmc.from_numpyro`: 1 for `fedmcmc.fed_gibbs`.
    """
    binary = np.issubdtype(np.asarray(column(data, "y")[:1]).dtype, np.integer)
    model = binary_effects if binary else normal_effects
    posterior = fedmcmc.from_numpyro(model, example=data, centered=centered)
    return posterior if marginal_nodes is None else fedmcmc.marginal(posterior, marginal_nodes)


def shared_by_groups(z: Array, x: Array) -> tuple[Array, Array, Array]:
    """Sample what groups share: mean and spread of their effects, and slopes."""
    num_effects = z.shape[1]
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([num_effects]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([num_effects]).to_event(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 2.5).expand([x.shape[1]]).to_event(1))
    return mu, tau, slopes


def _linear_predictor(z: Array, x: Array) -> Array:
    mu, tau, slopes = shared_by_groups(z, x)
    effect = numpyro.sample("effect", dist.Normal(mu, tau).to_event(1), infer={"local": True})
    return z @ effect + x @ slopes


def normal_effects(z: Any, x: Any, y: Any = None) -> None:
    """Give one group's rows normal outcomes; a NumPyro model."""
    eta = _linear_predictor(z, x)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(eta)):
        numpyro.sample("y", dist.Normal(eta, sigma), obs=y)


def binary_effects(z: Any, x: Any, y: Any = None) -> None:
    """Give one group's rows binary outcomes; a NumPyro model."""
    eta = _linear_predictor(z, x)
    with numpyro.plate("rows", len(eta)):
        numpyro.sample("y", dist.Bernoulli(logits=eta), obs=y)


def group_means(data: fedmcmc.FederatedData, marginal_nodes: int | None = None) -> Any:
    """Return means of groups with unit noise, of rows `y` alone."""
    column(data, "y")
    posterior = fedmcmc.from_numpyro(means_of_groups, example=data, centered=1.0)
    return posterior if marginal_nodes is None else fedmcmc.marginal(posterior, marginal_nodes)


def means_of_groups(y: Any = None) -> None:
    """Give one group's rows a mean of their own; a NumPyro model."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effect = numpyro.sample("effect", dist.Normal(mu, tau), infer={"local": True})
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(effect, 1), obs=y)
