"""What a site holds itself to before masked words leave it, whatever the server asks.

A server that could have one question answered twice, by other sites or with other words, could
subtract one answer from the other. So a site keeps on its own disk what it last answered, and
refuses what would let it be compared.
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
BEGUN = ".begun"
"""What a file beside the rules' own is called, which says that there was one."""
NONE = bytes(DIGEST_BYTES)
HEADER = struct.Struct("<16s32s32sqHQQ32sQ")
"""Mark, study, session, place (round, exchange), answers, ended, question, number of words."""


class RuleError(Refused):
    """A site refuses to answer; the message says which rule forbids it."""


class _Last(NamedTuple):
    """What a site knows of its last answer, as it lies on its disk."""

    session: bytes = NONE
    place: tuple[int, int] = (-2, 0)  # before all others
    num_answers: int = 0
    ended: bool = False
    question: bytes = NONE
    words: np.ndarray = np.zeros(0, np.uint64)


class SiteRules:
    """A site's own rules of a study; everything that leaves under masks comes from `answer`.

    Parameters
    ----------
    path
        A file on the site's disk, for this study alone. Beside it lies another, whose name ends
        with ``.begun``, from the first answer on.
    consortium
        As the site's owner approved it.
    num_rounds
        Rounds that the owner approved.
    most_answers
        Answers to different questions that the owner approved, of all phases; without one, a
        server that begins a new session may ask again for rounds that it has had.

    Raises
    ------
    RuleError
        If the file is another study's, damaged, or gone after it was there: the site then does not
        know what it answered.
    ValueError
        If `num_rounds` or `most_answers` is not positive.

    Notes
    -----
    1. One session, round, attempt and exchange has one content: words are written to disk before
       they leave, and sent again as they are. A GPU might compute others.
    2. The cohort is the whole study. Another attempt is for the same sites, question and words.
    3. There are three sites or more, as many as the owner asks for, and three that do not collude
       (`MaskGroup`).
    4. Rounds never go back within a session.
    5. A study that a site has left is over: those who go on need a new document, as the totals
       before and after tell the message of who left.
    6. Nothing is answered beyond the approved rounds and answers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        consortium: MaskGroup,
        *,
        num_rounds: int,
        most_answers: int | None = None,
    ) -> None:
        if num_rounds < 1 or (most_answers is not None and most_answers < 1):
            raise ValueError(f"An owner approves some rounds, got {num_rounds}, {most_answers}.")
        self._path, self._consortium = Path(path), consortium
        self._num_rounds, self._most_answers = num_rounds, most_answers
        self._last = self._read()

    @property
    def num_answers(self) -> int:
        """Answers to different questions so far."""
        return self._last.num_answers

    def begin(self, session: Session) -> None:
        """Go on in a new session, as after a restart of a site or of the server.

        Raises
        ------
        RuleError
            If it is not a session of the approved study.
        """
        if session.group != self._consortium:
            raise RuleError("This session is of another study than the one that was approved.")
        if session.identifier == self._last.session:
            return
        # What was answered last stays: the same question gets the same words in any session.
        place = _Last().place
        self._write(self._last._replace(session=session.identifier, place=place))

    def answer(
        self,
        session: Session,
        tag: MaskTag,
        sites: Sequence[int],
        question: bytes,
        compute: Callable[[], np.ndarray],
    ) -> bytes:
        """Return the frame that answers a question, whose words are on disk by then.

        Parameters
        ----------
        session
            The one that was begun last.
        tag
            Of the message.
        sites
            Numbers of the sites whose messages the server says it adds.
        question
            A digest, 32 bytes, of all that the answer depends on: the broadcast, and the site's own
            state and rows. The attempt is not part of it.
        compute
            Returns the words ``[num_words]`` uint64; called where the question is a new one.

        Raises
        ------
        RuleError
            If a rule forbids an answer. Nothing was computed, written or sent then.
        """
        last = self._last
        if last.ended:
            raise RuleError("This site has left the study, which is over (rule 5).")
        if session.identifier != last.session or session.group != self._consortium:
            raise RuleError("This session is not the one that was begun last (rule 4).")
        if len(question) != DIGEST_BYTES:
            raise ValueError(f"question is a digest of {DIGEST_BYTES} bytes, got {len(question)}.")
        num = len(self._consortium.sites)
        if list(sites) != list(range(num)):
            raise RuleError(
                f"Totals are over all {num} sites of the study, never over {list(sites)} (rule 2)."
            )
        if not 0 <= tag.round < self._num_rounds:
            raise RuleError(
                f"Round {tag.round} is beyond the {self._num_rounds} approved rounds (rule 6)."
            )
        if tag.place < last.place:
            raise RuleError(
                f"Round {tag.round}, exchange {tag.exchange} lies before the last answer of this "
                "session (rule 4)."
            )
        if tag.place == last.place and question != last.question:
            raise RuleError(
                f"Round {tag.round}, exchange {tag.exchange} was asked with another content in "
                "this session (rules 1 and 2)."
            )
        if question == last.question:
            if tag.place != last.place:
                self._write(last._replace(place=tag.place))
        else:
            if self._most_answers is not None and last.num_answers >= self._most_answers:
                raise RuleError(
                    f"All {self._most_answers} approved answers have been given (rule 6)."
                )
            words = np.array(compute(), np.uint64)
            new = _Last(
                last.session, tag.place, last.num_answers + 1, False, bytes(question), words
            )
            self._write(new)
        return masked_frame(session, tag, mask(self._last.words, session, tag))

    def leave(self) -> None:
        """Leave the study for good: it is over for this site, also after a restart."""
        self._write(self._last._replace(ended=True))

    @property
    def is_new(self) -> bool:
        """Whether this site knows of no session of the study."""
        return self._last.session == NONE

    @property
    def has_left(self) -> bool:
        """Whether this site has left the study."""
        return self._last.ended

    def _read(self) -> _Last:
        if not self._path.exists():
            if self._begun.exists():
                raise RuleError(
                    f"{self._path} is gone, so this site does not know what it answered last. "
                    f"{NEW_STUDY_ADVICE}"
                )
            return _Last()
        data = self._path.read_bytes()
        body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
        if len(data) < HEADER.size + DIGEST_BYTES or hashlib.sha256(body).digest() != digest:
            raise RuleError(
                f"{self._path} is damaged, so this site does not know what it answered last. "
                f"{NEW_STUDY_ADVICE}"
            )
        fields = HEADER.unpack_from(body)
        mark, study, session, round_, exchange, num_answers, ended, question, _ = fields
        if mark != MAGIC or study != self._consortium.study:
            raise RuleError(f"{self._path} holds the answers of another study.")
        words = np.frombuffer(body, "<u8", offset=HEADER.size).astype(np.uint64)
        place = (round_, exchange)
        return _Last(session, place, num_answers, bool(ended), question, words)

    def _write(self, last: _Last) -> None:
        """Write what a site is about to send, and return once it is on the disk."""
        head = HEADER.pack(
            MAGIC,
            self._consortium.study,
            last.session,
            *last.place,
            last.num_answers,
            last.ended,
            last.question,
            last.words.size,
        )
        body = head + last.words.astype("<u8").tobytes()
        if not self._begun.exists():
            with open_private(self._begun) as file:
                file.write(f"This site has answered under masks: {self._path.name}.\n".encode())
            _sync(self._begun)
        beside = self._path.with_name(self._path.name + ".new")
        with open_private(beside) as file:
            file.write(body + hashlib.sha256(body).digest())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._path)
        _sync(self._path.parent)
        self._last = last

    @property
    def _begun(self) -> Path:
        return self._path.with_name(self._path.name + BEGUN)


def _sync(path: Path) -> None:
    """Put a file, or what a folder says of its files, on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
