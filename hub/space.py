"""How much a disk still takes."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["free_bytes"]


def free_bytes(folder: Path) -> int:
    """What this user may still write where `folder` is, or would be."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
    return 0
