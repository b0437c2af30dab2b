"""Reasoning before an answer: tells it from the answer while both stream, and knows how to ask for it.

`reader` is the part of a parser that reads `<think>...</think>` and its like at the front of an answer; it
knows of calls only that they have opening tags. What models call the switch differs by template.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from speculoe_local.server.toolcalls.base import Event
from speculoe_local.server.toolcalls.feed import Feed
from speculoe_local.server.toolcalls.output import Output

__all__ = ["TAGS", "Tags", "begins_inside", "reader", "supported", "switches", "tags_of"]


class Tags(NamedTuple):
    """What stands around reasoning."""

    begin: str
    end: str


TAGS = (
    Tags("<think>", "</think>"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("[THINK]", "[/THINK]"),
)
_HARMONY = "<|channel|>"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def tags_of(template: str | None) -> Tags:
    """The tags a template names; `<think>` where it names none, since a model may use it all the same."""
    for tags in TAGS:
        if template is not None and tags.end in template:
            return tags
    return TAGS[0]


def supported(template: str | None) -> bool:
    """Whether a model of this template reasons before it answers."""
    return template is not None and (
        _HARMONY in template
        or "enable_thinking" in template
        or any(tags.end in template for tags in TAGS)
    )


def begins_inside(prompt: str, tags: Tags) -> bool:
    """Whether the prompt has opened the reasoning already, so that the answer only closes it."""
    return prompt.rstrip().endswith(tags.begin)


def switches(template: str | None, think: bool | str | None) -> dict[str, Any]:
    """Variables of the template that turn reasoning on or off, or set its effort ("low", "high"...).

    `think` None leaves the template's own default.
    """
    if think is None or template is None:
        return {}
    effort = think.strip().lower() if isinstance(think, str) else None
    on = effort not in ("none", "off", "false") if effort is not None else bool(think)
    found: dict[str, Any] = {}
    if "enable_thinking" in template:
        found["enable_thinking"] = on
    if _HARMONY in template or "reasoning_effort" in template:
        if not on or effort == "minimal":
            found["reasoning_effort"] = "low"  # as little as these templates know
        elif effort in _EFFORTS:
            found["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    elif "thinking" in template and "enable_thinking" not in template:
        found["thinking"] = on
    return found


def reader(
    feed: Feed,
    output: Output,
    tags: Tags,
    *,
    inside: bool,
    calls: Sequence[str] = (),
    salvage: Callable[[str], list[Event] | None] | None = None,
) -> Generator[None, None, bool]:
    """Read reasoning at the front of an answer. False: the answer ended in it.

    `inside`: the prompt has opened it. Some models call a function without closing their reasoning first:
    from one of the tags `calls` on, text is held back, and when the answer ends there `salvage` may say
    which calls it holds. None from it: it was reasoning about a call.
    """
    if not inside:
        space = yield from feed.space()
        if not (yield from feed.literal(tags.begin)):
            output.content(space)
            return True
    output.reasons = True
    held: list[str] = []
    while True:
        marks = (tags.end,) if held else (tags.end, *calls)
        mark = yield from feed.until(marks, held.append if held else output.reasoning)
        if mark == tags.end:
            output.reasoning("".join(held))
            output.end_reasoning()
            return True
        if mark is None:
            break
        held.append(mark)
    if held:
        text = "".join(held)
        events = salvage(text) if salvage is not None else None
        if events is None:
            output.reasoning(text)
        else:
            output.add(events)
    return False
