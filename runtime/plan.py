"""What of a model fits where on a machine, and how fast each way of running it should be. Pure arithmetic.

Takes a `ModelMap`, a `Host` (sizes and rates) and a `HitModel`, gives a `Plan`: memory, placement, a prediction
by mode from bytes moved per token, the fastest without loss, and every assumption in words. Measures nothing and
loads nothing; where slots lie is `placement`'s, rates are `rates`'s.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from speculoe_local.runtime import hits, placement
from speculoe_local.runtime.errors import BudgetError
from speculoe_local.runtime.hits import HitModel
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.modes import (
    AT_BEST,
    CPU_LAYER_S,
    DEVICE_LAYER_S,
    HAND_OFF_S,
    READ_BACK_S,
    Card,
    Host,
    Mode,
    ModeName,
    Rate,
    Work,
    fastest,
    modes_of,
    overlap,
)
from speculoe_local.runtime.needs import (
    HOST_RESERVE_BYTES,
    Needs,
    Traffic,
    device_reserve,
    needs_of,
    traffic_of,
)
from speculoe_local.runtime.placement import Placement, format_bytes

__all__ = ["Card", "Host", "Mode", "ModeName", "Plan", "Rate", "device_reserve", "make_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`fast` names the tier of the slots, `room_bytes` is what experts may take there (below 0: what is missing),
    `placed` None where not even one token's experts fit. `picked` is the fastest mode without loss, or None."""

    model: str
    host: Host
    needs: Needs
    traffic: Traffic
    routed_bytes: int
    fast: Literal["device", "memory"]
    reserve_bytes: int
    room_bytes: int
    placed: Placement | None
    resident_layers: int
    modes: tuple[Mode, ...]
    picked: Mode | None
    verdict: tuple[str, ...]
    assumptions: tuple[str, ...]

    def mode(self, name: ModeName) -> Mode:
        return next(mode for mode in self.modes if mode.name == name)

    def to_json(self) -> dict[str, Any]:
        placed = self.placed
        return {
            "model": self.model,
            "machine": asdict(self.host),
            "memory": {
                **asdict(self.needs),
                "routed_bytes": self.routed_bytes,
                "fast": self.fast,
                "reserve_bytes": self.reserve_bytes,
                "room_bytes": self.room_bytes,
            },
            "traffic": asdict(self.traffic),
            "placement": None
            if placed is None
            else {
                "kind": placed.kind,
                "slots": placed.slots,
                "residency": round(placed.residency, 4),
                "used_bytes": placed.used_bytes,
                "smallest_bytes": placed.smallest_bytes,
                "resident_layers": self.resident_layers,
            },
            "modes": [
                {k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(mode).items()}
                for mode in self.modes
            ],
            "picked": self.picked.name if self.picked else None,
            "verdict": list(self.verdict),
            "assumptions": list(self.assumptions),
        }


def make_plan(
    model: ModelMap,
    host: Host,
    *,
    ctx: int = 4096,
    ubatch: int = 512,
    hit_model: HitModel = hits.DEFAULT,
) -> Plan:
    """Plan `model` on `host` with a context of `ctx` tokens. Raises OptionError for a size that is none."""
    needs = needs_of(model, ctx, ubatch)
    card = host.card
    memory_room = needs.room(host.ram_bytes, HOST_RESERVE_BYTES, on_device=False)
    if card is None:
        reserve, room = HOST_RESERVE_BYTES, memory_room
    else:
        reserve = device_reserve(card.total_bytes)
        room = needs.room(card.free_bytes, reserve, on_device=True)
    placed = _place(model, room)
    work = Work(
        host=host,
        traffic=traffic_of(model, needs),
        n_layer=model.n_layer,
        n_moe=len(model.layers),
        routed_bytes=model.routed_bytes,
        used=max((layer.n_expert_used / layer.n_expert for layer in model.layers), default=0.0),
        hit_model=hit_model,
        memory_room=memory_room,
        behind_room=host.ram_bytes - HOST_RESERVE_BYTES - needs.embedding_bytes,
    )
    fitting = _fitting_layers(model, room) if card else 0
    modes = tuple(modes_of(work, placed, room, model, fitting))
    picked = fastest(mode for mode in modes if mode.exactness != "lossy")
    return Plan(
        model=model.name,
        host=host,
        needs=needs,
        traffic=work.traffic,
        routed_bytes=model.routed_bytes,
        fast="device" if card else "memory",
        reserve_bytes=reserve,
        room_bytes=room,
        placed=placed,
        resident_layers=fitting,
        modes=modes,
        picked=picked,
        verdict=_verdict(modes, picked),
        assumptions=_assumptions(work, needs, placed),
    )


def _place(model: ModelMap, room: int) -> Placement | None:
    if room < 0:
        return None
    try:
        return placement.plan(
            model,
            placement.parse_budget("auto"),
            available_bytes=room + model.other_bytes,
            reserve_bytes=0,
        )
    except BudgetError:
        return None


def _fitting_layers(model: ModelMap, room: int) -> int:
    """How many layers' experts fit whole, from the last one on, as `--n-cpu-moe` has it."""
    count = 0
    for nbytes in (layer.n_expert * layer.expert_bytes for layer in reversed(model.layers)):
        room -= nbytes
        if room < 0:
            break
        count += 1
    return count


def _verdict(modes: tuple[Mode, ...], picked: Mode | None) -> tuple[str, ...]:
    if picked is None:
        return ("does not run on this machine: " + modes[0].note,)
    rounded = " (rounded)" if picked.exactness == "rounded" else ""
    lines = [f"fastest without loss: {picked.name}{rounded}, about {_speed(picked)} tokens/s"]
    if picked.options:
        lines[0] += f" ({picked.options})"
    other = fastest(m for m in modes if m.name in ("resident", "cache", "prefetch"))
    if picked.name == "resident":
        lines.append("a plain placement is best: no slots, nothing is copied while it answers")
    elif picked.name in ("cpu-experts", "mapped") and other is not None:
        how = "experts on the processor" if picked.name == "cpu-experts" else "the processor alone"
        what = "the device" if other.name == "resident" else "slots"
        speeds = f"{_speed(picked)} against {_speed(other)} tokens/s"
        lines.append(f"a plain placement, {how}, beats {what}: {speeds}")
    elif picked.name in ("cpu-experts", "mapped"):
        lines.append("a plain placement is all that runs: there is no room for slots")
    elif picked.name == "cache":
        lines.append("prediction gains less than one per cent here")
    by_name = {mode.name: mode for mode in modes}
    lossy, mapped = by_name["speculate"], by_name["mapped"]
    if lossy.tokens_per_s and picked.tokens_per_s and lossy.tokens_per_s > picked.tokens_per_s:
        lines.append(f"speculate (lossy) may reach {_speed(lossy)}; `eval` says what it costs")
    if mapped.tokens_per_s and picked.tokens_per_s and picked.name != "mapped":
        times = picked.tokens_per_s / mapped.tokens_per_s
        if times >= AT_BEST:
            lines.append(f"{times:.1f} times as fast as the mapped file on the processor alone")
        elif picked.name != "resident":
            lines.append("the mapped file on the processor alone may be as fast, at its best")
    return tuple(lines)


def _speed(mode: Mode) -> str:
    return f"{mode.tokens_per_s or 0.0:.3g}"


def _assumptions(work: Work, needs: Needs, placed: Placement | None) -> tuple[str, ...]:
    card = work.host.card
    lines = list(work.host.remarks)
    lines.append(
        "a token reads all weights besides experts, its own experts, and the keys and values of half a context"
    )
    lines.append(
        f"compute buffers: {format_bytes(needs.compute_bytes)}, estimated from vocabulary and batch"
    )
    lines += needs.notes
    if card:
        lines.append(
            f"besides reading: {DEVICE_LAYER_S * 1e6:.0f} us a layer on the device, {READ_BACK_S * 1e6:.0f} us a layer for "
            f"expert ids, {HAND_OFF_S * 1e6:.0f} us a layer with experts on the processor"
        )
        lines.append("no other work shares the link or the memory's bandwidth")
    else:
        lines.append(f"besides reading: {CPU_LAYER_S * 1e6:.0f} us a layer")
    if placed is not None and placed.kind == "slotted":
        lines.append(
            f"hit rate {work.hit_model.slots(placed.residency):.0%} at {placed.residency:.0%} residency: "
            f"{work.hit_model.origin}; models and texts differ by several points"
        )
        lines.append(
            f"prediction hides {overlap(placed.residency):.0%} of the smaller of copies and compute: measured on the "
            "embedded model (50 % without a cache, 22 % at 25 % residency, 4 % at half)"
        )
        lines.append("speculate hides copies under all compute and never waits for a router")
    short = card is not None and work.held(work.routed_bytes) < 1
    if short or work.memory_room < work.routed_bytes:
        lines.append(
            "what memory does not hold comes from disk; memory drops what was used longest ago, and the disk reads "
            "ahead no more than is used (read-ahead 128 KiB)"
        )
    if short:
        lines.append(
            "memory behind a device keeps experts that the device does not (--source buffered)"
        )
    if card and card.shares_memory:
        lines.append(
            "this device shares main memory with the processor: its memory is counted twice"
        )
    return tuple(lines)
