"""Files that appear whole or not at all: written under another name beside the final one, then renamed.

Temporary names carry host and process id, so that a later run can tell a dead writer from a live one.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import psutil

_STALE_S = 24 * 3600


@contextmanager
def appearing(path: Path) -> Iterator[BinaryIO]:
    """A file open for writing that becomes `path` on leaving; on any error nothing is left.

    Its bytes are on the disk before the name appears. Of two writers the last one's file stays.
    """
    temporary = path.with_name(f".{path.stem}.{host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path, stem: str) -> None:
    """Remove temporary files for names starting with `stem` whose writers died; no others.

    A writer on another host cannot be asked, so its file goes when nobody wrote to it for a day.
    """
    for leftover in folder.glob(f".{stem}*.tmp"):
        owner = leftover.name.removesuffix(".tmp").rpartition(".")[2]
        name, _, rest = owner.partition("-")
        pid = rest.partition("-")[0]
        try:
            dead = name == host() and pid.isdigit() and not psutil.pid_exists(int(pid))
            if dead or time.time() - leftover.stat().st_mtime > _STALE_S:
                leftover.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # another process tidied up first


def host() -> str:
    """This machine's name, as far as it is fit for a file name."""
    return "".join(c for c in socket.gethostname() if c.isalnum())[:24] or "host"
