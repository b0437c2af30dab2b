"""What this machine has: cores, and memory as the process may really use it (cgroup limits count)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Machine", "cgroup_memory", "look"]


@dataclass(frozen=True, slots=True)
class Machine:
    """`available_bytes`: what can be taken now without swapping, inside the cgroup if there is one."""

    cores: int
    memory_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None


def look() -> Machine:
    memory = psutil.virtual_memory()
    limit, used = cgroup_memory()
    available = int(memory.available)
    if limit is not None:
        available = min(available, max(0, limit - used))
    return Machine(_cores(), int(memory.total), available, limit)


def _cores() -> int:
    """Cores this process may run on; two hyper-threads of one core count once."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(allowed, physical))


def cgroup_memory(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[int | None, int]:
    """(tightest limit of this process's cgroups or None, bytes used there without reclaimable cache).

    Reads the unified hierarchy (v2), every level up to the root, and the memory controller of v1.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return None, 0
    tightest: tuple[int, int] | None = None
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = base / inside.lstrip("/")
        for level in (folder, *folder.parents):
            found = _read_level(level, *names)
            if found is not None and (tightest is None or found[0] < tightest[0]):
                tightest = found
            if level == base:
                break
    return tightest or (None, 0)


def _read_level(
    folder: Path, limit_name: str, used_name: str, cache_key: str
) -> tuple[int, int] | None:
    try:
        text = (folder / limit_name).read_text().strip()
        used = int((folder / used_name).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if text == "max" or int(text) >= 1 << 60:  # v1 says "no limit" with a huge number
        return None
    return int(text), max(0, used - int(stat.get(cache_key, 0)))
