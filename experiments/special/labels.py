"""Labels of clients: counts, and the share of the most frequent one."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import loaders
from experiments.tidy import Row, from_numbers


def rows(data: Mapping[str, Any]) -> list[Row]:
    """Return labels of the clients of `experiments.loaders.image_classes` with arguments `data`."""
    federation, *_ = loaders.image_classes(**data)
    table: list[Row] = []
    for i in range(federation.num_clients):
        counts = np.bincount(federation.client_rows(i)["label"], minlength=10)
        share = {"share_of_dominant_label": counts.max() / counts.sum()}
        table += from_numbers("data", {"client": i + 1}, share)
        for label, count in enumerate(counts):
            table += from_numbers("data", {"client": i + 1, "label": label}, {"images": count})
    return table
