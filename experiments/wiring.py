"""Builds the functions that a config names by ``_target_``, and checks their settings first.

Values that exist only once data and model are there are passed by name: a function with a required
parameter ``posterior``, ``data``, ``example``, ``rng_key``, ``position``, ``centre`` or
``reference`` that its config leaves out receives it (see `Supplies`).
"""

import functools
import inspect
import sysconfig
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra
import jax
import optax
from hydra.errors import InstantiationException
from omegaconf import OmegaConf

import fedmcmc
from experiments import data as tables
from experiments import setup
from fedmcmc.pytrees import trees

__all__ = ["ConfigError", "Supplies", "build", "check", "locate", "short", "start_of", "takes"]

MODE_DIMENSIONS = 256
HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")
EXAMPLES = {
    "surrogates": "{_target_: fedmcmc.surrogates.taylor, _partial_: true}",
    "compressor": "{_target_: fedmcmc.quantize, num_levels: 16}",
    "participation": "{_target_: fedmcmc.participation.uniform, cohort_size: 2}",
}
"""Examples of arguments that have to be built, for messages."""


class ConfigError(ValueError):
    """Config that cannot be run; the message is one sentence for the terminal."""


class Supplies:
    """Values that a config leaves out, by the name of the parameter that receives them.

    Parameters
    ----------
    data
        `fedmcmc.FederatedData`; also supplied as ``example``.
    posterior
        The model; ``None`` while the model itself is built.
    """

    def __init__(
        self, data: fedmcmc.FederatedData, posterior: fedmcmc.Posterior | None = None
    ) -> None:
        self.data = self.example = data
        self.posterior = posterior
        self.rng_key = jax.random.key(0)  # fixed: setup does not depend on the seed of a run

    NAMES = (
        *("posterior", "data", "example", "rng_key"),
        *("position", "centre", "center", "reference", "laplace_scale"),
    )

    @functools.cached_property
    def position(self) -> Any:
        """A position to start from."""
        return start_of(self.posterior)(self.rng_key)

    @functools.cached_property
    def centre(self) -> Any:
        """The posterior's mode."""
        return fedmcmc.surrogates.mode(self.posterior, self.data, self.position).position

    @property
    def center(self) -> Any:
        """The posterior's mode."""
        return self.centre

    @functools.cached_property
    def laplace_scale(self) -> Any:
        """``S`` with ``S S'`` the covariance of the Gaussian at the mode, raveled."""
        from experiments.qlsd import truth  # imports BlackJAX, which starts JAX

        potential_fn = functools.partial(setup.potential, self.posterior, self.data.rows)
        return truth.laplace_scale(potential_fn, self.centre)

    @property
    def reference(self) -> Any:
        """The mode, or in more than 256 dimensions, where it is expensive, the start."""
        return (
            self.centre if trees.num_elements(self.position) <= MODE_DIMENSIONS else self.position
        )


def start_of(posterior: Any) -> Callable[[Any], Any]:
    """Return the function that draws a start from a key."""
    if posterior.init_fn is None:
        raise ConfigError("The model has no start: give its fedmcmc.Posterior an init_fn.")
    return posterior.init_fn


def locate(path: str, where: str) -> Any:
    """Return the object at an import path.

    Raises
    ------
    ConfigError
        If it cannot be imported.
    """
    try:
        return hydra.utils.get_object(path)
    except Exception as error:
        reason = short(error.__cause__ or error)
        raise ConfigError(f"{where}={path} cannot be imported: {reason}") from error


def short(error: BaseException) -> str:
    """Return the first line of an error's message, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def describe(error: BaseException) -> str:
    """Return an error's message, shortened, and the line of the user's code that raised it."""
    name = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
    packages = [str(Path(file).parent) for file in (__file__, fedmcmc.__file__)]
    libraries = (*packages, sysconfig.get_path("stdlib"))
    lines = [
        f" ({Path(frame.filename).name}, line {frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_file()
        and not frame.filename.startswith(libraries)
        and "site-packages" not in frame.filename
    ]
    return f"{name}{short(error)}{lines[-1] if lines else ''}"


def takes(function: Any, names: tuple[str, ...]) -> bool:
    """Return whether a function has a parameter with one of these names."""
    return not {*names}.isdisjoint(_parameters(function) or ())


def check(node: Any, where: str, supplied: tuple[str, ...] = Supplies.NAMES) -> None:
    """Check names and types of all arguments in a config, before anything is built.

    Parameters
    ----------
    node
        Plain containers, without interpolations.
    where
        Key of the node in the config, for messages.
    supplied
        Names of parameters that may be left out.

    Raises
    ------
    ConfigError
        If a target cannot be imported, an argument is unknown or missing, or has another type.
    """
    for key, value in _children(node):
        check(value, _join(where, key), supplied)
    if not isinstance(node, Mapping) or "_target_" not in node:
        return
    target = node["_target_"]
    if not isinstance(target, str) or target == "???":
        raise ConfigError(f"{where}._target_ must be an import path, got {target}.")
    parameters = _parameters(locate(target, where))
    if parameters is None:
        return
    keywords = {key: value for key, value in node.items() if key not in HYDRA_KEYS}
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key, value in keywords.items():
            if key not in named:
                options = ", ".join(n for n in named if n not in supplied)
                raise ConfigError(
                    f"{_join(where, key)}={value}: {target} has no argument {key!r}, "
                    f"its arguments are {options or 'none'}."
                )
    hints = _hints(locate(target, where))
    positional = len(node.get("_args_", ()))
    missing = []
    for i, (name, parameter) in enumerate(named.items()):
        argument = keywords.get(name)
        required = parameter.default is parameter.empty and i >= positional
        if argument == "???" or (
            required and argument is None and (name not in supplied) and not node.get("_partial_")
        ):
            missing.append(_join(where, name) + _example(_join(where, name)))
        elif name in keywords and name in hints:
            _check_type(_join(where, name), argument, hints[name])
    if missing:
        raise ConfigError(f"{where}={target} needs {', '.join(missing)}.")


def _example(where: str) -> str:
    """Return an example of an argument that has to be built, if there is one."""
    name = where.rpartition(".")[2]
    return f", for instance '{where}={EXAMPLES[name]}'" if name in EXAMPLES else ""


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        yield from ((k, v) for k, v in node.items() if k not in HYDRA_KEYS or k == "_args_")
    elif isinstance(node, list):
        yield from enumerate(node)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions in C have none
        return None


def _hints(function: Any) -> dict[str, Any]:
    called = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(called, localns={"optax": optax, "fedmcmc": fedmcmc})
    except Exception:  # annotations that cannot be evaluated are not checked
        return {}


def _check_type(where: str, value: Any, hint: Any) -> None:
    """Raise if a plain value has a type that an annotation of plain types excludes."""
    if not isinstance(value, bool | int | float | str) and value is not None:
        return
    if isinstance(value, str) and value.startswith("$"):  # filled in later; see `study.load`
        return
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    if any(_admits(option, value) for option in options):
        return
    expected = " or ".join(dict.fromkeys(map(_in_words, options)))
    raise ConfigError(f"{where} must be {expected or hint}{_example(where)}, got {value!r}.")


def _admits(option: Any, value: Any) -> bool:
    if typing.get_origin(option) is typing.Literal:
        return value in typing.get_args(option)
    if option is type(None):
        return value is None
    if option in (bool, str):
        return isinstance(value, option)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if option is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if option in (float, jax.Array):
        return number
    # Functions, optimizers and the like are built from a target.
    return option is Any or isinstance(option, typing.TypeVar)


def _in_words(option: Any) -> str:
    if typing.get_origin(option) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(option)))
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    plain[jax.Array] = "a number"
    if option is type(None):
        return "null"
    name = getattr(option, "__name__", None) or str(option)
    name = "a function" if name == "Callable" else name
    built = callable(option) or isinstance(option, type)
    return plain.get(option, f"{'{_target_: ...} that builds ' if built else ''}{name}")


def build(node: Any, where: str, supplies: Supplies | None) -> Any:
    """Build what a config names; hand every function the supplied values that it needs.

    Without `supplies` nothing is handed over, and ``_partial_`` has Hydra's meaning.

    Raises
    ------
    ConfigError
        If a function refuses its arguments.
    """
    try:
        if not isinstance(node, Mapping):
            return node
        marked = node if supplies is None else _mark(node)[0]
        built = hydra.utils.instantiate(OmegaConf.create(marked), _convert_="all")
        return built if supplies is None else _fill(built, supplies)
    except (ConfigError, tables.DataNotFound):
        raise
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, tables.DataNotFound):
            raise cause from error
        raise ConfigError(f"{where}: {describe(cause or error)}") from error
    except Exception as error:  # functions of users may raise anything
        raise ConfigError(f"{where}: {describe(error)}") from error


def _needs(function: Any) -> list[str]:
    """Return the names of supplied values that a function cannot be called without."""
    parameters = _parameters(function) or {}
    return [
        name
        for name, parameter in parameters.items()
        if name in Supplies.NAMES and parameter.default is parameter.empty
    ]


def _mark(node: Any) -> tuple[Any, bool]:
    """Delay calls that need supplied values; return also whether any call is delayed."""
    if isinstance(node, list):
        marked = [_mark(value) for value in node]
        return [value for value, _ in marked], any(delayed for _, delayed in marked)
    if not isinstance(node, Mapping):
        return node, False
    children = {key: _mark(value) for key, value in node.items()}
    values = {key: value for key, (value, _) in children.items()}
    delayed = any(child for _, child in children.values())
    if "_target_" in node:
        needs = set(_needs(locate(node["_target_"], "_target_"))) - {
            key for key, value in node.items() if value is not None
        }
        delayed = delayed or bool(needs)
        if delayed:
            values["_partial_"] = True
    return values, delayed


def _fill(value: Any, supplies: Supplies) -> Any:
    """Call what was delayed, innermost first."""
    if isinstance(value, list):
        items = [_fill(item, supplies) for item in value]
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        filled = {key: _fill(item, supplies) for key, item in value.items()}
        return filled if any(filled[key] is not item for key, item in value.items()) else value
    if not isinstance(value, functools.partial):
        return value
    keywords = {key: _fill(item, supplies) for key, item in value.keywords.items()}
    arguments = [_fill(item, supplies) for item in value.args]
    missing = [
        name
        for i, name in enumerate(_needs(value.func))
        if keywords.get(name) is None and i >= len(arguments)
    ]
    delayed = any(keywords[key] is not item for key, item in value.keywords.items()) or any(
        a is not b for a, b in zip(arguments, value.args, strict=True)
    )
    if not missing and not delayed:
        return value
    keywords |= {name: getattr(supplies, name) for name in missing}
    return value.func(*arguments, **keywords)
