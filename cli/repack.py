"""`speculoe-local repack`: an expert's matrices next to each other, in a file beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from speculoe_local.cli import options as opt

__all__ = ["repack"]


def repack(
    model: opt.ModelName = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            show_default=False,
            help="Default: MODEL with suffix .experts.gguf, where it is looked for.",
        ),
    ] = None,
    json_: opt.Json = False,
) -> None:
    """Lay each expert's gate, up and down next to each other, so that one read fetches it.

    A GGUF for llama.cpp cannot lie so: this writes a second file, as large as the experts, beside the
    model, which stays as it is.
    """
    from dataclasses import asdict

    from speculoe_local.cli.render import LoadBar
    from speculoe_local.convert.interleave import interleave

    path = opt.resolve_model(model)
    with LoadBar("repacking") as bar:
        done = interleave(path, out, progress=bar.update)
    if json_:
        print(json.dumps({**asdict(done), "model": str(path), "path": str(done.path)}))
        return
    print(f"{done.path}: {done.experts} experts, {done.bytes} bytes")
    for label, reads in (("from the model", done.before), ("from this file", done.after)):
        print(
            f"  {label}: {reads.per_expert:.2f} reads and {reads.touched_bytes:.0f} bytes of pages "
            f"for an expert of {reads.expert_bytes:.0f}"
        )
