"""Who has a model open. One locked file per opener, so that the system forgets those who died.

An opener locks a file of its own in the cache's lock folder; `rm` looks whether any is locked. Between
looking and removing it holds the guard, which openers take too, so that none slips in.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from speculoe_local.hub.cache import CachedModel, cache_dir, repo_folder
from speculoe_local.hub.errors import InUseError

__all__ = ["hold", "lock_folder", "opened", "unused"]

_GUARD_S: Final = 10.0
_held: list[FileLock] = []


@contextmanager
def opened(model: CachedModel, cache: Path | None = None) -> Iterator[None]:
    """While this lasts, `rm` refuses the model. Also notes when it was last used.

    In a cache that cannot be written it does nothing: nobody can remove the model there.
    """
    lock = _lock(model, cache or cache_dir())
    try:
        yield
    finally:
        _release(lock)


def hold(model: CachedModel, cache: Path | None = None) -> None:
    """As `opened`, until this process ends."""
    if (lock := _lock(model, cache or cache_dir())) is not None:
        _held.append(lock)


@contextmanager
def unused(model: CachedModel, cache: Path | None = None) -> Iterator[None]:
    """While this lasts, nobody has the model open and nobody can open it.

    Raises InUseError, with the process where it is known.
    """
    folder = lock_folder(cache or cache_dir(), model.repo)
    folder.mkdir(parents=True, exist_ok=True)
    with _guard(folder):
        for place in folder.glob(f"{_stem(model)}.*.open"):
            if not _abandoned(place):
                owner = place.name.split(".")[1]
                raise InUseError(
                    f"{model.name} is open in process {owner}: end that process, then try again"
                )
        yield


def lock_folder(cache: Path, repo: str) -> Path:
    """Where the hub's tools, and we, keep the locks of a repository."""
    return cache / ".locks" / repo_folder(cache, repo).name


def _lock(model: CachedModel, cache: Path) -> FileLock | None:
    folder = lock_folder(cache, model.repo)
    place = folder / f"{_stem(model)}.{os.getpid()}.{uuid.uuid4().hex[:8]}.open"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _guard(folder):
            lock = FileLock(place)
            lock.acquire(timeout=0)
    except (OSError, NotImplementedError):  # not writable, or a file system without locks
        return None
    _touch(model)
    return lock


def _release(lock: FileLock | None) -> None:
    if lock is not None:
        lock.release()
        Path(lock.lock_file).unlink(missing_ok=True)


def _touch(model: CachedModel) -> None:
    # Mounts without access times would never know that a model is used.
    for file in model.files:
        try:
            os.utime(file.place, ns=(time.time_ns(), file.place.stat().st_mtime_ns))
        except OSError:
            return


def _abandoned(place: Path) -> bool:
    """Whether nobody holds the lock at `place`; it is removed then."""
    lock = FileLock(place)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return False
    lock.release()
    place.unlink(missing_ok=True)
    return True


@contextmanager
def _guard(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / "speculoe-guard.lock")
    try:
        lock.acquire(timeout=_GUARD_S)
    except NotImplementedError:  # a file system without locks: nobody can tell anybody anything
        yield
        return
    except Timeout:
        raise InUseError(
            f"{folder} has been locked for {_GUARD_S:.0f} s: another `speculoe-local rm` is at work; "
            "try again when it is done"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _stem(model: CachedModel) -> str:
    return hashlib.sha256(model.stem.encode()).hexdigest()[:16]
