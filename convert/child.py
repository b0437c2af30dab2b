"""Work in a process of its own: progress comes back, Ctrl-C ends it at once, a crash is one line.

llama.cpp's quantizer cannot be interrupted and ends the process on some files; its converter brings
another `gguf` package than ours. Both therefore run apart. A worker reads one JSON request from its
standard input and writes JSON lines: {"progress": share} and {"note": text} as it goes, last {"result":
anything} or {"error": text} (`channel.Channel`). Knows nothing of what is worked on.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Final

from speculoe_local.runtime.errors import BackendError

__all__ = ["WorkerFailure", "run_worker"]

# The worker finds packages where this process does, in an editable install too.
_BOOT: Final = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); "
    "import importlib; importlib.import_module(sys.argv[2]).main()"
)
_TAIL_LINES: Final = 3


class WorkerFailure(BackendError):
    """The worker said why it could not do its work; `text` is its own words."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def run_worker(
    module: str,
    request: Mapping[str, Any],
    *,
    progress: Callable[[float], None] | None = None,
    note: Callable[[str], None] | None = None,
    environment: Mapping[str, str] | None = None,
    first_on_path: Sequence[str] = (),
) -> Any:
    """Run `module`'s main in a process of its own on `request`; its result. Paths must be absolute.

    `first_on_path` goes before this process's import path. An exception from `progress` or `note` ends
    the worker and is raised again. Raises WorkerFailure with the worker's reason, or BackendError when
    it dies without one.
    """
    path = [*first_on_path, *(entry for entry in sys.path if entry)]
    command = [sys.executable, "-c", _BOOT, json.dumps(path), module]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env={**os.environ, **(environment or {})},
            cwd=tempfile.gettempdir(),  # a module of the user's must not take the place of ours
        )
        try:
            reply = _converse(process, request, progress, note)
            code = process.wait()
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        if "result" in reply and code == 0:
            return reply["result"]
        if "error" in reply:
            raise WorkerFailure(str(reply["error"]))
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        raise BackendError(f"{module.rpartition('.')[2]} ended with {ended}: {_tail(complaints)}")


def _converse(
    process: subprocess.Popen[bytes],
    request: Mapping[str, Any],
    progress: Callable[[float], None] | None,
    note: Callable[[str], None] | None,
) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; its exit code says more
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.close()
    last: dict[str, Any] = {}
    for line in process.stdout:
        message: dict[str, Any] = json.loads(line)
        if "progress" in message and progress is not None:
            progress(float(message["progress"]))
        if "note" in message and note is not None:
            note(str(message["note"]))
        if "result" in message or "error" in message:
            last = message
    return last


def _tail(complaints: IO[bytes]) -> str:
    complaints.seek(0)
    lines = complaints.read().decode("utf-8", "replace").split("\n")
    return "; ".join([line.strip() for line in lines if line.strip()][-_TAIL_LINES:]) or "no reason"
