"""`speculoe-local calibrate`: learn what predicts a model's experts, into its sidecar."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from speculoe_local.cli import options as opt

__all__ = ["calibrate"]


def calibrate(
    model: opt.ModelName = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="UTF-8 text to calibrate with; repeatable. Default: what ships with Python.",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=128, metavar="N", help="Tokens to learn from.")
    ] = 16384,
    held_out: Annotated[
        int, typer.Option(min=64, metavar="N", help="Other tokens, to measure with.")
    ] = 4096,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="PATH",
            show_default=False,
            help="Where the sidecar goes. Default: MODEL with suffix .speculoe.gguf.",
        ),
    ] = None,
    imatrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write an importance matrix too, for `quantize --imatrix`.",
        ),
    ] = None,
    threads: opt.Threads = None,
    json_: opt.Json = False,
) -> None:
    """Find what predicts each layer's experts, and how well, and write it beside the model.

    Takes a minute for the embedded model. Interrupted, the same command goes on where it was.
    """
    from speculoe_local.cli.render import LoadBar, note
    from speculoe_local.cli.show import as_json, table
    from speculoe_local.convert.calibrate import calibrate as run
    from speculoe_local.convert.calibrate import partial_path
    from speculoe_local.convert.texts import read_text
    from speculoe_local.runtime.sidecar import sidecar_path

    path = opt.resolve_model(model)
    place = out or sidecar_path(path)
    began = time.monotonic()
    if partial_path(place).exists():
        note(f"going on with {partial_path(place).name}, if it is of the same calibration")
    with LoadBar("calibrating") as bar:
        sidecar = run(
            path,
            place,
            texts=None if not text else [read_text(file) for file in text],
            tokens=tokens,
            held_out=held_out,
            threads=threads,
            progress=bar.update,
        )
        if imatrix is not None:
            _write_imatrix(path, imatrix, text or [], tokens, threads, bar.update)
    seconds = time.monotonic() - began
    if json_:
        found = {**as_json(path, place, sidecar), "seconds": round(seconds, 1)}
        print(json.dumps(found | ({"imatrix": str(imatrix)} if imatrix else {})))
        return
    print(table(path, place, sidecar))
    note(f"{place} written, {place.stat().st_size} bytes, in {seconds:.0f} s")


def _write_imatrix(
    model: Path,
    out: Path,
    text: list[Path],
    tokens: int,
    threads: int | None,
    progress: Callable[[float], None],
) -> None:
    from speculoe_local.convert.calibrate import default_texts
    from speculoe_local.convert.imatrix import collect, write_imatrix
    from speculoe_local.convert.texts import read_text

    found = collect(
        model,
        [read_text(file) for file in text] or default_texts(),
        tokens=tokens,
        threads=threads,
        names=[str(file) for file in text] or ["what ships with Python"],
        progress=progress,
    )
    write_imatrix(out, found)
