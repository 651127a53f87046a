# %% [markdown]
# # A tenth of the bits
#
# In a round of Langevin dynamics every client sends a gradient, 32 bits per number. Quantized, a
# number takes a few bits, and random rounding leaves the gradient right on average. This page
# compares draws with and without compression, and counts what was sent.

# %%
import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc

NUM_CLIENTS, DIMENSION = 20, 40


def loglikelihood_fn(theta, rows):
    logits = rows["x"] @ theta
    return rows["y"] * logits - jnp.logaddexp(0.0, logits)


posterior = fedmcmc.Posterior(lambda theta: -0.5 * theta @ theta, loglikelihood_fn)
rng = np.random.default_rng(0)
truth = rng.normal(size=DIMENSION) / 4
clients = []
for _ in range(NUM_CLIENTS):
    x = rng.normal(size=(rng.integers(50, 150), DIMENSION))
    clients.append({"x": x, "y": (rng.random(len(x)) < 1 / (1 + np.exp(-x @ truth))).astype(float)})
data = fedmcmc.FederatedData.from_clients(clients)
white = fedmcmc.whiten(posterior, data, position=jnp.zeros(DIMENSION))

# %% [markdown]
# ## Three ways to send a gradient
#
# `lsd` sends floats. `quantize(1)` sends of each number whether it is zero, plus or minus the
# norm of all of them, so that most are zero and a code is short. `memory(quantize(2))` sends how
# the gradient differs from what the server remembers, which is small, and so its rounding is
# small, too.

# %%
kernels = {
    "floats": fedmcmc.lsd(white.posterior, step_size=0.1),
    "quantized": fedmcmc.qlsd(white.posterior, step_size=0.1, compressor=fedmcmc.quantize(1)),
    "quantized against a memory": fedmcmc.compress(
        fedmcmc.lsd(white.posterior, step_size=0.1), fedmcmc.memory(fedmcmc.quantize(2))
    ),
}
samples = {}
for name, kernel in kernels.items():
    samples[name] = fedmcmc.sample(
        jax.random.key(1),
        kernel,
        data,
        white.position,
        num_rounds=6_000,
        num_burnin=200,
        num_chains=4,
        progress=False,
    )

# %% [markdown]
# ## What was sent, and what came of it
#
# Whitened coordinates have a posterior whose sds are about one. Errors are told by the run
# itself, from the posterior's gradients at the draws.

# %%
sent = {
    name: run.totals["bits_up"].sum() / run.totals["rounds"].sum() for name, run in samples.items()
}
for name, run in samples.items():
    moments = run.diagnosis.moments
    print(
        f"{name}: {sent[name] / NUM_CLIENTS / DIMENSION:.2f} bits per number, means off by up to "
        f"{np.abs(moments.bias).max():.2f} posterior sd, sds {moments.spread.min():.2f} to "
        f"{moments.spread.max():.2f} of the posterior's"
    )

# %% [markdown]
# Without a memory the rounding is noise, which the chain takes for the posterior's: the draws are
# wider. Against a memory rounding is small where the chain moves little per round, and the draws
# are those of floats for less than a tenth of the bits. (Sds above one are those of Langevin
# steps of a finite size, which floats have, too.)

# %%
spread = {name: run.diagnosis.moments.spread.mean() for name, run in samples.items()}
memory = "quantized against a memory"
print(f"bits over those of floats: {sent[memory] / sent['floats']:.3f}")
print("; ".join(f"{name}: sds {value:.3f}" for name, value in spread.items()))
assert sent[memory] < sent["floats"] / 10
assert abs(spread[memory] - spread["floats"]) < 0.02 < spread["quantized"] - spread["floats"]

# %% [markdown]
# How many bits which compressor takes, by bound and by code, is in [bits](../docs/guides/compression.md).
