"""Tag prediction: words and tags of sentences by user, made up or of Stack Overflow.

A row is a sentence: `words`, the numbers of its words that are in the vocabulary, negative where
there is none; `weight`, one over the number of all its words; `tags`, one bit a tag.
"""

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fedmcmc
from experiments import data, tff
from experiments.fed_ep.methods import Federation

__all__ = ["Rows", "stack_overflow", "synthetic"]

MAX_WORDS = 40
"""Words of a sentence that are kept; the others count in its weight alone."""
CHUNK = 2**16  # rows that are drawn together


class Rows(NamedTuple):
    """See the module."""

    words: np.ndarray
    weight: np.ndarray
    tags: np.ndarray


def synthetic(
    seed: int,
    *,
    num_clients: int,
    num_words: int,
    num_tags: int,
    mean_rows: float = 10.0,
    max_rows: int = 100,
    num_test: int = 5_000,
    length: int = 10,
    num_topics: int = 20,
    concentration: float = 0.2,
) -> Federation:
    """Draw users who write about few topics each, sentences of a topic, tags by their words.

    Words are drawn from the topic's Zipf-like distribution, each tag by a logistic model of the
    sentence's mean word. The number of a user's sentences is geometric, cut off at `max_rows`.
    """
    rng = np.random.default_rng(seed)
    ranks = np.arange(1, num_words + 1) ** -1.0
    topics = ranks * rng.gamma(0.3, size=(num_topics, num_words))
    edges = np.cumsum(topics / topics.sum(axis=1, keepdims=True), axis=1)
    slopes = rng.normal(0, 4.0, (num_words, num_tags)).astype(np.float32)
    # About one tag in ten, some rarer.
    bias = rng.normal(-3.5, 0.7, num_tags).astype(np.float32)

    def sentences(topic: np.ndarray) -> Rows:
        parts = []
        for start in range(0, len(topic), CHUNK):
            own = topic[start : start + CHUNK]
            uniform = rng.random((len(own), length))
            words = np.empty((len(own), length), np.int16)
            for t in range(num_topics):
                mine = own == t
                found = np.searchsorted(edges[t], uniform[mine])
                words[mine] = np.minimum(found, num_words - 1)
            logits = bias + slopes[words].mean(axis=1)
            tags = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
            weight = np.full(len(own), 1 / length, np.float32)
            parts.append(Rows(words, weight, np.packbits(tags, axis=1)))
        return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    sizes = np.minimum(rng.geometric(1 / mean_rows, num_clients), max_rows)
    mixtures = rng.dirichlet(np.full(num_topics, concentration), num_clients).cumsum(axis=1)
    ids = np.repeat(np.arange(num_clients, dtype=np.int32), sizes)
    draws = rng.random(len(ids))
    topic = np.zeros(len(ids), np.int8)
    for t in range(num_topics - 1):
        topic += draws > mixtures[ids, t]
    # Held out: sentences of other users.
    others = rng.dirichlet(np.full(num_topics, concentration), num_test).cumsum(axis=1)
    held_out = (rng.random((num_test, 1)) > others[:, :-1]).sum(axis=1)
    federation = fedmcmc.FederatedData.from_arrays(sentences(topic), ids)
    text = (
        f"Made up: {num_clients:,} users with {len(ids):,} sentences of {length} words "
        f"({sizes.min()} to {sizes.max()} per user), {num_words:,} words, {num_tags} tags, "
        f"{num_test:,} sentences of other users for testing"
    )
    return Federation(federation, sentences(held_out), text)


def stack_overflow(num_words: int, num_tags: int, max_rows: int, num_test: int) -> Federation:
    """Read Stack Overflow: sentences of 342477 users, the most frequent words and tags.

    From ``stackoverflow_train.h5``, ``stackoverflow_test.h5``, ``stackoverflow.word_count`` and
    ``stackoverflow.tag_count`` in the folder of `experiments.data`. The first `max_rows` sentences
    of a user, and the first `num_test` of the test users'.

    Raises
    ------
    DataNotFound
        If the files are not in the folder.
    """
    folder = data.folder()
    names = ("train.h5", "test.h5")
    paths = [folder / f"stackoverflow_{name}" for name in names]
    counts = [folder / f"stackoverflow.{kind}_count" for kind in ("word", "tag")]
    tff.require([*paths, *counts], "Stack Overflow", "data/stackoverflow", "use fed_ep/tags_small")
    words, tags = (
        _most_frequent(path, num) for path, num in zip(counts, (num_words, num_tags), strict=True)
    )
    train, ids = _read(paths[0], words, tags, max_rows, None)
    test, _ = _read(paths[1], words, tags, max_rows, num_test)
    text = (
        f"Stack Overflow: {ids[-1] + 1:,} users with {len(ids):,} sentences, at most {max_rows} a "
        f"user, {len(words):,} words, {len(tags)} tags"
    )
    return Federation(fedmcmc.FederatedData.from_arrays(train, ids), test, text)


def _most_frequent(path: Path, num: int) -> dict[str, int]:
    """Return the numbers of the `num` most frequent entries of a file of counts."""
    text = path.read_text()
    if text.lstrip().startswith("{"):
        counts = json.loads(text)
    else:  # a word and its count a line
        counts = {line.split()[0]: int(line.split()[1]) for line in text.splitlines() if line}
    ordered = sorted(counts, key=lambda name: -counts[name])
    return {name: i for i, name in enumerate(ordered[:num])}


def _read(
    path: Path, words: dict[str, int], tags: dict[str, int], max_rows: int, num: int | None
) -> tuple[Rows, np.ndarray]:
    import h5py

    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    ids = []
    with h5py.File(path, "r") as file:
        for client, name in enumerate(sorted(file["examples"])):
            group = file["examples"][name]
            tokens, marks = group["tokens"][:max_rows], group["tags"][:max_rows]
            for row in _sentences(tokens, marks, words, tags):
                parts.append(row)
                ids.append(client)
            if num is not None and len(parts) >= num:
                break
    rows = Rows(*(np.stack(column) for column in zip(*parts[:num], strict=True)))
    return rows, np.asarray(ids[:num], np.int32)


def _sentences(
    tokens: np.ndarray, marks: np.ndarray, words: dict[str, int], tags: dict[str, int]
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for sentence, marked in zip(tokens, marks, strict=True):
        said = sentence.decode().split()
        known = [words[word] for word in said if word in words]
        padded = np.full(MAX_WORDS, -1, np.int16)
        kept = list(itertools.islice(known, MAX_WORDS))
        padded[: len(kept)] = kept
        bits = np.zeros(8 * math.ceil(len(tags) / 8), bool)
        bits[[tags[tag] for tag in marked.decode().split("|") if tag in tags]] = True
        yield padded, np.float32(1 / max(len(said), 1)), np.packbits(bits)
