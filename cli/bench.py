"""`speculoe-local bench`: runs side by side, interleaved, as a table or JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.runtime.bench import Report, RunReport

__all__ = ["bench"]


def bench(
    model: opt.ModelName = None,
    runs: Annotated[
        str,
        typer.Option(
            metavar="A,B,...",
            help="upstream: the unpatched library's own loop; resident: ours, all experts in memory; "
            "ondemand: ours, no cache, no prediction; cache: ours, slots for --expert-budget; "
            "prefetch: the same with predicted uploads; prefetch-native: by the library's own loop; "
            "misses-cpu, misses-split, misses-auto: with --misses; speculate, estimate, hybrid: the lossy modes.",
        ),
    ] = "upstream,resident,cache",
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Output tokens per round.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Prompt tokens.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds; more, less noise.")] = 7,
    upstream: Annotated[
        Path | None,
        typer.Option(
            envvar="SPECULOE_UPSTREAM_LIB",
            metavar="DIR",
            show_default=False,
            help="Folder of the unpatched libllama. Default: build/upstream/lib here.",
        ),
    ] = None,
    copy_share: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            show_default=False,
            help="Set the link so that on-demand copies take X of TPOT.",
        ),
    ] = None,
    buffers: Annotated[
        Literal["slots", "two-layer"],
        typer.Option(
            help="two-layer: keep no expert from one layer to the next, as ondemand does."
        ),
    ] = "slots",
    svg: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Also draw the runs as bars."),
    ] = None,
    weights: opt.Weights = "predicted",
    unmeasured: opt.Unmeasured = False,
    predict: opt.Predict = None,
    sidecar: opt.Sidecar = None,
    json_: opt.Json = False,
    expert_budget: opt.ExpertBudget = "25%",
    device: opt.Device = "auto",
    link: opt.Link = None,
    source: opt.Source = "auto",
    repack: opt.Repack = True,
    rpc: opt.Rpc = None,
    misses: opt.Misses = "upload",
    pin: opt.Pin = "auto",
    pin_layers: opt.PinLayers = "",
    n_cpu_moe: opt.NCpuMoe = 0,
    threads: opt.Threads = None,
    ctx: opt.Ctx = 4096,
    batch: opt.Batch = 512,
    ubatch: opt.Ubatch = 512,
) -> None:
    """Compare runs: same prompt, same tokens, taking turns. Ratios are taken within rounds."""
    from speculoe_local.runtime import bench as runtime
    from speculoe_local.runtime.chart import as_svg

    options = opt.engine_options(
        expert_budget=expert_budget,
        mode="exact",
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
        rpc=rpc,
        misses=misses,
        pin=pin,
        pin_layers=pin_layers,
        n_cpu_moe=n_cpu_moe,
    )
    names = tuple(name.strip() for name in runs.split(",") if name.strip())
    if upstream is None and Path("build/upstream/lib").is_dir():
        upstream = Path("build/upstream/lib").resolve()
    report = runtime.bench(
        runtime.Plan(
            opt.resolve_model(model),
            names,
            replace(options, buffers=buffers),
            prompt_tokens,
            tokens,
            rounds,
            upstream,
            copy_share,
        ),
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if svg is not None:
        svg.write_text(as_svg(report), encoding="utf-8")
    print(json.dumps(report.to_json()) if json_ else _table(report))


def _cost(run: RunReport) -> str:
    if run.exactness != "lossy":
        return "" if run.exactness == "exact" else "  " + run.exactness
    return "  lossy, " + ("never measured" if run.kl is None else f"KL {run.kl:.3f}")


def _table(report: Report) -> str:
    plan = report.plan
    budget = plan.options.expert_budget
    lines = [
        f"{plan.path.name}: {plan.prompt_tokens} prompt tokens, {plan.tokens} output tokens, "
        f"{plan.rounds} rounds, ubatch {plan.options.ubatch}, budget {budget}"
        + (f", link {plan.options.link}" if plan.options.link else ""),
        f"{'run':10} {'TPOT ms':>9} {'p90':>9} {'tokens/s':>9} {'prefill/s':>10} {'hits':>6} {'stall ms':>9} "
        f"{'copy ms':>8} {'recall':>7} {'overlap':>8}",
    ]
    lines += [
        f"{run.name:10} {run.tpot_ms:9.2f} {run.tpot_ms_p90:9.2f} {run.decode_tps:9.1f} "
        f"{run.prefill_tps:10.1f} {run.hit_rate:6.0%} {run.stall_ms:9.2f} {run.copy_ms:8.2f} "
        f"{run.recall:7.0%} {run.overlap_reached:8.0%}" + _cost(run)
        for run in report.runs
    ]
    lines += [
        f"{run.name}: {run.fixed_us_per_layer:.0f} us per layer beyond resident compute"
        for run in report.runs
        if run.fixed_us_per_layer
    ]
    lines += [
        f"TPOT {pair}: {ratio:.3f}   prompt time: {report.prefill_ratios[pair]:.3f}"
        for pair, ratio in report.ratios.items()
    ]
    lines.append(
        "all exact runs gave the same tokens"
        if report.same_tokens
        else "EXACT RUNS DIFFER IN THEIR TOKENS"
    )
    return "\n".join(lines)
