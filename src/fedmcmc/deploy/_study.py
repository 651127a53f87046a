"""A study: what sites and their server agree on before anything runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fedmcmc._types import ArrayTree, Client, FederatedKernel, Federation, Posterior, as_functions
from fedmcmc.data import FederatedData, Levels
from fedmcmc.deploy._columns import check_keys, checked_levels, read_columns, wide_shapes
from fedmcmc.deploy._frames import Refused, digest_of
from fedmcmc.deploy._masks import check_alike, check_settings, grid_of, num_colluding
from fedmcmc.deploy._names import check_printable, check_site_names
from fedmcmc.deploy._settings import check_names, read_toml
from fedmcmc.deploy._sources import Source, list_sources, load_source, read_source
from fedmcmc.deploy._words import (
    askable_estimators,
    askable_kernels,
    class_names,
    from_words,
    name_of_class,
    plain,
    to_words,
)
from fedmcmc.pytrees import schedules
from fedmcmc.storage import describe, versions
from fedmcmc.transforms import is_secured, secure_sum, without_secure_sum

SETUP = ("CommonExpansions", "Expansions", "Falls", "OwnExpansions", "ScoreCovariances")
"""What `fedmcmc.whiten` and `fedmcmc.surrogates` ask sites for, for `Study.asks`."""
FIT = ("Evaluations", "Expansions", "HamiltonianMonteCarlo", "Natural")
"""What `fedmcmc.fit` asks sites for, for `Study.asks`."""
MAX_ROWS = 2**31 - 1
"""Rows that all sites of a study have together at most, since positions of rows are int32."""
SCHEDULED_ROUNDS = 64
"""Rounds in which the schedules of two kernels are compared."""


@dataclass(frozen=True, eq=False, repr=False)
class Study:
    """What the sites of a study and its server agree on before anything runs.

    Parameters
    ----------
    name
        Of the study.
    posterior
        Where the model is: ``"package.module:name"`` of an installed package, or
        ``"file.py:name"`` of a file in `folder`. A `Posterior`, or ``settings -> Posterior``.
        Sources are read once, at their first use, and what was read is hashed and run. Packages
        are not taken from the working directory or `folder`, unless the program has imported them
        or ``PYTHONPATH`` names that folder by an absolute path.
    sites
        Rows of each site, by name, in the order of the clients. Sizes are known to all.
    rows
        One row's shapes and types: a tree of ``jax.ShapeDtypeStruct``. Integers of fewer than 32
        bits become int32.
    kernels
        Kernels by name, each found as the model is: ``(posterior, settings) -> FederatedKernel``.
    asks
        Names of kernel classes that the server may fill with numbers of its own, and of gradient
        estimators that these may then hold in place of full gradients, such as ``"Minibatch"``
        (``deploy.FIT`` for `fedmcmc.fit`, ``deploy.SETUP`` for `fedmcmc.whiten` and
        `fedmcmc.surrogates`; under masks ``deploy.SUMS`` at most). Without these, sites run
        `kernels` alone.
    settings
        Passed to the functions above.
    secure
        Empty, or what the masks of secure sums depend on: ``identities``, the sites' public keys by
        name (`deploy.make_identity`); ``rounds``, which a run may have at most; and if wanted
        ``answers``, to different questions, which a site gives at most in all runs; ``minimum``,
        the sites that must be there; ``colluding``, the sites that may tell the server all they
        know; ``operator``, the site whose owner runs the server, which counts as one more of them;
        ``resolution`` and ``most``, as of `fedmcmc.secure_sum`, of what `asks` allows. All
        kernels of the study must then be secure sums over all sites.
    folder
        Where files are looked for; each party has its own. Files lie within it, also where
        symbolic links lead.
    levels
        Levels of text columns in their order, by column. Sites code text by these.
    reproducible
        Whether sites draw from keys that the server sends, so that draws have the same bits as a
        simulation with the server's seed. All parties can then compute all noise, and know which
        rows are in each minibatch. By default sites draw from secrets of their own, and only
        kernels whose clients draw nothing have the bits of a simulation. Not under masks.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> study = Study(
    ...     name="heights",
    ...     posterior="model.py:posterior",
    ...     sites={"bern": 5, "basel": 3},
    ...     rows=jax.ShapeDtypeStruct((), jnp.float32),
    ... )
    >>> study.federation.num_rows
    8
    """

    name: str
    posterior: str
    sites: Mapping[str, int]
    rows: ArrayTree
    kernels: Mapping[str, str] = field(default_factory=dict)
    asks: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    secure: Mapping[str, Any] = field(default_factory=dict)
    folder: str | Path = "."
    levels: Mapping[str, Levels] = field(default_factory=dict)
    reproducible: bool = False

    def __repr__(self) -> str:
        """Name the study, its sites and what runs there."""
        runs = ", ".join([*self.kernels, *self.asks]) or "nothing"
        sites = ", ".join(f"{name} {num}" for name, num in self.sites.items())
        masks = ", under masks" * bool(self.secure)
        return f"Study({self.name!r}; rows per site: {sites}; runs {runs}{masks})"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"The name of a study must be text, got {self.name!r}.")
        if not isinstance(self.sites, Mapping) or not self.sites:
            raise ValueError(
                f"sites must be a mapping of names to numbers of rows, such as "
                f'{{"bern": 120, "basel": 80}}, got {self.sites!r}.'
            )
        for site, num in self.sites.items():
            if not isinstance(site, str) or not site or type(num) is not int or num < 1:
                raise ValueError(
                    f"sites must give each site's number of rows, a whole number of at least 1, "
                    f"got {num!r} for {site!r}."
                )
        known = askable_kernels() | askable_estimators()
        check_names(self.asks, known, f"asks of the study {self.name!r}")
        if not jax.tree.leaves(self.rows):
            raise ValueError("rows must say the shapes and types of one row.")
        object.__setattr__(self, "rows", wide_shapes(self.rows))
        object.__setattr__(self, "levels", checked_levels(self.levels, self.rows))
        self._check_names()
        for where in (self.posterior, *self.kernels.values()):
            if where.count(":") != 1:
                raise ValueError(
                    f"{where!r} names nothing: give 'package.module:name' or 'file.py:name'."
                )
        total = sum(self.sites.values())
        if total > MAX_ROWS:
            raise ValueError(
                f"The sites of the study {self.name!r} have {total:,} rows together, and a study "
                f"has at most {MAX_ROWS:,}."
            )
        try:
            json.dumps(self.settings)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The settings of the study {self.name!r} must be numbers, texts, truth values, "
                f"lists and tables ({error}): write dates as texts."
            ) from None
        if not isinstance(self.reproducible, bool):
            raise ValueError(f"reproducible must be true or false, got {self.reproducible!r}.")
        if self.secure:
            check_settings(self.secure, self.sites, self.asks)
            if self.reproducible:
                raise ValueError(
                    f"The study {self.name!r} has masks (secure) and reproducible = true: who "
                    "knows the sites' keys could compute single messages from sums. Remove "
                    "reproducible, or remove the table secure."
                )

    def _check_names(self) -> None:
        """Raise `ValueError` unless all names are printable, since owners read them."""
        columns = jax.tree_util.tree_leaves_with_path(self.rows)
        check_printable(
            {
                "the study": [self.name],
                "a source": [self.posterior, *self.kernels.values()],
                "a site": self.sites,
                "a column": [jax.tree_util.keystr(path, simple=True) for path, _ in columns],
                "a level": [level for levels in self.levels.values() for level in levels],
                "a kernel": self.kernels,
                "a kernel in asks": self.asks,
                "a setting": _keys(self.settings),
            }
        )
        check_site_names(self.sites)

    @classmethod
    def read(cls, path: str | Path) -> "Study":
        """Return the study in a TOML file, whose own folder is that of the study's files.

        Raises
        ------
        ValueError
            If it holds no study.
        """
        path = Path(path)
        given = read_toml(path)
        wanted = ("name", "posterior", "sites", "rows")
        tables = ("sites", "kernels", "settings", "secure")
        check_keys(given, wanted, ("asks", "reproducible", *tables), str(path))
        for name in tables:
            if not isinstance(given.get(name, {}), dict):
                raise ValueError(f"{path}: {name} must be a table, got {given[name]!r}.")
        rows, levels = read_columns(given.pop("rows"), path)
        return cls(**given, rows=rows, levels=levels, folder=path.parent)

    def to_dict(self) -> dict[str, Any]:
        """Return what the parties agree on, as `read` takes it, with the SHA-256 of files."""
        return {
            "name": self.name,
            "posterior": self.posterior,
            "sites": dict(self.sites),
            "rows": _described(self.rows),
            "kernels": dict(self.kernels),
            "asks": list(self.asks),
            "settings": dict(self.settings),
            "secure": dict(self.secure),
            "reproducible": self.reproducible,
            "files": {name: source.digest for name, source in self._sources.items()},
        } | ({"levels": {k: list(v) for k, v in self.levels.items()}} if self.levels else {})

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that the parties agree on, the study's files included.

        It does not run them: an owner compares it with what was approved before anything is run.
        """
        sites = [[name, num] for name, num in self.sites.items()]  # their order is the clients'
        text = json.dumps(self.to_dict() | {"sites": sites}, sort_keys=True)
        return digest_of(text.encode())

    @cached_property
    def consortium(self) -> Any:
        """Whose messages masks hide among whom: a `secure.MaskGroup`.

        Its document is the study, with what its kernels come out as and the software's versions.

        Raises
        ------
        ValueError
            If a sum over these sites would not hide a single message.
        """
        from fedmcmc.deploy.secure import MaskGroup, transcript

        known = json.dumps([self.kernel_digests, software()], sort_keys=True).encode()
        return MaskGroup(
            transcript("fedmcmc/study/1", bytes.fromhex(self.digest), known),
            tuple(bytes.fromhex(self.secure["identities"][site]) for site in self.sites),
            self.secure.get("minimum", 1),
            num_colluding(self.secure),
        )

    @property
    def sources(self) -> list[str]:
        """The files, modules and their packages that the model and the kernels are in."""
        return list_sources((self.posterior, *self.kernels.values()))

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """The sources by name, as they were read at their first use."""
        return {name: read_source(self.name, self.folder, name) for name in self.sources}

    def path(self, source: str) -> Path:
        """Return the file that a source of the model or of a kernel was read from.

        Raises
        ------
        ValueError
            If a source cannot be read, or is a package that is not installed.
        """
        return self._sources[source].path

    @cached_property
    def _modules(self) -> dict[str, ModuleType]:
        return {name: load_source(self._sources, name) for name in self._sources}

    def found(self, where: str) -> Any:
        """Return what has this name in one of the study's files: ``"file.py:name"``.

        Raises
        ------
        ValueError
            If it is in none of them.
        """
        source, _, name = where.partition(":")
        found = getattr(self._modules.get(source), name, None)
        if found is None:
            raise ValueError(f"The files of the study {self.name!r} have no {where}.")
        return found

    @cached_property
    def model(self) -> Posterior:
        """The model, from the study's files."""
        found = self.found(self.posterior)
        if not isinstance(found, Posterior) and callable(found):
            found = found(dict(self.settings))
        if not isinstance(found, Posterior):
            raise ValueError(
                f"{self.posterior} must be a Posterior or make one of the settings, got "
                f"{type(found).__name__}."
            )
        return as_functions(found)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The model's functions by name, also those within them (of `fedmcmc.marginal`)."""
        within = jax.tree_util.tree_leaves_with_path(
            self.model, is_leaf=lambda x: isinstance(x, Partial)
        )
        named = {
            jax.tree_util.keystr(path, simple=True, separator="."): fn
            for path, fn in within
            if isinstance(fn, Partial)
        }
        named |= {name: fn for name, fn in self.model._asdict().items() if fn is not None}
        return {name: plain(fn) for name, fn in named.items()}

    def kernel(self, name: str) -> FederatedKernel:
        """Return a kernel of the study, from its files.

        Raises
        ------
        ValueError
            If there is none of this name.
        """
        if name not in self.kernels:
            raise ValueError(
                f"The study {self.name!r} has no kernel {name!r}, only {sorted(self.kernels)}."
            )
        return self._built[name]

    @cached_property
    def _built(self) -> dict[str, FederatedKernel]:
        return {
            name: as_functions(self.found(where)(self.model, dict(self.settings)))
            for name, where in self.kernels.items()
        }

    @cached_property
    def kernel_digests(self) -> dict[str, str]:
        """Digests of the study's kernels: their numbers and structure."""
        return {name: kernel_digest(kernel) for name, kernel in self._built.items()}

    def _name_of(self, kernel: FederatedKernel) -> str | None:
        digest = kernel_digest(kernel)
        return next((n for n, own in self.kernel_digests.items() if own == digest), None)

    def adapt_kernel(self, kernel: FederatedKernel) -> FederatedKernel:
        """Return a kernel as sites run it: the study's with these numbers and this structure.

        So that the server computes with the functions that its sites have. Another kernel is
        returned as it is, and under masks as a secure sum.
        """
        name = self._name_of(kernel)
        if name is not None:
            return self._built[name]
        if not self.secure or is_secured(kernel):
            return kernel
        grid = grid_of(self.secure)
        secured = secure_sum(kernel, resolution=2.0**-grid.digits, most=grid.most)
        return as_functions(secured)

    def words_of(self, kernel: FederatedKernel) -> tuple[Any, bytes]:
        """Return how a site is told of a kernel: by its name, or in words and numbers.

        Under masks the words are those of the kernel whose secure sum the sites make themselves.

        Raises
        ------
        Refused
            If it is none of the study's, and sites may not be asked for it.
        """
        name = self._name_of(kernel)
        if name is not None:
            return {"named": name}, b""
        if self.secure:
            grid = grid_of(self.secure)
            inner = without_secure_sum(kernel, grid)
            if inner is None:
                raise Refused(
                    f"Under masks the study {self.name!r} sums what the server asks in steps of "
                    f"2**{-grid.digits} up to {grid.most:g} (secure.resolution, secure.most): give "
                    "the kernel as it is, without fedmcmc.secure_sum."
                )
            kernel = inner
        self._check_class(type(kernel).__qualname__)
        words, body = to_words(kernel, self.functions)
        self._check_classes(words)
        return words, body

    def kernel_of(self, words: Any, body: bytes) -> FederatedKernel:
        """Return the kernel that `words_of` told of.

        Raises
        ------
        Refused
            If it is not one that this study allows.
        FrameError
            If words and numbers are no kernel.
        """
        if isinstance(words, dict) and isinstance(words.get("named"), str):
            if words["named"] not in self.kernels:
                raise Refused(f"The study {self.name!r} has no kernel {words['named']!r}.")
            return self.kernel(words["named"])
        self._check_classes(words)
        if self.secure:
            check_alike(words)
        kernel: FederatedKernel = from_words(words, body, self.functions)
        masked = self.secure and isinstance(kernel, FederatedKernel)
        return self.adapt_kernel(kernel) if masked else kernel

    def _check_classes(self, words: Any) -> None:
        """Raise `Refused` unless the study allows the kernels and estimators in words."""
        self._check_class(name_of_class(words))
        names = class_names(words)
        for name in sorted(names & askable_kernels().keys()):
            self._check_class(name)
        for name in sorted(names & askable_estimators().keys() - {*self.asks}):
            raise Refused(
                f"The server's {name_of_class(words)} holds the gradient estimator {name!r}, and "
                f"in its own questions the study {self.name!r} allows full gradients only. Put the "
                f"kernel into the study's files, or name {name!r} in asks."
            )

    def _check_class(self, name: str) -> None:
        if name not in self.asks:
            raise Refused(
                f"A kernel {name!r} is none that the study {self.name!r} allows: it has the "
                f"kernels {sorted(self.kernels)}, exactly as its files and settings make them, "
                f"and asks for {sorted(self.asks)}."
            )

    @cached_property
    def federation(self) -> Federation:
        """What everybody knows of the clients."""
        return self.hollow.federation

    @cached_property
    def hollow(self) -> FederatedData:
        """The shapes of all sites' rows, without any row: for tracing alone."""
        sizes = np.fromiter(self.sites.values(), np.int32)
        total = int(sizes.sum())
        rows = jax.tree.map(lambda s: jax.ShapeDtypeStruct((total, *s.shape), s.dtype), self.rows)
        start = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
        share = (sizes / total).astype(jnp.result_type(float))
        with jax.ensure_compile_time_eval():  # kept, and so never of a program that is traced
            begin, size, part = (jnp.asarray(table) for table in (start, sizes, share))
            return FederatedData(rows, begin, size, part, int(sizes.max()))

    def client(self, index: int, rows: ArrayTree) -> Client:
        """Return one client as a step sees it; its rows lie alone, with NaN where others' would."""
        hollow, zero = self.hollow, jnp.zeros((), jnp.int32)
        share = hollow.share[index]
        padded = jax.tree.map(lambda leaf: _padded(leaf, hollow.max_size), rows)
        return Client(
            padded,
            zero,
            hollow.size[index],
            jnp.asarray(index, jnp.int32),
            share,
            jnp.ones((), share.dtype),
            hollow.max_size,
        )

    @property
    def client_like(self) -> Client:
        """The shapes of what `client` returns."""
        one = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), self.rows)
        shapes: Client = jax.eval_shape(lambda rows: self.client(0, rows), one)
        return shapes


def kernel_digest(kernel: FederatedKernel) -> str:
    """Return a digest of a kernel's numbers and structure; functions count by their names.

    What they compute is in the study's files, whose hashes are compared.
    """
    kernel = schedules.tabulate(as_functions(kernel), 0, SCHEDULED_ROUNDS, 0)
    return digest_of(json.dumps(describe(kernel), sort_keys=True).encode())


def software() -> dict[str, str]:
    """Return what must be the same everywhere for a run's numbers to be the same."""
    options = {
        "64-bit floats": "jax_enable_x64",
        "partitionable random numbers": "jax_threefry_partitionable",
    }
    settings = {name: str(getattr(jax.config, option, None)) for name, option in options.items()}
    return {name: versions()[name] for name in ("fedmcmc", "jax")} | settings


def _padded(leaf: Any, size: int) -> Any:
    """Return rows with what no step may read behind them: NaN, or a type's largest number."""
    leaf = jnp.asarray(leaf)
    floats = jnp.issubdtype(leaf.dtype, jnp.floating)
    nothing = jnp.nan if floats else True if leaf.dtype == bool else jnp.iinfo(leaf.dtype).max
    rest = jnp.full((size - leaf.shape[0], *leaf.shape[1:]), nothing, leaf.dtype)
    return jnp.concatenate([leaf, rest])


def _keys(table: Any) -> list[Any]:
    """Return the keys of a table and of the tables within it."""
    if isinstance(table, Mapping):
        return [*table, *(key for part in table.values() for key in _keys(part))]
    parts = table if isinstance(table, list | tuple) else ()
    return [key for part in parts for key in _keys(part)]


def _described(tree: ArrayTree) -> Any:
    named = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path): [str(np.dtype(leaf.dtype)), list(leaf.shape)]
        for path, leaf in named
    }
