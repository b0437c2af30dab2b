"""Options that several commands share, and what they come to. Knows no command.

Values are passed on as they are: the engine judges them and raises `OptionError`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from speculoe_local.runtime import EngineOptions

__all__ = [
    "Batch",
    "Ctx",
    "Device",
    "ExpertBudget",
    "Json",
    "Link",
    "MaxTokens",
    "MinP",
    "Misses",
    "NCpuMoe",
    "Mode",
    "ModelName",
    "Pin",
    "PinLayers",
    "Predict",
    "Repack",
    "RepeatPenalty",
    "Rpc",
    "Seed",
    "Sidecar",
    "Source",
    "Temp",
    "Threads",
    "TopK",
    "TopP",
    "Ubatch",
    "engine_options",
    "resolve_model",
]

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A GGUF file, or a pulled name (owner/repo:QUANT). Left out: the embedded model.",
    ),
]
ExpertBudget = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Fast memory for experts: 2GiB, 512MiB, 25% of all, or auto.",
    ),
]
Mode = Annotated[
    Literal["exact", "speculate", "estimate", "hybrid"],
    typer.Option(
        help="exact: the true router. The others execute predicted experts.",
    ),
]
Weights = Annotated[
    Literal["predicted", "true"],
    typer.Option(help="What predicted experts are weighted by: the prediction or the true router."),
]
Unmeasured = Annotated[
    bool,
    typer.Option("--unmeasured", help="Run a lossy mode although `eval` never measured it."),
]
Predict = Annotated[
    str | None,
    typer.Option(
        metavar="WHO",
        show_default=False,
        help="Who predicts uploads: quasi-hidden, estimator, hybrid, none, MODULE:CLASS.",
    ),
]
Sidecar = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        show_default=False,
        help="Calibration file. Default: MODEL with suffix .speculoe.gguf when present.",
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        metavar="RATE[,LATENCY]",
        show_default=False,
        help="Model the slow-to-fast link, for example 2GB/s,10us.",
    ),
]
Source = Annotated[
    Literal["auto", "buffered", "direct", "mapped"],
    typer.Option(help="How experts are read from the file."),
]
Repack = Annotated[
    bool,
    typer.Option(help="Use the interleaved weight layouts of the CPU."),
]
Misses = Annotated[
    Literal["upload", "cpu", "split", "auto"],
    typer.Option(
        help="Experts that are not resident: wait for their upload, let the CPU compute them, or some of either.",
    ),
]
Pin = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Experts kept where a device reads by itself: a size, 50%, auto (half of free memory), 0.",
    ),
]
PinLayers = Annotated[
    str,
    typer.Option(
        metavar="LAYERS", show_default=False, help="Layers whose experts all get slots: 0-2,7."
    ),
]
NCpuMoe = Annotated[
    int,
    typer.Option(
        "--n-cpu-moe",
        min=0,
        metavar="N",
        help="The CPU computes the experts of the first N layers, beside a device.",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="DEV",
        help="auto, cpu, cuda, vulkan or metal, with :N for the N-th; several (cuda:0,cuda:1) share the layers.",
    ),
]
Rpc = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT,...",
        show_default=False,
        help="Give layers to machines where rpc-serve runs; HOST:PORT=N says how many.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        show_default=False,
        help="Compute threads. Default: what the uploads leave of the cores.",
    ),
]
Ctx = Annotated[int, typer.Option(min=1, metavar="N", help="Context, in tokens.")]
Batch = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Prompt tokens per logical batch."),
]
Ubatch = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Prompt tokens per physical batch."),
]
Temp = Annotated[
    float,
    typer.Option(min=0.0, metavar="T", help="Temperature; 0 takes the likeliest."),
]
TopK = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Keep the N likeliest; 0 keeps all."),
]
TopP = Annotated[
    float,
    typer.Option(min=0.0, max=1.0, metavar="P", help="Keep this much probability."),
]
MinP = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        metavar="P",
        help="Drop what is less likely than P times the likeliest.",
    ),
]
RepeatPenalty = Annotated[
    float,
    typer.Option(min=0.0, metavar="X", help="Above 1 discourages repetition."),
]
Seed = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**32 - 1,
        metavar="N",
        show_default=False,
        help="Makes sampling repeatable. Default: another one each time.",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        show_default=False,
        help="Longest answer. Default: what the context holds.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def engine_options(
    *,
    expert_budget: str,
    mode: str,
    weights: str = "predicted",
    unmeasured: bool = False,
    predict: str | None,
    device: str,
    link: str | None,
    sidecar: Path | None,
    threads: int | None,
    ctx: int,
    batch: int,
    ubatch: int,
    source: str,
    repack: bool,
    rpc: str | None = None,
    misses: Literal["upload", "cpu", "split", "auto"] = "upload",
    pin: str = "auto",
    pin_layers: str = "",
    n_cpu_moe: int = 0,
) -> EngineOptions:
    """The options above as the engine takes them."""
    from speculoe_local.runtime import EngineOptions

    return EngineOptions(
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
        rpc=rpc,
        misses=misses,
        pin=pin,
        pin_layers=pin_layers,
        n_cpu_moe=n_cpu_moe,
    )


def resolve_model(model: str | None, progress: Callable[[float], None] | None = None) -> Path:
    """The file of MODEL, a path or a pulled name; without one the embedded model, made on first use.

    Raises `ModelError` where there is no such file, or the embedded model cannot be made; `HubError`
    where a model of that name is not, or not completely, in the cache.
    """
    if model is None:
        from speculoe_local.convert.embedded import embedded_model

        return embedded_model(progress)
    from speculoe_local.hub.inuse import hold
    from speculoe_local.hub.resolve import resolve

    found = resolve(model)
    if isinstance(found, Path):
        return found
    hold(found)  # until we end: `rm` refuses it
    return found.path
