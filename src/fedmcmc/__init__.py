"""Bayesian federated learning by sampling: composable kernels for JAX.

::

    model      ->  kernel               ->  round   ->  run   ->  draws
    interop        kernels, transforms      rounds      runs      Samples

Build a model (`from_numpyro`, `Posterior`) and a kernel (`qlsd_pp`, `fa_hmc`, `fsgld`, `fed_ep`),
change the kernel with transforms (`compress`, `faults`, `share_momentum`), and run it (`sample`).
`fit` does all of this for a model and data. docs/explanation/design.md describes the other
packages.
"""

from importlib import import_module as _import_module
from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version
from typing import TYPE_CHECKING as _TYPE_CHECKING

from fedmcmc import compression as compression
from fedmcmc import dynamics as dynamics
from fedmcmc import random as random
from fedmcmc import rounds as rounds
from fedmcmc import streaming as streaming
from fedmcmc import types as types
from fedmcmc.algorithms import adf as adf
from fedmcmc.algorithms import dg_sgld as dg_sgld
from fedmcmc.algorithms import dsgld as dsgld
from fedmcmc.algorithms import fa_hmc as fa_hmc
from fedmcmc.algorithms import fa_ld as fa_ld
from fedmcmc.algorithms import fed_avg as fed_avg
from fedmcmc.algorithms import fed_be as fed_be
from fedmcmc.algorithms import fed_ep as fed_ep
from fedmcmc.algorithms import fed_pa as fed_pa
from fedmcmc.algorithms import fed_sep as fed_sep
from fedmcmc.algorithms import fsgld as fsgld
from fedmcmc.algorithms import lsd as lsd
from fedmcmc.algorithms import lsd_pp as lsd_pp
from fedmcmc.algorithms import lsd_star as lsd_star
from fedmcmc.algorithms import psgld as psgld
from fedmcmc.algorithms import qlsd as qlsd
from fedmcmc.algorithms import qlsd_pp as qlsd_pp
from fedmcmc.algorithms import qlsd_star as qlsd_star
from fedmcmc.algorithms import sgld as sgld
from fedmcmc.compression import Compressor as Compressor
from fedmcmc.compression import memory as memory
from fedmcmc.compression import per_client as per_client
from fedmcmc.compression import quantize as quantize
from fedmcmc.compression import sparsify as sparsify
from fedmcmc.compression import top_k as top_k
from fedmcmc.data import ClientLoader as ClientLoader
from fedmcmc.data import FederatedData as FederatedData
from fedmcmc.data import partition as partition
from fedmcmc.diagnostics import DiagnosisWarning as DiagnosisWarning
from fedmcmc.diagnostics import SamplingWarning as SamplingWarning
from fedmcmc.diagnostics import at_rest as at_rest
from fedmcmc.diagnostics import rhat_below as rhat_below
from fedmcmc.gaussian import Gaussian as Gaussian
from fedmcmc.gaussian import Mixture as Mixture
from fedmcmc.gradients import augmented as augmented
from fedmcmc.gradients import conducive as conducive
from fedmcmc.gradients import epochs as epochs
from fedmcmc.gradients import fixed_point as fixed_point
from fedmcmc.gradients import full_gradient as full_gradient
from fedmcmc.gradients import minibatch as minibatch
from fedmcmc.gradients import noisy as noisy
from fedmcmc.gradients import scaffold as scaffold
from fedmcmc.gradients import svrg as svrg
from fedmcmc.kernels import averaging as averaging
from fedmcmc.kernels import consensus as consensus
from fedmcmc.kernels import distillation as distillation
from fedmcmc.kernels import ensemble as ensemble
from fedmcmc.kernels import fed_gibbs as fed_gibbs
from fedmcmc.kernels import gaussian_ensemble as gaussian_ensemble
from fedmcmc.kernels import gaussian_mh as gaussian_mh
from fedmcmc.kernels import hmc as hmc
from fedmcmc.kernels import langevin as langevin
from fedmcmc.kernels import mala as mala
from fedmcmc.kernels import multiple_try as multiple_try
from fedmcmc.kernels import natural as natural
from fedmcmc.kernels import pseudo_gradients as pseudo_gradients
from fedmcmc.kernels import relay as relay
from fedmcmc.kernels import underdamped as underdamped
from fedmcmc.participation import bernoulli as bernoulli
from fedmcmc.participation import categorical as categorical
from fedmcmc.participation import full as full
from fedmcmc.participation import uniform as uniform
from fedmcmc.placement import HostStore as HostStore
from fedmcmc.placement import Placement as Placement
from fedmcmc.placement import distributed as distributed
from fedmcmc.placement import use_all_cores as use_all_cores
from fedmcmc.pytrees import trees as trees
from fedmcmc.records import Record as Record
from fedmcmc.records import Samples as Samples
from fedmcmc.rounds import simulate as simulate
from fedmcmc.runs import NonFiniteError as NonFiniteError
from fedmcmc.runs import sample as sample
from fedmcmc.storage import Checkpoint as Checkpoint
from fedmcmc.storage import CheckpointError as CheckpointError
from fedmcmc.storage import resumable as resumable
from fedmcmc.transforms import augment as augment
from fedmcmc.transforms import compress as compress
from fedmcmc.transforms import faults as faults
from fedmcmc.transforms import natural_parameters as natural_parameters
from fedmcmc.transforms import secure_sum as secure_sum
from fedmcmc.transforms import sequence as sequence
from fedmcmc.transforms import share_momentum as share_momentum
from fedmcmc.transforms import switch as switch
from fedmcmc.types import FederatedKernel as FederatedKernel
from fedmcmc.types import FederatedState as FederatedState
from fedmcmc.types import Posterior as Posterior

if _TYPE_CHECKING:
    from fedmcmc import criticism as criticism
    from fedmcmc import deploy as deploy
    from fedmcmc import hierarchy as hierarchy
    from fedmcmc import inference as inference
    from fedmcmc import metrics as metrics
    from fedmcmc import models as models
    from fedmcmc import surrogates as surrogates
    from fedmcmc import wire as wire
    from fedmcmc.exact import correct as correct
    from fedmcmc.exact import tempered as tempered
    from fedmcmc.fitting import fit as fit
    from fedmcmc.hierarchy import local_draws as local_draws
    from fedmcmc.hierarchy import marginal as marginal
    from fedmcmc.interop.flax import from_flax as from_flax
    from fedmcmc.interop.numpyro import from_numpyro as from_numpyro
    from fedmcmc.models import load as load
    from fedmcmc.surrogates import whiten as whiten
    from fedmcmc.sweeps import sweep as sweep
    from fedmcmc.tuning import estimate_smoothness as estimate_smoothness
    from fedmcmc.tuning import predict_bias as predict_bias
    from fedmcmc.tuning import tune as tune

_PACKAGES = (
    "criticism",
    "deploy",
    "exact",
    "fitting",
    "hierarchy",
    "inference",
    "interop",
    "metrics",
    "models",
    "reports",
    "surrogates",
    "sweeps",
    "tuning",
    "wire",
)
_FUNCTIONS = {
    "correct": "fedmcmc.exact",
    "tempered": "fedmcmc.exact",
    "fit": "fedmcmc.fitting",
    "local_draws": "fedmcmc.hierarchy",
    "marginal": "fedmcmc.hierarchy",
    "from_flax": "fedmcmc.interop.flax",
    "from_numpyro": "fedmcmc.interop.numpyro",
    "load": "fedmcmc.models",
    "whiten": "fedmcmc.surrogates",
    "sweep": "fedmcmc.sweeps",
    "estimate_smoothness": "fedmcmc.tuning",
    "predict_bias": "fedmcmc.tuning",
    "tune": "fedmcmc.tuning",
}

try:
    __version__ = _version("fedmcmc")
except _PackageNotFoundError:  # run from a source tree
    __version__ = "not installed"


def __getattr__(name: str) -> object:
    """Import `_PACKAGES` and `_FUNCTIONS` when they are used, to start quickly."""
    if name in _PACKAGES:
        return _import_module(f"fedmcmc.{name}")
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_FUNCTIONS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_FUNCTIONS})
