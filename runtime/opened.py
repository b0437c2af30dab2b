"""From a GGUF path to a model ready to decode: plan, load, attach. What `Engine` and the server share.

    ModelMap -> Placement -> Model (experts left on disk) + ExpertSlots -> Context -> Orchestrator

Knows how the parts fit together and in which order they go; nothing of prompts, answers or threads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from fractions import Fraction

from speculoe_local.runtime import devices, machine, placement, rpc
from speculoe_local.runtime.devices import Device
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.expertfile import ExpertFile, expert_file_path
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.needs import HOST_RESERVE_BYTES, device_reserve, needs_of
from speculoe_local.runtime.options import EngineOptions, parse_layers, parse_link, parse_peers
from speculoe_local.runtime.orchestrator import NativeLoop, Orchestrator
from speculoe_local.runtime.placement import Placement
from speculoe_local.runtime.predict import Predictor, QuasiHidden, default_name, make_predictor
from speculoe_local.runtime.sidecar import Quality, Sidecar, sidecar_path
from speculoe_local.runtime.slots import ExpertSlots
from speculoe_local.runtime.speculate import Speculation, quality_of
from speculoe_local.runtime.spread import Spread, over, part_of, spread, without_experts
from speculoe_local.runtime.stats import Tier

__all__ = ["Opened", "open_model"]

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model in memory with its context and, where experts have slots, what serves them. Close it.

    `mode` is exact where all experts are resident, whatever was asked for; `quality` is what a lossy one
    was measured to cost. `rounded`: which bits an answer has depends on where its experts were computed.
    Not thread-safe; graphs of its context must not run at the same time.
    """

    model_map: ModelMap
    placed: Placement
    model: Model
    context: Context
    slots: ExpertSlots | None
    orchestrator: Orchestrator | NativeLoop | None
    predictor: str
    tier: Tier
    load_s: float
    speculation: Speculation | None
    mode: str
    quality: Quality | None
    rounded: bool

    def speculate(self, on: bool) -> None:
        """Whether decode steps execute predictions from now on, in a lossy mode; prompts must not."""
        if self.speculation is not None:
            self.speculation.switch(self.context.handle, on)

    def close(self) -> None:
        """Free everything, last made first. Once, and not while a graph runs."""
        if self.orchestrator is not None:
            self.orchestrator.close()
        if self.slots is not None:
            self.slots.detach(self.context.handle)
        self.context.close()
        if self.slots is not None:
            self.slots.close()
        if self.speculation is not None:
            self.speculation.close()
        self.model.close()


def open_model(
    path: str | bytes | os.PathLike[str],
    *,
    options: EngineOptions,
    n_parallel: int = 1,
    n_sequences: int = 1,
    shared: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Opened:
    """Plan, load and attach. `progress` gets 0..1 while weights are read.

    Batches of up to `n_parallel` tokens use expert slots, larger ones stream. Each of `n_sequences` has
    a context of its own; `shared`: they share one, and each may use what the others leave. What comes
    of a shared one depends, within rounding, on where in it a sequence lies.

    Raises ModelError, BudgetError, OptionError, SourceError or BackendError.
    """
    begin = time.perf_counter()
    whole = found = ModelMap.read(path)
    host = machine.look()
    chosen = devices.choose_all(options.device)
    device = chosen[0] if chosen else None
    parts = _spread(options, whole, device, host)
    if parts is not None:
        found = parts.of(whole)  # from here on, what of it is on this machine
    computed = _computed_here(options, found, chosen)
    found = without_experts(found, computed)  # and what of that is for slots
    sizes = _Sizes(options, n_sequences, shared, host)
    if len(chosen) > 1:
        placed, parts = sizes.place_over(found, chosen)
    else:
        placed = sizes.place(found, device)
    if parts is not None and parts.endpoints:
        placed = _away(placed, whole, found, parts)
    if len(chosen) > 1 and placed.kind == "slotted":
        # A device that holds all of its experts has no pools.
        found = part_of(found, [i for pool in placed.pools for i in pool.layers], rest=True)
    slotted = placed.kind == "slotted"
    sidecar = _sidecar(options, whole)
    mode = options.mode if slotted else "exact"  # with all experts at hand there is nothing to gain
    quality = quality_of(options, found, sidecar) if mode != "exact" else None
    if options.link and not slotted:
        raise OptionError(
            f"--link {options.link} models uploads, but all experts are resident; lower --expert-budget"
        )
    with ExitStack() as undo:
        model = undo.enter_context(
            closing(
                Model(
                    found.files[0],
                    lazy_experts=slotted or bool(computed),
                    lazy_layers=[*computed, *(layer.index for layer in found.layers if slotted)]
                    if parts or computed
                    else None,
                    repack=options.repack,
                    device=device,
                    spread=parts,
                    progress=progress,
                )
            )
        )
        slots = None
        if slotted:
            pin_bytes = _pin_bytes(options, found, device, host)
            slots = ExpertSlots(
                found,
                placed,
                source=_source(options, found, host),
                policy=options.policy,
                upload_threads=options.upload_threads,
                n_parallel=n_parallel,
                forget=options.buffers == "two-layer",
                repack=options.repack,
                device=device.name if device else None,
                misses=options.misses,
                pin_bytes=pin_bytes,
                link=parse_link(options.link) if options.link else None,
                # What is pinned is read once, matrix by matrix.
                expert_file=None if pin_bytes else _expert_file(whole),
            )
            undo.callback(slots.close)
            _note_pinned(options, pin_bytes, slots)
        context = Context(
            model,
            Shape(
                n_ctx=options.ctx if shared else options.ctx * n_sequences,
                n_batch=options.batch,
                n_ubatch=min(_ubatch(options, d) for d in (device, *chosen)),
                n_threads=options.threads or host.cores,
                n_seq=n_sequences,
                unified=shared,
            ),
        )
        orchestrator: Orchestrator | NativeLoop | None = None
        speculation = None
        if slots is not None:
            slots.attach(context.handle)
        if slots is not None and sidecar is not None and mode != "exact":
            speculation = Speculation(options, found, sidecar, slots)
        elif slots is not None:
            predictor = make_predictor(options.predict, found, sidecar)
            if predictor is not None:
                orchestrator = _loop(options, slots, predictor, found)
        undo.pop_all()
    return Opened(
        model_map=found,
        placed=placed,
        model=model,
        context=context,
        slots=slots,
        orchestrator=orchestrator,
        predictor=options.predict or default_name(sidecar) if orchestrator else "none",
        tier=_tier(options, slotted or bool(computed), device, whole if computed else found, host),
        load_s=time.perf_counter() - begin,
        speculation=speculation,
        mode=mode,
        quality=quality,
        rounded=_rounds(options, slots, device),
    )


def _computed_here(
    options: EngineOptions, model: ModelMap, chosen: Sequence[Device]
) -> tuple[int, ...]:
    """The layers whose experts the CPU computes from the mapped file, as llama.cpp's option of that name."""
    if options.n_cpu_moe == 0:
        return ()
    if len(chosen) != 1:
        where = "several devices" if chosen else "no device to spare"
        raise OptionError(f"--n-cpu-moe {options.n_cpu_moe}: there is {where}; leave it out")
    if options.n_cpu_moe > len(model.layers):
        raise OptionError(
            f"--n-cpu-moe {options.n_cpu_moe}: only {len(model.layers)} layers have routed experts"
        )
    return tuple(layer.index for layer in model.layers[: options.n_cpu_moe])


def _pin_bytes(
    options: EngineOptions, model: ModelMap, device: Device | None, host: machine.Machine
) -> int:
    """How much of the experts to keep where the device reads by itself. auto: all, but at most half of what
    memory is free; none for a driver that computes in software, whose memory that is anyway."""
    asked = placement.parse_budget(options.pin, "--pin")
    if device is None or not device.pins:
        if asked.nbytes or asked.share:
            _logger.warning("--pin %s: no device here reads main memory by itself", options.pin)
        return 0
    if asked.share is not None:
        return int(asked.share * model.routed_bytes)
    if asked.nbytes is not None:
        return min(asked.nbytes, model.routed_bytes)
    return 0 if device.is_software else min(model.routed_bytes, host.available_bytes // 2)


def _note_pinned(options: EngineOptions, asked: int, slots: ExpertSlots) -> None:
    pinned = slots.stats().pinned_bytes
    if asked - pinned > asked // 10:  # less is what the next matrix would not have fitted into
        _logger.warning(
            "--pin %s: %s are pinned, the driver gives no more; the other experts are read from their file",
            options.pin,
            placement.format_bytes(pinned),
        )


def _rounds(options: EngineOptions, slots: ExpertSlots | None, device: Device | None) -> bool:
    """The CPU computes misses as its plain kernels do: the bits of slots on the CPU, if those are plain too."""
    if slots is None or options.misses == "upload":
        return False
    return device is not None or slots.stats().repacked > 0


def _ubatch(options: EngineOptions, device: Device | None) -> int:
    most = device.most_ubatch if device is not None else None
    if device is None or most is None or options.ubatch <= most:
        return options.ubatch
    _logger.info(
        "device=%s ubatch=%d: its driver does not survive %d", device.name, most, options.ubatch
    )
    return most


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a placement follows from besides the model and its tier."""

    options: EngineOptions
    n_sequences: int
    shared: bool
    host: machine.Machine

    def place(
        self, model: ModelMap, device: Device | None, budget: placement.Budget | None = None
    ) -> Placement:
        """Where the experts of layers in one tier lie; `budget` None is the option's."""
        most = devices.most_buffer_bytes(device) if device is not None else None
        if self.options.buffers == "two-layer":
            return placement.two_layers(model, most_buffer_bytes=most)
        budget = budget or placement.parse_budget(self.options.expert_budget)
        free = model.other_bytes + self._room(model, device) if budget.is_auto else None
        return placement.plan(
            model,
            budget,
            available_bytes=free,
            most_buffer_bytes=most,
            pinned=_pinned(self.options, model),
        )

    def place_over(self, model: ModelMap, chosen: Sequence[Device]) -> tuple[Placement, Spread]:
        """The same for layers on several devices, each of which takes the same share of a budget."""
        counts, parts = over(model, chosen)
        budget = placement.parse_budget(self.options.expert_budget)
        if budget.nbytes is not None and model.is_moe:
            share = min(Fraction(1), Fraction(budget.nbytes, model.routed_bytes))
            budget = replace(budget, nbytes=None, share=share)
        first, placed = 0, []
        for device, count in zip(chosen, counts, strict=True):
            here = part_of(model, range(first, first + count), rest=device is chosen[-1])
            if here.is_moe or not model.is_moe:
                placed.append((device, here, self.place(here, device, budget)))
            first += count
        slotted = [i for i, (_, _, p) in enumerate(placed) if p.kind == "slotted"]
        for i in range(slotted[0], slotted[-1]) if slotted else ():
            device, here, found = placed[i]
            if found.kind == "resident":  # layers with slots predict the next one: leave no gap
                almost = replace(budget, nbytes=here.routed_bytes - 1, share=None)
                placed[i] = device, here, self.place(here, device, almost)
        named = [(device.name, here, found) for device, here, found in placed]
        return placement.join(named), parts

    def _room(self, model: ModelMap, device: Device | None) -> int:
        """What experts may take of the memory that they are to be fast in, as `plan` counts it; 0 or more."""
        ubatch = _ubatch(self.options, device)
        needs = needs_of(
            model, self.options.ctx, ubatch, sequences=self.n_sequences, shared=self.shared
        )
        if device is None:
            return max(
                0, needs.room(self.host.available_bytes, HOST_RESERVE_BYTES, on_device=False)
            )
        reserve = device_reserve(device.total_bytes)
        return max(0, needs.room(device.free_bytes, reserve, on_device=True))


def _pinned(options: EngineOptions, model: ModelMap) -> frozenset[int]:
    asked = parse_layers(options.pin_layers)
    if beyond := sorted(i for i in asked if i >= model.n_layer):
        raise OptionError(
            f"--pin-layers {beyond[0]}: the model has layers 0 to {model.n_layer - 1}"
        )
    return asked


def _spread(
    options: EngineOptions, model: ModelMap, device: Device | None, host: machine.Machine
) -> Spread | None:
    """Which layers other machines take; None without any."""
    if options.rpc is None:
        return None
    members = rpc.connect(parse_peers(options.rpc))
    free = host.available_bytes if device is None else device.free_bytes
    return spread(model, members, device, free)


def _away(placed: Placement, whole: ModelMap, here: ModelMap, parts: Spread) -> Placement:
    """`placed` for the layers that are here, saying where the others are."""
    if whole.is_moe and not here.is_moe:
        placed = replace(placed, kind="resident", reason="no layer with experts is on this machine")
    return replace(placed, reason=f"{placed.reason}; {parts.describe()}")


def _tier(
    options: EngineOptions,
    slotted: bool,
    device: Device | None,
    model: ModelMap,
    host: machine.Machine,
) -> Tier:
    if not slotted:
        return "resident"
    if options.link:
        return "link"
    if device is None:
        return "disk-ram"
    return "ram-vram" if model.total_bytes <= host.available_bytes else "disk-ram-vram"


def _loop(
    options: EngineOptions, slots: ExpertSlots, predictor: Predictor, model: ModelMap
) -> Orchestrator | NativeLoop:
    if options.loop == "python":
        most_used = max(layer.n_expert_used for layer in model.layers)
        return Orchestrator(slots, predictor, model.n_embd, most_used)
    if not isinstance(predictor, QuasiHidden):
        raise OptionError(f"--predict {options.predict} has no native loop; use the Python loop")
    return NativeLoop(slots, predictor, model.n_embd)


def _sidecar(options: EngineOptions, model: ModelMap) -> Sidecar | None:
    """The one that was named, or the one that lies beside the model. A damaged or foreign one is
    refused either way: to ignore it silently would be to answer with other figures than asked for."""
    path = options.sidecar or sidecar_path(model.files[0])
    return Sidecar.read(path, model) if options.sidecar or path.exists() else None


def _expert_file(found: ModelMap) -> ExpertFile | None:
    """The expert file beside the model, if there is one and it is the model's."""
    path = expert_file_path(found.files[0])
    if not path.exists():
        return None
    try:
        return ExpertFile.read(path, found)
    except ModelError as error:
        _logger.warning("expert_file=%s unused=%s", path, error)
        return None


def _source(options: EngineOptions, model: ModelMap, host: machine.Machine) -> str:
    """How to read experts: through the page cache while it can hold them, around it otherwise."""
    if options.source != "auto":
        return options.source
    return "buffered" if model.total_bytes <= host.available_bytes else "direct"
