"""Remove a model from the cache: its links in every commit, and those bytes that nothing else needs."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from filelock import Timeout

from speculoe_local.hub.cache import (
    PARTIAL,
    CachedModel,
    blob_of,
    cache_dir,
    commits_of,
    find,
    models,
    read_unfinished,
    repo_folder,
)
from speculoe_local.hub.download import blob_lock
from speculoe_local.hub.errors import InUseError, NotPulledError
from speculoe_local.hub.inuse import lock_folder, unused
from speculoe_local.hub.names import ModelName, sets_of
from speculoe_local.runtime.sidecar import sidecar_path

__all__ = ["Removed", "remove"]

_PULL: Final = ".speculoe-pull-*.json"


@dataclass(frozen=True, slots=True)
class Removed:
    """What is gone: files in snapshots and blobs, and the bytes that the disk has back."""

    name: str
    files: int
    freed_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "files": self.files, "freed_bytes": self.freed_bytes}


def remove(name: ModelName, cache: Path | None = None) -> tuple[Removed, ...]:
    """Remove the model `name`, complete or not; without quant and file, all models of the repository.

    Of the repository, bytes stay that another file of any commit leads to. The model's sidecar goes
    with it. Raises NotPulledError, and InUseError, having removed nothing of that model, while it is
    open or being pulled.
    """
    root = cache or cache_dir()
    if name.quant is None and name.file is None:
        found = [model for model in models(root) if model.repo == name.repo]
        if not found:
            raise NotPulledError(f"{name} is not in the cache {root}: see `speculoe-local list`")
    else:
        found = [find(name, root)]
    return tuple(_remove(model, name.revision, root) for model in found)


def _remove(model: CachedModel, revision: str | None, root: Path) -> Removed:
    folder = repo_folder(root, model.repo)
    places = _places(model, folder, revision)
    notes = _notes(model, folder)
    blobs = {blob for place in places if (blob := blob_of(place)) and blob.parent.name == "blobs"}
    for note in notes:
        wanted = read_unfinished(note)
        for hash_, _ in wanted.files.values() if wanted else ():
            blobs |= {folder / "blobs" / hash_, folder / "blobs" / (hash_ + PARTIAL)}
    with ExitStack() as locked:
        locked.enter_context(unused(model, root))
        for blob in blobs:
            try:
                if not blob.name.endswith(PARTIAL):
                    locked.enter_context(blob_lock(lock_folder(root, model.repo), blob.name))
            except Timeout:
                raise InUseError(
                    f"{model.name} is being pulled by another process: end it, then try again"
                ) from None
        freed = sum(_remove_file(place) for place in places)
        for note in notes:
            note.unlink(missing_ok=True)
        still = {blob_of(place) for place in (folder / "snapshots").rglob("*")}
        freed += sum(_remove_file(blob) for blob in blobs - still)
        _remove_empty(folder)
    return Removed(model.name, len(places), freed)


def _places(model: CachedModel, folder: Path, revision: str | None) -> list[Path]:
    """The model's files in all commits, or in those of `revision`, and the sidecars beside them."""
    found: list[Path] = []
    for commit in commits_of(folder, revision):
        snapshot = folder / "snapshots" / commit
        inside = [place.relative_to(snapshot).as_posix() for place in snapshot.rglob("*.gguf")]
        for one in sets_of(inside):
            if one.stem == model.stem:
                places = [snapshot.joinpath(*path.split("/")) for path in one.paths]
                found += places
                sidecar = sidecar_path(places[0])
                found += [sidecar] if os.path.lexists(sidecar) else []
    return found


def _notes(model: CachedModel, folder: Path) -> list[Path]:
    found = []
    for place in folder.glob(_PULL):
        wanted = read_unfinished(place)
        if wanted is None or any(one.stem == model.stem for one in sets_of(wanted.files)):
            found.append(place)
    return found


def _remove_file(place: Path) -> int:
    """Bytes that are free now: none where `place` is a link, or is gone already."""
    try:
        nbytes = 0 if place.is_symlink() else place.stat().st_size
        place.unlink()
    except FileNotFoundError:
        return 0
    return nbytes


def _remove_empty(folder: Path) -> None:
    """Folders that hold nothing any more, and names of commits that are gone."""
    for place in sorted((folder / "snapshots").rglob("*"), reverse=True):
        if place.is_dir() and not place.is_symlink():
            _rmdir(place)
    left = {place.name for place in (folder / "snapshots").glob("*")}
    for ref in (folder / "refs").rglob("*"):
        if ref.is_file() and ref.read_text(errors="replace").strip() not in left:
            ref.unlink()
    for inside in ("refs", "snapshots", "blobs"):
        for place in sorted((folder / inside).rglob("*"), reverse=True):
            if place.is_dir() and not place.is_symlink():
                _rmdir(place)
        _rmdir(folder / inside)
    _rmdir(folder)


def _rmdir(place: Path) -> None:
    try:
        place.rmdir()
    except OSError:
        return  # something is in it, or it is not there
