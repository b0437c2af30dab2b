"""Fields that requests of the OpenAI and llama-server dialects share, and what they mean to a job.

Names are llama-server's, OpenAI's where both have one. Unknown fields are ignored: clients send their own.
Knows no routes and no prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.runtime.options import Sampling
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.jobs import Job
from speculoe_local.server.settings import Settings

__all__ = ["Common", "bias_of", "choices_of", "job_of", "ping_of", "sampling_of", "stops_of"]

MIN_PING_S = 0.05
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
_SAMPLERS = {
    **{name: name for name in ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p")},
    **{name: name for name in ("min_p", "xtc", "temperature", "infill")},
    "typical_p": "typ_p",
    "temp": "temperature",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "m": "min_p",
    "t": "temperature",
    "e": "penalties",
    "d": "dry",
    "s": "top_n_sigma",
    "x": "xtc",
    "i": "infill",
}
# Fields of Sampling by the names that requests use.
_NAMES = {
    **{name: name for name in ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma")},
    **{name: name for name in ("xtc_probability", "xtc_threshold", "min_keep")},
    **{name: name for name in ("dynatemp_range", "dynatemp_exponent")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
    **{name: name for name in ("repeat_penalty", "frequency_penalty", "presence_penalty")},
    **{name: name for name in ("repeat_last_n", "dry_multiplier", "dry_base")},
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_last_n",
    "temperature": "temp",
}
_INT31 = 2**31 - 1


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("Input should be a finite number")
    return value


_Number = Annotated[float, BeforeValidator(_finite)]
_Share = Annotated[_Number, Field(ge=0, le=1)]
_Positive = Annotated[_Number, Field(ge=0)]
_Count = Annotated[int, Field(ge=-1, le=_INT31)]


class Common(BaseModel):
    """Sampling, ends and bookkeeping of a request for text."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    temperature: _Positive | None = None
    top_k: Annotated[int, Field(le=_INT31)] | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    typical_p: _Share | None = None
    top_n_sigma: _Number | None = None
    xtc_probability: _Share | None = None
    xtc_threshold: _Share | None = None
    dynatemp_range: _Number | None = None
    dynatemp_exponent: _Number | None = None
    mirostat: Annotated[int, Field(ge=0, le=2)] | None = None
    mirostat_tau: _Number | None = None
    mirostat_eta: _Number | None = None
    repeat_penalty: Annotated[_Number, Field(gt=0)] | None = None
    frequency_penalty: _Number | None = None
    presence_penalty: _Number | None = None
    repeat_last_n: _Count | None = None
    dry_multiplier: _Number | None = None
    dry_base: _Number | None = None
    dry_allowed_length: _Count | None = None
    dry_penalty_last_n: _Count | None = None
    dry_sequence_breakers: list[str] | None = None
    min_keep: Annotated[int, Field(ge=0, le=_INT31)] | None = None
    samplers: list[str] | str | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, Any] | list[Any] | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    t_max_predict_ms: int | None = None
    sse_ping_interval: _Number | None = None


def sampling_of(asked: Common, default: Sampling) -> Sampling:
    """`default` with what a request asks for. `seed` negative: a fresh one. Raises BadRequest."""
    changes: dict[str, Any] = {
        field: value
        for name, field in _NAMES.items()
        if (value := getattr(asked, name)) is not None
    }
    if asked.seed is not None:
        changes["seed"] = asked.seed & 0xFFFFFFFF if asked.seed >= 0 else None
    if asked.dry_base is not None and asked.dry_base < 1:
        changes["dry_base"] = default.dry_base
    if asked.dry_sequence_breakers is not None:
        if not asked.dry_sequence_breakers:
            raise BadRequest(
                "dry_sequence_breakers is empty; leave it out for the default",
                "dry_sequence_breakers",
            )
        changes["dry_breakers"] = tuple(asked.dry_sequence_breakers)
    if asked.samplers is not None:
        # Unknown names are left out, as llama-server does: newer clients name newer samplers.
        named = (_SAMPLERS.get(name) for name in asked.samplers)
        changes["samplers"] = tuple(dict.fromkeys(name for name in named if name is not None))
    return replace(default, **changes)


def job_of(asked: Common, settings: Settings, vocab: Vocabulary, *, max_tokens: int | None) -> Job:
    """A job without a prompt, with everything the shared fields say. Raises BadRequest."""
    limit = asked.t_max_predict_ms
    return Job(
        tokens=(),
        sampling=sampling_of(asked, settings.sampling),
        max_tokens=max_tokens if max_tokens is None or max_tokens >= 0 else None,
        stop=stops_of(asked.stop),
        logit_bias=bias_of(asked.logit_bias, vocab),
        ignore_end=bool(asked.ignore_eos),
        cache_prompt=asked.cache_prompt is not False,
        slot=asked.id_slot if asked.id_slot is not None and asked.id_slot >= 0 else None,
        max_ms=float(limit) if limit is not None and limit > 0 else None,
    )


def ping_of(asked: Common, settings: Settings) -> float:
    """Seconds between comments in a silent stream; 0 for none."""
    wanted = asked.sse_ping_interval
    if wanted is None:
        return settings.ping_s
    return wanted if wanted >= MIN_PING_S else 0.0


def choices_of(job: Job, n: int) -> list[Job]:
    """`job` n times; a given seed counts up, or all would be the same."""
    seed = job.sampling.seed
    if seed is None:
        return [job] * n
    return [
        replace(job, sampling=replace(job.sampling, seed=(seed + i) & 0xFFFFFFFF)) for i in range(n)
    ]


def stops_of(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings, empty ones left out. Raises BadRequest."""
    found = [stop] if isinstance(stop, str) else list(stop or ())
    if len(found) > MAX_STOPS:
        raise BadRequest(f"stop has {len(found)} strings, the limit is {MAX_STOPS}", "stop")
    for text in found:
        if len(text) > MAX_STOP_CHARS:
            raise BadRequest(
                f"a stop string has {len(text)} characters, the limit is {MAX_STOP_CHARS}", "stop"
            )
    return tuple(dict.fromkeys(text for text in found if text))


def bias_of(bias: Any, vocab: Vocabulary) -> dict[int, float]:
    """Additions to logits by token. `{"15043": 2}`, `[[15043, 2], ["text", -1], [13, false]]`.

    `false` forbids; a text means all its tokens. Raises BadRequest.
    """
    if not bias:
        return {}
    pairs = list(bias.items()) if isinstance(bias, Mapping) else bias
    found: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise BadRequest("logit_bias has an entry that is no [token, bias] pair", "logit_bias")
        value = _bias(pair[1])
        for token in _tokens(pair[0], vocab):
            if not 0 <= token < vocab.size:
                raise BadRequest(
                    f"logit_bias names token {token}, the model has 0..{vocab.size - 1}",
                    "logit_bias",
                )
            found[token] = value
    return found


def _bias(value: Any) -> float:
    if value is False:
        return -math.inf
    if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
        return float(value)
    raise BadRequest(f"logit_bias {str(value)[:40]!r} is no number; use -100..100", "logit_bias")


def _tokens(key: Any, vocab: Vocabulary) -> list[int]:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise BadRequest(f"logit_bias key {str(key)[:40]!r} is no token", "logit_bias")
    if isinstance(key, int):
        return [key]
    # JSON objects have texts for keys: digits mean a token's number.
    if key.isascii() and key.isdecimal():
        return [int(key[:12])]
    return vocab.tokenize(key, special=True, add_bos=False)
