"""Bring one blob into the cache: resumed where it was, and under its name only when its hash is right.

The bytes arrive in blobs/HASH.incomplete. A process that is killed leaves them there, and the next one
goes on behind them; both hold the lock that the hub's own tools take for a blob.
"""

from __future__ import annotations

import importlib.util
import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from huggingface_hub import constants
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there
    get_session,
    hf_raise_for_status,
)

from speculoe_local.hub.cache import PARTIAL
from speculoe_local.hub.errors import DamagedError, HubError, NetworkError
from speculoe_local.hub.explain import explain, is_transient, wait_s, write_failed
from speculoe_local.hub.listing import LONGEST_WAIT_S, TIMEOUT_S, Hub, Wanted
from speculoe_local.hub.space import free_bytes
from speculoe_local.hub.verify import check_blob, check_gguf

__all__ = ["Report", "blob_lock", "fetch", "link"]

TRIES: Final = 5  # in a row without a single byte
_POLL_S: Final = 0.2
_RANGE: Final = re.compile(r"bytes ([0-9]+)-")

# (phase, bytes of this file that are done in this phase); phases: waiting, downloading, verifying
Report = Callable[[str, int], None]


class _WrongAnswerError(NetworkError):
    """An answer that is in order as HTTP, and not what was asked for."""


def fetch(wanted: Wanted, folder: Path, locks: Path, hub: Hub, report: Report) -> int:
    """Bring `wanted` into `folder`/blobs, verified, unless it is there. The bytes that were fetched.

    `locks` is the cache's folder of locks for this repository. Another process that fetches the same
    blob is waited for. Raises HubError; what was fetched is kept, except where its hash is wrong.
    """
    blob = folder / "blobs" / wanted.blob
    partial = blob.with_name(blob.name + PARTIAL)
    fetched = 0
    try:
        blob.parent.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with blob_lock(locks, wanted.blob, lambda: report("waiting", _size(partial))):
            if blob.exists():
                if blob.stat().st_size == wanted.nbytes:
                    return 0
                os.replace(blob, partial)  # cut short by something else: the hash will tell
            resumed = _size(partial) > 0
            fetched = _download(wanted, partial, hub, report)
            try:
                _verify(wanted, partial, report)
            except DamagedError:
                partial.unlink()
                if not resumed:
                    raise
                # Old bytes may have been wrong: once more from the start.
                fetched += _download(wanted, partial, hub, report)
                _verify_or_remove(wanted, partial, report)
            _sync(partial)
            os.replace(partial, blob)
    except OSError as error:
        needed = max(0, wanted.nbytes - _size(partial))
        known = write_failed(error, blob.parent, needed, free_bytes(blob.parent))
        raise known or explain(error, hub.name, hub.endpoint) from error
    return fetched


def link(blob: Path, place: Path) -> None:
    """Make `place` in a snapshot lead to `blob`; where links cannot be, the file itself goes there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if constants.HF_HUB_DISABLE_SYMLINKS:
        os.replace(blob, place)
        return
    temporary = place.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        temporary.symlink_to(os.path.relpath(blob, place.parent))
    except (OSError, NotImplementedError):
        os.replace(blob, place)
    else:
        os.replace(temporary, place)


@contextmanager
def blob_lock(
    locks: Path, blob: str, waiting: Callable[[], None] | None = None
) -> Iterator[BaseFileLock]:
    """The lock that the hub's tools take while they fetch `blob`.

    While another has it `waiting` is called now and then; without `waiting`, Timeout is raised.
    """
    place = locks / f"{blob}.lock"
    lock: BaseFileLock = FileLock(place, mode=0o664)
    while True:
        try:
            lock.acquire(timeout=_POLL_S if waiting else 0)
            break
        except Timeout:
            if waiting is None:
                raise
            waiting()
        except NotImplementedError:  # a file system without locks
            lock = SoftFileLock(place)
    try:
        yield lock
    finally:
        lock.release()


def _download(wanted: Wanted, partial: Path, hub: Hub, report: Report) -> int:
    """Append to `partial` until it has all its bytes; how many were appended."""
    if _size(partial) > wanted.nbytes:
        partial.unlink()
    if _by_xet(wanted, partial):
        return _from_xet(wanted, partial, hub, report)
    fetched = failures = 0
    report("downloading", _size(partial))
    partial.touch()
    while (before := _size(partial)) < wanted.nbytes:
        problem: Exception | None = None
        try:
            _stream(wanted, partial, before, hub, report)
        except (HubError, OSError) as error:
            problem = error
        except Exception as error:
            if not is_transient(error):
                raise explain(error, hub.name, hub.endpoint) from error
            problem = error
        now = _size(partial)
        fetched += max(0, now - before)
        if problem is None:
            continue
        failures = 1 if now > before else failures + 1
        pause = wait_s(problem, failures)
        if _status(problem) == 416 and failures < TRIES:
            partial.unlink(missing_ok=True)  # the hub has less than we have: begin again
            partial.touch()
        elif not (isinstance(problem, _WrongAnswerError) or is_transient(problem)):
            raise problem
        elif failures == TRIES or pause > LONGEST_WAIT_S:
            raise explain(problem, hub.name, hub.endpoint) from problem
        hub.wait(pause)
    return fetched


def _stream(wanted: Wanted, partial: Path, offset: int, hub: Hub, report: Report) -> None:
    headers = {**hub.headers(), "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
    timeout = max(TIMEOUT_S, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    with get_session().stream("GET", wanted.url, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        start = _RANGE.match(response.headers.get("Content-Range", ""))
        if response.status_code != 206:
            offset = 0  # all of it, whatever was asked for
        elif start is None or int(start[1]) != offset:
            raise _WrongAnswerError(
                f"{hub.name}: asked for {wanted.path} from byte {offset}, the hub sent "
                f"{response.headers.get('Content-Range', 'no range')!r}; pull again"
            )
        length = response.headers.get("Content-Length", "")
        plain = response.headers.get("Content-Encoding", "identity") == "identity"
        if plain and length.isdecimal() and int(length) != wanted.nbytes - offset:
            raise _WrongAnswerError(
                f"{hub.name}: {length} bytes came for {wanted.path}, {wanted.nbytes - offset} were "
                "promised: is it the page of a proxy? check HF_ENDPOINT and proxies, then pull again"
            )
        with partial.open("r+b", buffering=0) as file:
            file.seek(offset)
            file.truncate()
            for piece in response.iter_bytes():
                offset += len(piece)
                if offset > wanted.nbytes:
                    raise _WrongAnswerError(
                        f"{hub.name}: more than the {wanted.nbytes} bytes of {wanted.path} came; pull "
                        "again"
                    )
                _write(file, piece)
                report("downloading", offset)


def _write(file: BinaryIO | Any, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:  # unbuffered files may take a part, as on a disk that is almost full
        rest = rest[file.write(rest) :]


def _by_xet(wanted: Wanted, partial: Path) -> bool:
    """Xet storage is faster, and starts again after an interruption. So it is used where plain HTTP
    has no such files, and where its own variable asks for speed; never to replace bytes we have."""
    if wanted.xet is None or constants.HF_HUB_DISABLE_XET or _size(partial) > 0:
        return False
    if wanted.nbytes <= constants.MAX_HTTP_DOWNLOAD_SIZE and not constants.HF_XET_HIGH_PERFORMANCE:
        return False
    return importlib.util.find_spec("hf_xet") is not None


def _from_xet(wanted: Wanted, partial: Path, hub: Hub, report: Report) -> int:
    from huggingface_hub import file_download

    arriving = partial.with_name(f"{wanted.blob}.xet{PARTIAL}")  # has holes: never resumed
    arriving.unlink(missing_ok=True)
    try:
        file_download.xet_get(
            incomplete_path=arriving,
            xet_file_data=wanted.xet,
            headers=hub.headers(),
            expected_size=wanted.nbytes,
            displayed_filename=wanted.path,
            tqdm_class=_reporting(report),
        )
        os.replace(arriving, partial)
    except OSError:
        raise
    except Exception as error:
        raise explain(error, hub.name, hub.endpoint) from error
    finally:
        arriving.unlink(missing_ok=True)
    return _size(partial)


def _reporting(report: Report) -> Any:
    """A progress bar, as the hub's library wants one, that draws nothing."""

    class Bar:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.n = 0

        def update(self, n: int = 1) -> None:
            self.n += int(n)
            report("downloading", self.n)

        def update_transfer(self, n: int) -> None:
            """Bytes on the wire: fewer, and not what a user waits for."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    return Bar


def _verify(wanted: Wanted, partial: Path, report: Report) -> None:
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        report("verifying", done)

    check_blob(partial, wanted.blob, wanted.path, add)
    check_gguf(partial, wanted.path)


def _verify_or_remove(wanted: Wanted, partial: Path, report: Report) -> None:
    try:
        _verify(wanted, partial, report)
    except DamagedError:
        partial.unlink()
        raise


def _sync(place: Path) -> None:
    with place.open("rb") as file:
        os.fsync(file.fileno())


def _size(place: Path) -> int:
    try:
        return place.stat().st_size
    except OSError:
        return 0


def _status(error: Exception) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)
