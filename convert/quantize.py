"""Quantize a GGUF through llama.cpp's quantizer, experts and the other weights by separate types.

Which tensors become what is decided and checked here, the arithmetic is llama.cpp's, in a process of
its own (`quantize_worker`). The file appears whole, after llama.cpp has opened it again and every tensor
in it has the type and shape that were asked for, or the fallback that llama.cpp uses where rows do not
fill a type's blocks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from speculoe_local.convert import child, files
from speculoe_local.convert.imatrix import read_imatrix
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.header import TensorInfo, shown, type_name
from speculoe_local.runtime.modelmap import ModelMap

__all__ = ["MIXTURES", "TYPES", "Changed", "Quantized", "quantize"]

# Types that a weight can be given, and the number of the file type that says so in the header.
TYPES: Final[dict[str, int]] = {
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7,
    "Q2_K": 10, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "IQ1_S": 24, "IQ1_M": 31,
    "IQ2_XXS": 19, "IQ2_XS": 20, "IQ2_S": 28, "IQ3_XXS": 23, "IQ3_S": 26, "IQ4_NL": 25,
    "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38,
}  # fmt: skip
# llama.cpp's mixtures (llama_ftype): it chooses a type for each tensor.
MIXTURES: Final[dict[str, int]] = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11,
    "Q3_K_M": 12, "Q3_K_L": 13, "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18,
    "IQ2_XXS": 19, "IQ2_XS": 20, "Q2_K_S": 21, "IQ3_XS": 22, "IQ3_XXS": 23, "IQ1_S": 24,
    "IQ4_NL": 25, "IQ3_S": 26, "IQ3_M": 27, "IQ2_S": 28, "IQ2_M": 29, "IQ4_XS": 30, "IQ1_M": 31,
    "BF16": 32, "TQ1_0": 36, "TQ2_0": 37, "MXFP4_MOE": 38,
}  # fmt: skip
_NEEDS_IMATRIX: Final = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"))
_PLAIN: Final = frozenset(("F32", "F16", "BF16"))
_EXPERTS: Final = re.compile(r"blk\.[0-9]+\.ffn_(gate|up|down|gate_up)_exps\.weight")
# With a plain file type llama.cpp ignores types by tensor; any other will do where all are given.
_ANY_QUANTIZED: Final = "Q8_0"


@dataclass(frozen=True, slots=True)
class Changed:
    """One tensor that got another type. `wanted` is empty where llama.cpp's mixture chose."""

    name: str
    before: str
    after: str
    wanted: str
    bytes_before: int
    bytes_after: int

    @property
    def fell_back(self) -> bool:
        """Whether rows did not fill the wanted type's blocks, so that llama.cpp took another."""
        return bool(self.wanted) and self.after != self.wanted


@dataclass(frozen=True, slots=True)
class Quantized:
    """What `quantize` wrote; sizes in bytes, of weights alone."""

    path: Path
    bytes_before: int
    bytes_after: int
    experts_before: int
    experts_after: int
    changed: tuple[Changed, ...]

    @property
    def fallbacks(self) -> tuple[Changed, ...]:
        return tuple(change for change in self.changed if change.fell_back)

    @property
    def requantized(self) -> tuple[Changed, ...]:
        """Tensors that were quantized before: their losses add up."""
        return tuple(change for change in self.changed if change.before not in _PLAIN)


def quantize(
    model: Path,
    out: Path,
    *,
    mixture: str | None = None,
    experts: str | None = None,
    rest: str | None = None,
    imatrix: Path | None = None,
    threads: int | None = None,
    progress: Callable[[float], None] | None = None,
) -> Quantized:
    """Write `model` to `out` with routed experts as type `experts` and the other weights as `rest`.

    What neither names stays as it is, or with a `mixture` (Q4_K_M and so on) becomes what llama.cpp
    chooses. Norms, biases and routers always stay. A split model becomes one file. `imatrix` is a file
    of `convert.imatrix`. `progress` gets the share done, 0 to 1.

    Raises OptionError for a type that is unknown, needs an imatrix or an `out` that is `model`;
    ModelError when the model cannot be read or the result is not what was asked for; BackendError when
    llama.cpp refuses, or the disk is full.
    """
    mixture, experts, rest = (_upper(name) for name in (mixture, experts, rest))
    _check_types(mixture, experts, rest, imatrix is not None)
    source = ModelMap.read(model)
    if any(out.exists() and out.samefile(file) for file in source.files):
        raise OptionError(f"{shown(out)} is the model itself; name another file with --out")
    if experts and not source.is_moe:
        raise OptionError(f"{shown(model)} has no routed experts; leave --experts out, give --rest")
    if imatrix is not None:
        read_imatrix(imatrix)  # refused here with a better word than llama.cpp's
    wanted = wanted_types(source, mixture, experts, rest)
    _require_space(out, sum(_bytes_as(source.tensors[name], kind) for name, kind in wanted.items()))
    with files.appearing(out) as file:
        try:
            child.run_worker(
                f"{__package__}.quantize_worker",
                {
                    "model": str(source.files[0].resolve()),
                    "out": str(Path(file.name).resolve()),
                    "ftype": _file_type(mixture, experts, rest),
                    "types": _patterns(wanted),
                    "imatrix": str(imatrix.resolve()) if imatrix else None,
                    "threads": threads or 0,
                },
                progress=progress,
            )
        except child.WorkerFailure as error:
            raise BackendError(
                f"{shown(model)} cannot be quantized: {error.text}{_space_left(out)}"
            ) from error
        made = ModelMap.read(file.name)
        _verify(source, made, wanted)
    return Quantized(
        path=out,
        bytes_before=source.total_bytes,
        bytes_after=made.total_bytes,
        experts_before=source.routed_bytes,
        experts_after=made.routed_bytes,
        changed=tuple(_changes(source, made, wanted)),
    )


def wanted_types(
    model: ModelMap, mixture: str | None, experts: str | None, rest: str | None
) -> dict[str, str]:
    """The type wanted of each tensor by name, as far as one is: a mixture leaves the choice open."""
    wanted: dict[str, str] = {}
    for name, tensor in model.tensors.items():
        kind = experts if _EXPERTS.fullmatch(name) else rest
        if kind is None and mixture is None:
            kind = type_name(tensor.ggml_type)
        if kind is not None and len(tensor.shape) > 1 and name.endswith(".weight"):
            wanted[name] = kind
    return wanted


def _upper(name: str | None) -> str | None:
    return name.upper().replace("-", "_") if name else None


def _check_types(
    mixture: str | None, experts: str | None, rest: str | None, has_imatrix: bool
) -> None:
    if not (mixture or experts or rest):
        raise OptionError(
            "nothing to do: give --experts, --rest or --type, for example --type Q4_K_M"
        )
    for option, name, known in (
        ("--type", mixture, MIXTURES),
        ("--experts", experts, TYPES),
        ("--rest", rest, TYPES),
    ):
        if name and name not in known:
            hint = f"; mixtures go with --type {name}" if name in MIXTURES else ""
            raise OptionError(f"{option} {name} is unknown, known are {', '.join(known)}{hint}")
        if name in _NEEDS_IMATRIX and not has_imatrix:
            raise OptionError(
                f"{option} {name} is useless without an importance matrix; make one with "
                "`calibrate MODEL --imatrix FILE` and give --imatrix FILE"
            )


def _file_type(mixture: str | None, experts: str | None, rest: str | None) -> int:
    if mixture:
        if mixture in _PLAIN and (experts or rest):
            return TYPES[_ANY_QUANTIZED]
        return MIXTURES[mixture]
    named = experts or rest
    if named in _PLAIN or named is None:
        named = rest if rest and rest not in _PLAIN else _ANY_QUANTIZED
    return TYPES[named]


def _patterns(wanted: Mapping[str, str]) -> list[tuple[str, int]]:
    """Regular expressions and ggml types, one for each tensor: no name is another's part then."""
    return [
        (f"^{re.escape(name)}$", int(GGMLQuantizationType[kind])) for name, kind in wanted.items()
    ]


def _bytes_as(tensor: TensorInfo, kind: str) -> int:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    weights = 1
    for extent in tensor.shape:
        weights *= extent
    return int(weights // block * size)


def _require_space(out: Path, needed: int) -> None:
    if not out.parent.is_dir():
        raise OptionError(f"{shown(out.parent)} is no folder; make it or name another --out")
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise OptionError(
            f"{shown(out.parent)} has {free} bytes free, {needed} are needed; free some or choose "
            "another --out"
        )


def _space_left(out: Path) -> str:
    free = shutil.disk_usage(out.parent).free
    return f"; {free} bytes are free in {shown(out.parent)}" if free < 1 << 26 else ""


def _verify(source: ModelMap, made: ModelMap, wanted: Mapping[str, str]) -> None:
    for name, tensor in source.tensors.items():
        other = made.tensors.get(name)
        if other is None or other.shape != tensor.shape:
            raise ModelError(
                f"the quantized file lacks {name} of shape {tensor.shape}; report this"
            )
        kind = type_name(other.ggml_type)
        want = wanted.get(name, kind)
        # What llama.cpp never quantizes keeps its type, what does not fit falls back to another.
        fits = tensor.shape[0] % GGML_QUANT_SIZES[GGMLQuantizationType[want]][0] == 0
        if fits and kind not in (want, type_name(tensor.ggml_type)):
            raise ModelError(f"{name} became {kind} where {want} was wanted; report this")
    if extra := made.tensors.keys() - source.tensors.keys():
        raise ModelError(f"the quantized file has {sorted(extra)[0]} besides; report this")


def _changes(source: ModelMap, made: ModelMap, wanted: Mapping[str, str]) -> Iterator[Changed]:
    for name, tensor in source.tensors.items():
        after = made.tensors[name]
        if after.ggml_type != tensor.ggml_type:
            yield Changed(
                name=name,
                before=type_name(tensor.ggml_type),
                after=type_name(after.ggml_type),
                wanted=wanted.get(name, ""),
                bytes_before=tensor.nbytes,
                bytes_after=after.nbytes,
            )
