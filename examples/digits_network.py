# %% [markdown]
# # A network on images, and whether to believe its probabilities
#
# Ten clients have pictures of handwritten digits. A network is trained without bringing pictures
# together, and then its weights are sampled: predictions are averaged over draws. The question is
# not only how often it is right, but whether a prediction that is made with 80 percent is right
# eight times in ten.

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
# Clients differ: most have pictures of a few digits only.

# %%
owner = fedmcmc.partition.dirichlet(jax.random.key(0), labels[train], 10, 0.5)
data = fedmcmc.FederatedData.from_arrays({"x": images[train], "y": labels[train]}, owner)
print(data)
kinds = [len(np.unique(data.client_rows(i)["y"])) for i in range(data.num_clients)]
print(f"kinds of digits per client: {kinds}")


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
print(f"{size:,} weights, {data.num_rows} pictures to learn from, {len(test)} to be judged by")

# %% [markdown]
# ## Trained: one network
#
# Federated averaging trains at the clients and averages; a posterior's mode is its goal.

# %%
fed_avg = fedmcmc.fed_avg(
    posterior, client_optimizer=optax.sgd(0.3), num_local_epochs=2, batch_size=20
)
trained = fedmcmc.sample(
    jax.random.key(2), fed_avg, data, start, num_rounds=400, num_burnin=399, progress=False
)
point = jax.tree.map(lambda leaf: leaf[0, -1], trained.draws)

# %% [markdown]
# ## Sampled: many networks
#
# From there Langevin dynamics go on, whose clients send gradients of all their pictures: once of
# the posterior, and once of a cold one, whose noise has a twentieth of the variance.

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
# Weights of a network mix slowly, if at all: its hidden units may change places. What is to be
# trusted are predictions, so it is these that one compares between chains.

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
    print(f"{name}: total variation between the chains' predictions {between:.3f} on average")

# %% [markdown]
# ## Calibration

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
# With this prior the posterior's predictions are too careful: they are right more often than
# their confidence says. That the draws of a cold posterior predict better is found for many
# networks (Wenzel and others, 2020). Which temperature to take is decided on pictures held out,
# as here, and not by the posterior.

# %%
careful = scores["posterior"]["accuracy"] - scores["posterior"]["confidence"]
print(f"the posterior is right {careful:.3f} more often than its confidence says")
assert careful > 0.05
for other in ("one network", "posterior"):
    assert scores["cold posterior"]["nats per picture"] < scores[other]["nats per picture"]

# %%
figure, ax = plt.subplots(figsize=(4, 4))
ax.plot([0, 1], [0, 1], color="#bbb")
for name, p in probabilities.items():
    found = metrics.reliability(p, truth, num_bins=10)
    many = found.num_rows >= 10
    ax.plot(found.confidence[many], found.accuracy[many], "o-", label=name)
ax.set_xlabel("confidence")
ax.set_ylabel("how often it is right")
ax.legend()
figure.tight_layout()
