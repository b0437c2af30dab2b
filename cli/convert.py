"""`speculoe-local convert`: a Hugging Face folder becomes a GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from speculoe_local.cli import options as opt

__all__ = ["convert"]


def convert(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder with config.json and safetensors.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            metavar="FILE",
            show_default=False,
            help="Default: DIR's name with .gguf.",
        ),
    ] = None,
    outtype: Annotated[
        Literal["auto", "f32", "f16", "bf16", "q8_0"],
        typer.Option(help="Type of the weights; auto keeps 16-bit ones as they are."),
    ] = "auto",
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="The model's name in the file."),
    ] = None,
    tokenizer_pre: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Whose pre-tokenizer it is, where llama.cpp does not know its hash.",
        ),
    ] = None,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let Python files in DIR run, if they must.")
    ] = False,
    json_: opt.Json = False,
) -> None:
    """Convert a Hugging Face folder to a GGUF, with llama.cpp's own converter.

    Needs the extra `convert` (torch, transformers); works without a network.
    """
    from speculoe_local.cli.render import LoadBar
    from speculoe_local.convert.hf import convert as run
    from speculoe_local.convert.hf import default_out

    with LoadBar("converting") as bar:
        done = run(
            folder,
            out or default_out(folder),
            outtype=outtype,
            name=name,
            tokenizer_pre=tokenizer_pre,
            allow_code=allow_code,
            progress=bar.update,
        )
    if json_:
        facts = {
            "file": str(done.path),
            "bytes": done.bytes,
            "architecture": done.architecture,
            "hf_architecture": done.hf_architecture,
            "tokenizer_pre": done.tokenizer_pre,
            "tensors": done.tensors,
        }
        print(json.dumps(facts))
        return
    print(
        f"{done.path}: {done.hf_architecture} as {done.architecture}, {done.tensors} tensors, "
        f"{done.bytes} bytes"
    )
