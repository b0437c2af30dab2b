"""Stream a qwen3moe model of gigabytes to disk: experts far beyond a small budget or page cache.

`python -m tests.models.big OUT --gib 2.2`. One encoded block per matrix role is written over and
over with its rows rotated, so experts differ and memory stays at one tensor (tens of MB).
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from tests.models.draft import Bytes, Dims, Draft, ExpertFill, encode, nbytes
from tests.models.families import FAMILY

_GIB: Final = 1 << 30


def tiled(seed: int) -> ExpertFill:
    """Return a filler that rotates one random block by a different number of rows per expert."""
    blocks: dict[tuple[str, int, int], Bytes] = {}

    def fill(draft: Draft, name: str, shape: tuple[int, int, int], gain: float) -> Bytes:
        n_expert, rows, cols = shape
        role = name.split(".")[2]
        if (role, rows, cols) not in blocks:
            values = draft.normal(f"{role}.{seed}", (rows, cols), gain)
            blocks[role, rows, cols] = encode(values, draft.expert_type).reshape(rows, -1)
        block = blocks[role, rows, cols]
        out = np.empty((n_expert, *block.shape), np.uint8)
        first = zlib.crc32(name.encode())
        for expert in range(n_expert):
            # An odd stride visits many offsets before it repeats; layers start at unlike ones.
            cut = (first + 37 * expert) % rows
            out[expert, : rows - cut], out[expert, rows - cut :] = block[cut:], block[:cut]
        return out.reshape(-1)

    return fill


def plan(gib: float, *, n_layer: int, n_expert: int, n_used: int, n_embd: int, quant: str) -> Dims:
    """Return sizes whose routed experts alone are at least `gib` GiB."""
    block = gguf.GGML_QUANT_SIZES[Type[quant]][0]
    row = nbytes((n_embd,), Type[quant])
    wanted = (
        gib * _GIB / (n_layer * n_expert * 3 * row)
    )  # gate, up, down: n_ff_exp rows' worth each
    n_ff_exp = math.ceil(wanted / max(block, 32)) * max(block, 32)
    return Dims(
        n_layer=n_layer,
        n_expert=n_expert,
        n_used=n_used,
        n_embd=n_embd,
        n_ff_exp=n_ff_exp,
        n_head=8,
        head_dim=64,
    )


def build_big(
    path: Path,
    *,
    gib: float = 2.2,
    n_layer: int = 16,
    n_expert: int = 64,
    n_used: int = 4,
    n_embd: int = 1024,
    quant: str = "Q8_0",
    seed: int = 0,
) -> Path:
    """Write a qwen3moe model with at least `gib` GiB of routed experts; return `path`.

    `path` appears complete or not at all. Same arguments, same bytes.
    """
    dims = plan(gib, n_layer=n_layer, n_expert=n_expert, n_used=n_used, n_embd=n_embd, quant=quant)
    draft = Draft("qwen3moe", dims, quant, seed, fill=tiled(seed))
    FAMILY["qwen3moe"].describe(draft)
    return draft.write(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.big", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--used", type=int, default=4)
    parser.add_argument("--embd", type=int, default=1024)
    parser.add_argument("--quant", default="Q8_0", choices=["F16", "Q8_0", "Q4_0", "Q4_K", "MXFP4"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    path = build_big(
        args.out,
        gib=args.gib,
        n_layer=args.layers,
        n_expert=args.experts,
        n_used=args.used,
        n_embd=args.embd,
        quant=args.quant,
        seed=args.seed,
    )
    print(f"{path} bytes={path.stat().st_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
