"""Regression models by formula, for clients that keep their rows.

`glm` and `glmm` read a formula, let the clients agree on a schema by sums, build the design matrix
of each client, and fit a NumPyro model with `fedmcmc.fit`. `specify` returns the model before the
fit, with its priors.
"""

from fedmcmc.models._command import run_command as run_command
from fedmcmc.models._design import Design as Design
from fedmcmc.models._design import TermDesign as TermDesign
from fedmcmc.models._families import FAMILIES as FAMILIES
from fedmcmc.models._families import Family as Family
from fedmcmc.models._formula import Formula as Formula
from fedmcmc.models._formula import parse as parse
from fedmcmc.models._glm import Specification as Specification
from fedmcmc.models._glm import glm as glm
from fedmcmc.models._glm import glmm as glmm
from fedmcmc.models._glm import specify as specify
from fedmcmc.models._hazards import CensoredTimes as CensoredTimes
from fedmcmc.models._hazards import SplineHazard as SplineHazard
from fedmcmc.models._hazards import WeibullHazard as WeibullHazard
from fedmcmc.models._kaplan_meier import KaplanMeier as KaplanMeier
from fedmcmc.models._kaplan_meier import LogRank as LogRank
from fedmcmc.models._kaplan_meier import kaplan_meier as kaplan_meier
from fedmcmc.models._kaplan_meier import log_rank as log_rank
from fedmcmc.models._loading import load as load
from fedmcmc.models._model_fit import ModelFit as ModelFit
from fedmcmc.models._priors import Priors as Priors
from fedmcmc.models._regression import RegressionModel as RegressionModel
from fedmcmc.models._schema import Schema as Schema
from fedmcmc.models._schema import exchange as exchange
from fedmcmc.models._survival import SurvivalFamily as SurvivalFamily
from fedmcmc.models._survival import cumulative_incidence as cumulative_incidence
from fedmcmc.models._survival import restricted_mean as restricted_mean
from fedmcmc.models._survival import survival as survival
from fedmcmc.models._survival import survival_curves as survival_curves
