"""The Gaussian federation of `federations`, with the law of averaging kernels on it."""

import numpy as np

from tests.oracles.federations import Federation
from tests.oracles.laws_averaging import Averaging

FEDERATION = Federation()
SHARES = np.array(Federation.sizes) / sum(Federation.sizes)


def law(
    *,
    batch=None,
    replace=True,
    gradient_noise=0.0,
    weights=None,
    control_variate=False,
    noise_inside=False,
    **settings,
):
    """Return the law of an averaging kernel on `FEDERATION`.

    Minibatch noise cancels in a control variate, as all rows of a client share a curvature; so
    does other noise if it lies `noise_inside` of it.
    """
    w = SHARES if weights is None else np.asarray(weights, float)
    d = len(FEDERATION.start)
    noises = np.stack([gradient_noise**2 * np.eye(d)] * len(w)) * (not noise_inside)
    if batch is not None and not control_variate:
        noise = FEDERATION.location_noises(batch, replace=replace)
        noises = noises + noise / w[:, None, None] ** 2
    return Averaging(
        FEDERATION.precisions,
        FEDERATION.means,
        weights=w,
        noises=noises,
        control_variate=control_variate,
        **FEDERATION.prior,
        **settings,
    )
