"""What a server may be told, checked once, here. Frozen values; nothing reads them twice.

`cli/serve.py` makes one from options; dialects read what concerns them. Knows no dialect.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.options import EngineOptions, Sampling

__all__ = ["ModelSpec", "Settings"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model by the name it answers to."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Settings:
    """How a server runs. Raises OptionError when a value is not usable.

    `models`, the first is the default. `strict`: unknown names are refused (several models); else one
    model answers to any name. `queue` jobs may wait beside the `parallel` that run, each with a context
    of its own; with `shared_kv` they share one, which takes less memory, and answers then may depend,
    within rounding, on what runs beside them. `ping_s` is the
    period of comments in event streams, 0: none. `idle_s` unloads a model that rests that long, 0: never.
    `cache_dir` keeps KV of prefixes from `cache_min_tokens` on, at most `cache_bytes`. `hosts` are names
    accepted in Host beside loopback, `origins` those that browsers may call from. `log_prompts` lets the
    log show text. `merge_system`: join system messages at the front where a template insists on that.
    """

    models: tuple[ModelSpec, ...] = ()
    strict: bool = False
    engine: EngineOptions = field(default_factory=EngineOptions)
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    host: str = "127.0.0.1"
    port: int = 8080
    parallel: int = 4
    shared_kv: bool = False
    queue: int = 64
    ping_s: float = 15.0
    idle_s: float = 0.0
    cache_dir: Path | None = None
    cache_bytes: int = 2 << 30
    cache_min_tokens: int = 256
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    template_seconds: float = 5.0
    log_json: bool = False
    log_prompts: bool = False
    merge_system: bool = True
    grace_s: float = 3.0

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.models]
        for name in names:
            if not name or names.count(name) > 1:
                raise OptionError(
                    f"--models name {name!r} is empty or used twice; give each its own"
                )
        _in_range("--port", self.port, 0, 65535)
        _in_range("--parallel", self.parallel, 1, 64)
        _in_range("--queue", self.queue, 0, 100_000)
        _in_range("--ping", self.ping_s, 0, 3600)
        _in_range("--unload-after", self.idle_s, 0, 10**7)
        _in_range("--cache-size", self.cache_bytes, 1 << 20, 1 << 50)
        _in_range("--max-body", self.max_body_bytes, 1 << 10, 1 << 32)
        if "*" in self.origins:
            raise OptionError(
                "--cors-origin * would let any page in; list the origins that may call"
            )
        for key in self.keys:
            if not key or not key.isascii() or not key.isprintable():
                raise OptionError("an API key is empty or not printable ASCII; use another key")

    @property
    def default_model(self) -> str | None:
        return self.models[0].name if self.models else None


def _in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise OptionError(f"{name} {value} is not in {low}..{high}")
