"""Build a small random model of a family that llama.cpp loads and runs, whole or split.

Same arguments, same bytes: values are seeded by the seed and the tensor name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import gguf
import numpy as np

from tests.models.draft import Dims, Draft
from tests.models.families import FAMILY

FAMILIES: Final = tuple(FAMILY)
MOE_FAMILIES: Final = tuple(name for name, family in FAMILY.items() if family.routed)
QUANTS: Final = ("F16", "Q8_0", "Q4_K", "MXFP4", "Q4_0")

_K_QUANT_ROW: Final = 256


def default_quant(family: str) -> str:
    """Return the expert type real files of `family` come in (MXFP4 for gpt-oss, else Q8_0)."""
    return FAMILY[family].quant


def build(
    family: str,
    path: Path,
    *,
    quant: str | None = None,
    n_layer: int = 4,
    n_expert: int = 8,
    n_used: int = 2,
    n_embd: int | None = None,
    n_ff_exp: int | None = None,
    seed: int = 0,
) -> Path:
    """Write a model of `family` to `path` and return it.

    `quant` is the type of the expert matrices, `default_quant` if None. Row lengths default to
    64, or 256 for Q4_K, whose blocks are that long. Raises ValueError on a row that does not
    fill its blocks, on a family that is not in `FAMILIES` and on llama4 with fewer than 4
    layers; KeyError on an unknown type.
    """
    if family not in FAMILY:
        raise ValueError(f"no family {family!r}; use one of {', '.join(FAMILIES)}")
    kind = quant or default_quant(family)
    row = _K_QUANT_ROW if kind == "Q4_K" else 64
    dims = Dims(
        n_layer=n_layer,
        n_expert=n_expert,
        n_used=n_used,
        n_embd=n_embd or row,
        n_ff_exp=n_ff_exp or row,
    )
    draft = Draft(FAMILY[family].arch, dims, kind, seed)
    FAMILY[family].describe(draft)
    return draft.write(path)


def cached(family: str, quant: str | None, directory: Path) -> Path:
    """Return the default model of `family` in `directory`, building it on first use."""
    path = directory / f"{family}-{quant or default_quant(family)}.gguf"
    return path if path.exists() else build(family, path, quant=quant)


def split(path: Path, n: int) -> list[Path]:
    """Copy `path` into `n` shards beside it, named and numbered as llama.cpp expects.

    All metadata is in the first shard. Raises ValueError if there are fewer tensors than shards.
    """
    reader = gguf.GGUFReader(path)
    if not 1 <= n <= len(reader.tensors):
        raise ValueError(f"{n} shards of {len(reader.tensors)} tensors; use 1 to that many")
    arch = str(reader.fields["general.architecture"].contents())
    shards = []
    for i, ids in enumerate(np.array_split(np.arange(len(reader.tensors)), n)):
        shard = path.with_name(f"{path.stem}-{i + 1:05d}-of-{n:05d}.gguf")
        writer = gguf.GGUFWriter(shard, arch)
        if i == 0:
            _copy_metadata(reader, writer)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in (reader.tensors[k] for k in ids):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        shards.append(shard)
    return shards


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter) -> None:
    for key, field in reader.fields.items():
        # The reader lists the header as GGUF.*; the writer has written the architecture itself.
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
