"""Conversations as clients send them, made into what chat templates expect. Pure functions.

Clients send content as null, text or parts, arguments as text or objects, roles that templates never heard of.
`normalise` settles that once for all dialects; `arrangements` are what to try when a template refuses. Knows
nothing of templates but their source, and nothing of tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from speculoe_local.server.errors import BadRequest
from speculoe_local.server.toolcalls import hermes
from speculoe_local.server.toolcalls.formats import CallFormat

__all__ = ["arrangements", "functions", "normalise", "parse_arguments", "text_of"]

_MEDIA = ("image", "image_url", "input_image", "input_audio", "audio", "video", "video_url", "file")
_ROLES = {"function": "tool", "model": "assistant"}
Message = dict[str, Any]


def text_of(content: Any, where: str) -> str:
    """Content as one text: parts are joined by line breaks. Raises BadRequest for media."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(text for part in content if (text := _part(part, where)) is not None)
    raise BadRequest(f"{where} is {type(content).__name__}; give text, parts or null", "messages")


def normalise(
    messages: Any, *, template: str, form: CallFormat, tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Messages as `template` expects them. Raises BadRequest where one is none."""
    if not isinstance(messages, list | tuple):
        raise BadRequest("messages is missing or no list; give at least one message", "messages")
    if not messages:
        raise BadRequest("messages is empty; give at least one message", "messages")
    found = [_message(message, f"messages[{i}]", template) for i, message in enumerate(messages)]
    _name_results(found)
    if form.name == "harmony":
        return _for_harmony(found)
    return found if form.native else _in_words(found, tools)


def functions(tools: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The functions among `tools`, in the form templates know, and the kinds that were left out.

    Clients offer tools that run on a vendor's servers; a model that is never told of them does without.
    Raises BadRequest where a function has no name or its parameters are no schema.
    """
    if tools is None:
        return [], []
    if not isinstance(tools, list | tuple):
        raise BadRequest("tools is no list; give a list of functions", "tools")
    found: list[dict[str, Any]] = []
    skipped: list[str] = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise BadRequest(f"tools[{i}] is no object", "tools")
        function = tool.get("function")
        if tool.get("type", "function") != "function":
            skipped.append(str(tool.get("type"))[:60])
            continue
        body = function if isinstance(function, Mapping) else tool
        name = body.get("name")
        parameters = body.get("parameters")
        if not isinstance(name, str) or not name:
            raise BadRequest(f"tools[{i}] has no name", "tools")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise BadRequest(f"tools[{i}].parameters is no JSON schema", "tools")
        found.append(
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": str(body.get("description") or ""),
                    "parameters": dict(parameters or {"type": "object", "properties": {}}),
                },
            }
        )
    return found, skipped


def parse_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments of an earlier call as an object, whatever a client made of them."""
    if isinstance(arguments, str):
        text = arguments.strip()
        if not text:
            return {}
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            return {"raw_arguments": text}  # the model sees what it wrote
    if arguments is None:
        return {}
    return dict(arguments) if isinstance(arguments, Mapping) else {"raw_arguments": arguments}


def arrangements(messages: list[Message]) -> Iterator[list[Message]]:
    """What else to offer a template that refused: one system message in front, then none at all.

    Some templates insist on system messages coming first, some know none, some insist that user and
    assistant take turns.
    """
    told = "\n\n".join(m["content"] for m in messages if m["role"] == "system" and m["content"])
    others = [message for message in messages if message["role"] != "system"]
    if len(others) < len(messages):
        yield [{"role": "system", "content": told}, *others]
    merged: list[Message] = []
    for message in others:
        last = merged[-1] if merged else None
        if last is not None and message["role"] == last["role"] == "user":
            merged[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    if told:
        first = next((i for i, m in enumerate(merged) if m["role"] == "user"), None)
        if first is None:
            return
        asked = merged[first]
        merged[first] = {**asked, "content": f"{told}\n\n{asked['content']}"}
    if merged != messages:
        yield merged


def _part(part: Any, where: str) -> str | None:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise BadRequest(f"{where} has a part that is {type(part).__name__}", "messages")
    kind = part.get("type", "text")
    if kind in _MEDIA:
        raise BadRequest(f"{where} has a part of type {kind!r}; this server reads text", "messages")
    if kind in ("thinking", "reasoning", "redacted_thinking"):
        return None
    text = part.get("text", part.get("refusal"))
    return text if isinstance(text, str) else None


def _message(message: Any, where: str, template: str) -> Message:
    if not isinstance(message, Mapping):
        raise BadRequest(f"{where} is no object", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise BadRequest(f"{where} has no role", "messages")
    role = _ROLES.get(role, role)
    if role == "developer" and "developer" not in template:
        role = "system"
    found: Message = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    for key in ("name", "tool_call_id"):
        if isinstance(message.get(key), str):
            found[key] = message[key]
    for key in ("reasoning_content", "reasoning", "thinking"):
        if role == "assistant" and isinstance(message.get(key), str) and message[key]:
            found["reasoning_content"] = message[key]
            break
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise BadRequest(f"{where}.tool_calls is no list", "messages")
        found["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    return found


def _call(call: Any, where: str) -> dict[str, Any]:
    body = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(body, Mapping) or not isinstance(body.get("name"), str):
        raise BadRequest(f"{where} has no function name", "messages")
    found = {
        "type": "function",
        "function": {"name": body["name"], "arguments": parse_arguments(body.get("arguments"))},
    }
    if isinstance(call.get("id"), str):
        found["id"] = call["id"]
    return found


def _name_results(messages: list[Message]) -> None:
    """Give each tool's result the name of its function: clients send the id alone."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id", ""))
            if name is not None:
                message["name"] = name


def _for_harmony(messages: list[Message]) -> list[Message]:
    """One call per message, each followed by its result; words beside a call count as reasoning."""
    found: list[Message] = []
    waiting = list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls")
        reasoning = message.pop("reasoning_content", None)
        if not calls:
            if reasoning is not None:
                message["thinking"] = reasoning
            found.append(message)
            continue
        words = "\n\n".join(text for text in (reasoning, message["content"]) if text)
        for i, call in enumerate(calls):
            one: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            if words and i == 0:
                one["thinking"] = words
            found.append(one)
            result = _result_of(call, waiting, lone=len(calls) == 1)
            if result is not None:
                found.append(result)
    return found


def _result_of(call: Mapping[str, Any], waiting: list[Message], *, lone: bool) -> Message | None:
    """Take the result of `call` from the results that come next."""
    for i, message in enumerate(waiting):
        if message["role"] != "tool":
            return None
        if lone or message.get("tool_call_id") == call.get("id"):
            return waiting.pop(i)
    return None


def _in_words(messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """For a template that knows no functions: calls and results written out, tools told of first."""
    found: list[Message] = []
    for message in messages:
        calls = message.pop("tool_calls", None)
        if calls:
            text = "\n".join(hermes.written(call["function"]) for call in calls)
            message["content"] = f"{message['content']}\n{text}" if message["content"] else text
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            last = found[-1] if found else None
            if last is not None and last.get("results"):
                last["content"] += f"\n{text}"
                continue
            message = {"role": "user", "content": text, "results": True}
        found.append(message)
    for message in found:
        message.pop("results", None)
    if tools:
        words = hermes.instructions(tools)
        if found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{words}"
        else:
            found.insert(0, {"role": "system", "content": words})
    return found
