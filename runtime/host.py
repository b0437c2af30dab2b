"""The machine that a plan is for: what the user says of it, and for the rest what is measured here.

Reads option values (names as on the command line), measures as little as it can. Knows no plan.
"""

from __future__ import annotations

from collections import Counter

from speculoe_local.runtime import devices, machine, rates
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.modes import Card, Host, Rate
from speculoe_local.runtime.options import Link, parse_link
from speculoe_local.runtime.placement import parse_budget

__all__ = ["host_of"]

_SYSTEM_BYTES = 2 << 30  # of --ram: the system and what else runs
_PRODUCTS_OF_MEMORY = (
    0.75  # of a memory's bandwidth; the rest is lost to unpacking weights and to gaps
)
_PRODUCTS_OF_VRAM = 0.7
_MOST_BYTES_PER_S = 1e15


def host_of(
    model: ModelMap,
    *,
    vram: str | None = None,
    ram: str | None = None,
    link: str | None = None,
    disk: str | None = None,
    ram_rate: str | None = None,
    vram_rate: str | None = None,
    device: str = "auto",
    again: bool = False,
) -> Host:
    """The machine as described, what is not described measured here, as far as it is needed.

    Raises OptionError for a value that is none, and for a device that is neither here nor described.
    """

    vram_bytes, ram_bytes = _size("--vram", vram), _size("--ram", ram)
    given = {
        name: _link(name, value)
        for name, value in (
            ("--link", link), ("--disk", disk), ("--ram-rate", ram_rate), ("--vram-rate", vram_rate)
        )
    }  # fmt: skip
    described = vram_bytes is not None and given["--link"] and given["--vram-rate"]
    real = None if described else devices.choose(device)
    if not described and real is None:
        for name, value in (("--vram", vram), ("--link", link), ("--vram-rate", vram_rate)):
            if value is not None:
                raise OptionError(
                    f"{name} {value[:40]} is for a device, and none is here; give --vram, --link and --vram-rate "
                    "together to plan for one"
                )
    remarks: list[str] = []
    if ram_bytes is None:
        ram_bytes = machine.look().available_bytes
        remarks.append("main memory: what is available here now")
    else:
        ram_bytes = max(0, ram_bytes - _SYSTEM_BYTES)
        remarks.append("main memory: as given, less 2 GiB for the system and what else runs")

    needed = given["--ram-rate"] is None or real is not None
    measured = rates.measured(_type_of(model), real, again=again) if needed else None
    here = f"measured here on {measured.day}" if measured else ""
    if measured:
        remarks.append(f"main memory alone reads {measured.memory / 1e9:.1f} GB/s, {here}")

    def described_rate(name: str, share: float) -> Rate | None:
        rate: Link | None = given[name]
        return Rate(rate.rate * share, f"{share:.0%} of {name}") if rate else None

    products = described_rate("--ram-rate", _PRODUCTS_OF_MEMORY)
    if products is None:
        assert measured is not None
        products = Rate(measured.processor, f"products of one row {here}")
    if given["--disk"]:
        disk_rate = Rate(given["--disk"].rate, "--disk")
    else:
        disk_rate = Rate(rates.disk(model.files[0], again=again), "measured here")
    card = None
    if described or real is not None:
        on_device = described_rate("--vram-rate", _PRODUCTS_OF_VRAM)
        if on_device is None:
            assert measured is not None and measured.device is not None
            on_device = Rate(measured.device, f"products of one row {here}")
        upload = given["--link"]
        if upload is not None:
            moved = Rate(upload.rate, "--link")
        else:
            assert measured is not None and measured.upload is not None
            moved = Rate(
                measured.upload, f"{'pinned' if measured.pinned else 'ordinary'} memory, {here}"
            )
        assert vram_bytes is not None or real is not None
        card = Card(
            name=real.description if real else "as described",
            total_bytes=vram_bytes or (real.total_bytes if real else 0),
            free_bytes=vram_bytes or (real.free_bytes if real else 0),
            products=on_device,
            link=moved,
            latency_s=upload.latency if upload else 0.0,
            overlaps=real.overlaps if real else True,
            shares_memory=real is not None and real.type == "igpu" and vram_bytes is None,
        )
    return Host(ram_bytes, products, disk_rate, card, tuple(remarks))


def _type_of(model: ModelMap) -> int:
    """The type most of the experts' bytes are of; of a dense model, of all."""

    sizes: Counter[int] = Counter()
    for layer in model.layers:
        for matrix in layer.matrices:
            sizes[matrix.ggml_type] += matrix.nbytes
    if not sizes:
        for tensor in model.tensors.values():
            sizes[tensor.ggml_type] += tensor.nbytes
    return sizes.most_common(1)[0][0]


def _size(name: str, text: str | None) -> int | None:

    if text is None:
        return None
    try:
        nbytes = parse_budget(text).nbytes
    except OptionError:
        nbytes = None
    if not nbytes:
        raise OptionError(f"{name} {text[:40]!r} is not a size above 0; use for example 12GiB")
    return nbytes


def _link(name: str, text: str | None) -> Link | None:

    if text is None:
        return None
    wanted = "RATE[,LATENCY]" if name == "--link" else "a rate"
    wrong = f"{name} {text[:40]!r} is not {wanted} above 0; use for example 24GB/s"
    try:
        found = parse_link(text)
    except OptionError:
        raise OptionError(wrong) from None
    if name != "--link" and "," in text:
        raise OptionError(wrong)
    if found.rate > _MOST_BYTES_PER_S:
        raise OptionError(f"{name} {text[:40]!r} is above 1000 TB/s; use what can be measured")
    return found
