"""Requests of the Anthropic dialect as conversations in OpenAI's form. Pure functions.

Blocks of content become text, reasoning, calls and results. Knows no routes and no models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from speculoe_local.server.errors import BadRequest
from speculoe_local.server.prompt.chat import Conversation

__all__ = ["Asked", "conversation_of"]

# A line that one client puts in front of its system prompt, with a number drawn anew for each request:
# it says nothing to a model, and with it no prompt would ever begin like the one before.
_BILLING = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.IGNORECASE | re.MULTILINE)
# Tools that run on Anthropic's servers have a type with a date and no schema.
_CUSTOM = ("custom", "function")


class Asked(Protocol):
    """The fields of a body that make a conversation."""

    messages: list[Any]
    system: str | list[Any] | None
    tools: list[Any] | None
    thinking: dict[str, Any] | None
    output_config: dict[str, Any] | None
    chat_template_kwargs: dict[str, Any] | None


def conversation_of(body: Asked, *, calls: bool, plain: bool) -> Conversation:
    """What the body asks. `plain`: the answer has a set form, so reasoning is off unless asked for.

    Raises BadRequest for blocks that cannot be read.
    """
    messages = _system(body.system)
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    return Conversation(
        messages=messages,
        tools=[_tool(tool, i) for i, tool in enumerate(body.tools or ())] or None,
        calls=calls,
        variables=body.chat_template_kwargs,
        think=_think(body, plain=plain),
    )


def _think(body: Asked, *, plain: bool) -> bool | str | None:
    kind = (body.thinking or {}).get("type")
    if kind == "disabled":
        return False
    effort = (body.output_config or {}).get("effort")
    if isinstance(effort, str):
        return effort
    if kind == "enabled":
        return True
    return False if plain else None


def _system(system: str | list[Any] | None) -> list[dict[str, Any]]:
    if system is None:
        return []
    parts = [system] if isinstance(system, str) else [_text(block, "system") for block in system]
    text = "\n".join(kept for part in parts if (kept := _BILLING.sub("", part)))
    return [{"role": "system", "content": text}] if text else []


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} is no object", "messages")
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": content}
        return
    found: dict[str, Any] = {"role": role, "content": []}
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for i, block in enumerate(content):
        at = f"{where}.content[{i}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            yield _result(block, at)  # results come before what the user adds to them
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            found["content"].append({"type": "text", "text": _text(block, at)})
    if calls:
        found["tool_calls"] = calls
    if reasoning:
        found["reasoning_content"] = "\n\n".join(reasoning)
    if found["content"] or calls or reasoning or not content:
        yield found


def _text(block: Any, where: str) -> str:
    """The text of a block; search results and the like, which a model can read as well, as JSON."""
    if isinstance(block, str):
        return block
    if not isinstance(block, Mapping):
        raise BadRequest(f"{where} is {type(block).__name__}; give a block", "messages")
    if isinstance(block.get("text"), str):
        return str(block["text"])
    kind, source = block.get("type"), block.get("source")
    if kind == "document" and isinstance(source, Mapping) and source.get("type") == "text":
        return str(source.get("data") or "")
    if kind in ("image", "document"):
        raise BadRequest(f"{where} is of type {kind!r}; this server reads text", "messages")
    return json.dumps(block, ensure_ascii=False)


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    parts = content if isinstance(content, list) else [content] if content is not None else []
    text = "\n".join(_text(part, where) for part in parts)
    if block.get("is_error") is True and not text.lower().startswith("error"):
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise BadRequest(f"{where} has no name", "messages")
    return {
        "id": str(block.get("id") or ""),
        "type": "function",
        "function": {"name": block["name"], "arguments": block.get("input")},
    }


def _tool(tool: Any, at: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise BadRequest(f"tools[{at}] is no object", "tools")
    kind = tool.get("type") or "custom"
    if kind not in _CUSTOM:
        return {"type": kind}  # left out further on, with a note
    return {
        "type": "function",
        "function": {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("input_schema"),
        },
    }
