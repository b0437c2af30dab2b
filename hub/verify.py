"""Whether a file is what its blob's name says: SHA-256, or git's SHA-1 for small files.

Reads whole files. Knows nothing of where they come from.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from speculoe_local.hub.cache import CachedFile, CachedModel
from speculoe_local.hub.errors import DamagedError
from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.header import read_header
from speculoe_local.runtime.modelmap import ModelMap

__all__ = ["Verified", "check_blob", "check_gguf", "digest", "verify"]

_BLOCK = 1 << 20
_HASHES = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")

Report = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Verified:
    """`problem` is empty where all is well; `checked` is False where no hash is known, as in a cache
    without links: then only the header was looked at."""

    file: CachedFile
    problem: str
    checked: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.file.path,
            "bytes": self.file.nbytes,
            "ok": not self.problem,
            "hash_checked": self.checked,
            "problem": self.problem or None,
        }


def verify(model: CachedModel, report: Report = lambda nbytes: None) -> tuple[Verified, ...]:
    """Read all files of `model` and compare them with the names of their blobs.

    `report` gets the bytes read since its last call.
    """
    found = []
    for file in model.files:
        name = file.blob.name if file.blob is not None else ""
        checked = _HASHES.fullmatch(name) is not None
        try:
            if checked:
                check_blob(file.place, name, file.path, report)
            check_gguf(file.place, file.path)
            problem = ""
        except DamagedError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{file.path} cannot be read: {error.strerror}; check the disk"
        found.append(Verified(file, problem, checked))
    if len(found) > 1 and model.complete and not any(one.problem for one in found):
        try:
            ModelMap.read(model.path)  # each shard is in order: are they of one model?
        except ModelError as error:
            found[0] = replace(found[0], problem=str(error))
    return tuple(found)


def check_blob(place: Path, name: str, path: str, report: Report = lambda nbytes: None) -> None:
    """Raises DamagedError unless the bytes at `place` have the hash `name`; without one, nothing is
    known. `path` is what the message calls it."""
    if _HASHES.fullmatch(name) and (found := digest(place, len(name), report)) != name:
        kind = "SHA-256" if len(name) == 64 else "git's SHA-1"
        raise DamagedError(
            f"{path} is damaged: {kind} {found[:12]}..., the hub says {name[:12]}...; remove it with "
            "`speculoe-local rm` and pull it again"
        )


def check_gguf(place: Path, path: str) -> None:
    """Raises DamagedError unless the file begins as a GGUF and holds all the bytes that its header
    promises."""
    try:
        read_header(place)
    except ModelError as error:
        problem = str(error).removeprefix(str(place)).strip(": ")
        raise DamagedError(f"{path} is no usable GGUF: it {problem}") from error


def digest(place: Path, length: int, report: Report = lambda nbytes: None) -> str:
    """Of a whole file, as `length` hexadecimal digits: 64 for SHA-256, 40 for git's blob SHA-1."""
    hasher = hashlib.sha256() if length == 64 else hashlib.sha1(usedforsecurity=False)
    if length == 40:
        hasher.update(f"blob {place.stat().st_size}\0".encode())
    with place.open("rb") as file:
        while piece := file.read(_BLOCK):
            hasher.update(piece)
            report(len(piece))
    return hasher.hexdigest()
