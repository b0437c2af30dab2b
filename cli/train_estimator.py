"""`speculoe-local train-estimator`: train what predicts a model's experts, into its sidecar."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from speculoe_local.cli import options as opt

__all__ = ["train_estimator"]


def train_estimator(
    model: opt.ModelName = None,
    sidecar: opt.Sidecar = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="PATH",
            show_default=False,
            help="Where the sidecar goes. Default: where it is.",
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
    tokens: Annotated[
        int,
        typer.Option(min=128, metavar="N", help="Tokens to learn from, an eighth to stop by."),
    ] = 16384,
    kinds: Annotated[
        str, typer.Option(metavar="LIST", help="What to train: adapter, mlp or both.")
    ] = "adapter,mlp",
    epochs: Annotated[
        int, typer.Option(min=1, metavar="N", help="At most; fewer if nothing gets better.")
    ] = 8,
    rank: Annotated[int, typer.Option(min=1, metavar="N", help="Of each layer's adapter.")] = 64,
    narrow: Annotated[
        int, typer.Option(min=1, metavar="N", help="The mlp is the model's width over N wide.")
    ] = 4,
    expand: Annotated[
        int, typer.Option(min=1, metavar="N", help="And N times wider than that inside.")
    ] = 4,
    alone: Annotated[
        bool, typer.Option("--alone", help="The mlp estimates all, not what its base lacks.")
    ] = False,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Same seed, same estimators.")
    ] = 0,
    threads: opt.Threads = None,
    json_: opt.Json = False,
) -> None:
    """Train estimators, measure them beside the others, and write the best of each layer.

    The model must be calibrated. Needs the extra `train` (torch).
    """
    from speculoe_local.cli.render import LoadBar, note
    from speculoe_local.cli.show import as_json, table
    from speculoe_local.convert.texts import read_text
    from speculoe_local.convert.train.estimators import train_estimators
    from speculoe_local.convert.train.settings import Settings
    from speculoe_local.runtime.modelmap import ModelMap
    from speculoe_local.runtime.sidecar import Sidecar, sidecar_path

    path = opt.resolve_model(model)
    place = sidecar or sidecar_path(path)
    before = Sidecar.read(place, ModelMap.read(path))
    target = out or place
    began = time.monotonic()
    with LoadBar("training") as bar:
        trained = train_estimators(
            path,
            before,
            target,
            texts=None if not text else [read_text(file) for file in text],
            tokens=tokens,
            kinds=[kind.strip() for kind in kinds.split(",") if kind.strip()],
            settings=Settings(
                epochs=epochs, rank=rank, narrow=narrow, expand=expand, alone=alone, seed=seed
            ),
            threads=threads,
            progress=bar.update,
        )
    seconds = time.monotonic() - began
    if json_:
        print(json.dumps({**as_json(path, target, trained), "seconds": round(seconds, 1)}))
        return
    print(table(path, target, trained))
    note(f"{target} written, {target.stat().st_size} bytes, in {seconds:.0f} s")
