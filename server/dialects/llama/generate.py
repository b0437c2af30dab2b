"""llama-server's /completion and /infill: what they say about a job, and how the answer is written.

Knows no routes. What these endpoints know beyond the OpenAI dialect: fields of the response by choice
(`response_fields`), a least indentation that ends an answer, settings echoed back.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.dialects.fields import Common, choices_of, job_of
from speculoe_local.server.dialects.many_prompts import Tokens, prompts_of
from speculoe_local.server.dialects.openai.common import chat_logprobs, error_event, model_name
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.grammar.form import requested
from speculoe_local.server.http.wire import Tickets, event
from speculoe_local.server.jobs import Backend, Delta, Finish, Job, Timings, TokenLogprob
from speculoe_local.server.prompt.fim import fim_tokens
from speculoe_local.server.settings import Settings

__all__ = ["CompletionBody", "Generation", "InfillBody", "generations", "selected", "streamed"]

MAX_CHOICES = 64
_Count = Annotated[int, Field(ge=-2, le=2**31 - 1)]


class CompletionBody(Common):
    """/completion."""

    prompt: str | list[Any] = ""
    n_predict: _Count | None = None
    max_tokens: _Count | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    n_probs: Annotated[int, Field(ge=0, le=1000)] | None = None
    post_sampling_probs: bool | None = None
    n_indent: Annotated[int, Field(ge=0, le=1000)] | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    grammar: str | None = None
    grammar_lazy: bool | None = None
    grammar_triggers: list[Any] | None = None
    json_schema: Any = None
    response_format: dict[str, Any] | None = None


class InfillBody(CompletionBody):
    """/infill. Both sides are needed; further keys of `input_extra`'s entries are ignored."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: list[dict[str, Any]] | None = None


@dataclass(slots=True)
class Generation:
    """One answer as it grows, and how it is shown."""

    index: int
    job: Job
    prompt: str
    body: CompletionBody
    model: str
    vocab: Vocabulary
    n_ctx: int
    tickets: Tickets
    begun: float = field(default_factory=time.perf_counter)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    timings: Timings = Timings()  # noqa: RUF009  # frozen
    finish: Finish | None = None
    stop_hit: str | None = None
    lane: int = 0
    _pending: list[TokenLogprob] = field(default_factory=list)
    _pending_tokens: list[int] = field(default_factory=list)
    _dedented: bool = False

    def see(self, delta: Delta) -> str:
        """Take a delta; the text that is new. Ends the job where the indentation falls below the least."""
        self.lane = delta.lane
        self.tokens += delta.tokens
        self._pending_tokens += delta.tokens
        self.logprobs += delta.logprobs
        self._pending += delta.logprobs
        self.timings = delta.timings or self.timings
        if self._dedented:
            return ""
        before = len(self.text)
        self.text += delta.text
        self.finish, self.stop_hit = delta.finish, delta.stop_hit
        cut = _dedent_at(self.text, before, self.body.n_indent or 0)
        if cut is not None:
            self.text = self.text[:cut]
            self._dedented, self.finish = True, "length"
            self.tickets.cancel()
        return self.text[before:]

    @property
    def done(self) -> bool:
        return self.finish is not None

    def part(self, text: str) -> dict[str, Any]:
        """A step of a stream."""
        found: dict[str, Any] = {
            "index": self.index,
            "content": text,
            "tokens": self._pending_tokens,
            "stop": False,
            "id_slot": self.lane,
            "tokens_predicted": self.timings.predicted_n,
            "tokens_evaluated": len(self.job.tokens),
        }
        if self.body.timings_per_token:
            found["timings"] = self.timings.to_json()
        if self._pending:
            found["completion_probabilities"] = _probabilities(self._pending, self.vocab)
        self._pending, self._pending_tokens = [], []
        return found

    def progress(self, delta: Delta) -> dict[str, Any]:
        n = len(self.job.tokens)
        done = {
            "total": n,
            "cache": 0,
            "processed": round(delta.prompt_done * n),
            "time_ms": round((time.perf_counter() - self.begun) * 1e3),
        }
        return {**self.part(""), "prompt_progress": done}

    def last(self, *, stream: bool) -> dict[str, Any]:
        """The response, or the last step of a stream: then without what was told already."""
        used = self.timings.prompt_n + self.timings.cached_n + self.timings.predicted_n
        found: dict[str, Any] = {
            "index": self.index,
            "content": "" if stream else self.text,
            "tokens": self.tokens if self.body.return_tokens and not stream else [],
            "id_slot": self.lane,
            "stop": True,
            "model": self.model,
            "tokens_predicted": self.timings.predicted_n,
            "tokens_evaluated": len(self.job.tokens),
            "generation_settings": settings_of(self.job, self.body),
            "prompt": self.prompt,
            "has_new_line": "\n" in self.text,
            "truncated": self.finish == "length" and used >= self.n_ctx,
            "stop_type": self._stop_type(),
            "stopping_word": self.stop_hit or "",
            "tokens_cached": used,
            "timings": self.timings.to_json(),
        }
        if self.logprobs and not stream:
            found["completion_probabilities"] = _probabilities(self.logprobs, self.vocab)
        return found

    def _stop_type(self) -> str:
        if self.finish == "length":
            return "limit"
        if self.finish == "stop":
            return "word" if self.stop_hit is not None else "eos"
        return "none"


async def generations(
    body: CompletionBody, backend: Backend, settings: Settings, tickets: Tickets
) -> list[Generation]:
    """The answers that a request asks for. Raises BadRequest, GrammarError and (no such tokens) Unsupported."""
    if body.post_sampling_probs:
        raise BadRequest(
            "post_sampling_probs is not offered; n_probs alone gives log probabilities",
            "post_sampling_probs",
        )
    grammar = await requested(
        body.model_dump(include={"grammar", "json_schema", "response_format"})
    )
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    job = replace(
        job_of(body, settings, backend.vocab, max_tokens=limit),
        grammar=grammar,
        grammar_triggers=_triggers(body) if grammar is not None and body.grammar_lazy else (),
        top_logprobs=body.n_probs or None,
    )
    n = body.n_cmpl or body.n or 1
    model = model_name(body.model, backend)
    found: list[Generation] = []
    for tokens, text in await _prompts(body, backend, limit, n):
        shown = text if text is not None else _text_of(tokens, backend.vocab)
        for each in choices_of(replace(job, tokens=tokens), n):
            found.append(
                Generation(
                    len(found),
                    each,
                    shown,
                    body,
                    model,
                    backend.vocab,
                    backend.info.n_ctx,
                    tickets,
                )
            )
    return found


async def streamed(
    items: AsyncIterator[tuple[int, Delta]], found: Sequence[Generation]
) -> AsyncIterator[bytes]:
    """The events of a stream; no `[DONE]`, which is the OpenAI dialect's."""
    ended: set[int] = set()
    try:
        async for place, delta in items:
            one = found[place]
            if place in ended:
                continue
            text = one.see(delta)
            if one.body.return_progress and not delta.tokens and not one.done:
                yield event(one.progress(delta))
            elif text or (delta.tokens and not one.done):
                yield event(one.part(text))
            if one.done:
                ended.add(place)
                yield event(one.last(stream=True))
    except Exception as error:
        yield event(error_event(error))


def selected(response: dict[str, Any], fields: Sequence[str] | None) -> dict[str, Any]:
    """Only the fields asked for, by paths such as `timings/prompt_n`, each under its whole path."""
    if not fields:
        return response
    found: dict[str, Any] = {}
    for path in fields:
        value: Any = response
        for key in path.split("/"):
            if not isinstance(value, Mapping) or key not in value:
                break
            value = value[key]
        else:
            found[path] = value
    return found


def settings_of(job: Job, body: CompletionBody) -> dict[str, Any]:
    """`generation_settings`: what is in force, by llama-server's names."""
    s = job.sampling
    n_predict = -1 if job.max_tokens is None else job.max_tokens
    return {
        "seed": -1 if s.seed is None else s.seed,
        "temperature": s.temp,
        "dynatemp_range": s.dynatemp_range,
        "dynatemp_exponent": s.dynatemp_exponent,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "top_n_sigma": s.top_n_sigma,
        "xtc_probability": s.xtc_probability,
        "xtc_threshold": s.xtc_threshold,
        "typical_p": s.typical_p,
        "repeat_last_n": s.repeat_last_n,
        "repeat_penalty": s.repeat_penalty,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "dry_multiplier": s.dry_multiplier,
        "dry_base": s.dry_base,
        "dry_allowed_length": s.dry_allowed_length,
        "dry_penalty_last_n": s.dry_last_n,
        "dry_sequence_breakers": list(s.dry_breakers),
        "mirostat": s.mirostat,
        "mirostat_tau": s.mirostat_tau,
        "mirostat_eta": s.mirostat_eta,
        "stop": list(job.stop),
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "ignore_eos": job.ignore_end,
        "stream": bool(body.stream),
        "logit_bias": [
            {"token": token, "bias": max(bias, -1e30)} for token, bias in job.logit_bias.items()
        ],
        "n_probs": job.top_logprobs or 0,
        "min_keep": s.min_keep,
        "grammar": job.grammar or "",
        "grammar_lazy": bool(job.grammar_triggers),
        "samplers": list(s.samplers) if s.samplers is not None else [],
        "timings_per_token": bool(body.timings_per_token),
    }


async def _prompts(
    body: CompletionBody, backend: Backend, limit: int | None, each: int
) -> list[tuple[Tokens, str | None]]:
    if not isinstance(body, InfillBody):
        return await prompts_of(body.prompt, backend.vocab, field="prompt", each=each)
    n_ctx = backend.info.n_ctx
    tokens = await asyncio.to_thread(
        fim_tokens,
        backend.vocab,
        body.input_prefix,
        body.input_suffix,
        prompt=body.prompt,
        extra=[_extra(each, i) for i, each in enumerate(body.input_extra or ())],
        room=n_ctx - 1 - min(max(limit or 0, 0), n_ctx // 2),
    )
    return [(tokens, None)]


def _extra(entry: Mapping[str, Any], i: int) -> tuple[str, str]:
    text, name = entry.get("text"), entry.get("filename")
    if not isinstance(text, str):
        raise BadRequest(f"input_extra[{i}] has no text", "input_extra")
    if name is not None and not isinstance(name, str):
        raise BadRequest(f"input_extra[{i}].filename is no text", "input_extra")
    return name or "tmp", text


def _triggers(body: CompletionBody) -> tuple[str, ...]:
    """Words only: a pattern of a stranger's could keep the engine's thread busy for ever."""
    found = []
    for each in body.grammar_triggers or ():
        word = each.get("value") if isinstance(each, Mapping) else each
        kind = each.get("type", "word") if isinstance(each, Mapping) else "word"
        if kind not in ("word", 0, 1) or not isinstance(word, str) or not word:
            raise BadRequest("grammar_triggers takes words: {'type': 'word', 'value': ...}")
        found.append(f"({re.escape(word)})")
    if not found:
        raise BadRequest("grammar_lazy needs grammar_triggers; give words", "grammar_triggers")
    return tuple(found)


def _dedent_at(text: str, start: int, least: int) -> int | None:
    """Where the first line that is indented less than `least` begins, if it ends at `start` or later.

    The first line goes on where the prompt ended: it counts as indented.
    """
    if least <= 0:
        return None
    at = text.rfind("\n", 0, start)
    at = text.find("\n") if at < 0 else at
    while at >= 0:
        line = text[at + 1 :].split("\n", 1)[0]
        if line.strip(" \t") and len(line) - len(line.lstrip(" \t")) < least:
            return at + 1
        at = text.find("\n", at + 1)
    return None


def _probabilities(found: Sequence[TokenLogprob], vocab: Vocabulary) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = chat_logprobs(found, vocab)["content"]
    return listed


def _text_of(tokens: Sequence[int], vocab: Vocabulary) -> str:
    return b"".join(vocab.piece(t, special=True) for t in tokens).decode("utf-8", "replace")
