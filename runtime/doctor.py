"""What this machine and this build are, measured where it matters. Changes nothing."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speculoe_local.runtime import lib, machine
from speculoe_local.runtime.placement import format_bytes

__all__ = ["DiskRate", "Finding", "examine", "measure_disk"]

_READ_BYTES = 512 << 10  # about one expert
_LIMIT_BYTES = 256 << 20
_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: what it is about, what was found, and what follows from it ("" when nothing does)."""

    topic: str
    found: str
    follows: str = ""


@dataclass(frozen=True, slots=True)
class DiskRate:
    """Reads of 512 KiB in random order; `direct` says whether they went around the page cache."""

    bytes_per_s: float
    direct: bool


def measure_disk(path: Path) -> DiskRate:
    """How fast experts of `path` come off its disk: for a second, or 256 MiB, whichever is less."""
    direct = True
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # tmpfs and some network filesystems refuse
        direct = False
        fd = os.open(path, os.O_RDONLY)
    try:
        blocks = max(1, os.fstat(fd).st_size // _READ_BYTES)
        step = max(1, round(blocks * 0.618)) | 1  # visits all, never the next one
        done, begin = 0, time.perf_counter()
        with mmap.mmap(-1, _READ_BYTES) as buffer:  # page-aligned, as direct reads want
            for i in range(blocks):
                done += os.preadv(fd, [buffer], (i * step % blocks) * _READ_BYTES)
                spent = time.perf_counter() - begin
                if spent > _LIMIT_S or done >= _LIMIT_BYTES:
                    break
        return DiskRate(done / max(spent, 1e-9), direct)
    finally:
        os.close(fd)


def build_facts() -> dict[str, Any]:
    """What the build wrote beside the libraries: pin, patches, digest, options."""
    facts: dict[str, Any] = json.loads((lib.library_folder() / "build.json").read_text())
    return facts


def examine(model: Path | None = None) -> list[Finding]:
    """All findings; the disk is measured with `model` when there is one."""
    host = machine.look()
    build = build_facts()
    limit = host.cgroup_limit_bytes
    findings = [
        Finding(
            "system",
            f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        ),
        Finding("cores", str(host.cores), f"--threads {host.cores} unless told otherwise"),
        Finding(
            "memory",
            f"{format_bytes(host.memory_bytes)}, {format_bytes(host.available_bytes)} available"
            + (f", this cgroup may use {format_bytes(limit)}" if limit is not None else ""),
            "--expert-budget auto keeps all experts resident while they fit",
        ),
        Finding("processor", _features()),
        Finding("libraries", str(lib.library_folder())),
        Finding(
            "llama.cpp",
            f"{build['package']} {build['version']}, digest {build['digest']}, {build['build_type']}",
        ),
        Finding("patches", ", ".join(build["patches"]) or "none"),
        Finding("devices", ", ".join(_devices()), "experts are computed on the CPU"),
    ]
    if model is not None:
        rate = measure_disk(model)
        way = "direct reads" if rate.direct else "the filesystem refuses direct reads; page cache"
        findings.append(
            Finding(
                "disk",
                f"{format_bytes(int(rate.bytes_per_s))}/s in reads of {format_bytes(_READ_BYTES)} ({way})",
                "--source direct for models larger than memory, buffered for others",
            )
        )
    return findings


def as_json(findings: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in findings]


def _features() -> str:
    raw: bytes = lib.llama.llama_print_system_info()
    flags = [part.strip() for part in raw.decode("utf-8", "replace").replace(":", "|").split("|")]
    on = [flag.removesuffix(" = 1") for flag in flags if flag.endswith(" = 1")]
    return ", ".join(on) or "no extensions"


def _devices() -> list[str]:
    """What ggml computes on; its functions are reached through libllama, which links them."""
    ggml = lib.llama_library
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    ggml.ggml_backend_dev_get.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_get.argtypes = [ctypes.c_size_t]
    ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    ggml.ggml_backend_dev_description.argtypes = [ctypes.c_void_p]
    described: list[bytes] = [
        ggml.ggml_backend_dev_description(ggml.ggml_backend_dev_get(index))
        for index in range(ggml.ggml_backend_dev_count())
    ]
    return [raw.decode("utf-8", "replace").strip() for raw in described]
