"""What dialects hand to a model and get back: jobs in, deltas out. Values and protocols only.

Knows no dialect and no engine; `batching/scheduler.py` implements `Backend`, `models.py` implements
`Backends`, and dialects use nothing else of either.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.runtime.options import Sampling
from speculoe_local.runtime.slots import SlotStats

__all__ = [
    "Backend",
    "BackendInfo",
    "Backends",
    "Delta",
    "Finish",
    "Job",
    "LaneView",
    "LayerView",
    "ModelEntry",
    "Snapshot",
    "Ticket",
    "Timings",
    "TokenLogprob",
]

# "length": max_tokens, max_ms or the end of the context; "cancel": the client left.
Finish = Literal["stop", "length", "cancel"]
_NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to continue, or to embed. `n` choices are `n` jobs: they share the prompt's KV.

    `max_tokens` 0 runs the prompt only (fills the cache, gives `prompt_logprobs`). `grammar` is GBNF with a
    rule `root`; with `grammar_triggers` (regular expressions over the answer, first group starts the
    grammar) it sleeps until one matches. `logit_bias` adds to logits, -inf forbids. `top_logprobs` None:
    no logprobs; 0: of the chosen token only. `echo_logprobs`: `prompt_logprobs` with the first delta.
    `ignore_end`: go on after the model's own end of generation. `slot`: the lane wished for, a hint.
    `max_ms` bounds the time of predicting. `special`: control tokens show as text. `embeddings`: one delta
    with the prompt's hidden states, pooled as the model says (mean) and of unit length, and no answer.
    """

    tokens: tuple[int, ...]
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: str | None = None
    grammar_triggers: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None
    echo_logprobs: bool = False
    ignore_end: bool = False
    cache_prompt: bool = True
    slot: int | None = None
    max_ms: float | None = None
    special: bool = False
    embeddings: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log probability before any sampler, and the likeliest (token, bytes, logprob)."""

    token: int
    piece: bytes
    logprob: float
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """What an answer cost so far.

    `prompt_n` tokens of the prompt were run, `cached_n` were there already: the prompt's length is the
    sum. `queue_ms` passed before the prompt began. `experts` are the figures of `chat --json` under the
    same name; slots are shared, so requests and bytes are those of the whole batch in that time.
    """

    prompt_n: int = 0
    cached_n: int = 0
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0
    queue_ms: float = 0.0
    experts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ttft_ms(self) -> float:
        return self.queue_ms + self.prompt_ms

    def to_json(self) -> dict[str, Any]:
        """`timings` as llama-server names them, with `queue_ms` and `experts` added."""

        def per_token(ms: float, n: int) -> float:
            return round(ms / n, 4) if n else 0.0

        def per_second(ms: float, n: int) -> float:
            return round(n / ms * 1e3, 4) if ms else 0.0

        return {
            "cache_n": self.cached_n,
            "prompt_n": self.prompt_n,
            "prompt_ms": round(self.prompt_ms, 3),
            "prompt_per_token_ms": per_token(self.prompt_ms, self.prompt_n),
            "prompt_per_second": per_second(self.prompt_ms, self.prompt_n),
            "predicted_n": self.predicted_n,
            "predicted_ms": round(self.predicted_ms, 3),
            "predicted_per_token_ms": per_token(self.predicted_ms, self.predicted_n),
            "predicted_per_second": per_second(self.predicted_ms, self.predicted_n),
            "queue_ms": round(self.queue_ms, 3),
            "experts": dict(self.experts),
        }


@dataclass(frozen=True, slots=True)
class Delta:
    """What became known since the last one. The last has a `finish` and `timings` with `experts`; deltas
    with tokens have `timings` without, those of progress none.

    `text` is what may be shown: whole characters, no part of a stop string; it may lag behind `tokens`.
    `stop_hit` is the stop string that ended the answer, None when the model ended it itself.
    `prompt_done` 0..1 grows while the prompt runs (deltas without tokens), then stays 1.
    `prompt_logprobs` (with `echo_logprobs`, once): one per prompt token, None for the first.
    `embedding` float32 [n_embd].
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    stop_hit: str | None = None
    timings: Timings | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    embedding: npt.NDArray[np.float32] | None = None
    prompt_done: float = 1.0
    lane: int = 0


class Ticket(Protocol):
    """An accepted job. Iterate once; leaving the iteration early does not cancel, `cancel` does.

    Iterating raises SourceError, BackendError or ShuttingDown where the answer breaks off.
    """

    @property
    def id(self) -> str: ...
    @property
    def job(self) -> Job: ...
    def __aiter__(self) -> AsyncIterator[Delta]: ...
    def cancel(self) -> None: ...


@dataclass(frozen=True, slots=True)
class LaneView:
    """One of the `n_parallel` places where answers run; `job` None while it is free."""

    id: int
    ticket: str | None = None
    job: Job | None = None
    n_prompt: int = 0
    n_past: int = 0
    n_decoded: int = 0


@dataclass(frozen=True, slots=True)
class LayerView:
    """A layer's experts over the last moments: `slots` of `n_expert` have a place, `demand` and `predicted`
    were uploaded because they were missing, or foreseen; `hit_rate` None: nothing was asked for."""

    block: int
    n_expert: int
    slots: float
    demand: float = 0.0
    predicted: float = 0.0
    stall_ms: float = 0.0
    hit_rate: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state and the counters since loading, for /slots, /metrics and the page.

    `kv_tokens` of `kv_size` tokens are held, idle conversations included; one request may use `n_ctx`.
    `residency` is the share of experts with a slot. `layers` are there where they were asked for and
    experts have slots.
    """

    lanes: tuple[LaneView, ...]
    queued: int
    n_ctx: int
    kv_tokens: int
    accepted: int
    finished: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    prompt_s: float
    predicted_s: float
    slots: SlotStats
    residency: float
    layers: tuple[LayerView, ...] = ()
    kv_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that can be asked for, loaded or not; what its header says without loading it.

    `digest` is stable for the file (sha256 over its header), `modified` seconds since the epoch.
    """

    name: str
    path: Path
    size_bytes: int
    modified: float
    digest: str
    architecture: str
    quantization: str
    n_params: int
    n_ctx_train: int
    n_embd: int
    n_layer: int
    n_vocab: int
    n_expert: int
    n_expert_used: int
    template: str | None
    loaded: bool = False
    expires_at: float | None = None  # when idle unloading comes, seconds since the epoch


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """A loaded model. `n_ctx` is what one request may use, prompt and answer together.

    `mode` exact: the true router; `exactness` "exact", "rounded" (--misses) or what a lossy
    mode costs, in words.
    """

    entry: ModelEntry
    n_ctx: int
    n_parallel: int
    mode: str
    exactness: str
    tier: str
    residency: float
    budget_bytes: int
    load_s: float
    loaded_at: float

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def path(self) -> Path:
        return self.entry.path

    @property
    def template(self) -> str | None:
        return self.entry.template


class Backend(Protocol):
    """One loaded model; what dialects get."""

    @property
    def info(self) -> BackendInfo: ...
    @property
    def vocab(self) -> Vocabulary: ...

    async def submit(self, job: Job) -> Ticket:
        """Raises QueueFull, ContextOverflow, GrammarError, BadRequest (empty prompt, token out of range),
        Loading or ShuttingDown."""
        ...

    def snapshot(self, *, layers: bool = False) -> Snapshot: ...


class Backends(Protocol):
    """All models of a server."""

    @property
    def strict(self) -> bool:
        """Whether unknown names are refused; one model alone answers to any name."""
        ...

    async def get(self, name: str | None) -> Backend:
        """The model of that name, loaded if need be; None or "" is the default one.

        Raises UnknownModel, Loading (first model of a starting server), ModelError, BudgetError.
        """
        ...

    def entries(self) -> tuple[ModelEntry, ...]: ...

    async def unload(self, name: str) -> bool:
        """Drop a model from memory once its answers are done. False: it was not loaded."""
        ...

    def loaded(self) -> tuple[Backend, ...]:
        """Those in memory now; never loads one."""
        ...

    def progress(self) -> float | None:
        """0..1 while the first model loads, None once it is there."""
        ...
