# %% [markdown]
# # Compress gradients to a tenth of the bits
#
# In a round of Langevin dynamics every client sends a gradient with 32 bits per number. A quantized
# number takes a few bits, and rounding at random leaves the expected gradient unchanged. You
# compare draws and bits of three samplers: without compression, with it, and with a memory.

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
# `lsd` sends floats. `quantize(1)` rounds each number to zero or to plus or minus the norm of all
# numbers. Most numbers become zero, so the message is short. `memory(quantize(2))` sends the
# difference between the gradient and a value that the server has stored. The difference is small,
# so its rounding error is small, too.

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
# ## Bits and errors
#
# In whitened coordinates, the posterior standard deviations (sds) are about one. The run itself
# estimates errors, from gradients of the log posterior at the draws.

# %%
bits_per_round = {
    name: run.totals["bits_up"].sum() / run.totals["rounds"].sum() for name, run in samples.items()
}
for name, run in samples.items():
    moments = run.diagnosis.moments
    print(
        f"{name}: {bits_per_round[name] / NUM_CLIENTS / DIMENSION:.2f} bits per number, means off "
        f"by up to {np.abs(moments.bias).max():.2f} posterior sd, sds {moments.spread.min():.2f} "
        f"to {moments.spread.max():.2f} times the posterior's"
    )

# %% [markdown]
# Without a memory, rounding errors add noise, and the draws vary more. With a memory, rounding
# errors are small if the chain moves little per round. The sds of the draws then agree with the sds
# without compression to 0.02, for less than a tenth of the bits. (They are above one in both cases,
# because the steps of Langevin dynamics have a finite size.)

# %%
spread = {name: run.diagnosis.moments.spread.mean() for name, run in samples.items()}
memory = "quantized against a memory"
print(f"bits relative to floats: {bits_per_round[memory] / bits_per_round['floats']:.3f}")
print("; ".join(f"{name}: mean sd {value:.3f}" for name, value in spread.items()))
assert bits_per_round[memory] < bits_per_round["floats"] / 10
assert abs(spread[memory] - spread["floats"]) < 0.02 < spread["quantized"] - spread["floats"]

# %% [markdown]
# [Compress messages](../docs/guides/compression.md) has the bits of every compressor.
