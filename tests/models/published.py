"""GGUF headers of published models, written from their shapes: tensors are named and placed, their data is a hole.

`python -m tests.models.published FOLDER` writes them, a few kilobytes of disk each; with `--plan` it prints the
tables of docs/plan.md. Shapes are those of the published configurations (Qwen/Qwen3-30B-A3B, openai/gpt-oss-20b,
openai/gpt-oss-120b), types those of the usual files: Q4_K_M as llama.cpp mixes it, and MXFP4 with Q8_0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from speculoe_local.cli.plan import text
from speculoe_local.runtime.host import host_of
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.modes import ModeName
from speculoe_local.runtime.placement import format_bytes
from speculoe_local.runtime.plan import Plan, make_plan
from tests.models.draft import Value, add_value, nbytes

F32: Final = Type.F32


@dataclass(frozen=True, slots=True)
class Shape:
    """A published configuration. Sizes in elements."""

    arch: str
    name: str
    n_layer: int
    n_embd: int
    n_vocab: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_expert: int
    n_used: int
    n_ff_exp: int
    n_ctx: int
    window: int = 0

    @property
    def q(self) -> int:
        return self.n_head * self.head_dim

    @property
    def kv(self) -> int:
        return self.n_head_kv * self.head_dim


_OSS: Final = {
    "n_embd": 2880, "n_vocab": 201088, "n_head": 64, "n_head_kv": 8, "head_dim": 64, "n_used": 4,
    "n_ff_exp": 2880, "n_ctx": 131072, "window": 128,
}  # fmt: skip

SHAPES: Final = {
    "Qwen3-30B-A3B-Q4_K_M": Shape(
        "qwen3moe", "Qwen3-30B-A3B", n_layer=48, n_embd=2048, n_vocab=151936, n_head=32,
        n_head_kv=4, head_dim=128, n_expert=128, n_used=8, n_ff_exp=768, n_ctx=40960,
    ),
    "gpt-oss-20b-MXFP4": Shape("gpt-oss", "gpt-oss-20b", n_layer=24, n_expert=32, **_OSS),
    "gpt-oss-120b-MXFP4": Shape("gpt-oss", "gpt-oss-120b", n_layer=36, n_expert=128, **_OSS),
}  # fmt: skip

Tensor = tuple[str, tuple[int, ...], Type]  # numpy order: row length last


def write(model: str, folder: Path) -> Path:
    """Write the header of `model`, a key of SHAPES, as a file of the published size that holds no data."""
    shape = SHAPES[model]
    path = folder / f"{model}.gguf"
    writer = gguf.GGUFWriter(path, shape.arch)
    for key, value in _metadata(shape).items():
        add_value(writer, key, value)
    size = 0
    for name, extents, kind in _tensors(shape):
        length = nbytes(extents, kind)
        writer.add_tensor_info(name, extents, np.dtype(np.float32), length, raw_dtype=kind)
        size += -(-length // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(start + size)
    return path


def _metadata(s: Shape) -> dict[str, Value]:
    sizes: dict[str, Value] = {
        "block_count": s.n_layer,
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "expert_count": s.n_expert,
        "expert_used_count": s.n_used,
        "expert_feed_forward_length": s.n_ff_exp,
    }
    if s.window:
        sizes["attention.sliding_window"] = s.window
    return {"general.name": s.name, **{f"{s.arch}.{key}": value for key, value in sizes.items()}}


def _tensors(s: Shape) -> Iterator[Tensor]:
    layer = _qwen_layer if s.arch == "qwen3moe" else _oss_layer
    ends = (Type.Q4_K, Type.Q6_K) if s.arch == "qwen3moe" else (Type.Q8_0, Type.Q8_0)
    yield "token_embd.weight", (s.n_vocab, s.n_embd), ends[0]
    yield "output.weight", (s.n_vocab, s.n_embd), ends[1]
    yield "output_norm.weight", (s.n_embd,), F32
    for i in range(s.n_layer):
        for name, extents, kind in layer(s, i):
            yield f"blk.{i}.{name}", extents, kind


def _qwen_layer(s: Shape, i: int) -> Iterator[Tensor]:
    # Q4_K_M spends more bits on values and down in the first and last eighth, and every third between.
    eighth = s.n_layer // 8
    more = i < eighth or i >= 7 * eighth or (i - eighth) % 3 == 2
    better = Type.Q6_K if more else Type.Q4_K
    yield from _attention(s, Type.Q4_K, better)
    yield from ((f"attn_{part}_norm.weight", (s.head_dim,), F32) for part in "qk")
    yield "ffn_norm.weight", (s.n_embd,), F32
    yield from _experts(s, Type.Q4_K, better)


def _oss_layer(s: Shape, i: int) -> Iterator[Tensor]:
    yield from _attention(s, Type.Q8_0, Type.Q8_0)
    rows = {"q": s.q, "k": s.kv, "v": s.kv, "output": s.n_embd}
    yield from ((f"attn_{part}.bias", (size,), F32) for part, size in rows.items())
    yield "attn_sinks.weight", (s.n_head,), F32
    yield "post_attention_norm.weight", (s.n_embd,), F32
    yield from _experts(s, Type.MXFP4, Type.MXFP4)
    yield "ffn_gate_inp.bias", (s.n_expert,), F32
    for part, size in (("gate", s.n_ff_exp), ("up", s.n_ff_exp), ("down", s.n_embd)):
        yield f"ffn_{part}_exps.bias", (s.n_expert, size), F32


def _attention(s: Shape, kind: Type, values: Type) -> Iterator[Tensor]:
    yield "attn_norm.weight", (s.n_embd,), F32
    yield "attn_q.weight", (s.q, s.n_embd), kind
    yield "attn_k.weight", (s.kv, s.n_embd), kind
    yield "attn_v.weight", (s.kv, s.n_embd), values
    yield "attn_output.weight", (s.n_embd, s.q), kind


def _experts(s: Shape, kind: Type, down: Type) -> Iterator[Tensor]:
    yield "ffn_gate_inp.weight", (s.n_expert, s.n_embd), F32
    for part in ("gate", "up"):
        yield f"ffn_{part}_exps.weight", (s.n_expert, s.n_ff_exp, s.n_embd), kind
    yield "ffn_down_exps.weight", (s.n_expert, s.n_embd, s.n_ff_exp), down


# Memory's and devices' bandwidths as data sheets have them, less what no program reaches of a link or a disk.
MACHINES: Final = {
    "12 GB card on PCIe 4 x16, DDR5": (
        "--vram 12GiB --vram-rate 504GB/s --link 24GB/s,10us --ram 32GiB --ram-rate 65GB/s --disk 5GB/s --ctx 8192"
    ),
    "Laptop: 8 GB card on PCIe 4 x8": (
        "--vram 8GiB --vram-rate 256GB/s --link 12GB/s,10us --ram 16GiB --ram-rate 50GB/s --disk 3GB/s --ctx 8192"
    ),
    "No GPU, 16 GB of memory": (
        "--device cpu --ram 16GiB --ram-rate 40GB/s --disk 3GB/s --ctx 8192"
    ),
}


def tables(folder: Path) -> str:
    """What `plan` says of all models on all machines, as Markdown, and one answer of it in full."""
    paths = [write(model, folder) for model in SHAPES]
    parts = [_table(title, options, paths) for title, options in MACHINES.items()]
    title, options = next(iter(MACHINES.items()))
    whole = "\n".join(
        f"    {line}".rstrip() for line in text(_plan(paths[0], options)).splitlines()
    )
    return "\n\n".join([*parts, f"### In full: {paths[0].stem}, {title}", whole]) + "\n"


def _plan(path: Path, options: str) -> Plan:
    words = options.split()
    named = dict(zip(words[::2], words[1::2], strict=True))
    ctx = int(named.pop("--ctx"))
    model = ModelMap.read(path)
    given = {name.removeprefix("--").replace("-", "_"): value for name, value in named.items()}
    return make_plan(model, host_of(model, **given), ctx=ctx)


def _table(title: str, options: str, paths: list[Path]) -> str:
    plans = [_plan(path, options) for path in paths]
    rows = [
        ("", *(path.stem for path in paths)),
        ("---", *("---" for _ in paths)),
        ("experts, other weights", *(_sizes(plan) for plan in plans)),
        ("left for experts", *(_room(plan) for plan in plans)),
        *((mode.name, *(_cell(plan, mode.name) for plan in plans)) for mode in plans[0].modes),
    ]
    lines = [f"### {title}", "", f"    speculoe-local plan MODEL {options}", ""]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    said = [
        f"- {path.stem}: {'; '.join(plan.verdict)}."
        for path, plan in zip(paths, plans, strict=True)
    ]
    return "\n".join([*lines, "", *said])


def _sizes(plan: Plan) -> str:
    return f"{format_bytes(plan.routed_bytes)}, {format_bytes(plan.needs.weights_bytes)}"


def _room(plan: Plan) -> str:
    if plan.placed is None or plan.room_bytes < 0:
        return f"{format_bytes(abs(plan.room_bytes))} " + ("missing" if plan.room_bytes < 0 else "")
    what = (
        f"{plan.placed.residency:.0%} of them" if plan.placed.kind == "slotted" else "all of them"
    )
    return f"{format_bytes(plan.room_bytes)}: {what}"


def _cell(plan: Plan, name: ModeName) -> str:
    mode = plan.mode(name)
    if mode.tokens_per_s is None:
        return "-"
    speed = f"{mode.tokens_per_s:.1f}" if mode.tokens_per_s >= 1 else f"{mode.tokens_per_s:.2f}"
    return f"**{speed}**" if plan.picked is mode else speed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.models.published", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--plan", action="store_true", help="print the tables of docs/plan.md")
    args = parser.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.plan:
        print(tables(args.folder), end="")
    else:
        for model in SHAPES:
            print(write(model, args.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
