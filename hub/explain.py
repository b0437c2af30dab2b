"""What the hub's library raises, as one line for a user: what, why, next step.

The only place that knows its exceptions. Which of them are worth another try is told apart here, too.
"""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Final

from huggingface_hub import errors as hub
from huggingface_hub.errors import HfHubHTTPError

from speculoe_local.hub.errors import (
    AccessError,
    DamagedError,
    HubError,
    NetworkError,
    NoSuchModelError,
    OfflineError,
    SpaceError,
)
from speculoe_local.hub.names import ModelName
from speculoe_local.runtime.placement import format_bytes

__all__ = ["TransportError", "explain", "is_transient", "no_space", "wait_s", "write_failed"]

# Whatever HTTP library this version of the hub's library stands on, its base of all errors.
TransportError: type[Exception] = HfHubHTTPError.__bases__[0]

_TRANSIENT: Final = (408, 429, 500, 502, 503, 504)
_FULL: Final = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_RESET: Final = re.compile(r"\bt=([0-9]+)")


def explain(error: Exception, name: ModelName, endpoint: str) -> HubError:
    """The line for what went wrong while asking the hub at `endpoint` for `name`."""
    page = f"{endpoint}/{name.repo}"
    if isinstance(error, HubError):
        return error
    if isinstance(error, hub.OfflineModeIsEnabled):
        return OfflineError(f"{name}: offline (HF_HUB_OFFLINE); unset it to pull")
    if isinstance(error, hub.GatedRepoError):
        return AccessError(
            f"{name.repo} is gated: accept its terms at {page} and give a token of that account as "
            "HF_TOKEN"
        )
    if isinstance(error, hub.RevisionNotFoundError):
        return NoSuchModelError(
            f"{name.repo} has no revision {name.revision or 'main'!r}: see {page}"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        return AccessError(
            f"{name.repo} is private or misspelt: see {page}; for a private one give HF_TOKEN"
        )
    if isinstance(error, hub.EntryNotFoundError):
        return NoSuchModelError(f"{name}: the hub lists the file but does not have it: see {page}")
    if isinstance(error, hub.DisabledRepoError):
        return AccessError(f"{name.repo} has been disabled by the hub: see {page}")
    if isinstance(error, hub.XetDownloadError):
        return NetworkError(
            f"{name}: the hub's xet storage failed ({_line(error)}); set HF_HUB_DISABLE_XET=1, then pull "
            "again"
        )
    if isinstance(error, HfHubHTTPError):
        return _by_status(error, name, endpoint, page)
    if isinstance(error, (TransportError, ConnectionError, TimeoutError)):
        return NetworkError(
            f"{name}: cannot reach {endpoint} ({_line(error)}); check the network, HF_ENDPOINT and proxies, "
            "then pull again: what was fetched is kept"
        )
    return HubError(f"{name}: {type(error).__name__}: {_line(error)}; pull again")


def is_transient(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, (TransportError, ConnectionError, TimeoutError)) and not isinstance(
        error, hub.OfflineModeIsEnabled
    )


def wait_s(error: Exception, failures: int) -> float:
    """Seconds to wait before try number `failures` + 1: what the hub asks for, else 1, 2, 4, 8."""
    if isinstance(error, HfHubHTTPError):
        headers = error.response.headers
        asked = str(headers.get("Retry-After", ""))
        reset = _RESET.search(str(headers.get("RateLimit", "")))
        if asked.isdecimal():
            return float(asked)
        if error.response.status_code == 429 and reset:
            return float(reset[1])
    return float(min(8, 1 << max(0, failures - 1)))


def write_failed(error: OSError, folder: Path, needed: int, free: int) -> HubError | None:
    """The line for a failed write to the cache; None if that is not what `error` is."""
    if error.errno in _FULL:
        return no_space(folder, needed, free)
    if error.errno == errno.EFBIG:
        return SpaceError(
            f"{folder}: its file system, or a limit (ulimit -f), takes no file of this size "
            f"({format_bytes(needed, up=True)} more); set HF_HUB_CACHE to a folder elsewhere"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HubError(
            f"{folder} cannot be written ({error.strerror}); set HF_HUB_CACHE to a folder of yours"
        )
    if error.errno == errno.EIO:
        return DamagedError(f"{folder}: the disk fails ({error.strerror}); check it")
    return None


def no_space(folder: Path, needed: int, free: int) -> SpaceError:
    """`needed` and `free` in bytes."""
    lacking = format_bytes(max(needed - free, 1), up=True)
    return SpaceError(
        f"{folder}: {format_bytes(needed, up=True)} ({needed} bytes) are needed, {format_bytes(free)} "
        f"({free} bytes) are free; free {lacking} or set HF_HUB_CACHE to another disk, then pull again: "
        "what was fetched is kept"
    )


def _by_status(error: HfHubHTTPError, name: ModelName, endpoint: str, page: str) -> HubError:
    status = error.response.status_code
    if status == 429:
        wait = wait_s(error, 1)
        return NetworkError(
            f"{name}: {endpoint} limits requests (429); wait {wait:.0f} s and pull again, or give HF_TOKEN "
            "for a higher limit"
        )
    if status == 401:
        return AccessError(
            f"{name}: the hub refuses the token or wants one (401); set HF_TOKEN: {page}"
        )
    if status == 403:
        return AccessError(
            f"{name}: the hub forbids it to this token (403); accept the terms at {page} or use a token "
            "that may read it"
        )
    if status == 404:
        return NoSuchModelError(f"{name}: not found (404); check the name at {page}")
    return NetworkError(
        f"{name}: {endpoint} answers {status}; pull again later: what was fetched is kept"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__
