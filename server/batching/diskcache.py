"""KV of long prefixes on disk, so that a restarted server does not read a preamble anew.

One file per prefix: a line of JSON, the tokens (int32), the state as the context gave it. Files are
private to the user, written whole or not at all, checked by a digest, and the least recently used go when
the folder grows too large. Reads and writes run in threads of their own. Knows no context and no answer.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speculoe_local.server.batching.prefix import common

__all__ = ["DiskCache", "Stored"]

_log = logging.getLogger("speculoe_local.server")
_SUFFIX = ".prefix"
_FORMAT = 1
_MAX_HEADER = 4096
_STALE_S = 600

State = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Stored:
    """A prefix on its way into memory. `state` stays None where the file turns out to be no good."""

    tokens: tuple[int, ...]
    done: bool = False
    state: State | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    tokens: tuple[int, ...]


class DiskCache:
    """The prefixes in `folder` that belong to `key` (a model and a build). Close it."""

    def __init__(self, folder: Path, key: str, *, max_bytes: int, min_tokens: int) -> None:
        """Makes the folder. Raises OSError when it cannot."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._key = key
        self._max_bytes = max_bytes
        self._min_tokens = min_tokens
        self._lock = threading.Lock()
        self._entries: dict[Path, _Entry] = {}
        self._pending: list[tuple[int, ...]] = []
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="prefixes")
        for stale in folder.glob("*.part"):  # a server was killed while it wrote
            with contextlib.suppress(OSError):
                if time.time() - stale.stat().st_mtime > _STALE_S:
                    stale.unlink()
        for path in folder.glob(f"*{_SUFFIX}"):
            tokens = _read_tokens(path, key)
            if tokens is not None:
                self._entries[path] = _Entry(path, tokens)

    def wants(self, tokens: Sequence[int]) -> bool:
        """Whether storing `tokens` would add something."""
        if len(tokens) < self._min_tokens:
            return False
        known = [e.tokens for e in self._entries.values()] + self._pending
        return not any(common(k, tuple(tokens)) == len(tokens) for k in known)

    def put(self, tokens: Sequence[int], state: State) -> None:
        """Store what `tokens` left in the KV; returns at once. An empty state is none, and not stored."""
        if not state.nbytes or state.nbytes + 4 * len(tokens) + _MAX_HEADER > self._max_bytes:
            return
        whole = tuple(tokens)
        with self._lock:
            self._pending.append(whole)
        self._threads.submit(self._write, whole, state)

    def fetch(
        self, prompt: Sequence[int], *, beyond: int, then: Callable[[], None]
    ) -> Stored | None:
        """Begin to read the prefix that `prompt` shares most with, if that is at least `beyond` tokens;
        `then` is called, in another thread, when it is there or lost."""
        prompt = tuple(prompt)
        with self._lock:
            best = max(self._entries.values(), key=lambda e: common(e.tokens, prompt), default=None)
        if best is None or common(best.tokens, prompt) < max(beyond, self._min_tokens):
            return None
        stored = Stored(best.tokens)
        self._threads.submit(self._read, best, stored, then)
        return stored

    def close(self) -> None:
        """Waits for what is being written."""
        self._threads.shutdown(wait=True)

    def _read(self, entry: _Entry, stored: Stored, then: Callable[[], None]) -> None:
        try:
            stored.state = _read_state(entry.path, self._key)
            os.utime(entry.path)
        except (OSError, ValueError) as error:
            _log.warning("prefix %s is dropped: %s", entry.path.name, error)
            self._remove(entry.path)
        finally:
            stored.done = True
            then()

    def _write(self, tokens: tuple[int, ...], state: State) -> None:
        raw = np.asarray(tokens, np.int32)
        name = hashlib.sha256(self._key.encode() + raw.tobytes()).hexdigest()[:40]
        path = self._folder / f"{name}{_SUFFIX}"
        temporary = path.with_suffix(f".{os.getpid()}.part")
        try:
            self._make_room(raw.nbytes + state.nbytes + _MAX_HEADER)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_header(self._key, raw, state))
                file.write(raw.tobytes())
                file.write(state.data)
            os.replace(temporary, path)
            with self._lock:
                self._entries[path] = _Entry(path, tokens)
        except OSError as error:
            _log.warning("a prefix could not be stored: %s", error)
            with contextlib.suppress(OSError):
                temporary.unlink()
        finally:
            with self._lock:
                self._pending.remove(tokens)

    def _make_room(self, nbytes: int) -> None:
        """Remove what was used longest ago, of any model, until `nbytes` more are within the bound."""
        found = []
        for path in self._folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total + nbytes <= self._max_bytes:
                return
            self._remove(path)
            total -= size

    def _remove(self, path: Path) -> None:
        with self._lock:
            self._entries.pop(path, None)
        with contextlib.suppress(OSError):
            path.unlink()


def _header(key: str, tokens: npt.NDArray[np.int32], state: State) -> bytes:
    digest = hashlib.sha256(tokens.tobytes())
    digest.update(state.data)
    fields = {
        "format": _FORMAT,
        "key": key,
        "tokens": len(tokens),
        "state": state.nbytes,
        "sha256": digest.hexdigest(),
        "made": int(time.time()),
    }
    return json.dumps(fields).encode() + b"\n"


def _read_header(line: bytes, key: str) -> tuple[int, int, str] | None:
    """Tokens, bytes of state and digest; None for a file of another model or format."""
    try:
        fields = json.loads(line)
        if fields["format"] != _FORMAT or fields["key"] != key:
            return None
        return int(fields["tokens"]), int(fields["state"]), str(fields["sha256"])
    except (ValueError, KeyError, TypeError):
        return None


def _read_tokens(path: Path, key: str) -> tuple[int, ...] | None:
    try:
        with path.open("rb") as file:
            header = _read_header(file.readline(_MAX_HEADER), key)
            if header is None:
                return None
            raw = file.read(4 * header[0])
    except OSError:
        return None
    return tuple(np.frombuffer(raw, np.int32).tolist()) if len(raw) == 4 * header[0] else None


def _read_state(path: Path, key: str) -> State:
    """Raises ValueError for a file that is not what it says."""
    with path.open("rb") as file:
        header = _read_header(file.readline(_MAX_HEADER), key)
        if header is None:
            raise ValueError("it belongs to another model")
        rest = file.read()
    n_tokens, n_state, expected = header
    if len(rest) != 4 * n_tokens + n_state or hashlib.sha256(rest).hexdigest() != expected:
        raise ValueError("it is damaged")
    return np.frombuffer(rest, np.uint8)[4 * n_tokens :]
