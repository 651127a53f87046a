"""Settings of a kernel before it runs: predicted bias, step sizes, acceptance rates.

Predictions put a Gaussian in place of each client's likelihood. If a round of the kernel is then an
affine map with normal noise, its stationary distribution is a linear equation. Any other kernel is
simulated on the Gaussian clients.
"""

from fedmcmc.dynamics import gaussian_mh_acceptance as gaussian_mh_acceptance
from fedmcmc.dynamics import hmc_acceptance as hmc_acceptance
from fedmcmc.dynamics import hmc_step_size as hmc_step_size
from fedmcmc.dynamics import mala_acceptance as mala_acceptance
from fedmcmc.tuning._constants import NoiseAtMode as NoiseAtMode
from fedmcmc.tuning._constants import RelayConstants as RelayConstants
from fedmcmc.tuning._constants import noise_at_mode as noise_at_mode
from fedmcmc.tuning._constants import relay_constants as relay_constants
from fedmcmc.tuning._predictions import Prediction as Prediction
from fedmcmc.tuning._predictions import predict_bias as predict_bias
from fedmcmc.tuning._step_sizes import Smoothness as Smoothness
from fedmcmc.tuning._step_sizes import estimate_smoothness as estimate_smoothness
from fedmcmc.tuning._step_sizes import inverse_sqrt_schedule as inverse_sqrt_schedule
from fedmcmc.tuning._step_sizes import proposition_step_size as proposition_step_size
from fedmcmc.tuning._tune import Tuned as Tuned
from fedmcmc.tuning._tune import tune as tune
