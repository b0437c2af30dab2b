"""`speculoe-local inspect`: what a GGUF file holds, from its header alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from speculoe_local.cli import options as opt

if TYPE_CHECKING:
    from speculoe_local.convert.inspect import ExpertLayout, Inspection

__all__ = ["inspect", "table"]


def inspect(
    model: opt.ModelName = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="List every key.")] = False,
    json_: opt.Json = False,
) -> None:
    """Show what a GGUF file holds: sizes, types, how its experts lie, what lies beside it.

    Reads the header alone, so it is instant and safe on files from anywhere.
    """
    from speculoe_local.convert.inspect import as_json
    from speculoe_local.convert.inspect import inspect as look

    found = look(opt.resolve_model(model))
    if json_:
        print(json.dumps(as_json(found)))
        return
    print(table(found, tensors=tensors, metadata=metadata))


def table(found: Inspection, *, tensors: bool = False, metadata: bool = False) -> str:
    """The facts as lines of text."""
    from speculoe_local.convert.inspect import metadata_rows, printable
    from speculoe_local.runtime.header import shown, type_name

    header, model = found.header, found.model
    lines = [f"{shown(header.path)}: GGUF {header.version}, {_size(found.file_bytes)}"]
    if len(found.files) > 1:
        lines[0] += f" in {len(found.files)} files"
    if found.remark:
        lines.append(f"  no language model: {printable(found.remark)}")
    if model is not None:
        lines.append(
            f"  {printable(model.architecture)} {printable(model.name)!r}: {model.n_layer} layers, "
            f"n_embd {model.n_embd}, vocabulary {model.n_vocab}"
        )
        lines.append(f"  fingerprint {model.fingerprint[:16]}")
        if model.is_moe:
            share = model.routed_bytes / model.total_bytes
            lines.append(
                f"  routed experts {_size(model.routed_bytes)} ({share:.0%}), other weights "
                f"{_size(model.other_bytes)}"
            )
        else:
            lines.append("  dense: no routed experts")
    lines += [_layout(layout) for layout in found.layouts]
    lines.append(f"  {len(found.tensors)} tensors, {len(header.metadata)} keys; by type:")
    lines += [
        f"    {share.type:<8} {share.tensors:>5} tensors {_size(share.bytes):>10} "
        f"{share.bits_per_weight:6.2f} bits each"
        for share in found.types
    ]
    for label, file in (("sidecar", found.sidecar), ("expert file", found.expert_file)):
        if file is not None:
            lines.append(
                f"  {label} {shown(file.path)}: {_size(file.bytes)}, {printable(file.state)}"
            )
    if metadata:
        lines += ["", "metadata:", *metadata_rows(header.metadata)]
    if tensors:
        lines += ["", "tensors:"]
        lines += [
            f"  {printable(tensor.name):<40} {type_name(tensor.ggml_type):<8} "
            f"{' x '.join(str(extent) for extent in tensor.shape):<24} {tensor.nbytes:>12} bytes "
            f"at {tensor.offset}"
            for tensor in found.tensors
        ]
    return "\n".join(lines)


def _layout(layout: ExpertLayout) -> str:
    from speculoe_local.runtime.header import type_name

    span = f"layer {layout.first}"
    if layout.layers > 1:
        span = f"{layout.layers} layers {layout.first} to {layout.last}"
    parts = ", ".join(
        f"{matrix.kind} {type_name(matrix.ggml_type)} {matrix.ne0}x{matrix.ne1}"
        for matrix in layout.matrices
    )
    shared = f", shared expert {_size(layout.shared_bytes)}" if layout.shared_bytes else ""
    return (
        f"  {span}: {layout.used} of {layout.experts} experts of {_size(layout.expert_bytes)} in "
        f"{layout.reads_per_expert} places ({parts}){shared}"
    )


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
