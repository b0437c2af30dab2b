"""What a caller may choose, checked once, here. Frozen values; nothing reads options twice."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from speculoe_local.runtime.errors import OptionError

__all__ = [
    "EngineOptions",
    "Link",
    "Message",
    "Peer",
    "Sampling",
    "parse_device",
    "parse_devices",
    "parse_link",
    "parse_peers",
]

_MODES = ("exact", "speculate", "estimate", "hybrid")
_LAYERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", re.ASCII)
_MOST_LAYERS = 1 << 16
_MISSES = ("upload", "cpu", "split", "auto")
_BUFFERS = ("slots", "two-layer")
_SOURCES = ("auto", "buffered", "direct", "mapped")
_RATE = re.compile(r"([0-9.]+)\s*([kmgt]?)(i?)b/s", re.IGNORECASE)
_DEVICE = re.compile(r"(auto|cpu|cuda|vulkan|metal)(?::([0-9]{1,3}))?")
_TIME = re.compile(r"([0-9.]+)\s*(ns|us|ms|s)", re.IGNORECASE)
_PEER = re.compile(r"([A-Za-z0-9._-]{1,253}):([0-9]{1,5})(?:=([0-9]{1,5}))?")
_MOST_PEERS = 8  # of the 16 devices that llama.cpp takes, some have two
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; roles as the chat template knows them."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """llama.cpp's sampler chain and its neutral values; `temp` 0 is greedy, `seed` None draws one.

    Penalties look at `repeat_last_n` tokens (-1: the context), DRY at `dry_last_n`. `mirostat` 1 or 2
    replaces the truncating samplers. `samplers` names those to use, in order (None: llama.cpp's order):
    penalties, dry, top_n_sigma, top_k, typ_p, top_p, min_p, xtc, temperature, infill.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    typical_p: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_last_n: int = -1
    dry_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    min_keep: int = 0
    samplers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """A modelled slow-to-fast link: `rate` in bytes per second, `latency` in seconds per copy."""

    rate: float
    latency: float = 0.0


@dataclass(frozen=True, slots=True)
class Peer:
    """A machine that `rpc-serve` runs on. `layers`: how many go there; None: by its free memory."""

    host: str
    port: int
    layers: int | None = None

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is opened. Raises OptionError when a value is not usable, before any work.

    `predict` None means hybrid with a sidecar, quasi-hidden without. `buffers` two-layer keeps no expert from one layer
    to the next (a measurement: the setting of arXiv 2603.19289); the budget then does not count. `weights`:
    what predicted experts are weighted by in a lossy mode, the prediction or the true router. `unmeasured`
    runs such a mode although the sidecar does not say what it costs. `rpc`: `HOST:PORT[=LAYERS],...`, other
    machines that take layers. `misses`: whether what is not resident is waited for, or computed by the CPU where
    its bytes lie, which rounds differently. `pin`: how much of the experts is kept in memory that a device reads
    by itself. `pin_layers`: whose experts all have slots. `n_cpu_moe`: of the first so many layers with experts the CPU
    computes them, none has a slot.
    """

    expert_budget: str = "auto"
    mode: str = "exact"
    weights: str = "predicted"
    unmeasured: bool = False
    predict: str | None = None
    device: str = "auto"
    link: str | None = None
    sidecar: Path | None = None
    threads: int | None = None
    ctx: int = 4096
    batch: int = 512
    ubatch: int = 512
    source: str = "auto"
    policy: Literal["learned", "decayed", "lru"] = "learned"
    upload_threads: int = 2
    buffers: str = "slots"
    loop: str = "python"
    repack: bool = True
    rpc: str | None = None
    misses: Literal["upload", "cpu", "split", "auto"] = "upload"
    pin: str = "auto"
    pin_layers: str = ""
    n_cpu_moe: int = 0

    def __post_init__(self) -> None:
        _one_of("--mode", self.mode, _MODES)
        _one_of("--source", self.source, _SOURCES)
        _one_of("--misses", self.misses, _MISSES)
        _one_of("--weights", self.weights, ("predicted", "true"))
        _one_of("--buffers", self.buffers, _BUFFERS)
        if len(parse_devices(self.device)) > 1 and self.rpc is not None:
            raise OptionError(f"--device {self.device} does not go with --rpc; name one device")
        _one_of("loop", self.loop, ("python", "native"))
        for name in ("threads", "ctx", "batch", "ubatch", "upload_threads"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 24:
                raise OptionError(f"--{name.replace('_', '-')} {value} is not in 1..{1 << 24}")
        parse_layers(self.pin_layers)
        if not 0 <= self.n_cpu_moe <= _MOST_LAYERS:
            raise OptionError(f"--n-cpu-moe {self.n_cpu_moe} is not in 0..{_MOST_LAYERS}")
        if self.n_cpu_moe and self.rpc is not None:
            raise OptionError(
                f"--n-cpu-moe {self.n_cpu_moe} does not go with --rpc; give that machine fewer layers instead"
            )
        if self.link is not None:
            parse_link(self.link)
        if self.rpc is not None:
            parse_peers(self.rpc)
            if self.mode != "exact":
                raise OptionError(
                    f"--mode {self.mode} does not go with --rpc: layers of other machines execute no "
                    "predictions; use --mode exact"
                )


def parse_device(text: str) -> tuple[str, int]:
    """Read `cpu`, `vulkan`, `cuda:1`: the kind, and which of it. Raises OptionError for anything else."""
    named = _DEVICE.fullmatch(text)
    if named is None:
        raise OptionError(
            f"--device {text[:40]!r} is not known; use auto, cpu, cuda, vulkan or metal, with :N for the N-th"
        )
    return named[1], int(named[2] or 0)


def parse_devices(text: str) -> tuple[tuple[str, int], ...]:
    """Read `vulkan:0,vulkan:1`: each as `parse_device`. Raises OptionError also for one named twice, and for
    auto or cpu beside others."""
    found = tuple(parse_device(part.strip()) for part in text.split(","))
    if len(found) > 1 and (
        len(set(found)) < len(found) or {"auto", "cpu"} & {kind for kind, _ in found}
    ):
        raise OptionError(
            f"--device {text[:40]!r}: several devices are different ones by name; use for example cuda:0,cuda:1"
        )
    return found


def parse_layers(text: str) -> frozenset[int]:
    """Read `0-2,7`: indices of layers; "" is none. Raises OptionError for anything else."""
    found: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        match = _LAYERS.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < _MOST_LAYERS:
            raise OptionError(
                f"--pin-layers {part.strip()[:40]!r} is not a layer or a range of them; use for example 0-2,7"
            )
        found.update(range(first, last + 1))
    return frozenset(found)


def parse_link(text: str) -> Link:
    """Read `2GB/s`, `2GB/s,10us`. Raises OptionError for anything else."""
    rate_text, _, time_text = text.partition(",")
    rate = _RATE.fullmatch(rate_text.strip())
    time = _TIME.fullmatch(time_text.strip()) if time_text else None
    try:
        if rate is None or (time_text and time is None):
            raise ValueError
        power = " kmgt".index(rate[2].lower()) if rate[2] else 0
        per_second = float(rate[1]) * (1024 if rate[3] else 1000) ** power
        latency = float(time[1]) * _SECONDS[time[2].lower()] if time else 0.0
    except ValueError:
        raise OptionError(
            f"--link {text[:40]!r} is not RATE[,LATENCY]; use for example 2GB/s,10us"
        ) from None
    if per_second <= 0:
        raise OptionError(f"--link {text[:40]!r} moves nothing; use a rate above 0")
    return Link(per_second, latency)


def parse_peers(text: str) -> tuple[Peer, ...]:
    """Read `HOST:PORT,HOST:PORT=LAYERS`. Raises OptionError for anything else, and for one named twice."""
    peers = []
    for part in text.split(","):
        match = _PEER.fullmatch(part.strip())
        if match is None or not 1 <= int(match[2]) <= 65535 or match[3] == "0":
            raise OptionError(
                f"--rpc {part.strip()[:60]!r} is not HOST:PORT[=LAYERS]; use for example 10.0.0.2:50052"
            )
        peers.append(Peer(match[1], int(match[2]), int(match[3]) if match[3] else None))
    if len(peers) > _MOST_PEERS or len({peer.endpoint for peer in peers}) < len(peers):
        raise OptionError(f"--rpc {text[:60]!r} names one twice, or more than {_MOST_PEERS}")
    return tuple(peers)


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(f"{name} {value!r} is not known; use one of {', '.join(known)}")
