"""Hugging Face folder -> GGUF, through llama.cpp's own converter from the pinned source.

The converter is the one beside the libraries (`converter.zip`, put there by the build), so what it
writes is what they read. It runs in a process of its own (`hf_worker`), offline, and runs no Python from
the model's folder unless allowed. The file appears whole, after llama.cpp has opened it.
Needs the extra `convert` (torch, transformers, sentencepiece).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from speculoe_local.convert import child, files
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.header import shown
from speculoe_local.runtime.lib import library_folder
from speculoe_local.runtime.modelmap import ModelMap

__all__ = ["OUTTYPES", "Converted", "convert", "converter", "default_out", "supported"]

OUTTYPES: Final = ("auto", "f32", "f16", "bf16", "q8_0")
_NEEDED: Final = ("torch", "transformers", "sentencepiece")
_UNKNOWN_TOKENIZER: Final = "unknown tokenizer "
_OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True, slots=True)
class Converted:
    """What `convert` wrote. `hf_architecture` is the folder's word, `tokenizer_pre` llama.cpp's name
    for how text is split before BPE, empty for other tokenizers."""

    path: Path
    bytes: int
    architecture: str
    hf_architecture: str
    tokenizer_pre: str
    tensors: int


def convert(
    folder: Path,
    out: Path,
    *,
    outtype: str = "auto",
    name: str | None = None,
    tokenizer_pre: str | None = None,
    allow_code: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Converted:
    """Write the model in `folder` (config.json, safetensors, tokenizer) to the GGUF `out`.

    `outtype` is one of OUTTYPES; auto keeps 16-bit weights as they are. Experts that come in MXFP4 stay
    so. `tokenizer_pre` names the pre-tokenizer where its hash is unknown to llama.cpp. `allow_code` lets
    Python files in `folder` run, as some tokenizers need. `progress` gets the share written, 0 to 1.

    Raises OptionError for what can be put right (a missing package, an unknown tokenizer or type),
    ModelError when the folder is no model that llama.cpp's converter knows, BackendError when it fails.
    """
    if outtype not in OUTTYPES:
        raise OptionError(f"--outtype {outtype} is unknown, known are {', '.join(OUTTYPES)}")
    hf_architecture = _check_folder(folder)
    if hf_architecture not in supported():
        raise ModelError(
            f"{shown(folder)}: {hf_architecture} is not known to llama.cpp's converter at the pin; "
            "a newer speculoe-local may know it"
        )
    missing = [package for package in _NEEDED if importlib.util.find_spec(package) is None]
    if missing:
        raise OptionError(
            f"converting needs {', '.join(missing)}; run: pip install 'speculoe-local[convert]'"
        )
    if not out.parent.is_dir():
        raise OptionError(f"{shown(out.parent)} is no folder; make it or name another --out")
    request = {
        "folder": str(folder.resolve()),
        "outtype": outtype,
        "name": name,
        "tokenizer_pre": tokenizer_pre,
        "allow_code": allow_code,
    }
    with tempfile.TemporaryDirectory(prefix="speculoe-converter-") as scratch:
        unpack(Path(scratch))
        with files.appearing(out) as file:
            try:
                reply = child.run_worker(
                    f"{__package__}.hf_worker",
                    {**request, "out": str(Path(file.name).resolve())},
                    progress=progress,
                    environment=_OFFLINE,
                    first_on_path=[scratch, str(Path(scratch) / "gguf-py")],
                )
            except child.WorkerFailure as error:
                raise _explained(folder, hf_architecture, out, error.text) from error
            made = _verified(Path(file.name), tokenizer_pre)
    return Converted(
        path=out,
        bytes=out.stat().st_size,
        architecture=made.architecture,
        hf_architecture=hf_architecture,
        tokenizer_pre=reply["tokenizer_pre"],
        tensors=len(made.tensors),
    )


def default_out(folder: Path) -> Path:
    """Where a conversion goes when nobody says: in the working folder, named as the model's."""
    return Path(f"{folder.resolve().name}.gguf")


def converter() -> Path:
    """llama.cpp's converter as the build left it; raises BackendError when it is not there."""
    path = library_folder() / "converter.zip"
    if not path.is_file():
        raise BackendError(f"no converter at {shown(path)}; run `make setup` to build it")
    return path


def supported() -> frozenset[str]:
    """Architectures that the converter knows as text models, by the names in config.json."""
    with zipfile.ZipFile(converter()) as archive:
        tree = ast.parse(archive.read("conversion/__init__.py"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TEXT_MODEL_MAP":
            assert node.value is not None
            return frozenset(ast.literal_eval(node.value))
    raise BackendError(f"{shown(converter())} lists no architectures; run `make setup` again")


def unpack(folder: Path) -> None:
    """Put the converter's files into `folder`."""
    with zipfile.ZipFile(converter()) as archive:
        archive.extractall(folder)


def _check_folder(folder: Path) -> str:
    """The folder's architecture; raises ModelError unless it looks like a model."""
    if not folder.is_dir():
        raise ModelError(f"{shown(folder)} is no folder; name the one with config.json")
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{shown(folder)} has no config.json; name a model's folder") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{shown(folder)}/config.json cannot be read: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{shown(folder)}/config.json names no architecture; is it a model's?")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_index(folder, index)
    elif not (any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))):
        raise ModelError(f"{shown(folder)} has no *.safetensors; download the weights too")
    return names[0]


def _check_index(folder: Path, index: Path) -> None:
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{shown(index)} cannot be read: {error}; download it again") from error
    missing = sorted(part for part in parts if not (folder / str(part)).is_file())
    if missing:
        raise ModelError(
            f"{shown(folder)} lacks {len(missing)} of {len(parts)} weight files, the first is "
            f"{missing[0]}; download them too"
        )


def _explained(folder: Path, architecture: str, out: Path, text: str) -> Exception:
    """The worker's words as an error that says what to do."""
    if text.startswith(_UNKNOWN_TOKENIZER):
        return OptionError(
            f"{shown(folder)}: its tokenizer has the hash {text.removeprefix(_UNKNOWN_TOKENIZER)}, which "
            "llama.cpp at the pin does not know; check that tokenizer.json is the model's own, or say "
            "whose pre-tokenizer it is with --tokenizer-pre, such as qwen2 or gpt-4o"
        )
    if "trust_remote_code" in text:
        return OptionError(
            f"{shown(folder)}: its tokenizer runs Python from that folder; read the code, then "
            "allow it with --allow-code"
        )
    free = shutil.disk_usage(out.parent).free
    room = f"; {free} bytes are free in {shown(out.parent)}" if free < 1 << 26 else ""
    return BackendError(f"{shown(folder)} ({architecture}) cannot be converted: {text}{room}")


def _verified(path: Path, tokenizer_pre: str | None) -> ModelMap:
    made = ModelMap.read(path)
    try:
        child.run_worker(f"{__package__}.open_worker", {"path": str(path.resolve())})
    except child.WorkerFailure as error:
        if tokenizer_pre and "pre-tokenizer" in error.text:
            raise OptionError(
                f"--tokenizer-pre {tokenizer_pre} is unknown to llama.cpp; try qwen2, gpt-2, "
                "gpt-4o or llama-bpe"
            ) from error
        raise BackendError(f"llama.cpp cannot open what was converted: {error.text}") from error
    return made
