"""`speculoe-local upcycle`: a dense model becomes a Mixture of Experts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from speculoe_local.cli import options as opt

__all__ = ["upcycle"]


def upcycle(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A dense GGUF.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The GGUF to write.")],
    experts: Annotated[int, typer.Option(min=2, metavar="N", help="Experts of each layer.")] = 16,
    used: Annotated[int, typer.Option(min=1, metavar="K", help="Experts per token.")] = 4,
    shared: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default=False,
            help="Neurons that always run. Default: about half.",
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="UTF-8 text to learn from; repeatable. Default: what ships with Python.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(min=0, metavar="N", help="Windows of router training; 0: none.")
    ] = 160,
    split: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Keep the analysis here."),
    ] = None,
    threads: opt.Threads = None,
    json_: opt.Json = False,
) -> None:
    """Split a dense model's feed-forward layers into a shared expert and routed ones.

    Takes minutes for 135M parameters, hours for billions; needs the extra `train` (torch). Quality is
    lost: perplexity on text held out is measured before and after, and printed.
    """
    from speculoe_local.cli.render import LoadBar, note
    from speculoe_local.convert.texts import read_text
    from speculoe_local.convert.upcycle_any import upcycle as run

    stage = ""
    bar = LoadBar("upcycling")

    def report(name: str, share: float) -> None:
        nonlocal stage
        if name != stage:
            stage = name
            note(name)
        bar.update(share)

    with bar:
        done = run(
            model,
            out,
            experts=experts,
            used=used,
            shared=shared,
            documents=[read_text(file) for file in text] if text else None,
            steps=steps,
            split=split,
            threads=threads,
            progress=report,
        )
    if json_:
        print(json.dumps({**asdict(done), "path": str(done.path), "model": str(model)}))
        return
    shape = done.shape
    print(f"{done.path}: {done.architecture}, {done.bytes} bytes")
    print(
        f"  {shape.shared} shared neurons, {shape.experts} experts of {shape.width}, "
        f"{shape.used} per token"
    )
    print(
        f"  perplexity {done.before.value:.3f} -> {done.after.value:.3f} over "
        f"{done.after.scored} held-out tokens"
    )
