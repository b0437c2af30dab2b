"""The one thread that owns the engine: it opens, decodes and closes.

The main thread stays free to react to Ctrl-C at once, also while native code is busy, and showing
an answer never slows down decoding.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

__all__ = ["EngineThread", "cancel_on_interrupt", "leave"]

T = TypeVar("T")

# A queue that waits without end does not notice Ctrl-C on every system.
_POLL_S = 0.2
_CLOSE_LIMIT_S = 10.0


class EngineThread:
    """Runs functions one after the other in its own thread. For the main thread's use."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._unfinished = 0  # guarded by `_changed`
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def call(self, function: Callable[[], T]) -> T:
        """`function()`, or what it raises."""
        for result in self.stream(lambda: iter([function()])):
            return result
        raise AssertionError("the job gave no result")

    def stream(self, start: Callable[[], Iterator[T]]) -> Iterator[T]:
        """The items of `start()`, or what it raises; it runs ahead of the reader."""
        items: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()

        def job() -> None:
            try:
                for item in start():
                    items.put(("item", item))
                items.put(("end", None))
            except BaseException as error:
                items.put(("error", error))

        with self._changed:
            self._unfinished += 1
        self._jobs.put(job)
        while True:
            kind, value = _wait(items)
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def close(self, function: Callable[[], None] | None, exit_code: int) -> None:
        """Run `function` last, if any. Where the thread does not come back from native code, or the user
        insists, leave the process with `exit_code`: nothing of it is worth waiting for."""
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._unfinished, _CLOSE_LIMIT_S):
                    leave(exit_code)
            if function is not None:
                self.call(function)
        except KeyboardInterrupt:
            leave(130)
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            with self._changed:
                self._unfinished -= 1
                self._changed.notify_all()


@contextmanager
def cancel_on_interrupt(cancel: threading.Event, interrupt: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C sets `cancel` and calls `interrupt`; one more raises `KeyboardInterrupt`."""

    def handle(number: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()
        interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(exit_code: int) -> None:
    """End the process now. Ordinary exit would run destructors under a thread in native code."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _wait(items: queue.SimpleQueue[tuple[str, Any]]) -> tuple[str, Any]:
    while True:
        with suppress(queue.Empty):
            return items.get(timeout=_POLL_S)
