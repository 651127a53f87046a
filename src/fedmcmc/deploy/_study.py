"""Study: agreement of sites and their server, made before anything runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import Partial, keystr, tree_leaves_with_path
from jax.typing import ArrayLike

from fedmcmc.data import STUDY_KEYS, Dictionary, FederatedData, Levels
from fedmcmc.deploy._columns import (
    DICTIONARY_KEYS,
    check_keys,
    checked_levels,
    columns_of_dictionary,
    describe_rows,
    read_columns,
    wide_shapes,
)
from fedmcmc.deploy._frames import Refused, digest_of
from fedmcmc.deploy._masks import check_same_for_sites, check_settings, grid_of, num_colluding
from fedmcmc.deploy._names import check_printable, check_site_names, keys_within
from fedmcmc.deploy._row_ranges import RowRange, agreed_sites, describe_num_rows, read_sites
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
from fedmcmc.types import ArrayTree, Client, FederatedKernel, Federation, Posterior, as_functions

if TYPE_CHECKING:
    from fedmcmc.deploy.secure import MaskGroup

SETUP = ("CommonExpansions", "Expansions", "Falls", "OwnExpansions", "ScoreCovariances")
"""Kernels of `fedmcmc.whiten` and `fedmcmc.surrogates`, for `Study.asks`."""
FIT = ("Evaluations", "Expansions", "HamiltonianMonteCarlo", "Natural")
"""Kernels of `fedmcmc.fit`, for `Study.asks`."""
MAX_ROWS = 2**31 - 1
"""Largest number of rows of all sites together, because positions of rows are int32."""
SCHEDULED_ROUNDS = 64
"""Rounds in which the digests of kernels compare schedules."""


@dataclass(frozen=True, eq=False, repr=False)
class Study:
    """Agreement of the sites and the server of a study, made before anything runs.

    Parameters
    ----------
    name
        Name of the study.
    posterior
        Source of the model: ``"package.module:name"`` in an installed package, or
        ``"file.py:name"`` in a file of `folder`. The name belongs to a `Posterior` or to a function
        ``settings -> Posterior``. Each source is read once, at its first use, and the bytes that
        were read are hashed and run. Packages in the working directory or in `folder` count only if
        the program has imported them, or if ``PYTHONPATH`` has that folder as an absolute path.
    sites
        Number of rows of each site by name, in the order of the clients; or the smallest and the
        largest number, so that the site reports its number when it joins. All parties see it.
    rows
        Shapes and types of one row: a tree of ``jax.ShapeDtypeStruct``. Integers of fewer than 32
        bits become int32.
    kernels
        Sources of kernels by name, in the form of `posterior`, for functions ``(posterior,
        settings) -> FederatedKernel``.
    asks
        Names of kernel classes that the server may send with its own numbers, and of gradient
        estimators that these kernels may use instead of full gradients, such as ``"Minibatch"``:
        ``deploy.FIT`` for `fedmcmc.fit`, ``deploy.SETUP`` for `fedmcmc.whiten` and surrogates.
        Under masks only names from ``deploy.SUMS``.
    settings
        Settings for the functions above.
    secure
        Empty, or settings of masks. Required are ``identities``, the sites' public keys by name
        (`deploy.make_identity`), and ``rounds``, the most rounds per run. Optional are ``answers``,
        the most answers of a site to different questions in all runs; ``minimum``, the fewest
        sites; ``colluding``, the number of sites that may collude with the server; ``operator``,
        the site whose owner runs the server, which counts as one more colluding site; and
        ``resolution`` and ``max_abs``, the grid of `fedmcmc.secure_sum` for the server's questions.
        All kernels must be secure sums over all sites.
    folder
        Folder of the study's files; each party has its own. Symbolic links must not lead out of it.
    levels
        Levels of text columns by column, in the order of their codes.
    reproducible
        If true, sites draw from keys that the server sends, and draws have the bits of a simulation
        with the server's seed. All parties can then compute all noise and the rows in each
        minibatch. By default sites draw from their own secrets, and draws have the bits of a
        simulation only if clients draw nothing. Not allowed under masks.
    dictionary
        `Dictionary` in place of `rows` and `levels`, by which each site checks and codes its rows.
    row_ranges
        Ranges of numbers of rows by site, taken from `sites`.

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
    rows: ArrayTree = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    asks: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    secure: Mapping[str, Any] = field(default_factory=dict)
    folder: str | Path = "."
    levels: Mapping[str, Levels] = field(default_factory=dict)
    reproducible: bool = False
    dictionary: Dictionary | None = None
    row_ranges: Mapping[str, RowRange] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return the name of the study, its sites and its kernels."""
        runs = ", ".join([*self.kernels, *self.asks]) or "nothing"
        sites = ", ".join(f"{name} {describe_num_rows(self, name)}" for name in self.sites)
        masks = ", under masks" * bool(self.secure)
        return f"Study({self.name!r}; rows per site: {sites}; runs {runs}{masks})"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"The name of a study must be text, got {self.name!r}.")
        for name, value in read_sites(self.sites, self.row_ranges).items():
            object.__setattr__(self, name, value)
        allowed = askable_kernels() | askable_estimators()
        check_names(self.asks, allowed, f"asks of the study {self.name!r}")
        if self.dictionary is not None:
            for name, value in columns_of_dictionary(self).items():
                object.__setattr__(self, name, value)
        if not jax.tree.leaves(self.rows):
            raise ValueError("rows must hold the shape and the type of at least one column.")
        object.__setattr__(self, "rows", wide_shapes(self.rows))
        object.__setattr__(self, "levels", checked_levels(self.levels, self.rows))
        self._check_names()
        for where in (self.posterior, *self.kernels.values()):
            if where.count(":") != 1:
                raise ValueError(
                    f"The source {where!r} must be 'package.module:name' or 'file.py:name'."
                )
        total = sum(self.sites.values())
        if total > MAX_ROWS:
            raise ValueError(
                f"The sites of the study {self.name!r} have {total:,} rows together, but a study "
                f"can have at most {MAX_ROWS:,}."
            )
        try:
            json.dumps(self.settings)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The settings of the study {self.name!r} must be numbers, texts, true or false, "
                f"lists and tables ({error}): write dates as texts."
            ) from None
        if not isinstance(self.reproducible, bool):
            raise ValueError(f"reproducible must be true or false, got {self.reproducible!r}.")
        if self.secure:
            check_settings(self.secure, self.sites, self.asks)
            if self.reproducible:
                raise ValueError(
                    f"The study {self.name!r} has masks (secure) and reproducible = true. A party "
                    "that has the sites' random keys could compute single messages from sums. "
                    "Remove reproducible, or remove the table secure."
                )

    def _check_names(self) -> None:
        """Raise `ValueError` unless all names are printable, because owners read them."""
        columns = [keystr(path, simple=True) for path, _ in tree_leaves_with_path(self.rows)]
        declared = {} if self.dictionary is None else self.dictionary.columns
        levels = [*self.levels.values(), *(column.levels for column in declared.values())]
        check_printable(
            {
                "the study": [self.name],
                "a source": [self.posterior, *self.kernels.values()],
                "a site": self.sites,
                "a column": [*columns, *declared],
                "a unit": [column.unit for column in declared.values()],
                "a description": [column.description for column in declared.values()],
                "a level": [level for names in levels for level in names],
                "a kernel": self.kernels,
                "a kernel in asks": self.asks,
                "a setting": keys_within(self.settings),
            }
        )
        check_site_names(self.sites)

    @classmethod
    def read(cls, path: str | Path) -> "Study":
        """Return the study in a TOML file of its folder; raise `ValueError` if it is not valid."""
        path = Path(path)
        content = read_toml(path)
        has_dictionary = "columns" in content
        required = ("name", "posterior", "sites", "columns" if has_dictionary else "rows")
        tables = ("sites", "kernels", "settings", "secure")
        keys = DICTIONARY_KEYS if has_dictionary else ("columns",)
        check_keys(content, required, ("asks", "reproducible", *tables, *keys), str(path))
        for name in tables:
            if not isinstance(content.get(name, {}), dict):
                raise ValueError(f"{path}: {name} must be a table, got {content[name]!r}.")
        columns = read_columns(content, path)
        content = {key: x for key, x in content.items() if key in ("sites", *STUDY_KEYS)}
        return cls(**content | columns, folder=path.parent)

    def to_dict(self) -> dict[str, Any]:
        """Return the agreement in the form of the study's file, with the SHA-256 of sources."""
        return {
            "name": self.name,
            "posterior": self.posterior,
            "sites": agreed_sites(self),
            "rows": describe_rows(self.rows),
            "kernels": dict(self.kernels),
            "asks": list(self.asks),
            "settings": dict(self.settings),
            "secure": dict(self.secure),
            "reproducible": self.reproducible,
            "files": {name: source.digest for name, source in self._sources.items()},
            **({"levels": {k: list(v) for k, v in self.levels.items()}} if self.levels else {}),
            **({} if self.dictionary is None else {"dictionary": self.dictionary.to_dict()}),
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the agreement, with the contents of the study's files.

        It is computed without running the files, so that owners can compare it first.
        """
        sites = [*map(list, agreed_sites(self).items())]  # in the order of the clients
        text = json.dumps(self.to_dict() | {"sites": sites}, sort_keys=True)
        return digest_of(text.encode())

    @cached_property
    def consortium(self) -> "MaskGroup":
        """Group of the study's sites, for masks.

        Its document is the study with digests of the kernels and versions of the software. Raise
        `ValueError` if a sum over these sites would not hide a single message.
        """
        from fedmcmc.deploy.secure import MaskGroup, transcript

        built = json.dumps([self.kernel_digests, software()], sort_keys=True).encode()
        return MaskGroup(
            transcript("fedmcmc/study/1", bytes.fromhex(self.digest), built),
            tuple(bytes.fromhex(self.secure["identities"][site]) for site in self.sites),
            self.secure.get("minimum", 1),
            num_colluding(self.secure),
        )

    @property
    def sources(self) -> list[str]:
        """Files of the study, and modules with their packages, of the model and the kernels."""
        return list_sources((self.posterior, *self.kernels.values()))

    @cached_property
    def _sources(self) -> dict[str, Source]:
        """Sources by name, with the contents that were read at the first use."""
        return {name: read_source(self.name, self.folder, name) for name in self.sources}

    def path(self, source: str) -> Path:
        """Return the file of a source of the model or of a kernel.

        Raise `ValueError` if a source cannot be read, or is a package that is not installed.
        """
        return self._sources[source].path

    @cached_property
    def _modules(self) -> dict[str, ModuleType]:
        return {name: load_source(self._sources, name) for name in self._sources}

    def found(self, where: str) -> Any:
        """Return the object ``"file.py:name"``; raise `ValueError` if it does not exist."""
        source, _, name = where.partition(":")
        value = getattr(self._modules.get(source), name, None)
        if value is None:
            raise ValueError(f"The files of the study {self.name!r} have no {where}.")
        return value

    @cached_property
    def model(self) -> Posterior:
        """Model of the study, from its files."""
        model = self.found(self.posterior)
        if not isinstance(model, Posterior) and callable(model):
            model = model(dict(self.settings))
        if not isinstance(model, Posterior):
            raise ValueError(
                f"{self.posterior} must be a Posterior, or a function of the settings that returns "
                f"one; got {type(model).__name__}."
            )
        return as_functions(model)

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """Functions of the model by name, nested functions included (of `fedmcmc.marginal`)."""
        leaves = tree_leaves_with_path(self.model, is_leaf=lambda x: isinstance(x, Partial))
        named = {
            keystr(path, simple=True, separator="."): fn
            for path, fn in leaves
            if isinstance(fn, Partial)
        }
        named |= {name: fn for name, fn in self.model._asdict().items() if fn is not None}
        return {name: plain(fn) for name, fn in named.items()}

    def kernel(self, name: str) -> FederatedKernel:
        """Return a kernel of the study; raise `ValueError` if no kernel has this name."""
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
        """Digests of the numbers and the structure of the study's kernels, by name."""
        return {name: kernel_digest(kernel) for name, kernel in self._built.items()}

    def _name_of(self, kernel: FederatedKernel) -> str | None:
        digest = kernel_digest(kernel)
        return next((name for name, d in self.kernel_digests.items() if d == digest), None)

    def adapt_kernel(self, kernel: FederatedKernel) -> FederatedKernel:
        """Return the kernel that sites run in place of `kernel`.

        This is the study's kernel with the same numbers and structure, so that the server uses the
        functions of its sites. Any other kernel is returned unchanged, or under masks as a secure
        sum.
        """
        name = self._name_of(kernel)
        if name is not None:
            return self._built[name]
        if not self.secure or is_secured(kernel):
            return kernel
        grid = grid_of(self.secure)
        secured = secure_sum(kernel, resolution=2.0**-grid.digits, max_abs=grid.max_abs)
        return as_functions(secured)

    def words_of(self, kernel: FederatedKernel) -> tuple[Any, bytes]:
        """Return a kernel as a message to sites: its name, or words and numbers.

        Under masks the words describe the kernel without its secure sum, which sites add. Raise
        `Refused` if the study neither has the kernel nor allows its class.
        """
        name = self._name_of(kernel)
        if name is not None:
            return {"named": name}, b""
        if self.secure:
            grid = grid_of(self.secure)
            inner = without_secure_sum(kernel, grid)
            if inner is None:
                raise Refused(
                    f"Under masks the study {self.name!r} rounds the server's questions to steps "
                    f"of 2**{-grid.digits} up to {grid.max_abs:g} (secure.resolution, "
                    "secure.max_abs): pass the kernel without fedmcmc.secure_sum."
                )
            kernel = inner
        self._check_class(type(kernel).__qualname__)
        words, body = to_words(kernel, self.functions)
        self._check_classes(words)
        return words, body

    def kernel_of(self, words: object, body: bytes) -> FederatedKernel:
        """Return the kernel that `words_of` described.

        Raise `Refused` if the study does not allow the kernel, and `FrameError` if words and
        numbers do not describe a kernel.
        """
        if isinstance(words, dict) and isinstance(words.get("named"), str):
            if words["named"] not in self.kernels:
                raise Refused(f"The study {self.name!r} has no kernel {words['named']!r}.")
            return self.kernel(words["named"])
        self._check_classes(words)
        if self.secure:
            check_same_for_sites(words)
        kernel: FederatedKernel = from_words(words, body, self.functions)
        masked = self.secure and isinstance(kernel, FederatedKernel)
        return self.adapt_kernel(kernel) if masked else kernel

    def _check_classes(self, words: object) -> None:
        """Raise `Refused` unless the study allows the kernels and estimators in words."""
        self._check_class(name_of_class(words))
        names = class_names(words)
        for name in sorted(names & askable_kernels().keys()):
            self._check_class(name)
        for name in sorted(names & askable_estimators().keys() - {*self.asks}):
            raise Refused(
                f"The server's {name_of_class(words)} holds the gradient estimator {name!r}, but "
                f"for questions of the server the study {self.name!r} allows full gradients only. "
                f"Put the kernel into the study's files, or add {name!r} to asks."
            )

    def _check_class(self, name: str) -> None:
        if name not in self.asks:
            raise Refused(
                f"The study {self.name!r} does not allow the kernel {name!r}. It allows the "
                f"kernels {sorted(self.kernels)} of its files, with the numbers in its settings, "
                f"and the classes {sorted(self.asks)} (asks)."
            )

    @cached_property
    def federation(self) -> Federation:
        """Public information on the clients."""
        return self.data_like.federation

    @cached_property
    def data_like(self) -> FederatedData:
        """Data of all sites with shapes in place of rows, for tracing."""
        sizes = np.fromiter(self.sites.values(), np.int32)
        total = int(sizes.sum())
        rows = jax.tree.map(lambda s: jax.ShapeDtypeStruct((total, *s.shape), s.dtype), self.rows)
        starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)
        shares = (sizes / total).astype(jnp.result_type(float))
        with jax.ensure_compile_time_eval():  # cached, so never tracers
            start, size, share = (jnp.asarray(table) for table in (starts, sizes, shares))
            return FederatedData(rows, start, size, share, int(sizes.max()))

    def client(self, index: int, rows: ArrayTree) -> Client:
        """Return a client with its own rows only, padded by `_pad_rows`."""
        data, zero = self.data_like, jnp.zeros((), jnp.int32)
        share = data.share[index]
        padded = jax.tree.map(lambda leaf: _pad_rows(leaf, data.max_size), rows)
        return Client(
            padded,
            zero,
            data.size[index],
            jnp.asarray(index, jnp.int32),
            share,
            jnp.ones((), share.dtype),
            data.max_size,
        )

    @property
    def client_like(self) -> Client:
        """Shapes of the result of `client`."""
        row = jax.tree.map(lambda s: jax.ShapeDtypeStruct((1, *s.shape), s.dtype), self.rows)
        shapes: Client = jax.eval_shape(lambda rows: self.client(0, rows), row)
        return shapes


def kernel_digest(kernel: FederatedKernel) -> str:
    """Return a digest of a kernel's numbers and structure, with the names of its functions.

    The contents of functions are in the study's files, whose hashes the parties compare.
    """
    kernel = schedules.tabulate(as_functions(kernel), 0, SCHEDULED_ROUNDS, 0)
    return digest_of(json.dumps(describe(kernel), sort_keys=True).encode())


def software() -> dict[str, str]:
    """Return the versions and JAX settings that must be the same for all parties."""
    options = {
        "64-bit floats": "jax_enable_x64",
        "partitionable random numbers": "jax_threefry_partitionable",
    }
    settings = {name: str(getattr(jax.config, option, None)) for name, option in options.items()}
    return {name: versions()[name] for name in ("fedmcmc", "jax")} | settings


def _pad_rows(leaf: ArrayLike, size: int) -> Array:
    """Return rows followed by values that no step may read: NaN, or a type's largest number."""
    leaf = jnp.asarray(leaf)
    is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
    value = jnp.nan if is_float else True if leaf.dtype == bool else jnp.iinfo(leaf.dtype).max
    padding = jnp.full((size - leaf.shape[0], *leaf.shape[1:]), value, leaf.dtype)
    return jnp.concatenate([leaf, padding])
