"""The federation FEMNIST* of Vono et al. (2022)."""

import numpy as np

import fedmcmc
from experiments.images import Images, scale_pixels
from experiments.qlsd.federations import SEED, Federation, Rows, labelled

__all__ = ["digits"]

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


def _flat_rows(pixels: np.ndarray, labels: np.ndarray, scaling: str) -> Rows:
    return labelled(scale_pixels(pixels, scaling).reshape(len(pixels), -1), labels)
