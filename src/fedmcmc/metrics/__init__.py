"""Scores of draws and of the predictions made with them.

Scores in [0, 1] are fractions, not percentages; logarithms are natural. Predictions are
probabilities ``[..., num_rows, num_classes]`` with labels ``[..., num_rows]``. Leading axes
(chains, seeds, checkpoints) are broadcast into the result. All functions can be compiled and
mapped. Values are checked on the host if they are concrete; inside `jax.jit` only shapes are.

============================== ====================================================== =============
function                       comparison                                             perfect
============================== ====================================================== =============
`accuracy`                     predictions with labels                                1
`brier_score`                  predictions with labels, sum over classes              0
`negative_log_likelihood`      predictions with labels, nats per row                  0
`expected_calibration_error`   confidence with accuracy                               0
`reliability`                  the same by bins of confidence
`credibility_accuracy_curve`   accuracy of rows of at least some confidence
`agreement`                    predicted classes of two samplers                      1
`total_variation`              predictions of two samplers                            0
`predictive_entropy`           a score of each row, nats
`ood_auc`                      scores in and out of distribution                      1
`hpd_error`, `hpd_threshold`   high-density regions of two samplers, by `potential`   0
`marginal_error`               histograms of two samplers, see `marginal_error_floor` the floor
`gaussian_w2`                  two Gaussians                                          0
`estimation_error`             estimates of repeated runs with the truth              0
`relative_efficiency`          bits of messages with uncompressed ones
`rounds_to_threshold`          a curve over rounds with a level
`best_running_mean`            the best stretch of a curve over rounds
============================== ====================================================== =============

`predictive` averages predictions over draws. ArviZ computes effective sample sizes
(`fedmcmc.Samples.to_datatree`).
"""

from fedmcmc.metrics._calibration import CredibilityAccuracy as CredibilityAccuracy
from fedmcmc.metrics._calibration import Reliability as Reliability
from fedmcmc.metrics._calibration import credibility_accuracy_curve as credibility_accuracy_curve
from fedmcmc.metrics._calibration import expected_calibration_error as expected_calibration_error
from fedmcmc.metrics._calibration import reliability as reliability
from fedmcmc.metrics._classification import accuracy as accuracy
from fedmcmc.metrics._classification import brier_score as brier_score
from fedmcmc.metrics._classification import negative_log_likelihood as negative_log_likelihood
from fedmcmc.metrics._classification import predictive_entropy as predictive_entropy
from fedmcmc.metrics._comparison import agreement as agreement
from fedmcmc.metrics._comparison import total_variation as total_variation
from fedmcmc.metrics._detection import ood_auc as ood_auc
from fedmcmc.metrics._draws import predictive as predictive
from fedmcmc.metrics._marginals import marginal_error as marginal_error
from fedmcmc.metrics._marginals import marginal_error_floor as marginal_error_floor
from fedmcmc.metrics._potential import hpd_error as hpd_error
from fedmcmc.metrics._potential import hpd_threshold as hpd_threshold
from fedmcmc.metrics._potential import potential as potential
from fedmcmc.metrics._runs import EstimationError as EstimationError
from fedmcmc.metrics._runs import best_running_mean as best_running_mean
from fedmcmc.metrics._runs import estimation_error as estimation_error
from fedmcmc.metrics._runs import relative_efficiency as relative_efficiency
from fedmcmc.metrics._runs import rounds_to_threshold as rounds_to_threshold
from fedmcmc.metrics._wasserstein import gaussian_w2 as gaussian_w2
