"""Gaussian surrogates of each client's likelihood, the posterior's mode, and whitening.

A surrogate stands for ``p(x_s | theta)`` as a function of theta, without the prior, up to a factor
(El Mekkaoui et al. 2021, section 3.1). All functions return one `fedmcmc.Gaussian` per client,
leaves ``[num_clients, ...]``, made for `fedmcmc.fsgld` and `fedmcmc.conducive`. Rows enter the
compiled program as arguments: refitting to other rows of the same shapes compiles nothing.

In place of data a consortium may stand, such as `fedmcmc.deploy.Sites`: `taylor`, `laplace`,
`score_covariance`, `mode` and `whiten` ask it, and never see a row. The room may import every room
on lower floors.

========== ================================= ======================================================
function   where ``grad log q_s`` is exact   a client needs
========== ================================= ======================================================
`analytic` everywhere, where the model is    one pass over its rows
           Gaussian
`taylor`   at the common center; everywhere  one Hessian; a proper likelihood is not needed
           for a quadratic log likelihood
`laplace`  at the client's own maximum       an optimization and one Hessian
`sampled`  nowhere in particular             ``num_burnin + num_samples * thinning`` gradients
========== ================================= ======================================================

`score_covariance` says how the rows' scores vary within each client: the noise of minibatches.

A dense structure holds ``d * d`` numbers per client. A Hessian takes ``d`` products with a vector,
each about three gradients over the client's rows, dense or diagonal; the diagonal one takes 64 of
them at a time and builds no ``d`` by ``d`` matrix above 256 dimensions.
"""

from fedmcmc.surrogates._analytic import analytic as analytic
from fedmcmc.surrogates._ascents import NEWTON_DIMENSIONS as NEWTON_DIMENSIONS
from fedmcmc.surrogates._ascents import Expansion as Expansion
from fedmcmc.surrogates._ascents import Ledger as Ledger
from fedmcmc.surrogates._ascents import Objective as Objective
from fedmcmc.surrogates._ascents import Structure as Structure
from fedmcmc.surrogates._ascents import lbfgs as lbfgs
from fedmcmc.surrogates._ascents import newton as newton
from fedmcmc.surrogates._ascents import run_ascents as run_ascents
from fedmcmc.surrogates._expansions import Mode as Mode
from fedmcmc.surrogates._expansions import laplace as laplace
from fedmcmc.surrogates._expansions import mode as mode
from fedmcmc.surrogates._expansions import setup_bits as setup_bits
from fedmcmc.surrogates._expansions import taylor as taylor
from fedmcmc.surrogates._nonfinite import SITE_LOGS as SITE_LOGS
from fedmcmc.surrogates._nonfinite import explain_failures as explain_failures
from fedmcmc.surrogates._nonfinite import explain_nonfinite as explain_nonfinite
from fedmcmc.surrogates._nonfinite import nonfinite_answer as nonfinite_answer
from fedmcmc.surrogates._sampled import sampled as sampled
from fedmcmc.surrogates._scores import score_covariance as score_covariance
from fedmcmc.surrogates._whitening import Whitened as Whitened
from fedmcmc.surrogates._whitening import whiten as whiten
