"""Site that stores its own rows and answers the server's requests."""

import hashlib
import json
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedmcmc import wire
from fedmcmc.compression import host_words
from fedmcmc.data import row_values
from fedmcmc.deploy._approval import Approval
from fedmcmc.deploy._audit import AuditLog, num_masked_answers
from fedmcmc.deploy._columns import rows_of_site
from fedmcmc.deploy._disk import Disk
from fedmcmc.deploy._frames import (
    JOIN_BYTES,
    MAX_REASON_LENGTH,
    PART_BYTES,
    Frame,
    FrameError,
    Refused,
    Tag,
    check_step,
    decode,
    digest_of,
    pack,
    printable,
    unpack,
)
from fedmcmc.deploy._limits import MAX_MESSAGE_BYTES, Limits, Outflow, numbers_per_message
from fedmcmc.deploy._masks import STAGES
from fedmcmc.deploy._private import NEW_STUDY_ADVICE
from fedmcmc.deploy._programs import run_client, stack_chains, take_chain
from fedmcmc.deploy._row_ranges import read_num_rows, with_num_rows
from fedmcmc.deploy._secret import SiteSecret
from fedmcmc.deploy._shapes import RunShapes, max_num_bytes, shapes_of_run
from fedmcmc.deploy._site_masks import MASKS, SiteMasks
from fedmcmc.deploy._site_run import SiteRun
from fedmcmc.deploy._study import Study, software
from fedmcmc.deploy._words import from_words
from fedmcmc.interop import check_indices
from fedmcmc.kernels import Question
from fedmcmc.pytrees import trees
from fedmcmc.random import generator_named
from fedmcmc.rounds import ClientKeys
from fedmcmc.surrogates import nonfinite_answer
from fedmcmc.types import ArrayTree, FederatedKernel

LOG = logging.getLogger("fedmcmc.deploy")
HEADER_BYTES_PER_CHAIN = 64
"""Largest number of bytes per chain in the header of a message."""
MAX_NAME_LENGTH = 64
"""Characters of a run's name or a request's kind that appear in the site's log."""


class Site:
    """One site of a study.

    A site answers the server's requests with its own rows. Only sums over rows leave it, in the
    form of the kernel's messages, and a few numbers from `StepInfo` (bits, norm of the gradient).

    Parameters
    ----------
    study
        Study that the parties agreed on.
    name
        Name of this site in the study.
    rows
        Rows of the site, leaves ``[n, ...]``, or a table. Text is coded by the study's levels.
    folder
        Folder on the site's disk for its state.
    approved
        `Approval` of the site's owner, or the digest of the approved study. Files of a study run
        only if they are the approved ones.
    max_numbers, min_rows, min_batch, min_sites, refused_columns, max_bytes
        Limits of the site's owner, see `Limits`.
    identity
        Ed25519 private key of the site, or its file (`deploy.make_identity`), for a study under
        masks.
    log
        `AuditLog` to which every message is written before it leaves.

    Raises
    ------
    Refused
        If the study is not the approved one, or requires more than the site allows.
    ValueError
        If a limit is out of range, if the rows do not fit the study, if a text column has no levels
        in the study or another value, or if the identity is not the one in the study.
    """

    def __init__(
        self,
        study: Study,
        name: str,
        rows: Any,
        *,
        folder: str | Path,
        approved: Approval | str | None = None,
        max_numbers: int | None = None,
        min_rows: int | None = None,
        min_batch: int | None = None,
        min_sites: int | None = None,
        refused_columns: Sequence[str] = (),
        max_bytes: int = MAX_MESSAGE_BYTES,
        identity: Any = None,
        log: AuditLog | None = None,
    ) -> None:
        self.limits = Limits(
            max_numbers, min_rows, min_batch, min_sites, refused_columns, max_bytes
        )
        if isinstance(approved, Approval):
            approved.check(study, name)
        elif approved is not None and study.digest != approved:
            raise Refused(
                f"The study {study.name!r} is not the one approved: its digest is {study.digest}, "
                f"approved is {approved}. Compare its files and settings with the agreed ones."
            )
        if name not in study.sites:
            raise Refused(f"The study {study.name!r} has no site {name!r}.")
        self.study, self.name = study, name
        # Lets the server detect two processes of one site.
        self.process = secrets.token_hex(16)
        self.index = list(study.sites).index(name)
        self.disk = Disk(folder)
        self.disk.claim(name)
        site_rows = rows_of_site(study, name, rows)
        if name in study.row_ranges:
            num = jax.tree.leaves(site_rows)[0].shape[0]
            self.study = study = with_num_rows(study, {name: num})
        self.limits.check_study(study, name)
        self.client = study.client(self.index, site_rows)
        self._run: SiteRun | None = None
        self._secret: SiteSecret | None = None  # read when a client draws for the first time
        self._has_checked_indices = False
        self._bad_row = ""  # first logged row with an answer that is not finite
        self._last_step = (b"", b"")  # request and answer
        self._masks: SiteMasks | None = None
        if study.secure:
            if identity is None:
                raise Refused(f"The study {study.name!r} uses masks: give {name} its identity.")
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
        """Raise unless the folder has a record of all masked answers that are in the log."""
        assert self._masks is not None
        num_logged = num_masked_answers(log.path, self.study.digest)
        num_stored = self._masks.num_answers
        if num_logged is not None and (num_stored is None or num_stored < num_logged):
            raise Refused(
                f"By its log {self.name} has answered {num_logged} questions under masks in the "
                f"study {self.study.name!r}, but its folder {self.disk.folder} records only "
                f"{num_stored or 0}, as after the restoration of a backup. {NEW_STUDY_ADVICE}"
            )

    @property
    def state(self) -> ArrayTree:
        """State of this site's client in the current run, leaves ``[num_chains, 1, ...]``.

        It contains, for example, the latents of the site's groups, which never leave the site.
        ``None`` before a run.
        """
        run = self._run
        if run is None or run.pending is None:
            return None
        return jax.tree.map(lambda leaf: np.asarray(leaf)[:, None], run.pending)

    def hello(self) -> bytes:
        """Return the message with which the site joins."""
        study = self.study
        header: dict[str, Any] = {"site": self.name, "study": study.digest}
        header["software"] = software()
        header["process"] = self.process
        header["kernels"] = study.kernel_digests
        if study.row_ranges:
            header["rows"] = study.sites[self.name]
        if self._masks is not None:
            header["session"] = self._masks.session
        data = Frame("hello", header).to_bytes()
        if self._log is not None and data != self._hello:  # repeated until the server answers
            self._hello = data
            self._log.write("hello", **_log_entry(data))
        return data

    def answer(self, data: bytes) -> bytes | None:
        """Return the answer to a message of the server.

        If the bytes are not a message of the server, or not of this run, the answer is an error and
        nothing changes. If another exception occurs, the site's log has it, and the server receives
        only its type.

        Raises
        ------
        Refused
            If the server does not accept this site.
        """
        tag: list[Any] | None = None
        request = ""
        try:
            frame = Frame.parse(data)
            if frame.kind == "refused":
                if frame.header.get("process") != self.process:
                    return None  # meant for another process of this site
                raise Refused(printable(frame.header.get("reason"), MAX_REASON_LENGTH))
            if frame.kind == "welcome":
                if frame.header.get("another_ended") is True:
                    LOG.warning(
                        "%s: another, older process of this site ran and was ended by the server. "
                        "Run one process per site.",
                        self.name,
                    )
                LOG.info("%s joined the run of the study %s", self.name, self.study.name)
                return None
            request, tag = frame.kind, list(frame.tag)
            kind, header, body = self._respond(frame, data)
        except FrameError as error:
            reason = printable(error, MAX_REASON_LENGTH)
            LOG.warning("%s: a message was not understood: %s", self.name, reason)
            kind, header, body = "error", {"reason": reason}, b""
        except _Unready:
            kind, header, body = "unready", {}, b""
        except _Declined as error:
            reason = printable(error, MAX_REASON_LENGTH)
            LOG.warning("%s: declined: %s", self.name, reason)
            kind, header, body = "declined", {"reason": reason}, b""
        answer = Frame(kind, {"tag": tag, **header}, body).to_bytes()
        if self._log is not None:
            place: dict[str, Any] = {}
            if tag is not None:
                place = Tag(printable(tag[0], MAX_NAME_LENGTH), *tag[1:])._asdict()
            if self._masks is not None and self._masks.num_answers is not None:
                place["answers"] = self._masks.num_answers
            request = printable(request, MAX_NAME_LENGTH)
            self._log.write(kind, asked=request, **place, **_log_entry(answer))
        return answer

    def _respond(self, frame: Frame, data: bytes) -> tuple[str, dict[str, Any], bytes]:
        """Return kind, header and body of the answer to a request."""
        masked = self._masks is not None
        try:
            match frame.kind:
                case "begin":
                    self._begin(frame)
                case "setup":
                    return "answer", {}, self._set_up(frame)
                case "start":
                    self._current_run(frame).start(self.client, frame.body)
                case "resume":
                    run = self._current_run(frame)
                    run.resume(frame.tag.round, frame.header, masked=masked)
                case "step":
                    if data != self._last_step[0]:
                        self._last_step = (data, self._step(frame))
                    return "answer", {}, self._last_step[1]
                case stage if stage in STAGES and self._masks is not None:
                    part = self._masks.take_part(stage, frame.tag.attempt, frame.body)
                    return "answer", {}, part
                case _:
                    kind = printable(repr(frame.kind), MAX_NAME_LENGTH)
                    raise FrameError(f"The server requests {kind}, which is unknown.")
        except (FrameError, _Unready):
            raise
        except Refused as error:
            raise _Declined(str(error)) from error
        except Exception as error:
            kind = printable(repr(frame.kind), MAX_NAME_LENGTH)
            # The text of the exception stays at the site: it may contain numbers from rows.
            LOG.exception("%s: a message of the kind %s", self.name, kind)
            raise FrameError(
                f"{type(error).__name__} at a message of the kind {kind}; see the log of "
                f"{self.name}."
            ) from None
        return "ready", {}, b""

    def _begin(self, frame: Frame) -> None:
        """Prepare a run from its kernel, keys and shapes of positions."""
        tag, header, run = frame.tag, frame.header, self._run
        if run is not None and (run.name, run.attempt) == (tag.run, tag.attempt):
            return
        if self.study.row_ranges:
            self._set_num_rows(read_num_rows(self.study, header.get("rows"), self.name))
        reproducible = self.study.reproducible
        kernel_numbers, *key_words = unpack(frame.body, 1 + reproducible)
        kernel = self.study.kernel_of(header["kernel"], kernel_numbers)
        if not isinstance(kernel, FederatedKernel):
            raise FrameError("The kernel in the server's message is not a kernel.")
        position = from_words(header["position"], None, self.study.functions)
        generator = generator_named(header["generator"])
        key_like = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=generator)))
        num_chains = header["chains"]
        if type(num_chains) is not int or num_chains < 1:
            raise FrameError("A run has at least one chain.")
        keys = None
        if reproducible:
            like = jax.ShapeDtypeStruct((num_chains, *key_like.shape), key_like.dtype)
            words = jnp.asarray(decode(key_words[0], like))
            keys = jax.random.wrap_key_data(words, impl=generator)
        try:
            shapes = shapes_of_run(kernel, self.study, position)
        except ValueError as error:
            raise Refused(str(error)) from error
        self._check_length(shapes, num_chains)
        self.limits.check_run(kernel, self.study, self.name, shapes.setup_broadcast.position)
        self._check_indices()
        description = json.dumps(header | {"tag": None}, sort_keys=True).encode()
        self._run = SiteRun(
            self.name,
            self.disk,
            tag.run,
            tag.attempt,
            kernel,
            num_chains,
            generator,
            key_like,
            keys,
            shapes,
            readers=[wire.make_decoder(phase.broadcast) for phase in shapes.phases],
            digest=digest_of(description, frame.body),
            num_numbers=[
                numbers_per_message(phase.code, phase.report, masked=False)
                for phase in shapes.phases
            ],
        )
        self._last_step = (b"", b"")

    def _set_num_rows(self, num_rows: dict[str, int]) -> None:
        """Set the numbers of rows of all sites, which change the client's padding and share."""
        if num_rows == self.study.sites:
            return
        size = int(self.client.size)
        rows = jax.tree.map(lambda leaf: leaf[:size], self.client.rows)
        self.study = with_num_rows(self.study, num_rows)
        self.client = self.study.client(self.index, rows)

    def _check_length(self, shapes: RunShapes, num_chains: int) -> None:
        """Raise if broadcasts of a run are longer than this site accepts."""
        broadcasts = (shapes.setup_broadcast, *(phase.broadcast for phase in shapes.phases))
        largest = max(map(max_num_bytes, broadcasts))
        num = num_chains * (PART_BYTES + HEADER_BYTES_PER_CHAIN + largest) + JOIN_BYTES
        limit = self.limits.max_bytes
        if num > limit:
            raise Refused(
                f"The messages of this run have up to {num:,} bytes, and {self.name} accepts at "
                f"most {limit:,}: set max_bytes in [limits] of its site.toml to {num}."
            )

    def _check_indices(self) -> None:
        """Raise if a column of this site's rows indexes the model outside of an axis."""
        if self._has_checked_indices:
            return
        rows = jax.tree.map(
            lambda leaf: leaf[: int(self.client.size)], row_values(self.client.rows)
        )
        check_indices(self.study.model, rows, lambda row: f"row {row} of {self.name}")
        self._has_checked_indices = True

    def _current_run(self, frame: Frame) -> SiteRun:
        run, tag = self._run, frame.tag
        if run is None or (run.name, run.attempt) != (tag.run, tag.attempt):
            raise _Unready
        return run

    def _set_up(self, frame: Frame) -> bytes:
        """Return this site's terms of a sum that the server needs before the first round."""
        run, number = self._current_run(frame), frame.tag.phase
        shapes = run.shapes
        if not 0 <= number < len(shapes.setup):
            raise FrameError(f"The kernel has no phase {number} of the set-up.")
        num = run.num_chains
        self._check_session(frame)
        broadcasts = stack_chains(
            [decode(part, shapes.setup_broadcast) for part in unpack(frame.body, num)]
        )
        weights = jnp.ones(num, self.client.share.dtype)
        no_keys = ClientKeys((), ())
        inputs = (no_keys, broadcasts, (), weights, jnp.ones(num, bool))
        codes = run_client(run.kernel, self.client, *inputs, number=number, setup=True)[0]
        if self._masks is not None:
            place, body_digest = (0, number, len(shapes.setup), True), digest_of(frame.body)
            return self._mask(frame, place, body_digest, "", "", words_of(run.kernel, codes))
        message = pack(*(wire.encode(take_chain(codes, c)) for c in range(num)))
        num_numbers = num * numbers_per_message(shapes.setup[number], masked=False)
        self._outflow.add(num_numbers, f"{run.digest} setup {number}", frame.body, message)
        return message

    def _step(self, frame: Frame) -> bytes:
        """Answer a phase of a round; the state is on the disk when this returns."""
        run, tag, header = self._current_run(frame), frame.tag, frame.header
        shapes, number, num = run.shapes, tag.phase, run.num_chains
        if run.state is None:
            raise _Unready
        if not 0 <= number < len(shapes.phases):
            raise FrameError(f"The kernel has no phase {number}.")
        check_step(header, num)
        weights, active = header["weights"], header["active"]
        if not len(weights) == len(active) == num or not any(active):
            raise FrameError("A message does not state for every chain if the site takes part.")
        self._check_session(frame)
        if self._masks is not None and not (all(active) and all(w == 1 for w in weights)):
            raise Refused(
                "Under masks all sites take part in all chains, with one weight: a total in which "
                "one message weighs more than the others reveals that message."
            )
        sends_shared = run.keys is None and not trees.is_empty(shapes.shared)
        parts = iter(unpack(memoryview(frame.body), sum(map(bool, active)) + sends_shared))
        read = run.readers[number]
        try:
            received = [read(next(parts)) if on else None for on in active]
        except ValueError as error:
            raise FrameError(str(error)) from None
        filler = next(broadcast for broadcast in received if broadcast is not None)
        broadcasts = stack_chains([filler if b is None else b for b in received])
        if not np.all(np.asarray(broadcasts.round) == tag.round):
            raise FrameError("The round in a broadcast differs from the round in its message.")
        run.settle(header, masked=self._masks is not None)
        marks, keep = ([int(round_) for round_ in header[name]] for name in ("marks", "keep"))
        if run.has_client_state and marks:
            state = pack(run.origin.encode(), run.encode(run.state))
            self.disk.mark(run.name, marks, state, keep)
        weight = np.asarray(weights, self.client.share.dtype)
        # The body is long, so its digest is computed only if something depends on it.
        is_traced = run.has_client_state or run.has_private_draws or self._masks is not None
        body_digest = digest_of(frame.body) if is_traced else ""
        keys = self._keys(run, tag, body_digest, weight, active, next(parts, None))
        inputs = (keys, broadcasts, run.state, weight, np.asarray(active, bool))
        options: dict[str, Any] = dict(number=number, setup=False, generator=run.generator)
        codes, pending, reports = run_client(run.kernel, self.client, *inputs, **options)
        codes, reports = jax.tree.map(np.asarray, (codes, reports))
        chains = [c for c in range(num) if active[c]]
        if self._masks is None:
            message = pack(
                *(wire.encode(take_chain(codes, c)) for c in chains),
                *(wire.encode(take_chain(reports, c)) for c in chains),
            )
            num_numbers = len(chains) * run.num_numbers[number]
            place_text = f"{run.digest} {tag.round} {number}"
            self._outflow.add(num_numbers, place_text, frame.body, message)
        else:
            place = (tag.round, number, len(shapes.phases), False)
            state_digest = digest_of(run.encode(run.state))
            words = words_of(run.kernel, codes, reports.bits_down)
            message = self._mask(frame, place, body_digest, run.origin, state_digest, words)
        run.pending, run.answered = pending, (tag.round, number)
        if run.has_client_state:
            chains_text = repr([weights, active])
            sources = (run.origin, run.digest, f"{tag.round} {number}", body_digest, chains_text)
            run.pending_origin = digest_of(*(source.encode() for source in sources))
        run.save()
        self._log_bad_row(run, broadcasts, codes)
        return message

    def _keys(
        self,
        run: SiteRun,
        tag: Tag,
        body: str,
        weights: np.ndarray,
        active: list[Any],
        shared: bytes | None,
    ) -> Array | ClientKeys:
        """Return the run's keys, or words of keys that are derived from this site's secret.

        `body` is a digest of the message's body, which holds the broadcasts of all active chains;
        `shared` holds the keys of these chains for draws that all clients share.
        """
        if run.keys is not None:
            return run.keys
        shared_words: ArrayTree = ()
        if shared is not None:
            on = np.flatnonzero(active)
            shape, dtype = run.key_like.shape, run.key_like.dtype
            shared_words = np.zeros((run.num_chains, *shape), dtype)
            shared_words[on] = decode(shared, jax.ShapeDtypeStruct((len(on), *shape), dtype))
        if trees.is_empty(run.shapes.phases[tag.phase].private):
            return ClientKeys((), shared_words)
        if self._secret is None:
            rows = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(self.client.rows)]
            context = (self.study.digest, self.name, digest_of(*rows))
            self._secret = SiteSecret(self.disk.folder, *(text.encode() for text in context))
        place = f"{tag.round} {tag.phase}"
        sources = (run.digest, run.origin, place, body)
        question = digest_of(*(source.encode() for source in sources), shared or b"")
        chains = [(bytes([bool(on)]), w.tobytes()) for on, w in zip(active, weights, strict=True)]
        return ClientKeys(self._secret.keys(question.encode(), chains), shared_words)

    def _log_bad_row(self, run: SiteRun, broadcasts: ArrayTree, codes: ArrayTree) -> None:
        """Log once, for the site's owner, which row makes the answer to a question not finite."""
        question = run.kernel
        if self._bad_row or not isinstance(question, Question):
            return
        content, answer = (jax.tree.map(lambda leaf: leaf[0], x) for x in (broadcasts, codes))
        self._bad_row = nonfinite_answer(question.posterior, content.position, answer, self.client)
        if self._bad_row:
            LOG.warning("%s: %s", self.name, self._bad_row)

    def _check_session(self, frame: Frame) -> None:
        """Raise if a message under masks is not from this site's session."""
        if self._masks is None:
            return
        masks = frame.header.get("masks")
        if not isinstance(masks, dict):
            raise Refused(f"The study {self.study.name!r} uses masks, but its server does not.")
        if not self._masks.session or masks.get("session") != self._masks.session:
            raise _Unready  # this site or another one has restarted since

    def _mask(
        self,
        frame: Frame,
        place: tuple[int, int, int, bool],
        body: str,
        origin: str,
        state: str,
        words: np.ndarray,
    ) -> bytes:
        """Return words ``[num_chains, num_words]`` under masks, if the site's rules allow it.

        `body` is a digest of the message's body, `origin` a digest of the messages that produced
        the site's state, and `state` a digest of the state itself. A server that makes a single
        site return to an earlier state could otherwise subtract two totals.
        """
        run, masks = self._current_run(frame), self._masks
        assert masks is not None
        parts = (run.digest, repr(place), origin, body)
        question = digest_of(*(part.encode() for part in parts))

        def count() -> np.ndarray:
            self._outflow.add(words.size, question, b"", words.tobytes())
            return words.reshape(-1)

        return masks.answer(
            frame.header["masks"], place, bytes.fromhex(question), state.encode(), count
        )


def _log_entry(data: bytes) -> dict[str, Any]:
    """Return length and digest of a message, as ``sha256sum`` prints the digest."""
    return {"bytes": len(data), "digest": hashlib.sha256(data).hexdigest()}


class _Declined(Exception):
    """Request that the site declines."""


class _Unready(Exception):
    """Request of a run, or of a session of masks, that the site has not joined.

    The server sent it before it noticed that the connection is a new one; it will send the
    beginning of the run and the request again.
    """


def words_of(kernel: FederatedKernel, codes: ArrayTree, bits_down: ArrayTree = ()) -> np.ndarray:
    """Return codes ``[num_chains, num_words]`` and the bits of the broadcast as one more word.

    Under masks no other part of a client's report leaves a site; ``()`` adds no word.

    If a message is out of range, a secure sum replaces it by the ends of the range or by zeros. A
    server could use these known numbers: it could request a point at which the message of a single
    site is within the range, and read that message from the total. Such words are therefore random,
    which makes their total random. Nothing uses that total, since the last two words of a code
    count the replaced messages. Questions that leave out points with such numbers are the
    exception.
    """
    words = host_words(codes, num_lead=1)
    if not kernel.traits.marks_range_ends:
        for chain in np.flatnonzero(words[:, -2]):
            num = words.shape[1] - 2
            words[chain, :num] = np.frombuffer(secrets.token_bytes(8 * num), np.uint64)
    bits = [np.asarray(leaf).astype(np.uint64)[:, None] for leaf in jax.tree.leaves(bits_down)]
    return np.concatenate([words, *bits], axis=1)
