"""`speculoe-local quantize`: experts and the other weights to types of their own."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.convert.quantize import Changed, Quantized

__all__ = ["quantize"]


def quantize(
    model: opt.ModelName = None,
    *,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The GGUF to write.")],
    experts: Annotated[
        str | None,
        typer.Option(metavar="TYPE", show_default=False, help="Type of routed experts: Q4_K."),
    ] = None,
    rest: Annotated[
        str | None,
        typer.Option(metavar="TYPE", show_default=False, help="Type of the other weights: Q8_0."),
    ] = None,
    type_: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="NAME",
            show_default=False,
            help="A mixture of llama.cpp's, such as Q4_K_M, for what the two others do not name.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Importance matrix to use."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Measure perplexity on this text, before and after.",
        ),
    ] = None,
    threads: opt.Threads = None,
    json_: opt.Json = False,
) -> None:
    """Write a model with smaller weights; experts and the rest may have types of their own.

    What neither --experts, --rest nor --type names stays as it is.
    """
    from speculoe_local.cli.render import LoadBar
    from speculoe_local.convert.quantize import quantize as run
    from speculoe_local.convert.texts import read_text

    path = opt.resolve_model(model)
    words = read_text(text) if text else None
    with LoadBar("quantizing") as bar:
        done = run(
            path,
            out,
            mixture=type_,
            experts=experts,
            rest=rest,
            imatrix=imatrix,
            threads=threads,
            progress=bar.update,
        )
    facts = _as_json(path, done)
    if words is not None:
        facts["perplexity"] = _perplexity(path, out, words, threads)
    print(json.dumps(facts) if json_ else _table(facts))


def _as_json(model: Path, done: Quantized) -> dict[str, Any]:
    return {
        "model": str(model),
        "file": str(done.path),
        "bytes": done.path.stat().st_size,
        "weights": {"before": done.bytes_before, "after": done.bytes_after},
        "experts": {"before": done.experts_before, "after": done.experts_after},
        "changed": len(done.changed),
        "requantized": len(done.requantized),
        "types": _counted(done.changed),
        "fallbacks": _counted(done.fallbacks),
    }


def _counted(changes: tuple[Changed, ...]) -> list[dict[str, Any]]:
    counts = Counter((change.before, change.wanted, change.after) for change in changes)
    return [
        {"before": before, "wanted": wanted or after, "after": after, "tensors": count}
        for (before, wanted, after), count in counts.most_common()
    ]


def _perplexity(before: Path, after: Path, words: str, threads: int | None) -> dict[str, Any]:
    from speculoe_local.cli.render import LoadBar
    from speculoe_local.convert.perplexity import perplexity

    values = {}
    for label, path in (("before", before), ("after", after)):
        with LoadBar(f"perplexity {label}") as bar:
            values[label] = perplexity(path, words, threads=threads, progress=bar.update)
    found = {label: round(value.value, 4) for label, value in values.items()}
    return {**found, "tokens": values["after"].scored}


def _table(facts: dict[str, Any]) -> str:
    lines = [f"{facts['file']}: {facts['bytes']} bytes"]
    for label in ("weights", "experts"):
        before, after = facts[label]["before"], facts[label]["after"]
        if before:
            lines.append(f"  {label:<9} {before} -> {after} bytes ({after / before:.0%})")
    for row in facts["types"]:
        fallback = "" if row["wanted"] == row["after"] else f", for {row['wanted']}: rows too short"
        lines.append(f"  {row['tensors']:>5} tensors {row['before']} -> {row['after']}{fallback}")
    if facts["requantized"]:
        lines.append(
            f"  {facts['requantized']} tensors were quantized before: losses add up, start from F16 "
            "where there is one"
        )
    if "perplexity" in facts:
        found = facts["perplexity"]
        lines.append(
            f"  perplexity {found['before']:.3f} -> {found['after']:.3f} over {found['tokens']} tokens"
        )
    return "\n".join(lines)
