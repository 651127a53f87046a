"""A small study that attackers work on, and what a dishonest server or site can do in process."""

import struct
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import fedmcmc
from fedmcmc import deploy, wire
from fedmcmc.deploy import secure
from fedmcmc.deploy._frames import Frame
from fedmcmc.deploy._words import to_words
from fedmcmc.types import as_functions
from tests.support.studies import identity_of, public_key

HERE = "tests.deploy.attacks.support"
NAMES = ("bern", "basel", "chur")
SIZES = (6, 5, 4)
KEY = jax.random.key(2026)
POSITION = jnp.zeros(3)
RESOLUTION = 2.0**-22
"""Step of the integers that secure sums add here."""
PERMISSIVE = dict(min_rows=1, min_batch=1, min_sites=1)
"""Limits of an owner who relies on the randomness of the site alone."""


def loglikelihood(position, rows):
    """Return a log likelihood whose gradient is the row itself, which makes messages plain."""
    return rows["x"] @ position


def posterior(settings):
    return fedmcmc.Posterior(lambda position: -0.5 * jnp.sum(position**2), loglikelihood)


def _secured(kernel):
    return fedmcmc.secure_sum(kernel, resolution=RESOLUTION, max_abs=2.0**30)


KERNELS = {
    "lsd": lambda model: fedmcmc.lsd(model, step_size=0.01),
    "minibatch": lambda model: fedmcmc.lsd(model, step_size=0.01, batch_size=4),
    "snapshot": lambda model: fedmcmc.lsd_pp(model, step_size=0.01, batch_size=4, refresh_every=3),
    "relay": lambda model: fedmcmc.dsgld(model, step_size=0.01, batch_size=4, num_local_steps=2),
    "masked": lambda model: _secured(KERNELS["lsd"](model)),
    "masked minibatch": lambda model: _secured(KERNELS["minibatch"](model)),
    "noisy": lambda model: fedmcmc.langevin(
        model, fedmcmc.noisy(fedmcmc.full_gradient(), 1.0), step_size=0.01
    ),
}


def kernel(posterior, settings):
    return KERNELS[settings["kernel"]](posterior)


def rows_of(name):
    """Return whole numbers, which an attacker recognizes."""
    index = NAMES.index(name)
    x = np.random.default_rng(index).integers(-50, 50, (SIZES[index], 3))
    return {"x": x.astype(np.float32)}


ROWS = {name: rows_of(name)["x"] for name in NAMES}


def make_study(kernel="lsd", *, masked=False, cls=deploy.Study, **changes):
    """Return the study with one of `KERNELS`."""
    fields = dict(
        name="targets",
        posterior=f"{HERE}:posterior",
        sites=dict(zip(NAMES, SIZES, strict=True)),
        rows={"x": jax.ShapeDtypeStruct((3,), jnp.float32)},
        kernels={"main": f"{HERE}:kernel"},
        settings={"kernel": kernel},
    )
    if masked:
        fields["secure"] = dict(identities={name: public_key(name) for name in NAMES}, rounds=1000)
    return cls(**(fields | changes))


def open_site(study, name, folder, *, limits=PERMISSIVE, **changes):
    """Return a site; `limits` are its owner's, and `changes` more of `deploy.Site`."""
    fields = dict(rows=rows_of(name), folder=folder / name) | limits
    if study.secure:
        fields["identity"] = identity_of(name)
    return deploy.Site(study, name, **(fields | changes))


class Unscrupulous(deploy.Study):
    """The study at a server that asks for whatever it likes: what refuses it is a site."""

    def words_of(self, kernel):
        if any(kernel is own for own in self._built.values()):
            return super().words_of(kernel)
        asked = kernel.kernel if self.secure else kernel
        return to_words(as_functions(asked), self.functions)


@dataclass
class Exchange:
    """A request of the server, and what a site answered."""

    request: Frame
    answer: Frame | None
    data: bytes  # of the request, as sent


class Network(deploy.LocalTransport):
    """Sites in threads, and an attacker between them and the server.

    Parameters
    ----------
    study, folder
        Of all sites.
    request
        Takes a site's name and a frame for it, returns the frame that it gets instead.
    answer
        Takes a site's name, a request and its answer, returns the bytes that the server gets.
    opened
        Returns a site of the study: ``opened(study, name, folder, **changes)``.
    **changes
        Of `opened`.
    """

    def __init__(self, study, folder, *, request=None, answer=None, opened=open_site, **changes):
        super().__init__()
        self.exchanges = {name: [] for name in study.sites}
        self.sites, self._request, self._answer = {}, request, answer
        for name in study.sites:
            self.enter(opened(study, name, folder, **changes))

    def enter(self, site):
        """Connect a site, in place of an earlier process of the same name."""
        self.sites[site.name] = site
        honest = site.answer

        def answer(data):
            reply = honest(data)
            frame = Frame.parse(reply) if reply else None
            self.exchanges[site.name].append(Exchange(Frame.parse(data), frame, data))
            if reply and self._answer is not None:
                reply = self._answer(site.name, Frame.parse(data), frame)
            return reply

        site.answer = answer
        self.join(site)

    def send(self, site, data):
        if self._request is not None:
            data = self._request(site, Frame.parse(data)).to_bytes()
        super().send(site, data)

    def steps(self, name):
        """Return a site's exchanges in rounds."""
        return [x for x in self.exchanges[name] if x.request.kind == "step"]


@contextmanager
def server_of(study, network):
    """Connect a server to the sites of a network."""
    sites = deploy.Sites(study, network)
    try:
        yield sites
    finally:
        sites.close()


def run(study, network, kernel="main", *, key=KEY, position=POSITION, **settings):
    """Run a kernel of the study, or one that the server made, and return the samples."""
    settings = dict(num_rounds=1, progress=False) | settings
    with server_of(study, network) as sites:
        chosen = study.kernel(kernel) if isinstance(kernel, str) else kernel
        return sites.sample(key, chosen, position, **settings)


def parts_of(body):
    """Return the parts of a body, as many as there are."""
    parts, at = [], 0
    while at < len(body):
        (size,) = struct.unpack_from(">Q", body, at)
        parts.append(body[at + 8 : at + 8 + size])
        at += 8 + size
    return parts


def joined(parts):
    """Return parts as one body."""
    return b"".join(struct.pack(">Q", len(part)) + part for part in parts)


def numbers_in(shapes, exchange):
    """Return how many numbers are in the bytes of an answer to a set-up or a round.

    `shapes` are those of the run, as site and server know them.
    """
    request, answer = exchange.request, exchange.answer
    if answer is None or answer.kind != "answer" or request.kind not in ("setup", "step"):
        return 0
    parts, phase = parts_of(answer.body), request.tag.phase
    if request.kind == "setup":
        likes = [shapes.setup[phase]] * len(parts)
    else:
        exchange_like = shapes.phases[phase]
        num_chains = len(parts) // 2
        likes = num_chains * [exchange_like.code] + num_chains * [exchange_like.report]
    decoded = [wire.decode(part, like) for part, like in zip(parts, likes, strict=True)]
    return sum(np.size(leaf) for leaf in jax.tree.leaves(decoded))


def gradients_in(answer, num_chains=1):
    """Return the gradients ``[num_chains, 3]`` in an answer that is not under masks."""
    codes = parts_of(answer.body)[:num_chains]
    return np.stack([np.frombuffer(code, ">f4") for code in codes]).astype(float)


def totals_of(network, num_chains=1):
    """Return the sums ``[num_steps * num_chains, 3]`` that the masks of all sites leave."""
    totals = []
    for answers in zip(*(network.steps(name) for name in NAMES), strict=True):
        words = sum(secure.read_masked(x.answer.body)[3] for x in answers)
        numbers = words.reshape(num_chains, -1)[:, :3].astype(np.int64)
        totals.append(numbers * RESOLUTION)
    return np.concatenate(totals)


def predicted_batches(kernel, num_chains, keys=KEY):
    """Return how often each row of all sites is in each chain's message, ``[num_chains, rows]``.

    The server simulates sites whose rows are unit vectors with the keys that it chose: a message
    then lists the weights of the rows in it.
    """
    num = sum(SIZES)
    model = posterior({})
    simulated = kernel(model)
    units = np.split(np.eye(num, dtype=np.float32), np.cumsum(SIZES)[:-1])
    data = fedmcmc.FederatedData.from_clients([{"x": part} for part in units])
    start = jnp.zeros(num)

    def message(chain):
        key = jax.random.fold_in(keys, chain)
        state = simulated.init(fedmcmc.random.init_key(key), start, data)
        total = jnp.zeros(num)
        for client in range(len(SIZES)):
            kept = jax.tree.map(lambda leaf: leaf[client], state.clients)  # noqa: B023
            code, _, _ = fedmcmc.rounds.client_step(
                simulated, 0, key, state.broadcast, kept, data.client(client, 1.0)
            )
            total += code
        return total

    return np.asarray(jax.jit(jax.vmap(message))(jnp.arange(num_chains)), float)


def differences_within(rows):
    """Return rows ``[15, 3]`` less the mean of their site, which totals do not separate."""
    split = np.split(np.asarray(rows), np.cumsum(SIZES)[:-1])
    return np.concatenate([part - part.mean(axis=0) for part in split])


def error_of_rows(rows):
    """Return the largest error of recovered rows ``[15, 3]``, up to their sites' means."""
    truth = np.concatenate(list(ROWS.values()))
    return np.abs(differences_within(rows) - differences_within(truth)).max()


MODEL = """
import jax.numpy as jnp
import fedmcmc

posterior = fedmcmc.Posterior(
    lambda position: -0.5 * jnp.sum(position**2),
    lambda position, rows: rows["x"] @ position,
    init_fn=lambda key: jnp.zeros(3),
)


def kernel(posterior, settings):
    return fedmcmc.lsd(posterior, step_size=0.01)
"""
STUDY = """
name = "targets"
posterior = "model.py:posterior"
[sites]
bern = 6
basel = 5
chur = 4
[rows]
x = { dtype = "float32", shape = [3] }
[kernels]
main = "model.py:kernel"
"""
SERVER = """
study = "study.toml"
[run]
kernel = "main"
seed = 3
draws = "draws.npz"
num_rounds = 20
checkpoint = "checkpoint"
every_rounds = 1000
progress = false
"""


def write_study(folder, *, study=STUDY, model=MODEL):
    """Write the study as files, with a server's settings; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(model)
    (folder / "server.toml").write_text(SERVER)
    path = folder / "study.toml"
    path.write_text(study)
    return path
