"""A site: it has its own rows, answers the server's requests, and keeps its state on its disk."""

import hashlib
import json
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import wire
from fedmcmc._types import ArrayTree, FederatedKernel
from fedmcmc.compression import host_words
from fedmcmc.data import values_of
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import AuditLog, num_masked_answers
from fedmcmc.deploy._columns import rows_of_site
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy._frames import (
    JOIN_BYTES,
    PART_BYTES,
    Frame,
    FrameError,
    Refused,
    Tag,
    check_step,
    digest_of,
    pack,
    printable,
    unpack,
)
from fedmcmc.deploy._limits import MOST_BYTES, Limits, Outflow, numbers_per_message
from fedmcmc.deploy._masks import MASKS, STAGES, SiteMasks
from fedmcmc.deploy._private import NEW_STUDY_ADVICE
from fedmcmc.deploy._programs import chain_of, first_states, select, stacked, steps
from fedmcmc.deploy._secret import SiteSecret
from fedmcmc.deploy._shapes import Shapes, max_num_bytes, shapes_of_run
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._words import from_words
from fedmcmc.interop import check_indices
from fedmcmc.kernels import Points
from fedmcmc.pytrees import trees
from fedmcmc.random import generator_named
from fedmcmc.rounds import ClientKeys
from fedmcmc.surrogates import nonfinite_answer

LOG = logging.getLogger("fedmcmc.deploy")
MOST_REASON = 2000
"""Characters of a reason that are sent or shown."""
BYTES_PER_CHAIN = 64
"""Room in the header of a message for what it says of each chain."""
MOST_LETTERS = 64
"""Of what the server calls a run, or asks for, in the site's log."""


@dataclass
class _Run:
    """What a site has in memory of the run that it takes part in."""

    name: str
    attempt: int
    kernel: FederatedKernel
    num_chains: int
    generator: Any  # of the server's keys
    key_like: jax.ShapeDtypeStruct  # of the words of one of them
    keys: Array | None  # [num_chains], of a study that is reproducible
    shapes: Shapes
    readers: list[Callable[[bytes], ArrayTree]]  # of broadcasts, one per phase
    told: str  # a digest of all this, as the server told it
    num_numbers: list[int]  # in a message and report of one chain, one per phase
    # What the server has counted, leaves [num_chains, ...]; `None` before the first round.
    state: ArrayTree = None
    answered: tuple[int, int] = (-1, -1)  # round and phase of the last answer
    pending: ArrayTree = None  # the state after that answer, if the server counts it
    # Digests of all that the server sent and that made these two states. Clients' keys depend on
    # them, and under masks they must be the same at all sites.
    origin: str = ""
    pending_origin: str = ""
    # The state encoded last, which the next round encodes again.
    encoded: tuple[ArrayTree, bytes] = (None, b"")

    def encode(self, state: ArrayTree) -> bytes:
        """Return a state of all chains as bytes."""
        if state is not self.encoded[0]:
            self.encoded = state, wire.encode([state])
        return self.encoded[1]

    @cached_property
    def draws(self) -> bool:
        """Whether clients draw from keys that only the site knows."""
        return self.keys is None and not trees.is_empty([p.private for p in self.shapes.phases])

    @property
    def keeps(self) -> bool:
        """Whether this kernel's clients keep anything between rounds."""
        return bool(jax.tree.leaves(self.shapes.client))


class Site:
    """One site of a study.

    It answers what the server asks about its own rows. All that leaves it are sums over rows, in
    the form of the kernel's messages, and a few numbers (`StepInfo`: bits, the gradient's norm).

    Parameters
    ----------
    study
        What the parties agreed on.
    name
        Of this site in the study.
    rows
        Its rows, leaves ``[n, ...]``, or a table. Text becomes codes of the study's levels.
    folder
        On a disk of its own, where it keeps its state.
    approved
        What the site's owner has agreed to, an `Approval` or a study's digest; nothing of a study's
        files is run unless they are those.
    most_numbers, min_rows, min_batch, min_sites, refused_columns, most_bytes
        Limits that the site's owner sets, as `Limits` describes them.
    identity
        The site's Ed25519 private key, or the file that holds it (`deploy.make_identity`), for a
        study under masks.
    log
        An `AuditLog`, in which every message is before it leaves.

    Raises
    ------
    Refused
        If the study is another than approved, or asks for what the site does not give.
    ValueError
        If a limit is out of range, if rows are not those of the study, if a text column has no
        levels in the study or a value is none of them, or if the identity is not the one that the
        study names.
    """

    def __init__(
        self,
        study: Study,
        name: str,
        rows: Any,
        *,
        folder: str | Path,
        approved: Approval | str | None = None,
        most_numbers: int | None = None,
        min_rows: int | None = None,
        min_batch: int | None = None,
        min_sites: int | None = None,
        refused_columns: Sequence[str] = (),
        most_bytes: int = MOST_BYTES,
        identity: Any = None,
        log: AuditLog | None = None,
    ) -> None:
        self.limits = Limits(
            most_numbers, min_rows, min_batch, min_sites, refused_columns, most_bytes
        )
        if isinstance(approved, Approval):
            approved.check(study, name)
        elif approved is not None and study.digest != approved:
            raise Refused(
                f"The study {study.name!r} is not the one approved: its digest is {study.digest}, "
                f"approved is {approved}. Compare its files and settings with what was agreed."
            )
        if name not in study.sites:
            raise Refused(f"The study {study.name!r} has no site {name!r}.")
        self.study, self.name = study, name
        # The server sees by it whether two processes of a site run.
        self.process = secrets.token_hex(16)
        self.index = list(study.sites).index(name)
        self.disk = Disk(folder)
        self.disk.claim(name)
        own = rows_of_site(study, name, rows)
        self.limits.check_study(study, name)
        self.client = study.client(self.index, own)
        self._run: _Run | None = None
        self._secret: SiteSecret | None = None  # until a client draws
        self._checked = False  # whether columns index the model within its axes
        self._bad_row = ""  # what the log has of a row that is not finite
        self._last = (b"", b"")  # a request, and what was answered
        self._masks: SiteMasks | None = None
        if study.secure:
            if identity is None:
                raise Refused(f"The study {study.name!r} asks for masks: give {name} its identity.")
            self._masks = SiteMasks(study, self.index, identity, self.disk.folder / MASKS)
            if log is not None:
                self._check_masks(log)
        self._outflow = Outflow(name, self.disk, log, self.limits)
        self._log, self._hello = log, b""
        unknown = self.limits.unknown_columns(study)
        if unknown:
            LOG.warning("%s refuses columns that %r lacks: %s", name, study.name, unknown)
        if log is not None:
            log.write("started", site=name, study=study.digest, unknown_columns=unknown)

    def _check_masks(self, log: AuditLog) -> None:
        """Raise unless the folder knows of all answers under masks that the log has."""
        assert self._masks is not None
        logged = num_masked_answers(log.path, self.study.digest)
        known = self._masks.num_answers
        if logged is not None and (known is None or known < logged):
            raise Refused(
                f"By its log {self.name} has answered under masks in the study "
                f"{self.study.name!r}, {logged} questions, and its folder {self.disk.folder} knows "
                f"of {known or 0}, as after a backup was restored. {NEW_STUDY_ADVICE}"
            )

    @property
    def state(self) -> ArrayTree:
        """What this site keeps of the run that it answers, leaves ``[num_chains, 1, ...]``.

        Latents of its groups, for one, which it tells nobody. ``None`` before a run.
        """
        run = self._run
        if run is None or run.pending is None:
            return None
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], run.pending)

    def hello(self) -> bytes:
        """Return what the site says of itself when it joins."""
        study = self.study
        header = {"site": self.name, "study": study.digest, "software": software()}
        header["process"] = self.process
        header["kernels"] = study.kernel_digests
        if self._masks is not None:
            header["session"] = self._masks.session
        data = Frame("hello", header).to_bytes()
        if self._log is not None and data != self._hello:  # it calls for as long as nobody answers
            self._hello = data
            self._log.write("hello", **_sent(data))
        return data

    def answer(self, data: bytes) -> bytes | None:
        """Return the answer to a message of the server.

        Bytes that are no message of the server's, or not of this run, are answered with an error
        and change nothing. If anything else goes wrong the site's log has it, and the server is
        told what kind of error it was.

        Raises
        ------
        Refused
            If the server does not take this site.
        """
        tag: list[Any] | None = None
        asked = ""
        try:
            frame = Frame.parse(data)
            if frame.kind == "refused":
                if frame.header.get("process") != self.process:
                    return None  # to another process of this site, over whose connection it came
                raise Refused(printable(frame.header.get("reason"), MOST_REASON))
            if frame.kind == "welcome":
                if frame.header.get("another_ended") is True:
                    LOG.warning(
                        "%s: another, older process of this site ran and was ended by the server. "
                        "Run one process per site.",
                        self.name,
                    )
                return None
            asked, tag = frame.kind, list(frame.tag)
            kind, header, body = self._answered(frame, data)
        except FrameError as error:
            reason = printable(error, MOST_REASON)
            LOG.warning("%s: a message was not understood: %s", self.name, reason)
            kind, header, body = "error", {"reason": reason}, b""
        except _Unready:
            kind, header, body = "unready", {}, b""
        except _Declined as error:
            reason = printable(error, MOST_REASON)
            LOG.warning("%s: declined: %s", self.name, reason)
            kind, header, body = "declined", {"reason": reason}, b""
        answer = Frame(kind, {"tag": tag, **header}, body).to_bytes()
        if self._log is not None:
            run = () if tag is None else (printable(tag[0], MOST_LETTERS), *tag[1:])
            where = Tag(*run)._asdict() if run else {}
            if self._masks is not None and self._masks.num_answers is not None:
                where["answers"] = self._masks.num_answers
            asked = printable(asked, MOST_LETTERS)
            self._log.write(kind, asked=asked, **where, **_sent(answer))
        return answer

    def _answered(self, frame: Frame, data: bytes) -> tuple[str, dict[str, Any], bytes]:
        try:
            match frame.kind:
                case "begin":
                    self._begin(frame)
                case "setup":
                    return "answer", {}, self._set_up(frame)
                case "start":
                    self._start(frame)
                case "resume":
                    self._resume(frame)
                case "step":
                    if data != self._last[0]:
                        self._last = (data, self._step(frame))
                    return "answer", {}, self._last[1]
                case stage if stage in STAGES and self._masks is not None:
                    part = self._masks.take_part(stage, frame.tag.attempt, frame.body)
                    return "answer", {}, part
                case _:
                    kind = printable(repr(frame.kind), MOST_LETTERS)
                    raise FrameError(f"The server asks for {kind}, which is unknown.")
        except (FrameError, _Unready):
            raise
        except Refused as error:
            raise _Declined(str(error)) from error
        except Exception as error:
            kind = printable(repr(frame.kind), MOST_LETTERS)
            # What it says stays here: it may hold numbers of rows.
            LOG.exception("%s: a message of the kind %s", self.name, kind)
            raise FrameError(
                f"{type(error).__name__} at a message of the kind {kind}; the log of "
                f"{self.name} says more."
            ) from None
        return "ready", {}, b""

    def _begin(self, frame: Frame) -> None:
        """Take up a run: which kernel, which keys, positions of which shapes."""
        tag, header, run = frame.tag, frame.header, self._run
        if run is not None and (run.name, run.attempt) == (tag.run, tag.attempt):
            return
        reproducible = self.study.reproducible
        words, *numbers = unpack(frame.body, 1 + reproducible)
        kernel = self.study.kernel_of(header["kernel"], words)
        if not isinstance(kernel, FederatedKernel):
            raise FrameError("What the server asks for is no kernel.")
        position = from_words(header["position"], None, self.study.functions)
        generator = generator_named(header["generator"])
        key_like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=generator)))
        num_chains = header["chains"]
        if type(num_chains) is not int or num_chains < 1:
            raise FrameError("A run has at least one chain.")
        keys = None
        if reproducible:
            like = jax.ShapeDtypeStruct((num_chains, *key_like.shape), key_like.dtype)
            keys = jax.random.wrap_key_data(jnp.asarray(_read(numbers[0], like)), impl=generator)
        try:
            shapes = shapes_of_run(kernel, self.study, position)
        except ValueError as error:
            raise Refused(str(error)) from error
        self._check_length(shapes, num_chains)
        self.limits.check_run(kernel, self.study, self.name, shapes.first.position)
        self._check_indices()
        readers = [wire.reader(phase.broadcast) for phase in shapes.phases]
        told = digest_of(json.dumps(header | {"tag": None}, sort_keys=True).encode(), frame.body)
        numbers_sent = [
            numbers_per_message(phase.code, phase.report, masked=False) for phase in shapes.phases
        ]
        fields = (kernel, num_chains, generator, key_like, keys, shapes, readers, told)
        self._run = run = _Run(tag.run, tag.attempt, *fields, numbers_sent)
        if not run.keeps:
            run.state = run.pending = shapes.client  # nothing
        self._last = (b"", b"")

    def _check_length(self, shapes: Shapes, num_chains: int) -> None:
        """Raise where broadcasts of a run are longer than this site accepts."""
        broadcasts = (shapes.first, *(phase.broadcast for phase in shapes.phases))
        largest = max(map(max_num_bytes, broadcasts))
        num = num_chains * (PART_BYTES + BYTES_PER_CHAIN + largest) + JOIN_BYTES
        most = self.limits.most_bytes
        if num > most:
            raise Refused(
                f"The messages of this run have up to {num:,} bytes, and {self.name} accepts at "
                f"most {most:,}: set most_bytes in [limits] of its site.toml to that."
            )

    def _check_indices(self) -> None:
        """Raise where a column of this site's rows indexes the model outside of an axis."""
        if self._checked:
            return
        rows = jax.tree.map(lambda leaf: leaf[: int(self.client.size)], values_of(self.client.rows))
        check_indices(self.study.model, rows, lambda row: f"row {row} of {self.name}")
        self._checked = True

    def _current(self, frame: Frame) -> _Run:
        run, tag = self._run, frame.tag
        if run is None or (run.name, run.attempt) != (tag.run, tag.attempt):
            raise _Unready
        return run

    def _set_up(self, frame: Frame) -> bytes:
        """Return this site's terms of a sum that the server needs before the first round."""
        run, number = self._current(frame), frame.tag.phase
        shapes = run.shapes
        if not 0 <= number < len(shapes.setup):
            raise FrameError("A phase of the set-up that this kernel does not have.")
        num = run.num_chains
        self._check_session(frame)
        first = stacked([_read(part, shapes.first) for part in unpack(frame.body, num)])
        weights = jnp.ones(num, self.client.share.dtype)
        nothing_drawn = ClientKeys((), ())
        inputs = (nothing_drawn, first, (), weights, jnp.ones(num, bool))
        codes = steps(run.kernel, self.client, *inputs, number=number, setup=True)[0]
        if self._masks is not None:
            place, body = (0, number, len(shapes.setup), True), digest_of(frame.body)
            return self._masked(frame, place, body, "", "", words_of(run.kernel, codes))
        sent = pack(*(wire.encode(chain_of(codes, c)) for c in range(num)))
        num_numbers = num * numbers_per_message(shapes.setup[number], masked=False)
        self._outflow.add(num_numbers, f"{run.told} setup {number}", frame.body, sent)
        return sent

    def _start(self, frame: Frame) -> None:
        """Begin before the first round: what the client keeps, from its rows and the broadcast."""
        run = self._current(frame)
        if self._recalled(run):
            return
        self.disk.begin(run.name)
        like = run.shapes.phases[0].broadcast
        parts = unpack(frame.body, run.num_chains)
        broadcasts = stacked([_read(part, like) for part in parts])
        run.state = first_states(run.kernel, self.client, broadcasts)
        run.pending, run.answered = run.state, (-1, -1)
        run.origin = run.pending_origin = digest_of(b"start", run.told.encode(), frame.body)
        self._save(run)

    def _resume(self, frame: Frame) -> None:
        """Go back to the state before the round from which the server goes on.

        Of this run, or of the one that it goes on from, whose own state stays as it is.
        """
        run, round_ = self._current(frame), frame.tag.round
        if self._recalled(run):
            return
        name = str(frame.header.get("run", run.name))
        goes_back = name == run.name
        marked = self.disk.marked(name, round_, forget=goes_back)
        if marked is not None:
            origin, marked = unpack(marked, 2)
            run.state = run.pending = self._states(run, marked)  # with what was counted then
            run.origin = run.pending_origin = origin.decode()
            run.answered = tuple(frame.header["last"] or (-1, -1))
        elif self._read_state(run, name) is None or run.answered > (round_, 0):
            raise Refused(
                f"{self.name} has no state of round {round_} of this run, from which the server "
                "goes on: its folder is not that of the run."
            )
        else:
            self._settle(run, frame)
        if not goes_back:
            self.disk.begin(run.name)
        self._save(run)

    def _recalled(self, run: _Run) -> bool:
        """Return whether this site was in this very attempt before it was started again."""
        if run.state is not None:
            return True
        found = self._read_state(run)
        if found == run.attempt:
            return True
        run.state = run.pending = None
        run.answered = (-1, -1)
        return False

    def _read_state(self, run: _Run, name: str | None = None) -> int | None:
        """Read what is on the disk of a run, by default this one; return its attempt."""
        found = self.disk.read(run.name if name is None else name, 2)
        if found is None:
            return None
        header, (state, pending) = found
        run.state, run.pending = self._states(run, state), self._states(run, pending)
        run.answered = tuple(header["answered"])
        run.origin, run.pending_origin = header["origins"]
        attempt: int = header["attempt"]
        return attempt

    def _states(self, run: _Run, data: bytes) -> ArrayTree:
        like = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct((run.num_chains, *s.shape), s.dtype), run.shapes.client
        )
        return jax.tree.map(jnp.asarray, wire.decode(data, [like])[0])

    def _save(self, run: _Run) -> None:
        if run.keeps:
            origins = [run.origin, run.pending_origin]
            header = {"attempt": run.attempt, "answered": list(run.answered), "origins": origins}
            self.disk.write(run.name, header, run.encode(run.state), run.encode(run.pending))

    def _settle(self, run: _Run, frame: Frame) -> None:
        """Keep what the server has counted of the last answer, and drop the rest."""
        last, counted = frame.header["last"], frame.header["counted"]
        if last is None or tuple(last) != run.answered:
            if run.keeps and last is not None and tuple(last) > run.answered:
                raise Refused(
                    f"The server has counted an answer of {self.name} to round {last[0]} that is "
                    "not on its disk: its folder is not that of the run."
                )
            run.pending_origin = run.origin
            run.pending = run.state
            return
        if len(counted) != run.num_chains:
            raise FrameError("A message does not say of every chain what was counted.")
        if not all(counted):
            if self._masks is not None:
                raise Refused("Under masks the answers of all chains are counted, or of none.")
            run.pending = select(np.asarray(counted, bool), run.pending, run.state)
            if run.pending_origin != run.origin:  # it is not settled already
                both = (run.origin, run.pending_origin, repr([bool(chain) for chain in counted]))
                run.pending_origin = digest_of(*(part.encode() for part in both))
        run.origin = run.pending_origin
        run.state = run.pending

    def _step(self, frame: Frame) -> bytes:
        """Answer a phase of a round; the state is on the disk when this returns."""
        run, tag, header = self._current(frame), frame.tag, frame.header
        shapes, number, num = run.shapes, tag.phase, run.num_chains
        if run.state is None:
            raise _Unready
        if not 0 <= number < len(shapes.phases):
            raise FrameError("A phase that this kernel does not have.")
        check_step(header, num)
        weights, active = header["weights"], header["active"]
        if not len(weights) == len(active) == num or not any(active):
            raise FrameError("A message does not say of every chain who takes part.")
        self._check_session(frame)
        if self._masks is not None and not (all(active) and all(w == 1 for w in weights)):
            raise Refused(
                "Under masks all sites take part in all chains, with one weight: a total in which "
                "one message weighs more than the others tells that message."
            )
        sends_shared = run.keys is None and not trees.is_empty(shapes.shared)
        some = iter(unpack(memoryview(frame.body), sum(map(bool, active)) + sends_shared))
        parts = [next(some) if on else None for on in active]
        read = run.readers[number]
        heard = [None if part is None else _readable(read, part) for part in parts]
        anyone = next(broadcast for broadcast in heard if broadcast is not None)
        broadcasts = stacked([anyone if b is None else b for b in heard])
        if not np.all(np.asarray(broadcasts.round) == tag.round):
            raise FrameError("The round in a broadcast is not that of the message.")
        self._settle(run, frame)
        marks, keep = ([int(round_) for round_ in header[name]] for name in ("marks", "keep"))
        if run.keeps and marks:
            state = pack(run.origin.encode(), run.encode(run.state))
            self.disk.mark(run.name, marks, state, keep)
        weight = np.asarray(weights, self.client.share.dtype)
        # Only where it is used, as the body is long.
        is_traced = run.keeps or run.draws or self._masks is not None
        body = digest_of(frame.body) if is_traced else ""
        keys = self._keys(run, tag, body, weight, active, next(some, None))
        inputs = (keys, broadcasts, run.state, weight, np.asarray(active, bool))
        how: dict[str, Any] = dict(number=number, setup=False, generator=run.generator)
        codes, pending, reports = steps(run.kernel, self.client, *inputs, **how)
        codes, reports = jax.tree.map(np.asarray, (codes, reports))
        chains = [c for c in range(num) if active[c]]
        if self._masks is None:
            sent = pack(
                *(wire.encode(chain_of(codes, c)) for c in chains),
                *(wire.encode(chain_of(reports, c)) for c in chains),
            )
            num_numbers = len(chains) * run.num_numbers[number]
            self._outflow.add(num_numbers, f"{run.told} {tag.round} {number}", frame.body, sent)
        else:
            place = (tag.round, number, len(shapes.phases), False)
            kept = digest_of(run.encode(run.state))
            words = words_of(run.kernel, codes, reports.bits_down)
            sent = self._masked(frame, place, body, run.origin, kept, words)
        run.pending, run.answered = pending, (tag.round, number)
        if run.keeps:
            made_of = (run.origin, run.told, f"{tag.round} {number}", body, repr([weights, active]))
            run.pending_origin = digest_of(*(part.encode() for part in made_of))
        self._save(run)
        self._log_bad_row(run, broadcasts, codes)
        return sent

    def _keys(
        self,
        run: _Run,
        tag: Tag,
        body: str,
        weights: np.ndarray,
        active: list[Any],
        shared: bytes | None,
    ) -> Array | ClientKeys:
        """Return what clients draw from: words of keys of this site's secret, or the run's keys.

        `body` is a digest of the message's body, with the broadcasts of all active chains; `shared`
        are the keys of what all clients draw alike in these chains.
        """
        if run.keys is not None:
            return run.keys
        shared_words: ArrayTree = ()
        if shared is not None:
            on = np.flatnonzero(active)
            shape, dtype = run.key_like.shape, run.key_like.dtype
            shared_words = np.zeros((run.num_chains, *shape), dtype)
            shared_words[on] = _read(shared, jax.ShapeDtypeStruct((len(on), *shape), dtype))
        if trees.is_empty(run.shapes.phases[tag.phase].private):
            return ClientKeys((), shared_words)
        if self._secret is None:
            rows = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(self.client.rows)]
            context = (self.study.digest, self.name, digest_of(*rows))
            self._secret = SiteSecret(self.disk.folder, *(text.encode() for text in context))
        place = f"{tag.round} {tag.phase}"
        asked = (run.told, run.origin, place, body)
        question = digest_of(*(part.encode() for part in asked), shared or b"")
        chains = [(bytes([bool(on)]), w.tobytes()) for on, w in zip(active, weights, strict=True)]
        return ClientKeys(self._secret.keys(question.encode(), chains), shared_words)

    def _log_bad_row(self, run: _Run, broadcasts: ArrayTree, codes: ArrayTree) -> None:
        """Log once which row makes the answer to a question not finite, for the site's owner."""
        if self._bad_row or not isinstance(broadcasts.position, Points):
            return
        content, answer = (jax.tree.map(lambda leaf: leaf[0], x) for x in (broadcasts, codes))
        question: Any = run.kernel  # only questions are about points
        self._bad_row = nonfinite_answer(question.posterior, content.position, answer, self.client)
        if self._bad_row:
            LOG.warning("%s: %s", self.name, self._bad_row)

    def _check_session(self, frame: Frame) -> None:
        """Raise where a message under masks is not of this site's session."""
        if self._masks is None:
            return
        asked = frame.header.get("masks")
        if not isinstance(asked, dict):
            raise Refused(f"The study {self.study.name!r} asks for masks, and its server does not.")
        if not self._masks.session or asked.get("session") != self._masks.session:
            raise _Unready  # of before this site or another was started again

    def _masked(
        self,
        frame: Frame,
        place: tuple[int, int, int, bool],
        body: str,
        origin: str,
        kept: str,
        words: np.ndarray,
    ) -> bytes:
        """Return words ``[num_chains, num_words]`` under masks, if the site's rules allow it.

        `body` is a digest of the message's body, `origin` a digest of what made the site's state,
        and `kept` one of the state itself. A server that has one site alone go back to an earlier
        state could subtract two totals.
        """
        run, masks = self._current(frame), self._masks
        assert masks is not None
        parts = (run.told, repr(place), origin, body)
        question = digest_of(*(part.encode() for part in parts))

        def counted() -> np.ndarray:
            self._outflow.add(words.size, question, b"", words.tobytes())
            return words.reshape(-1)

        return masks.answer(
            frame.header["masks"], place, bytes.fromhex(question), kept.encode(), counted
        )


def _sent(data: bytes) -> dict[str, Any]:
    """Return what a log has of a message that leaves; the digest is that of ``sha256sum``."""
    return {"bytes": len(data), "digest": hashlib.sha256(data).hexdigest()}


class _Declined(Exception):
    """The site does not do what it is asked."""


class _Unready(Exception):
    """The site has not been told of the run.

    It was asked over a connection of which the server did not know yet that it is a new one, and
    will be told and asked again.
    """


def words_of(kernel: FederatedKernel, codes: ArrayTree, bits_down: ArrayTree = ()) -> np.ndarray:
    """Return codes ``[num_chains, num_words]``, and the bits that were needed below as a word.

    Of what clients report no more leaves a site under masks; ``()`` adds no word.

    In place of a message that is out of range a secure sum has the ends of the range, or zeros. A
    server that knows them could ask where one site alone is within the range, whose message the
    total would be. So these words are random, and their total is, too; nothing uses it, as the
    counts, the last two words of a code, say what it is. Questions that leave out places with such
    numbers are the exception.
    """
    words = host_words(codes, num_lead=1)
    if not kernel.traits.marks_range_ends:
        for chain in np.flatnonzero(words[:, -2]):
            num = words.shape[1] - 2
            words[chain, :num] = np.frombuffer(secrets.token_bytes(8 * num), np.uint64)
    below = [np.asarray(leaf).astype(np.uint64)[:, None] for leaf in jax.tree.leaves(bits_down)]
    return np.concatenate([words, *below], axis=1)


def _read(data: bytes, like: ArrayTree) -> ArrayTree:
    return _readable(partial(wire.decode, like=like), data)


def _readable(read: Callable[[bytes], ArrayTree], data: bytes) -> ArrayTree:
    try:
        return read(data)
    except ValueError as error:
        raise FrameError(str(error)) from None
