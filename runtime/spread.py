"""Which layers run here and which on other machines. Pure arithmetic.

Whole layers move, with their attention, KV and experts; what is left has its experts in slots as ever.
Takes sizes and free memory, gives what llama.cpp wants to know: devices, shares, a number of layers.
Knows no socket and no model in memory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import BudgetError, OptionError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.needs import device_reserve
from speculoe_local.runtime.placement import format_bytes

__all__ = [
    "Member",
    "Spread",
    "deal",
    "over",
    "part_of",
    "split_evenly",
    "spread",
    "without_experts",
]

_BLOCK = re.compile(r"blk\.([0-9]{1,6})\.")


@dataclass(frozen=True, slots=True)
class Member:
    """One other machine: where it is, its devices, and how many layers were asked for (None: what fits)."""

    endpoint: str
    devices: tuple[Device, ...]
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Layers and their devices, in llama.cpp's order.

    `devices` and `shares` (layers of each, the output counting as one) go together; the layers before
    the last `n_offloaded` run on the CPU. `output_here`: the output's weights stay in main memory.
    `local`: the layers of this machine; `remote`: endpoint and first and last layer of each part.
    """

    devices: tuple[Device, ...]
    shares: tuple[int, ...]
    n_offloaded: int
    output_here: bool
    local: tuple[int, ...]
    remote: tuple[tuple[str, int, int], ...]
    endpoints: tuple[str, ...]

    def of(self, model: ModelMap) -> ModelMap:
        """What of `model` is on this machine."""
        return part_of(model, self.local, rest=True)

    def describe(self) -> str:
        parts = [
            f"{_layers(first, last)} on {endpoint}"
            for endpoint, first, last in self.remote
            if first <= last
        ]
        here = _layers(self.local[0], self.local[-1]) if self.local else "no layer"
        return ", ".join([f"{here} here", *parts])


def spread(
    model: ModelMap, members: Sequence[Member], device: Device | None, local_free: int
) -> Spread:
    """Give each member layers: the number asked for, or by free memory and at most what fits there.

    The CPU's layers are the first ones, those of a local `device` the last ones, so that each answer
    crosses the network as hidden states and not as logits.

    Raises OptionError when more layers are asked for than there are, BudgetError when a member that
    names no number has room for none.
    """
    sizes = layer_bytes(model)
    devices = [d for member in members for d in member.devices]
    counts = deal(sizes, local_free, members)
    n_remote, n = sum(counts), len(sizes)
    n_local = n - n_remote
    first = n_local if device is None else 0
    per_device: list[int] = []
    remote = []
    at = first
    for member, count in zip(members, counts, strict=True):
        per_device += split_evenly(count, [d.free_bytes for d in member.devices])
        remote.append((member.endpoint, at, at + count - 1))
        at += count
    local = range(n_local) if device is None else range(n_remote, n)
    if device is None:
        per_device[-1] += (
            1  # llama.cpp counts the output as the last layer; an override keeps it here
        )
    else:
        devices.append(device)
        per_device.append(n_local + 1)
    return Spread(
        devices=tuple(devices),
        shares=tuple(per_device),
        n_offloaded=sum(per_device),
        output_here=device is None,
        local=tuple(local),
        remote=tuple(remote),
        endpoints=tuple(member.endpoint for member in members),
    )


def over(model: ModelMap, devices: Sequence[Device]) -> tuple[tuple[int, ...], Spread]:
    """Layers for each of several local devices, in order and by what is free beside a reserve, and how llama.cpp
    is told so. At least one layer each: raises OptionError for more devices than layers."""
    n = len(layer_bytes(model))
    if len(devices) > n:
        raise OptionError(f"--device names {len(devices)} devices, the model has {n} layers")
    free = [max(0, d.free_bytes - device_reserve(d.total_bytes)) for d in devices]
    counts = split_evenly(n, free)
    while 0 in counts:
        counts[counts.index(max(counts))] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts), Spread(
        devices=tuple(devices),
        shares=(*counts[:-1], counts[-1] + 1),  # the output counts as the last layer
        n_offloaded=n + 1,
        output_here=False,
        local=tuple(range(n)),
        remote=(),
        endpoints=(),
    )


def part_of(model: ModelMap, layers: Sequence[int], *, rest: bool) -> ModelMap:
    """What of `model` lies with some of its layers; `rest`: embeddings and output, too."""
    here = set(layers)
    tensors = {
        name: tensor
        for name, tensor in model.tensors.items()
        if (int(match[1]) in here if (match := _BLOCK.match(name)) else rest)
    }
    away = sum(t.nbytes for name, t in model.tensors.items() if name not in tensors)
    return replace(
        model,
        tensors=tensors,
        layers=tuple(layer for layer in model.layers if layer.index in here),
        total_bytes=model.total_bytes - away,
    )


def without_experts(model: ModelMap, layers: Collection[int]) -> ModelMap:
    """`model` as if those of its layers had no routed experts: the CPU computes them, whatever else goes where."""
    away = sum(la.n_expert * la.expert_bytes for la in model.layers if la.index in layers)
    return replace(
        model,
        layers=tuple(layer for layer in model.layers if layer.index not in layers),
        total_bytes=model.total_bytes - away,
    )


def layer_bytes(model: ModelMap) -> list[int]:
    """Bytes of all weights of each block, blocks that only predict further tokens included."""
    sizes: dict[int, int] = {}
    for name, tensor in model.tensors.items():
        if match := _BLOCK.match(name):
            sizes[int(match[1])] = sizes.get(int(match[1]), 0) + tensor.nbytes
    return [sizes.get(i, 0) for i in range(max(sizes, default=-1) + 1)]


def deal(sizes: Sequence[int], local_free: int, members: Sequence[Member]) -> list[int]:
    """Layers for each member: as asked, else its share of all free memory, at most what fits in its own.

    Raises as `spread`.
    """
    n, largest = len(sizes), max(sizes)
    asked = sum(member.layers or 0 for member in members)
    if asked > n:
        raise OptionError(f"--rpc asks for {asked} layers, the model has {n}; ask for at most {n}")
    total = local_free + sum(d.free_bytes for m in members for d in m.devices)
    left = n - asked
    counts = []
    for member in members:
        if member.layers is not None:
            counts.append(member.layers)
            continue
        free = sum(d.free_bytes for d in member.devices)
        room = sum(
            max(0, d.free_bytes - device_reserve(d.total_bytes)) // largest for d in member.devices
        )
        if room == 0:
            raise BudgetError(
                f"{member.endpoint} has {format_bytes(free)} free, a layer takes {format_bytes(largest)} "
                f"beside a reserve; leave it out, or say how many with {member.endpoint}=LAYERS"
            )
        count = min(max(1, n * free // max(total, 1)), room, left)
        counts.append(count)
        left -= count
    return counts


def split_evenly(count: int, weights: Sequence[int]) -> list[int]:
    """`count` in whole parts as `weights` say, those with the largest remainder first; sums to `count`."""
    whole = sum(weights)
    if whole == 0:
        weights, whole = [1] * len(weights), len(weights)
    parts = [count * weight // whole for weight in weights]
    by_remainder = sorted(range(len(parts)), key=lambda i: (-(count * weights[i] % whole), i))
    for i in by_remainder[: count - sum(parts)]:
        parts[i] += 1
    return parts


def _layers(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first} to {last}"
