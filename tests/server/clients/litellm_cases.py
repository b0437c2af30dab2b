"""litellm's calls against the server whose URL is the argument; test_litellm.py reads what they return.

A process of its own: litellm leaves sockets open when it ends, which would be another test's warning.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, Literal

import litellm
from litellm.exceptions import BadRequestError
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
SUM = [{"role": "user", "content": "What is 2+3?"}]
TOO_LONG = [{"role": "user", "content": "word " * 3000}]  # the context holds 2048 tokens
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
HERE: dict[str, Any] = {
    "model": "openai/embedded",
    "api_base": f"{sys.argv[1]}/v1",
    "api_key": "none",
    "max_retries": 0,
}
ASKED: dict[str, Any] = {**HERE, "temperature": 0, "max_tokens": 24}


class City(BaseModel):
    """What an answer must look like."""

    coastal: bool
    climate: Literal["cold", "mild", "hot"]


def completion() -> Any:
    answer = litellm.completion(**ASKED, messages=MESSAGES)
    choice = answer.choices[0]
    tokens = answer.usage.completion_tokens
    return {"text": choice.message.content, "finish": choice.finish_reason, "tokens": tokens}


def at_once() -> Any:
    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(**ASKED, messages=MESSAGES) for _ in range(3))
        )

    return [answer.choices[0].message.content for answer in asyncio.run(ask())]


def stream() -> Any:
    chunks = list(
        litellm.completion(
            **ASKED, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
    )
    whole: Any = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    return {
        "text": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
        "built": whole.choices[0].message.content,
        "tokens": whole.usage.completion_tokens,
    }


def tools() -> Any:
    asked = {**ASKED, "max_tokens": 60, "tools": [ADD], "parallel_tool_calls": False}
    forced = {"type": "function", "function": {"name": "add"}}
    choice = litellm.completion(**asked, messages=SUM, tool_choice=forced).choices[0]
    (call,) = choice.message.tool_calls
    pieces = list(litellm.completion(**asked, messages=SUM, tool_choice=forced, stream=True))
    built: Any = litellm.stream_chunk_builder(pieces, messages=SUM)
    (streamed,) = built.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    turns = [*SUM, choice.message.model_dump(exclude_none=True), result]
    last = litellm.completion(**asked, messages=turns, tool_choice="none").choices[0]
    return {
        "finish": choice.finish_reason,
        "call": call.function.model_dump(),
        "streamed": streamed.function.model_dump(),
        "answer": last.message.content,
    }


def response_format() -> Any:
    messages = [{"role": "user", "content": "Describe Oslo as JSON."}]
    asked = {**ASKED, "max_tokens": 60}
    answer = litellm.completion(**asked, messages=messages, response_format=City)
    return City.model_validate_json(answer.choices[0].message.content).model_dump()


def text_completion() -> Any:
    asked = {**ASKED, "model": "text-completion-openai/embedded", "max_tokens": 2}
    return litellm.text_completion(**asked, prompt="The capital of France is").choices[0].text


def embedding() -> Any:
    found = litellm.embedding(**HERE, input=["hello", "hello", "other words"])
    return [each["embedding"] for each in found.data]


def errors() -> Any:
    found = []
    for streamed in (False, True):
        try:
            list(litellm.completion(**ASKED, messages=TOO_LONG, stream=streamed))
        except BadRequestError as error:
            found.append({"status": error.status_code, "message": str(error)})
    return found


def attempt(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    cases = (
        *(completion, at_once, stream, tools),
        *(response_format, text_completion, embedding, errors),
    )
    print(json.dumps({case.__name__: attempt(case) for case in cases}))
