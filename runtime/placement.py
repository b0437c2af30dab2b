"""Decide how many expert slots each layer gets from a memory budget. Pure arithmetic.

Takes a `ModelMap` and a `Budget`, gives a `Placement`: pools of slots, staging for prompts, and why.
Allocates nothing, measures nothing and knows no device; who calls it says how much memory there is.

A pool is one bank per matrix kind whose slots are shared by the layers of the pool: all layers of one
shape, so that a layer whose router repeats itself leaves slots to one whose router does not. (Routing of
gpt-oss-20b, 25 % of the experts, policy `learned`: 74.7 % hits with one pool, 71.9 % with one for each
layer, groups of neighbours in between.) A prompt, which wants more experts than a pool holds, streams
whole matrices through the staging buffers instead.

Where a device limits one buffer, layers of one shape share as few pools as banks within the limit allow.
Layers of a pool then lie evenly over the model and not side by side: each pool has early and late layers,
whose routing differs, and those that run one after the other do not compete for slots.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby
from typing import Literal

from speculoe_local.runtime.errors import BudgetError, OptionError
from speculoe_local.runtime.modelmap import ModelMap, MoeLayer

__all__ = [
    "Budget",
    "Placement",
    "Pool",
    "describe",
    "format_bytes",
    "join",
    "parse_budget",
    "plan",
    "two_layers",
]

_ROOMY = 8  # a second staging buffer comes when two take at most this part of the budget
_UNITS = {unit: 1000**power for power, unit in enumerate(("", "k", "m", "g", "t"))}
_UNITS |= {unit: 1024**power for power, unit in enumerate(("ki", "mi", "gi", "ti"), start=1)}
_BUDGET = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,9})?) ?(%|[kmgt]?i?b?)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory for experts as asked for: bytes, or a share of all routed experts, or neither (auto)."""

    text: str
    nbytes: int | None = None
    share: Fraction | None = None

    @property
    def is_auto(self) -> bool:
        return self.nbytes is None and self.share is None


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots shared by `layers` (indices in the model); one slot of all its banks is `slot_bytes`.

    A bank is allocated with one slot more than `slots`; see `Placement.spare_bytes`. `device` names whose
    memory holds it where several do, None otherwise.
    """

    layers: tuple[int, ...]
    slots: int
    slot_bytes: int
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """What to allocate. `used_bytes`, slots and staging, never exceeds `budget_bytes`.

    `residency` is slots over all routed experts, `smallest_bytes` the smallest budget that works.
    A resident or dense model has neither pools nor staging: it runs as upstream runs it.
    """

    kind: Literal["resident", "slotted", "dense"]
    pools: tuple[Pool, ...]
    staging_bytes: int
    staging_buffers: int
    budget_bytes: int
    used_bytes: int
    residency: float
    smallest_bytes: int
    reason: str

    @property
    def slots(self) -> int:
        return sum(pool.slots for pool in self.pools)

    @property
    def spare_bytes(self) -> int:
        """The spare slot of each pool's banks, which comes from the reserve and not the budget."""
        return sum(pool.slot_bytes for pool in self.pools)


def parse_budget(text: str, option: str = "--expert-budget") -> Budget:
    """Read `2GiB`, `512 MB`, `1.5g`, `123456` (bytes), `25%` (of all routed experts) or `auto`.

    KiB, MiB, GiB, TiB are powers of 1024, kB, MB, GB, TB powers of 1000; the B and the case are
    free. Raises OptionError for anything else, above 100% and from 2^63 bytes on.
    """
    asked = text.strip()
    if asked.lower() == "auto":
        return Budget("auto")
    match = _BUDGET.fullmatch(asked.lower())
    unit = match[2].removesuffix("b") if match else "?"
    if match is None or (unit != "%" and unit not in _UNITS):
        raise OptionError(
            f"{option} {asked[:40]!r} is not a size; use for example 2GiB, 512MiB, 25% or auto"
        )
    number = Fraction(match[1])
    if unit == "%":
        if number > 100:
            raise OptionError(f"{option} {asked} is above 100%; use at most 100%")
        return Budget(asked, share=number / 100)
    nbytes = int(number * _UNITS[unit])
    if nbytes >= 1 << 63:
        raise OptionError(f"{option} {asked} is not below 2^63 bytes; use 100% or less")
    return Budget(asked, nbytes=nbytes)


def plan(
    model: ModelMap,
    budget: Budget,
    *,
    available_bytes: int | None = None,
    reserve_bytes: int = 0,
    most_buffer_bytes: int | None = None,
    pinned: Collection[int] = (),
) -> Placement:
    """Spend `budget` on slots for the experts of `model`.

    `auto` needs `available_bytes`, the fast memory that is free before loading: all experts stay
    resident if they, the other weights and `reserve_bytes` fit in it, otherwise slots get what is
    left. No bank, its spare slot included, is larger than `most_buffer_bytes` (None: any size works).
    Layers in `pinned` (by index) have a slot for each expert, whatever the others get.

    Raises BudgetError, naming the smallest budget that works, if one token's experts do not fit, and for
    experts too large for one buffer; OptionError for `auto` without `available_bytes`.
    """
    if not model.is_moe:
        return Placement("dense", (), 0, 0, 0, 0, 1.0, 0, "the model has no routed experts")
    staging = _staging_bytes(model)
    least = _pools(model.layers, 0, None, pinned)
    floor = _slots_bytes(least)
    smallest = min(floor + staging, model.routed_bytes)

    spare = sum(pool.slot_bytes for pool in least)
    budget_bytes = _resolve(model, budget, available_bytes, reserve_bytes, spare)
    if budget_bytes >= model.routed_bytes:
        reason = f"all {format_bytes(model.routed_bytes)} of experts fit"
        return Placement(
            "resident", (), 0, 0, budget_bytes, model.routed_bytes, 1.0, smallest, reason
        )
    if budget_bytes < smallest:
        raise BudgetError(_refusal(model, budget, budget_bytes, smallest))
    _check_buffers(model, most_buffer_bytes)

    # The budget that first affords the second buffer must not get fewer slots than a smaller one
    # did, so just below the threshold what the buffer will take stays unspent.
    threshold = max(_ROOMY * 2 * staging, floor + 2 * staging)
    buffers = 2 if budget_bytes >= threshold else 1
    usable = budget_bytes if buffers == 2 else min(budget_bytes, threshold - staging)
    pools = _pools(model.layers, usable - buffers * staging, most_buffer_bytes, pinned)
    if budget.is_auto and len(pools) > len(least):  # each has a spare slot
        more = sum(pool.slot_bytes for pool in pools) - spare
        left = max(usable - buffers * staging - more, floor)
        pools = _pools(model.layers, left, most_buffer_bytes, pinned)
    return Placement(
        kind="slotted",
        pools=pools,
        staging_bytes=staging,
        staging_buffers=buffers,
        budget_bytes=budget_bytes,
        used_bytes=_slots_bytes(pools) + buffers * staging,
        residency=sum(p.slots for p in pools) / _n_experts(model),
        smallest_bytes=smallest,
        reason="layers of equal shape share them",
    )


def two_layers(model: ModelMap, *, most_buffer_bytes: int | None = None) -> Placement:
    """Slots for all experts of two layers of each shape, for measurements without a cache.

    Raises BudgetError for a model without routed experts, and where a bank of them is larger than
    `most_buffer_bytes`: in several pools they would be buffers of more than two layers.
    """
    if not model.is_moe:
        raise BudgetError(f"{model.name} has no routed experts, so there is nothing to buffer")
    largest = plan(model, parse_budget("100%"))
    pools = tuple(
        Pool(pool.layers, 2 * model.layer(pool.layers[0]).n_expert, pool.slot_bytes)
        for pool in _pools(model.layers, 0, None)
    )
    for pool in pools:
        _check_bank(model.layer(pool.layers[0]), pool.slots + 1, most_buffer_bytes)
    _check_buffers(model, most_buffer_bytes)
    staging = _staging_bytes(model)
    used = _slots_bytes(pools) + staging
    return Placement(
        kind="slotted",
        pools=pools,
        staging_bytes=staging,
        staging_buffers=1,
        budget_bytes=used,
        used_bytes=used,
        residency=sum(p.slots for p in pools) / _n_experts(model),
        smallest_bytes=largest.smallest_bytes,
        reason="two layers' worth of buffers, nothing is kept",
    )


def join(parts: Sequence[tuple[str, ModelMap, Placement]]) -> Placement:
    """One placement of several devices: by name, with the layers of each. Slotted if one of them is."""
    slotted = [(name, model, placed) for name, model, placed in parts if placed.kind == "slotted"]
    if not slotted:
        placed = next((p for _, _, p in parts if p.kind == "resident"), parts[0][2])
        return replace(
            placed,
            budget_bytes=sum(p.budget_bytes for _, _, p in parts),
            used_bytes=sum(p.used_bytes for _, _, p in parts),
            smallest_bytes=sum(p.smallest_bytes for _, _, p in parts),
            reason=f"all {format_bytes(sum(p.used_bytes for _, _, p in parts))} of experts fit"
            if placed.kind == "resident"
            else placed.reason,
        )
    n_buffers = min(p.staging_buffers for _, _, p in slotted)
    given_up = sum((p.staging_buffers - n_buffers) * p.staging_bytes for _, _, p in slotted)
    held = sum(p.residency * _n_experts(model) for _, model, p in parts)
    full = [name for name, model, p in parts if model.is_moe and p.kind == "resident"]
    return Placement(
        kind="slotted",
        pools=tuple(replace(pool, device=name) for name, _, p in slotted for pool in p.pools),
        staging_bytes=sum(p.staging_bytes for _, _, p in slotted),
        staging_buffers=n_buffers,
        budget_bytes=sum(p.budget_bytes for _, _, p in parts),
        used_bytes=sum(p.used_bytes for _, _, p in parts) - given_up,
        residency=held / sum(_n_experts(model) for _, model, _ in parts),
        smallest_bytes=sum(p.smallest_bytes for _, _, p in parts),
        reason="layers of equal shape share them on each device"
        + "".join(f", all fit on {name}" for name in full),
    )


def describe(placement: Placement) -> str:
    """A few lines for people: slots by layer, staging, and what was used of the budget."""
    if placement.kind != "slotted":
        return f"{placement.kind}: {placement.reason}"
    lines = [f"slotted: {placement.residency:.1%} of experts have a slot, {placement.reason}"]
    for pool in placement.pools:
        noun, together = ("layers", "together ") if len(pool.layers) > 1 else ("layer", "")
        slots = f"{together}{pool.slots} slots of {format_bytes(pool.slot_bytes)}"
        where = f" on {pool.device}" if pool.device else ""
        lines.append(f"  {noun} {_ranges(pool.layers)}: {slots}{where}")
    lines.append(
        f"  prompts: {placement.staging_buffers} x {format_bytes(placement.staging_bytes)} of staging"
    )
    lines.append(
        f"  budget: {format_bytes(placement.used_bytes)} of {format_bytes(placement.budget_bytes)} "
        f"used; the smallest that works is {format_bytes(placement.smallest_bytes, up=True)}"
    )
    return "\n".join(lines)


def format_bytes(nbytes: int, *, up: bool = False) -> str:
    """`nbytes` with one decimal in the largest unit of 1024 that keeps it at 1 or more.

    With `up` it is rounded up, so that what is shown is enough.
    """
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            tenths = Fraction(nbytes * 10, 1024**power)
            return f"{(-(-tenths // 1) if up else round(tenths)) / 10:.1f} {unit}"
    return f"{nbytes} B"


def _pools(
    layers: tuple[MoeLayer, ...],
    slot_budget: int,
    most_buffer_bytes: int | None,
    pinned: Collection[int] = (),
) -> tuple[Pool, ...]:
    """Pools for each kind of layer: each kind gets the k of its layers, then slots are dealt round by round.

    Layers are of one kind if their experts have the same shapes and are equally many, and both are `pinned`
    or neither: those have slots for all to begin with. In round r each
    layer of more than r experts, the first layers first, brings its kind one slot; those that make up
    the k are there already, whatever the budget: the layer that runs pins so many. The order of dealing
    is fixed and ends at the first slot that does not fit, so a larger budget never means fewer slots;
    less than one slot of the largest layer stays unspent, and what no buffer would hold.
    """
    kinds = [(layer.n_expert, layer.shape_class, layer.index in pinned) for layer in layers]
    members: dict[Hashable, list[MoeLayer]] = {}
    for layer, kind in zip(layers, kinds, strict=True):
        members.setdefault(kind, []).append(layer)
    cost = {kind: group[0].expert_bytes for kind, group in members.items()}
    most = {kind: _most_slots(group[0], most_buffer_bytes) for kind, group in members.items()}
    room = {kind: len(g) * min(g[0].n_expert, most[kind]) for kind, g in members.items()}
    slots = {
        kind: room[kind] if g[0].index in pinned else max(layer.n_expert_used for layer in g)
        for kind, g in members.items()
    }
    left = slot_budget - sum(slots[kind] * cost[kind] for kind in slots)
    dealt = dict.fromkeys(slots, 0)
    rounds = range(max(layer.n_expert for layer in layers))
    for kind in (kind for r in rounds for kind in kinds if r < kind[0]):
        dealt[kind] += 1
        if dealt[kind] <= slots[kind] or slots[kind] == room[kind]:
            continue
        left -= cost[kind]
        if left < 0:
            break
        slots[kind] += 1
    return tuple(
        pool
        for kind, group in members.items()
        for pool in _share_out(group, slots[kind], most[kind])
    )


def _share_out(group: Sequence[MoeLayer], slots: int, most: int) -> Iterator[Pool]:
    """`slots` of layers of one kind, in as few pools as hold them with at most `most` in each."""
    least, n_expert = max(layer.n_expert_used for layer in group), group[0].n_expert
    held, parts, rooms = 0, [group], [0]
    for n_pools in range(1, len(group) + 1):
        if n_pools > 1 and n_pools * least > slots:
            break
        tried = [group[first::n_pools] for first in range(n_pools)]
        room = [min(most, len(part) * n_expert) for part in tried]
        if min(slots, sum(room)) > held:
            held, parts, rooms = min(slots, sum(room)), tried, room
        if held == slots:
            break
    shares = [held] if len(parts) == 1 else [least] * len(parts)
    for _ in range(held - sum(shares)):  # in proportion to layers, as far as there is room
        open_parts = (i for i, room in enumerate(rooms) if shares[i] < room)
        shares[min(open_parts, key=lambda i: shares[i] / len(parts[i]))] += 1
    for part, share in zip(parts, shares, strict=True):
        yield Pool(tuple(layer.index for layer in part), share, group[0].expert_bytes)


def _most_slots(layer: MoeLayer, most_buffer_bytes: int | None) -> int:
    """How many slots a bank within the limit has beside its spare one."""
    if most_buffer_bytes is None:
        return 1 << 62
    return most_buffer_bytes // max(m.bytes_per_expert for m in layer.matrices) - 1


def _check_buffers(model: ModelMap, most_buffer_bytes: int | None) -> None:
    """Whether the limit leaves each layer the slots that one token pins, and its prompts a staging buffer."""
    for layer in model.layers:
        _check_bank(layer, max(layer.n_expert_used + 1, layer.n_expert), most_buffer_bytes)


def _check_bank(layer: MoeLayer, n_experts: int, most_buffer_bytes: int | None) -> None:
    largest = max(layer.matrices, key=lambda m: m.bytes_per_expert)
    nbytes = n_experts * largest.bytes_per_expert
    if most_buffer_bytes is not None and nbytes > most_buffer_bytes:
        raise BudgetError(
            f"{largest.name}: {n_experts} experts take {format_bytes(nbytes, up=True)}, one buffer of the device "
            f"{format_bytes(most_buffer_bytes)} at most; use --device cpu"
        )


def _resolve(
    model: ModelMap, budget: Budget, available: int | None, reserve: int, spare: int
) -> int:
    """The budget in bytes; `spare` is what the spare slots of all pools take."""
    if budget.nbytes is not None:
        return budget.nbytes
    if budget.share is not None:
        return int(budget.share * model.routed_bytes)
    if available is None:
        raise OptionError(
            "--expert-budget auto cannot be used, the free memory is unknown; give a size such as 25%"
        )
    left = max(available - model.other_bytes - reserve, 0)
    return left if left >= model.routed_bytes else max(left - spare, 0)


def _refusal(model: ModelMap, budget: Budget, budget_bytes: int, smallest: int) -> str:
    tenths = -(-smallest * 1000 // model.routed_bytes)  # rounded up: what is shown must work
    percent = f"{tenths / 10:.1f}".removesuffix(".0") + "%"
    leaves = f" leaves {format_bytes(budget_bytes)}, which" if budget.is_auto else ""
    first = "free memory or use" if budget.is_auto else "use"
    return (
        f"--expert-budget {budget.text}{leaves} is below the {format_bytes(smallest, up=True)} "
        f"({percent}) that one token of this model needs; {first} at least {percent}"
    )


def _staging_bytes(model: ModelMap) -> int:
    """One buffer per weight type, as large as the largest matrix of it: layouts do not mix."""
    largest: dict[int, int] = {}
    for matrix in (matrix for layer in model.layers for matrix in layer.matrices):
        largest[matrix.ggml_type] = max(largest.get(matrix.ggml_type, 0), matrix.nbytes)
    return sum(largest.values())


def _n_experts(model: ModelMap) -> int:
    return sum(layer.n_expert for layer in model.layers)


def _slots_bytes(pools: tuple[Pool, ...]) -> int:
    return sum(pool.slots * pool.slot_bytes for pool in pools)


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    runs = [
        [number for _, number in run]
        for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
