"""From a conversation to the tokens a model continues, and to the parser of what it will answer.

    messages, tools -> messages.normalise -> runtime.template -> text -> tokens

Text that came with the request is never read as control tokens, whatever it contains: before rendering,
`_Guard` puts words without meaning in place of control tokens written in it, and puts them back once the
template's own are told apart. Knows no dialect; blocks on the template's process, so `prepare` runs `build`
on a thread.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from anyio import to_thread

from speculoe_local.runtime import template as templates
from speculoe_local.runtime.errors import TemplateError
from speculoe_local.runtime.llama import Vocabulary
from speculoe_local.server.errors import BadRequest
from speculoe_local.server.jobs import Backend
from speculoe_local.server.prompt.messages import arrangements, functions, normalise
from speculoe_local.server.toolcalls import Parser, Schemas, thinking
from speculoe_local.server.toolcalls.formats import CallFormat, format_of, make_parser

__all__ = ["Conversation", "Prompt", "bare", "build", "prepare", "supports_thinking"]

_RESERVED = {
    *("messages", "tools", "template", "bos", "eos", "bos_token", "eos_token"),
    "add_generation_prompt",
}
# A control token's text that is shorter is too common in ordinary text to stand for itself in a template.
_MIN_CONTROL_CHARS = 3
_controls: WeakKeyDictionary[Vocabulary, tuple[str, ...]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a client asks. `messages` and `tools` as OpenAI's chat completions have them, unchecked.

    `calls` False: tools are neither offered nor looked for. `variables` go to the template
    (chat_template_kwargs). `think`: reasoning on, off or its effort, None for the template's default.
    `split_reasoning` False leaves reasoning in the content. `continue_last`: an assistant's message at the
    end is continued, not answered.
    """

    messages: Any
    tools: Any = None
    calls: bool = True
    variables: Any = None
    think: bool | str | None = None
    split_reasoning: bool = True
    continue_last: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to run and how to read the answer.

    `special` and `stops` belong into the job. `tools` None: no call is looked for; `offered` are the same
    as the template got them. `tags` stand around reasoning: `inside`, the prompt has opened it already;
    `may_reason`, some may come; `split_reasoning`, the parser tells it apart. `skipped` are kinds of tools
    that were not offered to the model. `notice`: what the user should know about the template.
    """

    text: str
    tokens: tuple[int, ...]
    stops: tuple[str, ...]
    form: CallFormat
    tools: Schemas | None
    tags: thinking.Tags
    inside: bool
    may_reason: bool
    split_reasoning: bool
    special: bool
    skipped: tuple[str, ...] = ()
    notice: str | None = None
    offered: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    def parser(self) -> Parser:
        """A new parser, for one answer."""
        tags = self.tags if self.split_reasoning else None
        return make_parser(self.form, tools=self.tools, tags=tags, inside=self.inside)


async def prepare(backend: Backend, asked: Conversation, *, merge_system: bool = True) -> Prompt:
    """`build` for a loaded model, off the event loop."""
    work = partial(build, backend.vocab, backend.info.template, asked, merge_system=merge_system)
    return await to_thread.run_sync(work)


def build(
    vocab: Vocabulary, template: str | None, asked: Conversation, *, merge_system: bool = True
) -> Prompt:
    """Render and tokenise. With `merge_system`, a template that refuses the conversation is offered it again
    with its system messages joined in front, then without any.

    Raises BadRequest where the conversation is none, TemplateError where the template refuses it.
    """
    chosen = templates.choose(template)
    form = format_of(template)
    tools, skipped = functions(asked.tools) if asked.calls else ([], [])
    messages = normalise(asked.messages, template=chosen.source, form=form, tools=tools)
    begun = _begun(messages) if asked.continue_last else None
    if begun is not None:
        messages = messages[:-1]
    tags = thinking.tags_of(template)
    variables = {**thinking.switches(template, asked.think), **_variables(asked.variables)}
    guard = _Guard(_controls_of(vocab), tags)

    def render(arranged: list[dict[str, Any]]) -> str:
        return templates.render(
            chosen.source,
            [guard.hide_message(message) for message in arranged],
            bos=vocab.text_of(vocab.bos),
            eos=vocab.text_of(vocab.eos),
            tools=guard.hide(tools) if tools and form.native else None,
            **guard.hide(variables),
        )

    text = _render(render, messages, merge_system=merge_system)
    inside = form.name != "harmony" and thinking.begins_inside(text, tags)
    if begun is not None:
        text += _opening(form, tags, inside=inside, reasoning=guard.hide(begun[0]))
        text += guard.hide(begun[1])
        inside = False
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools} or None
    return Prompt(
        text=guard.restore(text),
        tokens=tuple(_tokenize(vocab, text, guard)),
        stops=chosen.stops,
        form=form,
        tools=schemas,
        tags=tags,
        inside=inside,
        may_reason=inside or (begun is None and _may_reason(template, text, tags)),
        split_reasoning=asked.split_reasoning,
        special=_needs_controls(vocab, form, tags, calls=schemas is not None),
        skipped=tuple(skipped),
        notice=chosen.notice,
        offered=tuple(tools),
    )


def bare(vocab: Vocabulary, text: str = "", *, tokens: Sequence[int] = ()) -> Prompt:
    """A prompt as it is, without template; its answer is content and nothing else.

    `tokens` where they are known; else those of `text`, control tokens written in it included.
    """
    form = format_of(None)
    return Prompt(
        text=text,
        tokens=tuple(tokens or vocab.tokenize(text)),
        stops=(),
        form=form,
        tools=None,
        tags=thinking.TAGS[0],
        inside=False,
        may_reason=False,
        split_reasoning=False,
        special=False,
    )


def supports_thinking(template: str | None) -> bool:
    """Whether a model of this template reasons before it answers."""
    return thinking.supported(template)


class _Guard:
    """Keeps control tokens that are written in a request from being read as such."""

    def __init__(self, controls: Sequence[str], tags: thinking.Tags) -> None:
        self._tags = {*tags}
        self.controls = _pattern(controls)
        self._in_answers = _pattern([text for text in controls if text not in self._tags])
        self._hidden: list[str] = []
        # Drawn anew for each request: nobody can write it beforehand.
        self._mark = f"zq{secrets.token_hex(8)}"
        self._marked = re.compile(self._mark + r"x(\d+)y")

    def hide(self, value: Any, *, answer: bool = False) -> Any:
        """`value` with all its texts made harmless. `answer`: tags of reasoning stay, templates cut there."""
        pattern = self._in_answers if answer else self.controls
        if isinstance(value, str):
            return value if pattern is None else pattern.sub(self._put_away, value)
        if isinstance(value, Mapping):
            return {
                self.hide(key, answer=answer): self.hide(item, answer=answer)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(item, answer=answer) for item in value]
        return value

    def hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        hidden: dict[str, Any] = self.hide(message, answer=message["role"] == "assistant")
        return hidden

    @property
    def used(self) -> bool:
        return bool(self._hidden)

    def restore(self, text: str) -> str:
        return self._marked.sub(lambda match: self._hidden[int(match[1])], text)

    def _put_away(self, match: re.Match[str]) -> str:
        self._hidden.append(match[0])
        return f"{self._mark}x{len(self._hidden) - 1}y"


def _pattern(texts: Sequence[str]) -> re.Pattern[str] | None:
    """Any of `texts`, longer ones first, as llama.cpp looks for them."""
    if not texts:
        return None
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))


def _controls_of(vocab: Vocabulary) -> tuple[str, ...]:
    found = _controls.get(vocab)
    if found is None:
        texts = vocab.controls()
        found = _controls[vocab] = tuple(t for t in texts if len(t) >= _MIN_CONTROL_CHARS)
    return found


def _tokenize(vocab: Vocabulary, text: str, guard: _Guard) -> list[int]:
    begins = bool(bos := vocab.text_of(vocab.bos)) and text.startswith(bos)
    if not guard.used or guard.controls is None:
        return vocab.tokenize(text, add_bos=not begins)
    tokens = [] if begins else vocab.tokenize("", add_bos=True)
    at = 0
    for match in guard.controls.finditer(text):
        tokens += _plain(vocab, guard.restore(text[at : match.start()]))
        tokens += vocab.tokenize(match[0], add_bos=False)
        at = match.end()
    return tokens + _plain(vocab, guard.restore(text[at:]))


def _plain(vocab: Vocabulary, text: str) -> list[int]:
    return vocab.tokenize(text, special=False, add_bos=False) if text else []


def _render(render: Any, messages: list[dict[str, Any]], *, merge_system: bool) -> str:
    try:
        return str(render(messages))
    except TemplateError as error:
        if merge_system:
            for arranged in arrangements(messages):
                try:
                    return str(render(arranged))
                except TemplateError:
                    continue
        raise error


def _variables(variables: Any) -> dict[str, Any]:
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise BadRequest("chat_template_kwargs is no object", "chat_template_kwargs")
    for name in variables:
        if name in _RESERVED:
            raise BadRequest(
                f"chat_template_kwargs.{name} is the server's to set; leave it out",
                "chat_template_kwargs",
            )
    return dict(variables)


def _begun(messages: list[dict[str, Any]]) -> tuple[str, str] | None:
    """Reasoning and content of an answer to be continued, when the last message is one."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        return None
    reasoning = last.get("reasoning_content", last.get("thinking", ""))
    return str(reasoning), str(last["content"])


def _opening(form: CallFormat, tags: thinking.Tags, *, inside: bool, reasoning: str) -> str:
    """What stands between the prompt and the content of an answer to be continued."""
    if form.name == "harmony":
        told = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant"
        return (told if reasoning else "") + "<|channel|>final<|message|>"
    if inside:
        return f"\n{reasoning}\n{tags.end}\n\n"
    return f"{tags.begin}\n{reasoning}\n{tags.end}\n\n" if reasoning else ""


def _may_reason(template: str | None, text: str, tags: thinking.Tags) -> bool:
    """Whether the answer may begin with reasoning: not where the prompt has closed it already."""
    return thinking.supported(template) and not text.rstrip().endswith(tags.end)


def _needs_controls(
    vocab: Vocabulary, form: CallFormat, tags: thinking.Tags, *, calls: bool
) -> bool:
    """Whether what tells parts of an answer apart are control tokens, which show only when asked for."""
    if form.name == "harmony":
        return True
    controls = _controls_of(vocab)
    return any(mark in controls for mark in (*tags, *(form.opens if calls else ())))
