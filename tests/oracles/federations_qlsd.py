"""A Gaussian federation whose rows differ in curvature, and its laws under the QLSD family."""

import numpy as np

from tests.oracles import laws, laws_qlsd, laws_quantised
from tests.oracles.federations import Federation


class Curved(Federation):
    """Ragged clients whose rows differ in curvature.

    Minibatch noise then depends on theta, and differences of gradients at two places have noise of
    their own, unless the rows are the same at both.
    """

    def __init__(self, seed=1):
        super().__init__(seed)
        rng = np.random.default_rng(seed)
        d = len(self.start)
        self.row_factors = [
            (0.4 * rng.normal(size=(n, d, d)) + np.eye(d)).round(2) for n in self.sizes
        ]
        self.curvatures = [f.transpose(0, 2, 1) @ f for f in self.row_factors]
        self.precisions = np.array([c.sum(0) for c in self.curvatures])
        pairs = zip(self.curvatures, self.rows, strict=True)
        slopes = np.array([np.einsum("nij,nj->i", *pair) for pair in pairs])
        self.means = np.linalg.solve(self.precisions, slopes[..., None])[..., 0]
        self.shares = np.array(self.sizes) / sum(self.sizes)
        # Off the mode: the sum of the clients' gradients there is not zero.
        self.centre = np.array([0.7, -0.3, 0.2])

    def client_trees(self):
        return [{"x": x, "factor": f} for x, f in zip(self.rows, self.row_factors, strict=True)]

    def langevin(self, *, batch=None, replace=True, split=False, **settings):
        """Return the law of LSD and its kin; `batch` rows a gradient."""
        if batch is not None:
            settings["batches"] = [
                laws.batch_noise(rows, curvatures, batch, replace=replace)
                for rows, curvatures in zip(self.rows, self.curvatures, strict=True)
            ]
        shares = self.shares if split else None
        return laws_qlsd.langevin(
            self.precisions, self.means, shares=shares, **self.prior, **settings
        )

    def quantised(self, **settings):
        """Return the laws after one and two rounds of full gradients, quantised."""
        return laws_quantised.two_rounds(
            self.precisions, self.means, position=self.start, **self.prior, **settings
        )
