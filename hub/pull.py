"""Pull a model: choose its files, see that they fit, bring them in, and only then call it complete.

Everything is kept where it is when it stops, so that the same command goes on. Knows no terminal.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from speculoe_local.hub.cache import (
    PARTIAL,
    CachedModel,
    blob_of,
    cache_dir,
    commits_of,
    find,
    ready,
    repo_folder,
    unfinished_path,
)
from speculoe_local.hub.download import fetch, link
from speculoe_local.hub.errors import (
    IncompleteError,
    NetworkError,
    NoSuchModelError,
    NotPulledError,
    OfflineError,
)
from speculoe_local.hub.explain import no_space, write_failed
from speculoe_local.hub.inuse import lock_folder
from speculoe_local.hub.listing import Hub, Wanted
from speculoe_local.hub.names import ModelName, ModelSet, choose, is_commit, sets_of
from speculoe_local.hub.space import free_bytes

__all__ = ["Phase", "Progress", "Pulled", "is_offline", "pull"]

MARGIN_BYTES: Final = 64 << 20  # what stays free on the disk
_TRUE: Final = ("1", "on", "yes", "true")

Phase = Literal["listing", "waiting", "downloading", "verifying"]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a pull is: file `number` of `files` (from 1; 0 while listing), bytes of the whole model.

    `done_bytes` of the `total_bytes` are fetched, or, while `phase` is verifying, of this file's.
    """

    phase: Phase
    file: str
    number: int
    files: int
    done_bytes: int
    total_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "event": "progress",
            "phase": self.phase,
            "file": self.file,
            "number": self.number,
            "files": self.files,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True)
class Pulled:
    """A complete model, and what it took: bytes that came over the network, and seconds."""

    model: CachedModel
    fetched_bytes: int
    seconds: float


def is_offline() -> bool:
    """Whether the environment forbids the network, in the hub's tools' own words."""
    return any(
        os.environ.get(variable, "").strip().lower() in _TRUE
        for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )


def pull(
    name: ModelName,
    *,
    cache: Path | None = None,
    offline: bool = False,
    progress: Callable[[Progress], None] = lambda progress: None,
    endpoint: str | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> Pulled:
    """Make the model `name` complete in the cache, fetching what is missing, and verify what came.

    `offline`, or HF_HUB_OFFLINE: no connection is made, and what is not there is an error. Any number
    of processes may pull at once. `wait` is how to sleep between tries.

    Raises HubError: see `hub.errors`. What was fetched stays, the same call goes on.
    """
    began = time.monotonic()
    root = cache or cache_dir()
    if offline or is_offline():
        try:
            return Pulled(ready(name, root), 0, time.monotonic() - began)
        except (NotPulledError, IncompleteError) as error:
            raise OfflineError(
                f"{name} is not complete in the cache {root}, and offline nothing can be fetched; pull it "
                "with a network"
            ) from error
    progress(Progress("listing", "", 0, 0, 0, 0))
    hub = Hub(name, endpoint, wait)
    chosen, wanted = _ask(hub)
    folder = repo_folder(root, name.repo)
    commit = wanted[0].commit
    total = sum(one.nbytes for one in wanted)
    fetched = 0
    note = unfinished_path(folder, commit, chosen.stem)
    missing = [one for one in wanted if not _there(folder, one)]
    try:
        if missing:
            _require_space(folder, missing)
            _write(note, _unfinished(name, wanted))
        for number, one in enumerate(wanted, 1):
            before = sum(earlier.nbytes for earlier in wanted[: number - 1])
            if one not in missing:
                continue
            at = Progress("downloading", one.path, number, len(wanted), before, total)

            def report(
                phase: str, done: int, at: Progress = at, before: int = before, one: Wanted = one
            ) -> None:
                if phase == "verifying":
                    step = replace(at, phase="verifying", done_bytes=done, total_bytes=one.nbytes)
                else:
                    step = replace(
                        at,
                        phase="waiting" if phase == "waiting" else "downloading",
                        done_bytes=before + done,
                    )
                progress(step)

            fetched += fetch(one, folder, lock_folder(root, name.repo), hub, report)
            if not _there(folder, one):
                link(folder / "blobs" / one.blob, _place(folder, one))
        if not is_commit(name.revision):
            _write(folder.joinpath("refs", *(name.revision or "main").split("/")), commit)
        note.unlink(missing_ok=True)
        _keep_sidecar(folder, commit, wanted[0])
    except OSError as error:
        known = write_failed(error, folder, total, free_bytes(folder))
        if known is None:
            raise
        raise known from error
    pinned = find(ModelName(name.repo, file=wanted[0].path, revision=commit), root)
    at_revision = f"@{name.revision}" if name.revision else ""
    model = replace(pinned, name=f"{name.repo}{at_revision}{pinned.name.removeprefix(name.repo)}")
    return Pulled(model, fetched, time.monotonic() - began)


def _ask(hub: Hub) -> tuple[ModelSet, list[Wanted]]:
    """What the name means on the hub, and its files, all of one commit."""
    for last in (False, True):
        listed = {file.path: file for file in hub.tree()}
        chosen = choose(sets_of(listed), hub.name)
        if chosen.missing:
            raise NoSuchModelError(
                f"{hub.name}: the repository itself lacks {chosen.missing[0]}, one of "
                f"{len(chosen.paths) + len(chosen.missing)} shards; choose another quant"
            )
        first = hub.head(listed[chosen.paths[0]])
        rest = [hub.wanted(listed[path], first.commit) for path in chosen.paths[1:]]
        wanted = [first, *rest]
        expected = [
            (listed[one.path].sha256 or one.blob, listed[one.path].nbytes) for one in wanted
        ]
        if expected == [(one.blob, one.nbytes) for one in wanted]:
            return chosen, wanted
        if last:
            break  # otherwise the branch has moved between the two requests
    raise NetworkError(
        f"{hub.name}: the hub's list and its files disagree about {chosen.paths[0]}; pull again later"
    )


def _place(folder: Path, one: Wanted) -> Path:
    return folder.joinpath("snapshots", one.commit, *one.path.split("/"))


def _there(folder: Path, one: Wanted) -> bool:
    try:
        return _place(folder, one).stat().st_size == one.nbytes
    except OSError:
        return False


def _require_space(folder: Path, missing: list[Wanted]) -> None:
    needed = 0
    for one in missing:
        blob = folder / "blobs" / one.blob
        for place in (blob, blob.with_name(blob.name + PARTIAL)):
            if place.exists():
                needed -= min(place.stat().st_size, one.nbytes)
                break
        needed += one.nbytes
    free = free_bytes(folder)
    if needed and free < needed + MARGIN_BYTES:
        raise no_space(folder.parent, needed + MARGIN_BYTES, free)


def _unfinished(name: ModelName, wanted: list[Wanted]) -> str:
    return json.dumps(
        {
            "repo": name.repo,
            "commit": wanted[0].commit,
            "revision": name.revision,
            "files": {one.path: [one.blob, one.nbytes] for one in wanted},
        }
    )


def _write(place: Path, text: str) -> None:
    """Write a small file so that nobody reads half of it."""
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, place)
    finally:
        temporary.unlink(missing_ok=True)


def _keep_sidecar(folder: Path, commit: str, first: Wanted) -> None:
    """A calibration of the same bytes in an older commit counts in this one, too."""
    from speculoe_local.runtime.sidecar import sidecar_path

    here = sidecar_path(_place(folder, first))
    if here.exists():
        return
    for other in commits_of(folder, None):
        place = folder.joinpath("snapshots", other, *first.path.split("/"))
        there = sidecar_path(place)
        if other != commit and there.is_file() and blob_of(place) == blob_of(_place(folder, first)):
            here.symlink_to(os.path.relpath(there, here.parent))
            return
