"""A site owner's approval of a study, and comparisons of later studies with the approved one."""

import datetime
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmcmc.deploy._frames import Refused, printable
from fedmcmc.deploy._study import Study, software
from fedmcmc.storage import write_atomically


@dataclass(frozen=True)
class Approval:
    """Study that the owner of a site has approved.

    Attributes
    ----------
    site
        Name of the owner's site.
    digest
        `Study.digest`.
    study
        `Study.to_dict`, for comparisons with later studies part by part.
    software
        Versions of the software, which also runs at the site.
    time
        Time of the approval, in ISO format.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> study = Study(
    ...     "heights", "fedmcmc:lsd", {"bern": 5, "basel": 3}, jax.ShapeDtypeStruct((), jnp.float32)
    ... )
    >>> approval = Approval.of(study, "bern")
    >>> study.sites["basel"] = 4
    >>> approval.differences(study)
    ['rows of basel: 3 when it was approved, now 4']
    """

    site: str
    digest: str
    study: dict[str, Any]
    software: dict[str, str]
    time: str

    @classmethod
    def of(cls, study: Study, site: str) -> "Approval":
        """Return the approval of a study in its present form."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(site, study.digest, _list_parts(study), software(), now)

    @classmethod
    def read(cls, path: str | Path) -> "Approval":
        """Return the approval in a file.

        Raises
        ------
        Refused
            If the file is missing or is not an approval.
        """
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            raise Refused(
                f"There is no approval {path}: read what the study does, and approve it with "
                "'fedmcmc deploy approve'."
            ) from None
        try:
            approval = cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            approval = None
        if approval is None or {type(approval.study), type(approval.software)} != {dict}:
            raise Refused(f"{path} is not an approval that 'fedmcmc deploy approve' has written.")
        return approval

    def save(self, path: str | Path) -> None:
        """Write the approval to a file, completely or not at all."""
        data = (json.dumps(asdict(self), indent=1) + "\n").encode()
        write_atomically(Path(path), lambda file: file.write(data))

    def check(self, study: Study, site: str) -> None:
        """Raise `Refused`, with the differences, if `study` is not the approved one."""
        if site != self.site:
            raise Refused(f"The approval is for the site {self.site}, and this site is {site}.")
        if study.digest == self.digest and software() == self.software:
            return
        raise Refused(
            f"{site} has approved the study {self.study.get('name')!r} at {printable(self.time)}, "
            f"but this study differs from it: {'; '.join(self.differences(study))}. Read the "
            "differences, and approve the study again with 'fedmcmc deploy approve'."
        )

    def differences(self, study: Study) -> list[str]:
        """Return the differences between `study` and the approved study, one per file or key."""
        phrases = _compare(self.study, _list_parts(study), "")
        phrases += _compare(self.software, software(), "")
        if not phrases and study.digest != self.digest:
            phrases = ["how this version of fedmcmc computes digests"]
        return phrases


PREFIXES = {
    "sites": "rows of ",
    "rows": "column ",
    "levels": "levels of ",
    "dictionary": "dictionary.",
    "settings": "settings.",
    "kernels": "kernels.",
    "secure": "secure.",
    "files": "file ",
}
"""Beginnings of phrases about the entries of a study's tables."""
ABSENT = object()
DIGEST_LENGTH = 64
"""Hexadecimal digits of a SHA-256 digest, which phrases shorten."""


def _list_parts(study: Study) -> dict[str, Any]:
    """Return the parts of a study, with the order of its sites, which JSON may lose."""
    parts: dict[str, Any] = json.loads(json.dumps(study.to_dict()))
    return parts | {"order of the sites": list(study.sites)}


def _compare(old: object, new: object, where: str) -> list[str]:
    """Return the differences between two parts of studies, as phrases."""
    if isinstance(old, dict) and isinstance(new, dict):
        phrases = []
        for name in [*old, *(name for name in new if name not in old)]:
            path = where + printable(name)
            if isinstance(old.get(name), dict):
                path = f"{path}." if where else PREFIXES[name]
            phrases += _compare(old.get(name, ABSENT), new.get(name, ABSENT), path)
        return phrases
    if old == new:
        return []
    if old is ABSENT:
        return [f"{where} is new: {_shorten(new)}"]
    if new is ABSENT:
        return [f"{where} is gone: it was {_shorten(old)}"]
    return [f"{where}: {_shorten(old)} when it was approved, now {_shorten(new)}"]


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:16]}…" if len(text) == DIGEST_LENGTH else printable(text)
