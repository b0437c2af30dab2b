"""Ways of running a model with experts on a machine, and how fast each should be. Pure arithmetic.

Takes what a token reads (`needs`), where experts have room (`placement`), sizes and rates of a `Host`, and hit
rates (`hits`). Knows no header and no words for users beyond a note per mode; `plan` puts all together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from speculoe_local.runtime.hits import HitModel
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.needs import Traffic
from speculoe_local.runtime.placement import Placement, format_bytes

__all__ = [
    "CPU_LAYER_S",
    "DEVICE_LAYER_S",
    "HAND_OFF_S",
    "READ_BACK_S",
    "AT_BEST",
    "Card",
    "Host",
    "Mode",
    "ModeName",
    "Rate",
    "Work",
    "fastest",
    "modes_of",
    "overlap",
]

# Time that no rate covers, per layer of a token. Orders of magnitude seen on desktop cards and CPUs.
DEVICE_LAYER_S = 50e-6
CPU_LAYER_S = 10e-6
READ_BACK_S = 20e-6  # expert ids from the device, and the next launch
HAND_OFF_S = (
    40e-6  # a layer's experts on the processor: ids and input out, sums back, threads woken
)

# What prediction hides of the smaller of copies and compute, by residency: README, "Measured".
_OVERLAP = ((0.0, 0.25, 0.5, 1.0), (0.5, 0.22, 0.04, 0.0))
_TIE = 0.99  # within one per cent the simpler mode is as good
AT_BEST = 1.1  # what is predicted at its best must be so many times as fast to be picked

_MISS_READS = 2  # a miss is read by the processor, and again for its upload

ModeName = Literal[
    "resident",
    "cpu-experts",
    "misses-cpu",
    "cache",
    "prefetch",
    "speculate",
    "ondemand",
    "mapped",
]

_SLOTTED: tuple[ModeName, ...] = ("misses-cpu", "cache", "prefetch", "speculate", "ondemand")
Exactness = Literal["exact", "rounded", "lossy"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes per second, and where that is from."""

    bytes_per_s: float
    origin: str


@dataclass(frozen=True, slots=True)
class Card:
    """A device: `free_bytes` of `total_bytes` can be taken, `products` is the rate at which it multiplies
    weights in its memory, `link` that of uploads, `latency_s` of each. `overlaps`: copies run beside graphs."""

    name: str
    total_bytes: int
    free_bytes: int
    products: Rate
    link: Rate
    latency_s: float = 0.0
    overlaps: bool = True
    shares_memory: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: `ram_bytes` of main memory can be taken, `products` is the rate at which the processor
    multiplies weights in it, `disk` that of reads of an expert's size. `remarks` say how it is known."""

    ram_bytes: int
    products: Rate
    disk: Rate
    card: Card | None = None
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of running the model. `tokens_per_s` None: it does not run so, and `note` says why.

    Milliseconds per token: `compute_ms` on the fast tier and processor, `copy_ms` for what was not there, of
    which `hidden_ms` pass under compute. `options` are those of `chat`, "" where the program has none for it.
    """

    name: ModeName
    exactness: Exactness
    tokens_per_s: float | None
    hit_rate: float | None = None
    compute_ms: float = 0.0
    copy_ms: float = 0.0
    hidden_ms: float = 0.0
    note: str = ""
    options: str = ""


@dataclass(frozen=True, slots=True)
class Work:
    """What one token costs here. Rooms are bytes that experts may take in main memory: `memory_room` when
    everything lies there, `behind_room` behind a device."""

    host: Host
    traffic: Traffic
    n_layer: int
    n_moe: int
    routed_bytes: int
    used: float
    hit_model: HitModel
    memory_room: int
    behind_room: int

    def fixed_s(self, device: bool) -> float:
        return self.n_layer * (DEVICE_LAYER_S if device else CPU_LAYER_S)

    def compute_s(self, device: bool) -> float:
        """With all experts of the token in the tier that computes."""
        card = self.host.card
        rate = card.products if device and card else self.host.products
        t = self.traffic
        moved = t.weights_bytes + t.experts_bytes + t.kv_bytes
        return self.fixed_s(device) + moved / rate.bytes_per_s

    def copy_s(self, hit_rate: float, residency: float) -> float:
        """To bring what the fast tier misses: from main memory over the link, and what is not there from disk."""
        t = self.traffic
        missed = t.experts_bytes * (1 - hit_rate)
        card = self.host.card
        if card is None:
            return missed / self.host.disk.bytes_per_s
        return (
            missed / card.link.bytes_per_s
            + t.copies * (1 - hit_rate) * card.latency_s
            + self.disk_s(hit_rate, residency)
        )

    def disk_s(self, hit_rate: float, residency: float) -> float:
        """For what a device misses and main memory behind it does not hold either."""
        held = self.held(self.routed_bytes)
        found = 1.0 if held >= 1 else self.hit_model.pages(min(1.0, residency + held), self.used)
        missed = self.traffic.experts_bytes * min(1 - hit_rate, 1 - found)
        return missed / self.host.disk.bytes_per_s

    def held(self, nbytes: int) -> float:
        """The share of so many bytes of experts that main memory holds behind a device."""
        return min(1.0, max(0, self.behind_room) / nbytes) if nbytes else 1.0


def modes_of(
    work: Work, placed: Placement | None, room: int, model: ModelMap, fitting: int
) -> Iterable[Mode]:
    card = work.host.card
    fast = "the device" if card else "memory"
    if placed is not None and placed.kind != "slotted":
        what = "all experts fit" if model.is_moe else "the model fits"
        yield _timed("resident", work.compute_s(bool(card)), hit_rate=1.0, note=f"{what} {fast}")
        absent = "not needed: everything is resident"
    else:
        if room < 0:
            short = f"weights besides experts and the context lack {format_bytes(-room, up=True)} of {fast}"
        elif not model.is_moe:
            short = f"{fast} is too small, and there are no experts to leave out"
        else:
            short = f"experts take {format_bytes(work.routed_bytes)}, {fast} leaves {format_bytes(room)}"
        yield Mode("resident", "exact", None, note=short)
        absent = short if room < 0 else f"{format_bytes(room)} hold not even one token's experts"
    if card is not None:
        yield _cpu_experts(work, placed, room, model, fitting)
    if placed is not None and placed.kind == "slotted":
        yield from _slotted(work, placed)
    else:
        if not model.is_moe:
            absent = "the model has no routed experts"
        for name in _SLOTTED:
            if card is not None or name != "misses-cpu":
                yield Mode(name, _exactness(name), None, note=absent)
    yield _mapped(work)


def _slotted(work: Work, placed: Placement) -> Iterable[Mode]:
    card = work.host.card
    r = placed.residency
    hit = work.hit_model.slots(r)
    lossy_compute = work.compute_s(card is not None)
    compute = lossy_compute + (work.n_moe * READ_BACK_S if card else 0.0)
    copy = work.copy_s(hit, r)
    if card is not None:
        yield _timed(
            "misses-cpu",
            _misses_on_cpu_s(work, card, hit),
            work.disk_s(hit, r),
            hit_rate=hit,
            note="slots, and the processor computes what they miss",
            options="--misses cpu",
        )
    beside = card is None or card.overlaps
    hidden = overlap(r) * min(copy, compute) if beside else 0.0
    yield _timed("cache", compute, copy, hit_rate=hit, options="--predict none")
    yield _timed(
        "prefetch",
        compute,
        copy,
        hidden,
        hit_rate=hit,
        note="" if beside else "this device copies and computes in turn",
    )
    yield _timed(
        "speculate",
        lossy_compute,
        copy,
        min(copy, lossy_compute) if beside else 0.0,
        hit_rate=hit,
        note="executes predicted experts; at best",
        options="--mode speculate",
    )
    yield _timed("ondemand", compute, work.copy_s(0.0, r), hit_rate=0.0, note="no expert is kept")


def _misses_on_cpu_s(work: Work, card: Card, hit: float) -> float:
    t = work.traffic
    return (
        work.fixed_s(True)
        + (t.weights_bytes + t.kv_bytes + hit * t.experts_bytes) / card.products.bytes_per_s
        + _MISS_READS * (1 - hit) * t.experts_bytes / work.host.products.bytes_per_s
        + work.n_moe * HAND_OFF_S
    )


def _cpu_experts(
    work: Work, placed: Placement | None, room: int, model: ModelMap, fitting: int
) -> Mode:
    """The last layers' experts on the device while they fit, those of the first on the processor."""
    card, t, host = work.host.card, work.traffic, work.host
    assert card is not None
    if not model.is_moe or (placed is not None and placed.kind != "slotted"):
        why = (
            "not needed: everything is resident"
            if model.is_moe
            else "the model has no routed experts"
        )
        return Mode("cpu-experts", "exact", None, note=why)
    if room < 0:
        why = f"weights besides experts and the context lack {format_bytes(-room, up=True)} of the device"
        return Mode("cpu-experts", "exact", None, note=why)
    last = model.layers[len(model.layers) - fitting :]
    on_device = sum(layer.n_expert_used * layer.expert_bytes for layer in last)
    left = t.experts_bytes - on_device
    left_whole = model.routed_bytes - sum(la.n_expert * la.expert_bytes for la in last)
    compute = (
        work.fixed_s(True)
        + (t.weights_bytes + t.kv_bytes + on_device) / card.products.bytes_per_s
        + left / host.products.bytes_per_s
        + (work.n_moe - fitting) * HAND_OFF_S
    )
    held = work.held(left_whole)
    found = 1.0 if held >= 1 else work.hit_model.pages(held, work.used)
    return _timed(
        "cpu-experts",
        compute,
        left * (1 - found) / host.disk.bytes_per_s,
        hit_rate=None,
        options=f"--n-cpu-moe {work.n_moe - fitting}",
        note=f"experts of {fitting} of {work.n_moe} layers on the device"
        + ("" if held >= 1 else f", memory holds {held:.0%} of the others"),
    )


def _mapped(work: Work) -> Mode:
    """The processor alone, the file mapped: what runs without slots."""
    if work.memory_room < 0:
        lack = format_bytes(-work.memory_room, up=True)
        return Mode(
            "mapped",
            "exact",
            None,
            note=f"weights besides experts and the context lack {lack} of memory",
        )
    held = min(1.0, work.memory_room / work.routed_bytes) if work.routed_bytes else 1.0
    found = 1.0 if held >= 1 else work.hit_model.pages(held, work.used)
    copy = work.traffic.experts_bytes * (1 - found) / work.host.disk.bytes_per_s
    note = "processor alone" + ("" if held >= 1 else f", memory holds {held:.0%} of the experts")
    return _timed("mapped", work.compute_s(False), copy, hit_rate=found, note=note)


def _exactness(name: ModeName) -> Exactness:
    if name == "misses-cpu":
        return "rounded"
    return "lossy" if name == "speculate" else "exact"


def _timed(
    name: ModeName,
    compute: float,
    copy: float = 0.0,
    hidden: float = 0.0,
    *,
    hit_rate: float | None,
    note: str = "",
    options: str = "",
) -> Mode:
    return Mode(
        name=name,
        exactness=_exactness(name),
        tokens_per_s=1 / (compute + copy - hidden),
        hit_rate=hit_rate,
        compute_ms=compute * 1e3,
        copy_ms=copy * 1e3,
        hidden_ms=hidden * 1e3,
        note=note,
        options=options,
    )


def overlap(residency: float) -> float:
    return float(np.interp(residency, *_OVERLAP))


def fastest(modes: Iterable[Mode]) -> Mode | None:
    """The fastest; of those within one per cent the first, which is the simplest. The mapped file's speed is
    the best it may have, so it must be well above the others."""
    running = [
        (speed / AT_BEST if mode.name == "mapped" else speed, mode)
        for mode in modes
        if (speed := mode.tokens_per_s) is not None
    ]
    best = max((speed for speed, _ in running), default=0.0)
    return next((mode for speed, mode in running if speed >= best * _TIE), None)
