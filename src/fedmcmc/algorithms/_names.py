"""What a kernel is called: by the function that makes it, which is what its user wrote."""

from collections.abc import Callable
from typing import Any

from fedmcmc._types import FederatedKernel
from fedmcmc.gradients import holds_augmented, without_augmented


def name_of(kernel: FederatedKernel) -> str:
    """Return the name of the function that makes a kernel: of an algorithm, if it is one.

    A composition that is an algorithm has its name, whoever composed it. What a transform changed
    is in brackets.

    Examples
    --------
    >>> import fedmcmc
    >>> posterior = fedmcmc.Posterior(lambda t: -0.5 * t**2, lambda t, x: -0.5 * (x - t) ** 2)
    >>> kernel = fedmcmc.dsgld(posterior, step_size=0.01, num_local_steps=2)
    >>> name_of(kernel)
    'dsgld'
    >>> name_of(fedmcmc.faults(kernel, drop=0.1))
    'faults(dsgld)'
    """
    family = type(kernel).__name__
    if not type(kernel).__module__.startswith("fedmcmc."):
        return family  # a user's own, which may have the name of one of the package's
    if family not in AROUND and holds_augmented(kernel):
        return f"augment({name_of(without_augmented(kernel))})"
    return NAMES[family](kernel) if family in NAMES else family


def _kind(block: Any) -> str:
    return type(block).__name__


def _relay(kernel: Any) -> str:
    algorithms = dict.fromkeys(("FullGradient", "Minibatch"), "dsgld") | {"Conducive": "fsgld"}
    name = algorithms.get(_kind(kernel.estimator), "relay")
    return "sgld" if name == "dsgld" and kernel.participation.pooled else name


def _langevin(kernel: Any) -> str:
    plain = dict.fromkeys(("FullGradient", "Minibatch"), "lsd")
    algorithms = plain | {"FixedPoint": "lsd_star", "Svrg": "lsd_pp"}
    name = algorithms.get(_kind(kernel.estimator), "langevin")
    if _kind(kernel.preconditioner) == "Rms":
        return "psgld" if name == "lsd" and kernel.participation.pooled else "langevin"
    return name


def _averaging(kernel: Any) -> str:
    estimator = kernel.estimator
    for wrapper in ("Noisy", "Scaffold"):
        estimator = estimator.estimator if _kind(estimator) == wrapper else estimator
    if _kind(estimator) not in ("FullGradient", "Minibatch"):
        return "averaging"
    return {"EulerMaruyama": "fa_ld", "Leapfrog": "fa_hmc"}.get(
        _kind(kernel.integrator), "averaging"
    )


def _pseudo_gradients(kernel: Any) -> str:
    algorithms = {"Displacement": "fed_avg", "PosteriorDelta": "fed_pa"}
    whole = _kind(kernel.estimator) in ("FullGradient", "Minibatch", "Epochs")
    return algorithms.get(_kind(kernel.delta), "pseudo_gradients") if whole else "pseudo_gradients"


def _compressed(kernel: Any) -> str:
    inner = name_of(kernel.kernel)
    quantized = {"lsd": "Quantize", "lsd_star": "Quantize", "lsd_pp": "Memory"}
    langevin = _kind(kernel.kernel) == "Langevin"  # `lsd` of latents is another
    if langevin and quantized.get(inner) == _kind(kernel.compressor):
        return f"q{inner}"
    return f"compress({inner})"


def _within(transform: str) -> Callable[[Any], str]:
    return lambda kernel: f"{transform}({name_of(kernel.kernel)})"


AROUND = ("Compressed", "Faulty", "Secured", "Sequence")
"""Families of kernels around others."""
CAVITIES = {"site": "fed_ep", "average": "fed_sep", "power": "fed_sep", "global": "adf"}
NAMES: dict[str, Callable[[Any], str]] = {
    "Averaging": _averaging,
    "Compressed": _compressed,
    "Consensus": lambda kernel: "consensus" if _kind(kernel.estimator) == "Noisy" else "dg_sgld",
    "EnsembleKernel": lambda kernel: (
        "fed_be" if _kind(kernel.estimator) in ("FullGradient", "Minibatch") else "ensemble"
    ),
    "Faulty": _within("faults"),
    "FederatedGibbs": lambda kernel: "fed_gibbs",
    "GaussianMetropolis": lambda kernel: "gaussian_mh",
    "HamiltonianMonteCarlo": lambda kernel: "mala" if kernel.max_integration_steps == 1 else "hmc",
    "JointLangevin": lambda kernel: "lsd",
    "Langevin": _langevin,
    "MultipleTry": lambda kernel: "multiple_try",
    "Natural": lambda kernel: CAVITIES.get(kernel.cavity, "natural"),
    "PseudoGradients": _pseudo_gradients,
    "RefreshedRelay": lambda kernel: "fsgld",
    "Relay": _relay,
    "Secured": _within("secure_sum"),
    "Sequence": lambda kernel: f"sequence({', '.join(map(name_of, kernel.kernels))})",
}
"""A name from a kernel, by the family that it belongs to."""
