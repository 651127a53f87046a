"""The federations of images of Vono et al. (2022)."""

import jax
import numpy as np

import fedmcmc
from experiments.images import CIFAR10_MOMENTS, Images, scale_pixels
from experiments.qlsd.federations import SEED, Federation, Rows, labelled, some_rows

__all__ = ["contiguous_blocks", "digits", "dominant_digits"]

NUM_GROUPS = 26  # of the sorted digits; left over from a split of the letters
PICKED_GROUPS, REPEATED_GROUPS = 20, 6


def digits(
    images: Images,
    num_clients: int = 10,
    *,
    scaling: str = "standard",
    seed: int = SEED,
    shared_seed: bool = False,
) -> Federation:
    """Split digits as FEMNIST*: clients of 20 to 99 images, drawn from pools that overlap.

    The images are sorted by label and cut into 26 groups of `num_clients` chunks, equal in size;
    what is left over (of the last label) is not used. A client picks 20 groups and 6 of these
    once more, a random chunk of each time, and draws its images from this pool without
    replacement. So clients share images, and one client may hold an image twice.

    Parameters
    ----------
    images
        EMNIST digits in the paper; MNIST stands in for it.
    num_clients
        Number of clients ``b``; at least ``26 b`` images are needed.
    scaling
        Of the pixels, see `experiments.images.scale_pixels`; the released notebooks standardise
        with MNIST's moments.
    seed
        Decides sizes, groups, chunks and images.
    shared_seed
        Whether each client sets the seed anew before it draws, so that all draw the same places
        of their pools.
    """
    sizes = np.random.RandomState(seed).randint(20, 100, num_clients)
    rng = np.random.RandomState(seed)
    pools = _digit_pools(images.y_train, num_clients, rng)
    clients = []
    for size, pool in zip(sizes, pools, strict=True):
        if size > pool.size:
            raise ValueError(
                f"a client needs {size} images and its pool has {pool.size}: give more images "
                f"(got {len(images.y_train)}) or fewer clients (got {num_clients})."
            )
        rows = (np.random.RandomState(seed) if shared_seed else rng).choice(pool, size, False)
        clients.append(_flat_rows(images.x_train[rows], images.y_train[rows], scaling))
    data = fedmcmc.FederatedData.from_clients(clients)
    return Federation(data, _flat_rows(images.x_test, images.y_test, scaling))


def _digit_pools(labels: np.ndarray, num_clients: int, rng: np.random.RandomState) -> np.ndarray:
    """Return row numbers of each client's pool, ``[num_clients, 26 * chunk_size]``."""
    chunk_size = len(labels) // (NUM_GROUPS * num_clients)
    used = np.argsort(labels, kind="stable")[: NUM_GROUPS * num_clients * chunk_size]
    chunks = used.reshape(NUM_GROUPS, num_clients, chunk_size)
    picked = [rng.choice(NUM_GROUPS, PICKED_GROUPS, False) for _ in range(num_clients)]
    again = [rng.choice(groups, REPEATED_GROUPS, False) for groups in picked]
    pools = []
    for groups in zip(picked, again, strict=True):
        pools.append([chunks[group, rng.choice(num_clients)] for group in np.concatenate(groups)])
    return np.array(pools).reshape(num_clients, -1)


def dominant_digits(
    rng_key: jax.Array,
    images: Images,
    num_clients: int,
    proportion: float,
    *,
    num_rows: int | None = None,
    scaling: str = "standard",
) -> Federation:
    """Split images so that one label dominates each client (our copy of the paper lacks how much).

    Rows of images keep their shape. `num_rows` takes that many of the training images at random.
    """
    split_key, row_key = jax.random.split(rng_key)
    rows = some_rows(row_key, len(images.y_train), num_rows)
    labels = images.y_train[rows]
    ids = fedmcmc.partition.dominant_label(split_key, labels, num_clients, proportion)
    train = labelled(scale_pixels(images.x_train[rows], scaling), labels)
    data = fedmcmc.FederatedData.from_arrays(train, ids)
    return Federation(data, labelled(scale_pixels(images.x_test, scaling), images.y_test))


def contiguous_blocks(
    images: Images, num_clients: int = 20, *, num_rows: int | None = None, scaling: str = "standard"
) -> Federation:
    """Split CIFAR-10 in its order into blocks whose sizes differ by at most one.

    `num_rows` takes the first so many training images.
    """
    total = len(images.y_train) if num_rows is None else num_rows
    if not num_clients <= total <= len(images.y_train):
        raise ValueError(
            f"num_rows must lie between {num_clients} clients and {len(images.y_train)} images, "
            f"got {total}."
        )
    x_train, x_test = (
        scale_pixels(x, scaling, CIFAR10_MOMENTS) for x in (images.x_train[:total], images.x_test)
    )
    ids = np.arange(total) * num_clients // total
    data = fedmcmc.FederatedData.from_arrays(labelled(x_train, images.y_train[:total]), ids)
    return Federation(data, labelled(x_test, images.y_test))


def _flat_rows(pixels: np.ndarray, labels: np.ndarray, scaling: str) -> Rows:
    return labelled(scale_pixels(pixels, scaling).reshape(len(pixels), -1), labels)
