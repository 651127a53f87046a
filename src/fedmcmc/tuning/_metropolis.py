"""Cost of an effective draw of MALA on a standard normal, in closed form.

For a reversible proposal, the mean acceptance rate is twice the probability that the ratio exceeds
one, and ``E[accepted f] = 2 E[f; ratio above one]`` for symmetric ``f``. For MALA on a standard
normal in ``d`` dimensions, both are probabilities of a t distribution, hence of a beta.
"""

import numpy as np

from fedmcmc.dynamics import mala_acceptance


def mala_rounds_per_draw(size: int) -> float:
    """Return the approximate number of proposals per effective draw, at the best step size.

    The autocorrelation of a coordinate at lag one is ``1 - E[accepted (x - y)**2] / 2 = 1 - (g +
    g**2 / 2) * (acceptance in size + 2 dimensions)``. The result treats it as if it decayed
    geometrically. A reversible chain needs at least as many proposals; on Gaussians in 3 to 100
    dimensions, at most a tenth more.
    """
    steps = np.geomspace(1e-3, 3, 2000)
    accepted = np.array([mala_acceptance(step, size + 2) for step in steps])
    gains = (steps + steps**2 / 2) * accepted
    return float(2 / gains.max() - 1)
