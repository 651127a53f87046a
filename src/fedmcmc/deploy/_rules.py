"""Rules that a site follows before masked words leave it, independently of the server.

If a server received two answers to one question, from different sites or with different words, it
could subtract one answer from the other. A site therefore stores its last answer on its own disk
and refuses requests for a second one.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedmcmc.deploy._frames import Refused
from fedmcmc.deploy._private import NEW_STUDY_ADVICE, open_private
from fedmcmc.deploy._session import DIGEST_BYTES, MaskGroup, Session
from fedmcmc.deploy._sums import MaskTag, mask, masked_frame

MAGIC = b"fedmcmc/rules/1\n"
MARKER_SUFFIX = ".begun"
"""Suffix of a second file, which shows that a site has answered even if the first is missing."""
NO_DIGEST = bytes(DIGEST_BYTES)
HEADER = struct.Struct("<16s32s32sqHQQ32sQ")
"""Mark, study, session, place (round, exchange), answers, ended, question, number of words."""


class RuleError(Refused):
    """Refusal of a site to answer under masks, with the number of the rule."""


class _LastAnswer(NamedTuple):
    """Last answer of a site, in the form in which it is on its disk."""

    session: bytes = NO_DIGEST
    place: tuple[int, int] = (-2, 0)  # before all places of a session
    num_answers: int = 0
    ended: bool = False
    question: bytes = NO_DIGEST
    words: np.ndarray = np.zeros(0, np.uint64)


class SiteRules:
    """Rules of a site in a study under masks; all masked words of the site come from `answer`.

    Parameters
    ----------
    path
        File on the site's disk, for this study alone. The first answer creates a second file next
        to it, whose name ends with ``.begun``.
    consortium
        Group of sites that the site's owner approved.
    num_rounds
        Number of rounds that the owner approved.
    max_answers
        Number of answers to different questions, of all phases, that the owner approved. If it is
        ``None``, a server that begins a new session may request earlier rounds again.

    Raises
    ------
    RuleError
        If the file belongs to another study, is damaged, or is missing after the first answer: the
        site then has no record of its last answer.
    ValueError
        If `num_rounds` or `max_answers` is not positive.

    Notes
    -----
    1. Every session, round, attempt and exchange has one content. Words are on the disk before they
       leave, and a repeated request gets the stored words, because a GPU might compute other words.
    2. Sums are over all sites of the study. A repeated attempt has the same sites, question and
       words.
    3. The study has at least three sites, at least as many as the owner requires, and at least
       three that do not collude (`MaskGroup`).
    4. Rounds never go back within a session.
    5. If a site has left a study, the study is over: totals before and after would reveal the
       site's message. The remaining sites need a new document.
    6. The site answers only within the approved numbers of rounds and answers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        consortium: MaskGroup,
        *,
        num_rounds: int,
        max_answers: int | None = None,
    ) -> None:
        if num_rounds < 1 or (max_answers is not None and max_answers < 1):
            raise ValueError(
                f"An owner must approve at least one round and one answer, got num_rounds = "
                f"{num_rounds}, max_answers = {max_answers}."
            )
        self._path, self._consortium = Path(path), consortium
        self._num_rounds, self._max_answers = num_rounds, max_answers
        self._previous = self._read()

    @property
    def num_answers(self) -> int:
        """Number of different questions that the site has answered."""
        return self._previous.num_answers

    def begin(self, session: Session) -> None:
        """Continue in a new session, for example after a restart of a site or of the server.

        Raises
        ------
        RuleError
            If the session does not belong to the approved study.
        """
        if session.group != self._consortium:
            raise RuleError("This session belongs to another study, not to the approved one.")
        if session.identifier == self._previous.session:
            return
        # The last answer stays: the same question gets the same words in every session.
        place = _LastAnswer().place
        self._write(self._previous._replace(session=session.identifier, place=place))

    def answer(
        self,
        session: Session,
        tag: MaskTag,
        sites: Sequence[int],
        question: bytes,
        compute: Callable[[], np.ndarray],
    ) -> bytes:
        """Return the frame that answers a question; its words are then on the disk.

        Parameters
        ----------
        session
            Session that was begun last.
        tag
            Tag of the message.
        sites
            Numbers of the sites whose messages the server adds, according to the server.
        question
            Digest, 32 bytes, of everything that determines the answer except for the attempt: the
            broadcast, and the site's state and rows.
        compute
            Function that returns the words ``[num_words]`` uint64; called for a new question only.

        Raises
        ------
        RuleError
            If a rule forbids an answer. Nothing is computed, written or sent in this case.
        """
        previous = self._previous
        if previous.ended:
            raise RuleError("This site has left the study, so the study is over (rule 5).")
        if session.identifier != previous.session or session.group != self._consortium:
            raise RuleError("This session is not the one that this site has begun last (rule 4).")
        if len(question) != DIGEST_BYTES:
            raise ValueError(
                f"question must be a digest of {DIGEST_BYTES} bytes, got {len(question)} bytes."
            )
        num = len(self._consortium.sites)
        if list(sites) != list(range(num)):
            raise RuleError(
                f"Sums must be over all {num} sites of the study, not over {list(sites)} (rule 2)."
            )
        if not 0 <= tag.round < self._num_rounds:
            raise RuleError(
                f"Round {tag.round} is beyond the {self._num_rounds} approved rounds (rule 6)."
            )
        if tag.place < previous.place:
            raise RuleError(
                f"Round {tag.round}, exchange {tag.exchange} is before the last answer of this "
                "session (rule 4)."
            )
        if tag.place == previous.place and question != previous.question:
            raise RuleError(
                f"The request for round {tag.round}, exchange {tag.exchange} had another content "
                "in this session (rules 1 and 2)."
            )
        if question == previous.question:
            if tag.place != previous.place:
                self._write(previous._replace(place=tag.place))
        else:
            if self._max_answers is not None and previous.num_answers >= self._max_answers:
                raise RuleError(
                    f"All {self._max_answers} approved answers have been sent (rule 6)."
                )
            words = np.array(compute(), np.uint64)
            num_answers = previous.num_answers + 1
            self._write(
                _LastAnswer(previous.session, tag.place, num_answers, False, bytes(question), words)
            )
        return masked_frame(session, tag, mask(self._previous.words, session, tag))

    def leave(self) -> None:
        """Leave the study permanently; the site refuses all requests, also after a restart."""
        self._write(self._previous._replace(ended=True))

    @property
    def is_new(self) -> bool:
        """True if this site has no record of a session of the study."""
        return self._previous.session == NO_DIGEST

    @property
    def has_left(self) -> bool:
        """True if this site has left the study."""
        return self._previous.ended

    def _read(self) -> _LastAnswer:
        if not self._path.exists():
            if self._marker.exists():
                raise RuleError(
                    f"{self._path} is missing, and with it the record of this site's last answer. "
                    f"{NEW_STUDY_ADVICE}"
                )
            return _LastAnswer()
        data = self._path.read_bytes()
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if len(data) < HEADER.size + DIGEST_BYTES or hashlib.sha256(body).digest() != digest:
            raise RuleError(
                f"{self._path} is damaged, and with it the record of this site's last answer. "
                f"{NEW_STUDY_ADVICE}"
            )
        fields = HEADER.unpack_from(body)
        mark, study, session, round_, exchange, num_answers, ended, question, _ = fields
        if mark != MAGIC or study != self._consortium.study:
            raise RuleError(
                f"{self._path} holds answers of another study: give each study its own folder."
            )
        words = np.frombuffer(body, "<u8", offset=HEADER.size).astype(np.uint64)
        place = (round_, exchange)
        return _LastAnswer(session, place, num_answers, bool(ended), question, words)

    def _write(self, answer: _LastAnswer) -> None:
        """Write the answer that a site will send, and return when it is on the disk."""
        head = HEADER.pack(
            MAGIC,
            self._consortium.study,
            answer.session,
            *answer.place,
            answer.num_answers,
            answer.ended,
            answer.question,
            answer.words.size,
        )
        body = head + answer.words.astype("<u8").tobytes()
        if not self._marker.exists():
            with open_private(self._marker) as file:
                file.write(f"This site has answered under masks: {self._path.name}.\n".encode())
            _sync(self._marker)
        new_path = self._path.with_name(self._path.name + ".new")
        with open_private(new_path) as file:
            file.write(body + hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(self._path)
        _sync(self._path.parent)
        self._previous = answer

    @property
    def _marker(self) -> Path:
        return self._path.with_name(self._path.name + MARKER_SUFFIX)


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
