"""`speculoe-local plan`: what of a model fits where, and how fast it should be, before it is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.runtime.modes import Mode
    from speculoe_local.runtime.plan import Plan

__all__ = ["brief", "plan", "text"]


def plan(
    model: opt.ModelName = None,
    vram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="Memory of the device, for example 12GiB. Default: what is free on this machine's.",
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="Main memory, of which the system keeps 2 GiB. Default: what is available here.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE[,LATENCY]",
            show_default=False,
            help="Uploads to the device, for example 24GB/s,10us. Default: measured.",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", show_default=False, help="Reads of the model's disk. Default: measured."
        ),
    ] = None,
    ram_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            show_default=False,
            help="Bandwidth of main memory. Default: products are measured.",
        ),
    ] = None,
    vram_rate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            show_default=False,
            help="Bandwidth of the device's memory. Default: products are measured.",
        ),
    ] = None,
    ctx: opt.Ctx = 4096,
    ubatch: opt.Ubatch = 512,
    device: opt.Device = "auto",
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE.npz",
            show_default=False,
            help="A routing trace as for `replay`: hit rates are taken from it.",
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--measure", help="Measure this machine's rates again.")
    ] = False,
    json_: opt.Json = False,
) -> None:
    """Say what of MODEL fits where and how fast each mode should be, without loading it.

    Rates that are not given are measured on this machine in a second or two, and remembered. With --vram the
    device need not exist. The fastest mode without loss is named, and so is a plain placement that beats slots.
    """
    from speculoe_local.runtime import hits
    from speculoe_local.runtime.host import host_of
    from speculoe_local.runtime.modelmap import ModelMap
    from speculoe_local.runtime.plan import make_plan

    found = ModelMap.read(opt.resolve_model(model))
    host = host_of(
        found,
        vram=vram,
        ram=ram,
        link=link,
        disk=disk,
        ram_rate=ram_rate,
        vram_rate=vram_rate,
        device=device,
        again=again,
    )
    hit_model = hits.of_trace(trace) if trace else hits.DEFAULT
    made = make_plan(found, host, ctx=ctx, ubatch=ubatch, hit_model=hit_model)
    print(json.dumps(made.to_json()) if json_ else text(made))


def text(made: Plan) -> str:
    """Memory, modes, verdict and assumptions for people."""
    from speculoe_local.runtime.placement import format_bytes

    host, needs = made.host, made.needs
    kind = f"device ({host.card.name})" if host.card else "main memory"
    whole = host.card.free_bytes if host.card else host.ram_bytes
    rates = [("processor", host.products), ("disk", host.disk)]
    if host.card:
        rates = [("device", host.card.products), ("link", host.card.link), *rates]
    lines = [
        f"{made.model}: experts {format_bytes(made.routed_bytes)}, other weights "
        f"{format_bytes(needs.weights_bytes)}",
        "",
        f"{kind}: {format_bytes(whole)}",
        f"  {format_bytes(made.reserve_bytes):>10}  reserve",
        f"  {format_bytes(needs.beside_bytes if host.card else needs.weights_bytes):>10}  weights besides experts",
        f"  {format_bytes(needs.kv_bytes + needs.state_bytes):>10}  context of {needs.ctx} tokens",
        f"  {format_bytes(needs.compute_bytes):>10}  compute buffers",
        _room(made),
    ]
    if host.card:
        lines.append(f"main memory: {format_bytes(host.ram_bytes)}")
    lines += ["", "rates:"]
    lines += [
        f"  {name:9} {rate.bytes_per_s / 1e9:8.2f} GB/s  {rate.origin}" for name, rate in rates
    ]
    lines += [
        "",
        f"{'mode':12} {'tokens/s':>8} {'hits':>6} {'compute':>8} {'copies':>8} {'hidden':>7}  ms/token",
    ]
    lines += [_row(mode) for mode in made.modes]
    lines += ["", *made.verdict, "", "assumed:", *(f"  - {line}" for line in made.assumptions)]
    return "\n".join(lines)


def brief(path: Path) -> tuple[str, ...]:
    """The verdict for the model at `path` on this machine, as lines; none where it cannot be told."""
    from speculoe_local.runtime.errors import SpeculoeError
    from speculoe_local.runtime.host import host_of
    from speculoe_local.runtime.modelmap import ModelMap
    from speculoe_local.runtime.plan import make_plan

    try:
        model = ModelMap.read(path)
        return make_plan(model, host_of(model)).verdict
    except SpeculoeError:
        return ()  # no device, no rate: the placement stands without a speed


def _room(made: Plan) -> str:
    from speculoe_local.runtime.placement import format_bytes

    if made.room_bytes < 0:
        return f"  {format_bytes(-made.room_bytes, up=True):>10}  are missing"
    line = f"  {format_bytes(made.room_bytes):>10}  for experts"
    placed = made.placed
    if placed is None:
        return f"{line}: not even one token's"
    if placed.kind == "slotted":
        return (
            f"{line}: {placed.slots} slots, {placed.residency:.0%} of all, and "
            f"{format_bytes(placed.staging_buffers * placed.staging_bytes)} of staging for prompts"
        )
    return f"{line}: all of them" if placed.kind == "resident" else line


def _row(mode: Mode) -> str:
    if mode.tokens_per_s is None:
        return f"{mode.name:12} {'-':>8}  {mode.note}"
    speed = f"{mode.tokens_per_s:.1f}" if mode.tokens_per_s >= 1 else f"{mode.tokens_per_s:.2f}"
    hit = "" if mode.hit_rate is None else f"{mode.hit_rate:.1%}"
    note = "; ".join(
        part for part in ("" if mode.exactness == "exact" else mode.exactness, mode.note) if part
    )
    row = f"{mode.name:12} {speed:>8} {hit:>6} {mode.compute_ms:8.1f} {mode.copy_ms:8.1f} {mode.hidden_ms:7.1f}  {note}"
    return row.rstrip()
