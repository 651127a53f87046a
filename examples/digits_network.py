# %% [markdown]
# # Check the probabilities of a network on images
#
# Ten clients have pictures of handwritten digits. This page first trains a network without pooling
# the pictures, then samples its weights and averages predictions over the draws. It measures how
# often the predictions are right. It also measures calibration: predictions made with 80 %
# confidence should be right in 80 % of cases.

# %%
import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from sklearn.datasets import load_digits

import fedmcmc
from fedmcmc import metrics
from fedmcmc.interop.flax import predictive

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = np.random.default_rng(0).permutation(len(labels))
train, test = order[:600], order[600:]

# %% [markdown]
# The clients differ: each has its own shares of the digits, and most lack some digits entirely.

# %%
owner = fedmcmc.partition.dirichlet(jax.random.key(0), labels[train], 10, 0.5)
data = fedmcmc.FederatedData.from_arrays({"x": images[train], "y": labels[train]}, owner)
print(data)
num_digits = [len(np.unique(data.client_rows(i)["y"])) for i in range(data.num_clients)]
print(f"number of different digits per client: {num_digits}")


# %%
class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.tanh(nn.Dense(32)(x)))


posterior = fedmcmc.from_flax(
    Network(), example=data, prior_scale=0.8, likelihood="categorical", check=False
)
start = posterior.init_fn(jax.random.key(1))
size = sum(leaf.size for leaf in jax.tree.leaves(start))
print(f"{size:,} weights, {data.num_rows} training pictures, {len(test)} test pictures")

# %% [markdown]
# ## Train one network
#
# In federated averaging, each client trains on its own pictures and the server averages the
# weights. The result approximates the posterior mode.

# %%
fed_avg = fedmcmc.fed_avg(
    posterior, client_optimizer=optax.sgd(0.3), num_local_epochs=2, batch_size=20
)
trained = fedmcmc.sample(
    jax.random.key(2), fed_avg, data, start, num_rounds=400, num_burnin=399, progress=False
)
point = jax.tree.map(lambda leaf: leaf[0, -1], trained.draws)

# %% [markdown]
# ## Sample many networks
#
# Langevin dynamics start at the trained network. In each round every client sends the gradient of
# its log likelihood, computed on all of its pictures. The first run samples the posterior. The
# second run samples a cold posterior with temperature 0.05, so its noise has a twentieth of the
# variance.

# %%
draws = {}
for name, temperature in (("posterior", 1.0), ("cold posterior", 0.05)):
    kernel = fedmcmc.lsd(posterior, step_size=2e-4, temperature=temperature)
    draws[name] = fedmcmc.sample(
        jax.random.key(3),
        kernel,
        data,
        point,
        num_rounds=5_000,
        num_burnin=1_000,
        thinning=50,
        num_chains=2,
        progress=False,
    )
    print(name, draws[name], sep=": ")

# %% [markdown]
# The weights of a network mix slowly, if at all: its hidden units can be reordered without any
# change of predictions. Therefore compare predictions between chains, not weights.

# %%
predict = predictive(Network(), likelihood="categorical")
pictures, truth = {"x": images[test]}, labels[test]
probabilities = {"one network": np.asarray(predict(point, pictures))}
for name, samples in draws.items():
    chains = [
        metrics.predictive(predict, jax.tree.map(lambda x, c=c: x[c], samples.draws), pictures)
        for c in range(2)
    ]
    probabilities[name] = np.asarray(chains[0] + chains[1]) / 2
    between = float(metrics.total_variation(*chains).mean())
    print(f"{name}: mean total variation between the chains' predictions {between:.3f}")

# %% [markdown]
# ## Compare accuracy and calibration

# %%
scores = {}
for name, p in probabilities.items():
    scores[name] = {
        "accuracy": float(metrics.accuracy(p, truth)),
        "nats per picture": float(metrics.negative_log_likelihood(p, truth)),
        "calibration error": float(metrics.expected_calibration_error(p, truth)),
    }
    scores[name]["confidence"] = float(np.max(p, axis=-1).mean())
    print(name + ": " + ", ".join(f"{key} {value:.3f}" for key, value in scores[name].items()))

# %% [markdown]
# With this prior, the posterior's predictions are underconfident: they are right more often than
# their confidence suggests. Cold posteriors predict better for many networks
# ([Wenzel et al. 2020](../docs/reference/bibliography.md#wenzel-et-al-2020)). The posterior does
# not determine the temperature, so choose it on held-out pictures, as here.

# %%
excess = scores["posterior"]["accuracy"] - scores["posterior"]["confidence"]
print(f"posterior: accuracy minus mean confidence {excess:.3f}")
assert excess > 0.05
for name in ("one network", "posterior"):
    assert scores["cold posterior"]["nats per picture"] < scores[name]["nats per picture"]

# %%
figure, ax = plt.subplots(figsize=(4, 4))
ax.plot([0, 1], [0, 1], color="#bbb")
for name, p in probabilities.items():
    bins = metrics.reliability(p, truth, num_bins=10)
    is_filled = bins.num_rows >= 10
    ax.plot(bins.confidence[is_filled], bins.accuracy[is_filled], "o-", label=name)
ax.set_xlabel("confidence")
ax.set_ylabel("accuracy")
ax.legend()
figure.tight_layout()
