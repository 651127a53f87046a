"""Tag prediction: sentences by user, and a logistic regression per tag on their words.

A row is a sentence. Its columns are `words`, the numbers of its words in the vocabulary, negative
where there is none; `weight`, one over the number of all its words; and `tags`, one bit per tag.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial

import fedmcmc
from experiments import data as sources
from experiments import tff
from experiments.models import column, flat_logprior

NUM_TOPICS, LENGTH = 20, 10
"""Topics of synthetic users, and words of their sentences."""
MAX_WORDS = 40
"""Words of a sentence that are kept; the others count in its weight alone."""
CHUNK = 2**16
"""Sentences that are drawn together."""


def synthetic(
    num_clients: int = 1_000,
    num_words: int = 1_000,
    num_tags: int = 50,
    num_test: int = 1_000,
    mean_rows: float = 10.0,
    max_rows: int = 100,
    seed: int = 0,
) -> tuple[fedmcmc.FederatedData, tff.Columns]:
    """Draw users who write about few topics each; other users write the held-out sentences.

    Words are drawn from the topic's Zipf-like distribution, and each tag by a logistic model of the
    sentence's mean word. The number of a user's sentences is geometric, cut off at `max_rows`.
    """
    rng = np.random.default_rng(seed)
    topics = np.arange(1, num_words + 1) ** -1.0 * rng.gamma(0.3, size=(NUM_TOPICS, num_words))
    edges = np.cumsum(topics / topics.sum(axis=1, keepdims=True), axis=1)
    slopes = rng.normal(0, 4.0, (num_words, num_tags)).astype(np.float32)
    bias = rng.normal(-3.5, 0.7, num_tags).astype(np.float32)  # about one tag in ten
    sizes = np.minimum(rng.geometric(1 / mean_rows, num_clients), max_rows)
    ids = np.repeat(np.arange(num_clients, dtype=np.int32), sizes)

    def draw_topics(users: np.ndarray, num_users: int) -> np.ndarray:
        mixtures = rng.dirichlet(np.full(NUM_TOPICS, 0.2), num_users).cumsum(axis=1)
        topic, uniform = np.zeros(len(users), np.int8), rng.random(len(users))
        for t in range(NUM_TOPICS - 1):
            topic += uniform > mixtures[users, t]
        return topic

    def draw_sentences(topic: np.ndarray) -> tff.Columns:
        uniform = rng.random((len(topic), LENGTH))
        words = np.empty(uniform.shape, np.int16)
        for t in range(NUM_TOPICS):
            drawn = np.searchsorted(edges[t], uniform[topic == t])
            words[topic == t] = np.minimum(drawn, num_words - 1)
        probability = 1 / (1 + np.exp(-(bias + slopes[words].mean(axis=1))))
        tags = np.packbits(rng.random(probability.shape) < probability, axis=1)
        return {"words": words, "weight": np.full(len(words), 1 / LENGTH, "f4"), "tags": tags}

    topics_of_rows = draw_topics(ids, num_clients), draw_topics(np.arange(num_test), num_test)
    train, test = (
        _joined([draw_sentences(t[i : i + CHUNK]) for i in range(0, len(t), CHUNK)])
        for t in topics_of_rows
    )
    return fedmcmc.FederatedData.from_arrays(train, ids), test


def _joined(parts: Sequence[tff.Columns]) -> tff.Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def stack_overflow(
    num_words: int = 10_000, num_tags: int = 500, max_rows: int = 1_000, num_test: int = 10_000
) -> tuple[fedmcmc.FederatedData, tff.Columns]:
    """Read Stack Overflow: sentences of 342,477 users, the most frequent words and tags.

    At most `max_rows` sentences are read per user, and `num_test` of the test users.
    """
    parts = ("_train.h5", "_test.h5", ".word_count", ".tag_count")
    files = [f"stackoverflow{part}" for part in parts]
    paths = sources.require("Stack Overflow", files, f"{tff.ADVICE} use study=fed_ep/tags_small")
    words, tags = _most_frequent(paths[2], num_words), _most_frequent(paths[3], num_tags)
    train, ids = _read(paths[0], words, tags, max_rows)
    test, _ = _read(paths[1], words, tags, max_rows, num_test)
    return fedmcmc.FederatedData.from_arrays(train, ids), test


def _most_frequent(path: Path, num: int) -> dict[str, int]:
    """Return numbers of the most frequent entries of a file of counts, JSON or one per line."""
    text = path.read_text()
    is_json = text.lstrip().startswith("{")
    counts = json.loads(text) if is_json else dict(line.split()[:2] for line in text.splitlines())
    ordered = sorted(counts, key=lambda name: -int(counts[name]))
    return {name: i for i, name in enumerate(ordered[:num])}


def _read(
    path: Path, words: dict[str, int], tags: dict[str, int], max_rows: int, num: int | None = None
) -> tuple[tff.Columns, np.ndarray]:
    """Read the first `num` sentences of a file, and the numbers of their users."""
    parts: list[tff.Columns] = []
    sizes: list[int] = []
    for sentences, marks in tff.clients(path, ("tokens", "tags"), max_rows):
        parts.append(_encoded(sentences, marks, words, tags))
        sizes.append(len(sentences))
        if num is not None and sum(sizes) >= num:
            break
    ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return {name: values[:num] for name, values in _joined(parts).items()}, ids[:num]


def _encoded(
    sentences: Any, marks: Any, words: dict[str, int], tags: dict[str, int]
) -> tff.Columns:
    """Return the rows of a user's sentences; its tags are joined by bars in `marks`."""
    split = [sentence.decode().split() for sentence in sentences]
    numbers = np.full((len(split), MAX_WORDS), -1, np.int16)
    bits = np.zeros((len(split), len(tags)), bool)
    for i, (sentence, names) in enumerate(zip(split, marks, strict=True)):
        indices = [words[word] for word in sentence if word in words][:MAX_WORDS]
        numbers[i, : len(indices)] = indices
        bits[i, [tags[tag] for tag in names.decode().split("|") if tag in tags]] = True
    weight = np.array([1 / max(len(sentence), 1) for sentence in split], np.float32)
    return {"words": numbers, "weight": weight, "tags": np.packbits(bits, axis=1)}


def regressions(
    data: fedmcmc.FederatedData, num_words: int = 1_000, num_tags: int = 50
) -> fedmcmc.Posterior:
    """Return a logistic regression per tag on the mean word, with a flat prior; starts at zero."""
    column(data, "words")
    start = {"kernel": jnp.zeros((num_words, num_tags)), "bias": jnp.zeros(num_tags)}
    init_fn = Partial(lambda start, rng_key: start, start)
    return fedmcmc.Posterior(flat_logprior, _terms, _resample, init_fn=init_fn)


def logits(position: Any, rows: Any) -> Array:
    """Return the logits of all tags, ``[num_rows, num_tags]``."""
    is_word = rows["words"] >= 0
    weights = position["kernel"][jnp.where(is_word, rows["words"], 0).astype(jnp.int32)]
    total = jnp.sum(jnp.where(is_word[..., None], weights, 0), axis=-2)
    return position["bias"] + rows["weight"][..., None] * total


def unpack(rows: Any, num_tags: int) -> Array:
    """Return the tags of rows as bits, ``[num_rows, num_tags]``."""
    return jnp.unpackbits(rows["tags"].astype(jnp.uint8), axis=-1, count=num_tags)


def _terms(position: Any, rows: Any) -> Array:
    predicted = logits(position, rows)
    tags = unpack(rows, predicted.shape[-1])
    return jnp.sum(tags * predicted - jax.nn.softplus(predicted), axis=-1)


def _resample(rng_key: Array, position: Any, rows: Any) -> Any:
    drawn = jax.random.bernoulli(rng_key, jax.nn.sigmoid(logits(position, rows)))
    return {**rows, "tags": jnp.packbits(drawn, axis=-1).astype(rows["tags"].dtype)}
