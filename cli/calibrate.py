"""`speculoe-local calibrate`: learn what predicts a model's experts, into its sidecar."""

from __future__ import annotations

import json
import time
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
            texts=None if not text else [_read(file) for file in text],
            tokens=tokens,
            held_out=held_out,
            threads=threads,
            progress=bar.update,
        )
    seconds = time.monotonic() - began
    if json_:
        print(json.dumps({**as_json(path, place, sidecar), "seconds": round(seconds, 1)}))
        return
    print(table(path, place, sidecar))
    note(f"{place} written, {place.stat().st_size} bytes, in {seconds:.0f} s")


def _read(file: Path) -> str:
    from speculoe_local.runtime.errors import OptionError

    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"--text {str(file)!r} is not UTF-8 at byte {error.start}; give a text file"
        ) from error
    except OSError as error:
        raise OptionError(f"--text {str(file)!r} cannot be read: {error.strerror}") from error
