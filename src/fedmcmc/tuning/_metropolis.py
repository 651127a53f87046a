"""What a draw costs where each step is accepted or rejected: closed forms on Gaussians.

For a reversible proposal the mean acceptance is twice the probability that the ratio is above one,
and likewise ``E[accepted f] = 2 E[f; ratio above one]`` for symmetric ``f``. For the proposal of
MALA on a standard normal in ``d`` dimensions both are probabilities of a t distribution, hence of
a beta.
"""

import numpy as np

from fedmcmc.dynamics import mala_acceptance


def mala_rounds_per_draw(size: int) -> float:
    """Return about how many proposals an effective draw of a coordinate takes, at the best step.

    From the autocorrelation at lag one, ``1 - E[accepted (x - y)**2] / 2`` of a coordinate, which
    is ``1 - (g + g**2 / 2) * (acceptance in size + 2 dimensions)``, as if it decayed geometrically:
    a reversible chain takes no fewer, and on Gaussians in 3 to 100 dimensions at most a tenth more.
    """
    steps = np.geomspace(1e-3, 3, 2000)
    accepted = np.array([mala_acceptance(step, size + 2) for step in steps])
    gains = (steps + steps**2 / 2) * accepted
    return float(2 / gains.max() - 1)
