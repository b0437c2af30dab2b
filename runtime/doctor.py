"""What this machine and this build are, measured where it matters. Changes nothing."""

from __future__ import annotations

import json
import mmap
import os
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from speculoe_local.runtime import devices, lib, machine, transfers
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import BackendError, OptionError
from speculoe_local.runtime.placement import format_bytes

__all__ = ["DiskRate", "Finding", "examine", "measure_disk"]

_READ_BYTES = 512 << 10  # about one expert
_LIMIT_BYTES = 256 << 20
_LIMIT_S = 1.0
_HIDES = 0.5  # of a copy's time, from which on it counts as running beside graphs


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
        *_devices(),
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


def _devices() -> list[Finding]:
    """What this build can compute on besides the CPU, and what each device is worth."""
    built = devices.built()
    if not built:
        return [
            Finding(
                "devices",
                "no module but the CPU's",
                "for a card `make setup BACKEND=vulkan` or cuda",
            )
        ]
    findings = []
    for kind in built:
        try:
            found = devices.available(kind)
        except OptionError as error:
            findings.append(Finding(kind, str(error)))
            continue
        for device in found:
            findings += [_abilities(device), _uploads(device)]
        if not found:
            findings.append(Finding(kind, "no device", "experts are computed on the CPU"))
    return findings


def _abilities(device: Device) -> Finding:
    able = {
        "copies beside graphs": device.overlaps,
        "pinned memory": device.pins,
        "events": device.events,
    }
    said = ", ".join(name if can else f"no {name}" for name, can in able.items())
    return Finding(
        f"{device.kind}:{device.index}",
        f"{device.description}, {format_bytes(device.free_bytes)} free of "
        f"{format_bytes(device.total_bytes)}; its driver says: {said}",
        "computes in software, so only when named"
        if device.is_software
        else "--device auto takes the first of these",
    )


def _uploads(device: Device) -> Finding:
    """Rates from memory to the device, and whether copies really pass while it computes."""
    topic = f"{device.kind}:{device.index} uploads"
    try:
        found = transfers.measure(device)
    except BackendError as error:
        return Finding(topic, str(error))
    rates = [f"{format_bytes(int(found.ordinary))}/s from ordinary memory"]
    if found.pinned is not None:
        rates.insert(0, f"{format_bytes(int(found.pinned))}/s from pinned memory")
    return Finding(
        topic,
        f"{', '.join(rates)}; {found.hidden:.0%} of a copy's time passes while a graph runs",
        "prefetching hides uploads"
        if found.hidden >= _HIDES
        else "uploads cost their time: prefetching hides little",
    )
