"""What MODEL on a command line means: a file, or the name of a model in the cache. Never the network."""

from __future__ import annotations

from pathlib import Path

from speculoe_local.hub.cache import CachedModel, ready
from speculoe_local.hub.names import ModelName, parse_name
from speculoe_local.runtime.errors import ModelError, OptionError

__all__ = ["resolve"]


def resolve(text: str, cache: Path | None = None) -> Path | CachedModel:
    """The file at `text`, if there is something, else the complete model of that name in the cache.

    Raises ModelError where it can be neither, NotPulledError or IncompleteError where it is the name of
    a model that is not (all) there.
    """
    path = Path(text).expanduser()
    if path.exists():
        return path
    name = _name(text)
    if name is None:
        raise ModelError(
            f"model {text!r} does not exist: give the path of a GGUF file or a pulled name "
            "(owner/repo:QUANT), or leave it out for the embedded model"
        )
    return ready(name, cache)


def _name(text: str) -> ModelName | None:
    explicit = text.lower().startswith(("hf:", "hf.co/", "huggingface.co/", "http:", "https:"))
    if not explicit and text.endswith(".gguf") and ":" not in text:
        return None  # a path, mistyped
    try:
        return parse_name(text)
    except OptionError:
        if explicit:
            raise
        return None
