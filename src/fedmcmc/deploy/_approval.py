"""What the owner of a site has agreed to, and what is another since."""

import datetime
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmcmc.deploy._frames import Refused, printable
from fedmcmc.deploy._study import Study, software
from fedmcmc.storage import write_whole


@dataclass(frozen=True)
class Approval:
    """A study as a site's owner has approved it.

    Attributes
    ----------
    site
        Whose owner.
    digest
        `Study.digest`.
    study
        `Study.to_dict`, so that a later study can be held against it part by part.
    software
        Versions that it was approved with: this package runs, too.
    time
        When.

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
        """Return the approval of a study as it is now."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return cls(site, study.digest, _listed(study), software(), now)

    @classmethod
    def read(cls, path: str | Path) -> "Approval":
        """Return the approval in a file.

        Raises
        ------
        Refused
            If there is none.
        """
        try:
            data = Path(path).read_bytes()
        except FileNotFoundError:
            raise Refused(
                f"There is no approval {path}: read what the study does, and approve it, by "
                "fedmcmc deploy approve."
            ) from None
        try:
            approval = cls(**json.loads(data))
        except (ValueError, TypeError, RecursionError):
            approval = None
        if approval is None or {type(approval.study), type(approval.software)} != {dict}:
            raise Refused(f"{path} is no approval as fedmcmc deploy approve writes it.")
        return approval

    def save(self, path: str | Path) -> None:
        """Write it to a file, which is whole or not there."""
        data = (json.dumps(asdict(self), indent=1) + "\n").encode()
        write_whole(Path(path), lambda file: file.write(data))

    def check(self, study: Study, site: str) -> None:
        """Raise `Refused` if another study was approved, saying what is another."""
        if site != self.site:
            raise Refused(f"The approval is of {self.site}, and this is {site}.")
        if study.digest == self.digest and software() == self.software:
            return
        raise Refused(
            f"{site} has approved the study {self.study.get('name')!r} at {printable(self.time)}, "
            f"and not this one. What is another: {'; '.join(self.differences(study))}. Read it, "
            "and approve it anew by fedmcmc deploy approve."
        )

    def differences(self, study: Study) -> list[str]:
        """Return what is another in `study`, one phrase per file or setting."""
        found = _compared(self.study, _listed(study), "")
        found += _compared(self.software, software(), "")
        if not found and study.digest != self.digest:
            found = ["how this version of fedmcmc computes digests"]
        return found


NAMES = {
    "sites": "rows of ",
    "rows": "column ",
    "levels": "levels of ",
    "settings": "settings.",
    "kernels": "kernels.",
    "secure": "secure.",
    "files": "file ",
}
ABSENT = object()


def _listed(study: Study) -> dict[str, Any]:
    """Return the study with the order of its sites, which JSON may lose."""
    found: dict[str, Any] = json.loads(json.dumps(study.to_dict()))
    return found | {"order of the sites": list(study.sites)}


def _compared(old: Any, new: Any, where: str) -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in [*old, *(name for name in new if name not in old)]:
            path = where + printable(name)
            if isinstance(old.get(name), dict):
                path = f"{path}." if where else NAMES[name]
            found += _compared(old.get(name, ABSENT), new.get(name, ABSENT), path)
        return found
    if old == new:
        return []
    if old is ABSENT:
        return [f"{where} is new: {_short(new)}"]
    if new is ABSENT:
        return [f"{where} is gone: it was {_short(old)}"]
    return [f"{where}: {_short(old)} when it was approved, now {_short(new)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:16]}…" if len(text) == 64 else printable(text)
