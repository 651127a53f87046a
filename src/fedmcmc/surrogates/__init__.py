"""Gaussian surrogates of each client's likelihood, the posterior's mode, and whitening.

A surrogate approximates ``p(x_s | theta)`` as a function of theta, without the prior, up to a
factor (El Mekkaoui et al. 2021, section 3.1). All functions return one `fedmcmc.Gaussian` per
client, leaves ``[num_clients, ...]``, for `fedmcmc.fsgld` and `fedmcmc.conducive`. Rows are
arguments of the compiled program, so other rows of the same shapes cause no compilation.

`taylor`, `laplace`, `score_covariance`, `mode` and `whiten` also accept a consortium instead of
data, such as `fedmcmc.deploy.Sites`, and then read no rows.

========== ================================= ======================================================
function   ``grad log q_s`` is exact         computation per client
========== ================================= ======================================================
`analytic` everywhere, if the model is       one pass over the rows
           Gaussian
`taylor`   at the common center; everywhere  one Hessian; the likelihood may be improper
           for a quadratic log likelihood
`laplace`  at the client's maximum           an optimization and one Hessian
`sampled`  nowhere in particular             ``num_burnin + num_samples * thinning`` gradients
========== ================================= ======================================================

`score_covariance` returns the covariance of the rows' scores within each client: the noise of
minibatches.

A dense structure has ``d * d`` numbers per client. A Hessian, dense or diagonal, takes ``d``
products with a vector, each with the cost of about three gradients over the client's rows. A
diagonal one computes 64 products at a time and needs no ``d`` by ``d`` matrix above 256 dimensions.
"""

from fedmcmc.surrogates._analytic import analytic as analytic
from fedmcmc.surrogates._ascents import NEWTON_DIMENSIONS as NEWTON_DIMENSIONS
from fedmcmc.surrogates._ascents import Expansion as Expansion
from fedmcmc.surrogates._ascents import Ledger as Ledger
from fedmcmc.surrogates._ascents import Objective as Objective
from fedmcmc.surrogates._ascents import Structure as Structure
from fedmcmc.surrogates._ascents import expanded_prior as expanded_prior
from fedmcmc.surrogates._ascents import lbfgs as lbfgs
from fedmcmc.surrogates._ascents import newton as newton
from fedmcmc.surrogates._ascents import run_ascents as run_ascents
from fedmcmc.surrogates._expansions import laplace as laplace
from fedmcmc.surrogates._expansions import setup_bits as setup_bits
from fedmcmc.surrogates._expansions import taylor as taylor
from fedmcmc.surrogates._mode import mode as mode
from fedmcmc.surrogates._nonfinite import SITE_LOGS as SITE_LOGS
from fedmcmc.surrogates._nonfinite import explain_failures as explain_failures
from fedmcmc.surrogates._nonfinite import explain_nonfinite as explain_nonfinite
from fedmcmc.surrogates._nonfinite import nonfinite_answer as nonfinite_answer
from fedmcmc.surrogates._sampled import sampled as sampled
from fedmcmc.surrogates._scores import score_covariance as score_covariance
from fedmcmc.surrogates._whitening import Whitened as Whitened
from fedmcmc.surrogates._whitening import whiten as whiten
