"""What lies in the cache: the layout that the Hugging Face tools and llama.cpp share, read as models.

    models--OWNER--REPO/blobs/HASH                     the bytes; HASH.incomplete while they arrive
    models--OWNER--REPO/snapshots/COMMIT/PATH          links to blobs (files where links cannot be)
    models--OWNER--REPO/refs/REVISION                  the commit that a branch or tag was, last seen
    models--OWNER--REPO/.speculoe-pull-NAME.json       ours: what an unfinished pull is after
    .locks/models--OWNER--REPO/                        locks, see `download` and `inuse`

Reads names, sizes and times. Opens no file of a model and never the network.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from speculoe_local.hub.errors import IncompleteError, NoSuchModelError, NotPulledError
from speculoe_local.hub.names import ModelName, ModelSet, choose, sets_of

__all__ = [
    "CachedFile",
    "CachedModel",
    "Unfinished",
    "blob_of",
    "cache_dir",
    "find",
    "models",
    "read_unfinished",
    "ready",
    "repo_folder",
    "unfinished_path",
]

PARTIAL: Final = ".incomplete"
_PULL: Final = ".speculoe-pull-"
_SHORT_COMMIT: Final = 7


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of a model: `path` in the repository, `place` in the snapshot, `blob` None where the
    cache has no links, sizes in bytes."""

    path: str
    place: Path
    blob: Path | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache, in one commit. `name` is how to ask for it again, `stem` its path without
    shard number and suffix.

    `missing` are paths in the repository; `nbytes` is there, partly fetched files included, of
    `total_bytes`, None where nobody has said. `last_used` is in seconds since 1970, 0 if unknown.
    """

    name: str
    repo: str
    label: str
    stem: str
    commit: str
    files: tuple[CachedFile, ...]
    missing: tuple[str, ...]
    nbytes: int
    total_bytes: int | None
    last_used: float

    @property
    def complete(self) -> bool:
        return bool(self.files) and not self.missing

    @property
    def path(self) -> Path:
        """What to open: the first shard. IndexError if nothing of the model is there yet."""
        return self.files[0].place

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "repo": self.repo,
            "quant": self.label,
            "commit": self.commit,
            "path": str(self.path) if self.files else None,
            "bytes": self.nbytes,
            "total_bytes": self.total_bytes,
            "shards": len(self.files) + len(self.missing),
            "complete": self.complete,
            "missing": list(self.missing),
            "last_used": self.last_used,
        }


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a pull wants: `files` maps paths in the repository to blob name and bytes. `revision` is
    what was asked for, None for the main branch."""

    repo: str
    commit: str
    revision: str | None
    files: dict[str, tuple[str, int]]


def cache_dir() -> Path:
    """The cache's folder, from the variables that llama.cpp and the hub's tools look at, in turn."""
    for variable, inside in (
        ("LLAMA_CACHE", ""),
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
    ):
        if found := os.environ.get(variable):
            return Path(os.path.expandvars(found)).expanduser() / inside
    return Path.home() / ".cache" / "huggingface" / "hub"


def repo_folder(cache: Path, repo: str) -> Path:
    return cache / ("models--" + repo.replace("/", "--"))


def unfinished_path(folder: Path, commit: str, stem: str) -> Path:
    """Where a pull of the model with that stem says what it is after."""
    key = hashlib.sha256(f"{commit}/{stem}".encode()).hexdigest()[:16]
    return folder / f"{_PULL}{key}.json"


def read_unfinished(place: Path) -> Unfinished | None:
    """None where the file is gone, or is not what a pull writes."""
    try:
        found = json.loads(place.read_text(encoding="utf-8"))
        files = {str(path): (str(blob), int(n)) for path, (blob, n) in found["files"].items()}
        revision = found["revision"]
        return Unfinished(
            str(found["repo"]), str(found["commit"]), str(revision) if revision else None, files
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def models(cache: Path | None = None) -> tuple[CachedModel, ...]:
    """All GGUF models in the cache, each in its newest commit, in order of their names."""
    root = cache or cache_dir()
    found: list[CachedModel] = []
    for folder in sorted(root.glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        if folder.is_dir():
            found += _models_of(repo, folder, None)
    return tuple(found)


def find(name: ModelName, cache: Path | None = None) -> CachedModel:
    """The model `name` means among those in the cache, complete or not.

    Raises NotPulledError, naming what of the repository is there.
    """
    folder = repo_folder(cache or cache_dir(), name.repo)
    found = _models_of(name.repo, folder, name.revision)
    if not found:
        raise NotPulledError(f"{name} is not in the cache: run `speculoe-local pull {name}`")
    by_stem = {model.stem: model for model in found}
    whole = {stem: model for stem, model in by_stem.items() if model.complete}
    for group in (whole, by_stem) if name.quant is None and name.file is None else (by_stem,):
        sets = sets_of(
            path
            for model in group.values()
            for path in (*(file.path for file in model.files), *model.missing)
        )
        try:
            return by_stem[choose(sets, name).stem]
        except NoSuchModelError:
            continue
    labels = ", ".join(model.label for model in found)
    raise NotPulledError(
        f"{name} is not in the cache, of {name.repo} it has {labels}: run `speculoe-local pull {name}`"
    )


def ready(name: ModelName, cache: Path | None = None) -> CachedModel:
    """As `find`; IncompleteError, with the command that goes on, unless all files are there."""
    model = find(name, cache)
    if model.complete:
        return model
    shards = len(model.files) + len(model.missing)
    raise IncompleteError(
        f"{model.name} is INCOMPLETE: {len(model.files)} of {shards} files are there; run "
        f"`speculoe-local pull {model.name}` to fetch the rest"
    )


def commits_of(folder: Path, revision: str | None) -> list[str]:
    """Snapshots in the cache, the one to prefer first; of `revision` alone if there is one."""
    try:
        there = {
            entry.name: entry.stat().st_mtime
            for entry in (folder / "snapshots").iterdir()
            if entry.is_dir()
        }
    except OSError:
        return []
    current = _ref(folder, revision or "main")
    if revision is not None:
        return [name for name in there if name == current or _begins(name, revision)]
    return sorted(there, key=lambda name: (name != current, -there[name]))


def gguf_files(snapshot: Path) -> Iterator[tuple[str, Path]]:
    """Paths in the repository and places of all non-empty .gguf files of a snapshot that can be read."""
    for place in sorted(snapshot.rglob("*.gguf")):
        try:
            if place.is_file() and place.stat().st_size > 0:
                yield place.relative_to(snapshot).as_posix(), place
        except OSError:
            continue  # a link to a blob that has gone


def blob_of(place: Path) -> Path | None:
    """The blob that a file of a snapshot leads to; None where the file is no link."""
    try:
        # One step alone: a blob may itself lead on, to a store that several caches share.
        return Path(os.path.normpath(place.parent / os.readlink(place)))
    except OSError:
        return None


def _models_of(repo: str, folder: Path, revision: str | None) -> list[CachedModel]:
    found: dict[str, CachedModel] = {}
    revisions: dict[str, str | None] = {}
    for commit in commits_of(folder, revision):
        there = dict(gguf_files(folder / "snapshots" / commit))
        for one in sets_of(there):
            files = tuple(_file(path, there[path]) for path in one.paths)
            if one.stem not in found or (not found[one.stem].complete and not one.missing):
                found[one.stem] = _model(repo, one, commit, files, one.missing, None, 0)
    for place in sorted(folder.glob(f"{_PULL}*.json")):
        wanted = read_unfinished(place)
        if wanted is None or not (
            revision in (None, wanted.revision) or _begins(wanted.commit, revision or "")
        ):
            continue
        first = next(iter(sets_of(wanted.files)), None)
        if first is None or (first.stem in found and found[first.stem].complete):
            continue
        revisions[first.stem] = wanted.revision
        files = _fetched(folder, wanted)
        have = {file.path for file in files}
        arriving = sum(
            _size(folder / "blobs" / (blob + PARTIAL))
            for path, (blob, _) in wanted.files.items()
            if path not in have
        )
        found[first.stem] = _model(
            repo,
            first,
            wanted.commit,
            files,
            tuple(path for path in wanted.files if path not in have),
            sum(nbytes for _, nbytes in wanted.files.values()),
            arriving,
        )
    return _named(found, revisions)


def _fetched(folder: Path, wanted: Unfinished) -> tuple[CachedFile, ...]:
    snapshot = folder / "snapshots" / wanted.commit
    places = {path: snapshot.joinpath(*path.split("/")) for path in wanted.files}
    return tuple(_file(path, place) for path, place in places.items() if _size(place) > 0)


def _file(path: str, place: Path) -> CachedFile:
    return CachedFile(path, place, blob_of(place), _size(place))


def _model(
    repo: str,
    one: ModelSet,
    commit: str,
    files: tuple[CachedFile, ...],
    missing: tuple[str, ...],
    total: int | None,
    arriving: int,
) -> CachedModel:
    nbytes = sum(file.nbytes for file in files)
    if total is None and not missing:
        total = nbytes
    used = max((_used(file.place) for file in files), default=0.0)
    return CachedModel(
        repo, repo, one.label, one.stem, commit, files, missing, nbytes + arriving, total, used
    )


def _named(found: dict[str, CachedModel], revisions: dict[str, str | None]) -> list[CachedModel]:
    """Each with a name that means it alone: by its quant, by its file where two share one. An
    unfinished one has the revision that it is of, so that pulling the name goes on."""
    labels = [model.label.lower() for model in found.values()]
    named = []
    for model in found.values():
        alone = labels.count(model.label.lower()) == 1
        tag = model.label if alone else (*(f.path for f in model.files), *model.missing)[0]
        at = f"@{revision}" if (revision := revisions.get(model.stem)) else ""
        named.append(replace(model, name=f"{model.repo}{at}:{tag}"))
    return sorted(named, key=lambda model: model.name.lower())


def _begins(commit: str, revision: str) -> bool:
    """Whether `revision` is `commit`, or as much of it as nobody calls a branch."""
    return len(revision) >= _SHORT_COMMIT and commit.startswith(revision)


def _ref(folder: Path, revision: str) -> str | None:
    try:
        return folder.joinpath("refs", *revision.split("/")).read_text().strip()
    except (OSError, ValueError):
        return None


def _size(place: Path) -> int:
    try:
        return place.stat().st_size
    except OSError:
        return 0


def _used(place: Path) -> float:
    try:
        return place.stat().st_atime
    except OSError:
        return 0.0
