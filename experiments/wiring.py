"""Builds the functions that a config names by ``_target_``, and checks their settings first.

Values that exist only once data and model are there are passed by name: a function receives those
of `Supplies` that it requires and its config leaves out.
"""

import contextlib
import functools
import inspect
import sysconfig
import traceback
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hydra
import jax
import optax

import fedmcmc
from experiments import data as tables
from experiments import reference, setup
from fedmcmc.pytrees import trees

MODE_DIMENSIONS = 256
HYDRA_KEYS = ("_target_", "_partial_", "_recursive_", "_args_")
EXAMPLES = {
    "surrogates": "{_target_: fedmcmc.surrogates.taylor, _partial_: true}",
    "compressor": "{_target_: fedmcmc.quantize, num_levels: 16}",
    "participation": "{_target_: fedmcmc.participation.uniform, cohort_size: 2}",
}
"""Examples of arguments that have to be built, for messages."""
PLAIN = {
    bool: ("true or false", (bool,)),
    str: ("text", (str,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    jax.Array: ("a number", (int, float)),
    type(None): ("null", (type(None),)),
}
"""Annotations of plain values: in words, and the types in a config."""


class ConfigError(ValueError):
    """Config that cannot be run; the message is one sentence for the terminal."""


class Supplies:
    """Model and data, and what functions in configs may receive of them, by parameters' names.

    `posterior` is ``None`` while it is built. `test` has held-out rows, and `other` rows of another
    data set, for predictions out of distribution; they are ``None`` if there are none.
    """

    NAMES = (
        *("posterior", "data", "example", "rng_key"),
        *("position", "centre", "reference", "laplace_scale"),
    )

    def __init__(
        self,
        data: fedmcmc.FederatedData,
        posterior: Any = None,
        test: Any = None,
        other: Any = None,
    ) -> None:
        self.data = self.example = data
        self.posterior, self.test, self.other = posterior, test, other
        self.rng_key = jax.random.key(0)  # fixed: setup does not depend on the seed of a run

    @functools.cached_property
    def position(self) -> Any:
        """A position to start from."""
        return self.posterior.init_fn(self.rng_key)

    @functools.cached_property
    def centre(self) -> Any:
        """The posterior's mode."""
        return fedmcmc.surrogates.mode(self.posterior, self.data, self.position).position

    @functools.cached_property
    def laplace_scale(self) -> Any:
        """``S`` with ``S S'`` the covariance of the Gaussian at the mode, raveled."""
        potential_fn = functools.partial(setup.potential, self.posterior, self.data.rows)
        return reference.laplace_scale(potential_fn, self.centre)

    @property
    def reference(self) -> Any:
        """The mode, or in more than 256 dimensions, where it is expensive, the start."""
        expensive = trees.num_elements(self.position) > MODE_DIMENSIONS
        return self.position if expensive else self.centre


def locate(path: str, where: str) -> Any:
    """Return the object at an import path; raise `ConfigError` if it cannot be imported."""
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

    `where` is the key of the node in the config, for messages, and `supplied` has the names of
    parameters that may be left out.
    """
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, Mapping):
        return
    keywords = _keywords(node)
    for key, value in keywords.items():
        check(value, _join(where, key), supplied)
    if "_target_" not in node:
        return
    target, positional = node["_target_"], node.get("_args_", [])
    check(positional, where, supplied)
    if not isinstance(target, str) or target == "???":
        raise ConfigError(f"{where}._target_ must be an import path, got {target}.")
    parameters = _parameters(locate(target, where))
    if parameters is None:
        return
    named = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    unknown = [key for key in keywords if key not in named]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        key, options = unknown[0], ", ".join(n for n in named if n not in supplied)
        raise ConfigError(
            f"{_join(where, key)}={keywords[key]}: {target} has no argument {key!r}, "
            f"its arguments are {options or 'none'}."
        )
    missing = []
    for name, parameter in list(named.items())[len(positional) :]:
        argument, label = keywords.get(name), _join(where, name)
        optional = parameter.default is not parameter.empty or name in supplied
        if argument == "???" or (argument is None and not optional and not node.get("_partial_")):
            missing.append(label + _example(label))
        elif name in keywords:
            _check_type(label, argument, parameter.annotation)
    if missing:
        raise ConfigError(f"{where}={target} needs {', '.join(missing)}.")


def _keywords(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in HYDRA_KEYS}


def _example(where: str) -> str:
    """Return an example of an argument that has to be built, if there is one."""
    name = where.rpartition(".")[2]
    return f", for instance '{where}={EXAMPLES[name]}'" if name in EXAMPLES else ""


def _join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def _parameters(function: Any) -> Mapping[str, inspect.Parameter] | None:
    names = {"optax": optax, "fedmcmc": fedmcmc}
    for options in ({"eval_str": True, "locals": names}, {}):
        with contextlib.suppress(Exception):  # functions in C have no signature
            return inspect.signature(function, **options).parameters
    return None


def _check_type(where: str, value: Any, annotation: Any) -> None:
    """Raise if a plain value has a type that an annotation of plain types excludes."""
    unknown = annotation is inspect.Parameter.empty or isinstance(annotation, str)
    if unknown or not isinstance(value, bool | int | float | str | None):
        return
    if isinstance(value, str) and value.startswith("$"):  # filled in later; see `study.load`
        return
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    options = typing.get_args(annotation) if union else (annotation,)
    expected = [_in_words(option, value) for option in options]
    if all(expected):
        listed = " or ".join(dict.fromkeys(expected))
        raise ConfigError(f"{where} must be {listed}{_example(where)}, got {value!r}.")


def _in_words(option: Any, value: Any) -> str:
    """Return what an option of an annotation admits, or nothing if it admits the value."""
    literals = typing.get_args(option) if typing.get_origin(option) is typing.Literal else ()
    words, kinds = PLAIN.get(option, ("", ()))
    is_any = option in (Any, object) or isinstance(option, typing.TypeVar)
    if is_any or value in literals or type(value) in kinds:
        return ""
    # Functions, optimizers and the like are built from a target.
    name = getattr(option, "__name__", str(option))
    name = "a function" if name == "Callable" else name
    target = f"{{_target_: ...}} that builds {name}" if callable(option) else name
    return words or " or ".join(map(repr, literals)) or target


def build(node: Any, where: str, supplies: Supplies | None) -> Any:
    """Build what a config names; hand every function the supplied values that it needs.

    A function with ``_partial_: true`` is called if it needs supplied values, and returned with
    its arguments otherwise. With ``_recursive_: false`` it receives configs.
    """
    try:
        return _build(node, supplies)
    except (ConfigError, tables.DataNotFound):
        raise
    except Exception as error:  # functions of users may raise anything
        raise ConfigError(f"{where}: {describe(error)}") from error


def _build(node: Any, supplies: Supplies | None) -> Any:
    if isinstance(node, list):
        return [_build(item, supplies) for item in node]
    if not isinstance(node, Mapping):
        return node
    keywords = _keywords(node)
    if node.get("_recursive_", True):
        keywords = {key: _build(value, supplies) for key, value in keywords.items()}
    if "_target_" not in node:
        return keywords
    function = locate(node["_target_"], "_target_")
    positional = _build(node.get("_args_", []), supplies)
    missing = [
        name
        for name, parameter in list((_parameters(function) or {}).items())[len(positional) :]
        if name in Supplies.NAMES and parameter.default is parameter.empty
        if keywords.get(name) is None and supplies is not None
    ]
    keywords |= {name: getattr(supplies, name) for name in missing}
    if node.get("_partial_") and not missing:
        return functools.partial(function, *positional, **keywords)
    return function(*positional, **keywords)
