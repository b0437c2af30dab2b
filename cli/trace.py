"""`speculoe-local trace`: one answer as a timeline for a trace viewer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from speculoe_local.cli import options as opt

__all__ = ["trace"]


def trace(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Where the JSON goes.")
    ],
    model: opt.ModelName = None,
    prompt: Annotated[
        str, typer.Option("-p", "--prompt", metavar="TEXT", help="What to answer.")
    ] = "Why is the sky blue?",
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Draw a few layers of it, too."),
    ] = None,
    max_tokens: opt.MaxTokens = 16,
    expert_budget: opt.ExpertBudget = "25%",
    mode: opt.Mode = "exact",
    weights: opt.Weights = "predicted",
    unmeasured: opt.Unmeasured = False,
    predict: opt.Predict = None,
    sidecar: opt.Sidecar = None,
    device: opt.Device = "auto",
    link: opt.Link = None,
    source: opt.Source = "auto",
    repack: opt.Repack = True,
    misses: opt.Misses = "upload",
    pin: opt.Pin = "auto",
    pin_layers: opt.PinLayers = "",
    n_cpu_moe: opt.NCpuMoe = 0,
    threads: opt.Threads = None,
    ctx: opt.Ctx = 4096,
    batch: opt.Batch = 512,
    ubatch: opt.Ubatch = 512,
) -> None:
    """Record compute, stalls, uploads and predictions of one answer (Perfetto, Chrome)."""
    from speculoe_local.runtime import Engine
    from speculoe_local.runtime import trace as runtime

    options = opt.engine_options(
        expert_budget=expert_budget,
        mode=mode,
        weights=weights,
        unmeasured=unmeasured,
        predict=predict,
        device=device,
        link=link,
        sidecar=sidecar,
        threads=threads,
        ctx=ctx,
        batch=batch,
        ubatch=ubatch,
        source=source,
        repack=repack,
        misses=misses,
        pin=pin,
        pin_layers=pin_layers,
        n_cpu_moe=n_cpu_moe,
    )
    with Engine.open(opt.resolve_model(model), options=options) as engine:
        found = runtime.record(engine, prompt, max_tokens=max_tokens or 16)
    output.write_text(json.dumps(runtime.as_chrome(found)))
    if svg is not None:
        svg.write_text(runtime.as_svg(found, *runtime.excerpt(found)))
    print(
        f"{output}: {len(found.events)} spans; {found.overlap:.0%} of predicted upload time lies "
        "under compute",
        file=sys.stderr,
    )
