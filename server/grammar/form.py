"""What a request says about the form of its answer, as one GBNF grammar.

`response_format`, `json_schema` and `grammar` of the OpenAI and llama-server dialects, `text.format` of
responses. A constraint that cannot be kept is refused with the reason, never dropped. Grammars of schemas
are kept, since agents send the same schema with every request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from speculoe_local.server.errors import BadRequest, GrammarError
from speculoe_local.server.grammar import gbnf
from speculoe_local.server.grammar.json_rules import JSON_OBJECT
from speculoe_local.server.grammar.schema import schema_grammar

__all__ = ["form_of", "grammar_of_schema", "requested"]

_FORMATS = ("text", "json_object", "json_schema", "grammar")


async def requested(body: Mapping[str, Any]) -> str | None:
    """The grammar that a request asks for in any of its ways; None: none.

    Converting and checking a large one takes a while: it happens off the event loop. Raises GrammarError
    and BadRequest.
    """
    given = [key for key in ("response_format", "json_schema", "grammar") if _says(body.get(key))]
    if not given:
        return None
    if len(given) > 1:
        raise BadRequest(f"{given[0]} and {given[1]} are both given; use one of them", given[1])
    key = given[0]
    return await asyncio.to_thread(_grammar_of, key, body[key])


def form_of(response_format: Any) -> str | None:
    """The grammar of a `response_format`. Raises GrammarError and BadRequest."""
    if not isinstance(response_format, Mapping):
        raise BadRequest("response_format is no object; use {'type': ...}", "response_format")
    kind = response_format.get("type")
    if kind not in _FORMATS:
        raise BadRequest(
            f"response_format.type {str(kind)[:40]!r} is not known; use one of {', '.join(_FORMATS)}",
            "response_format",
        )
    if kind == "text":
        return None
    if kind == "grammar":
        return _checked(response_format.get("grammar"))
    # Chat completions wrap the schema, responses and llama-server's json_object do not.
    wrapped = response_format.get("json_schema")
    holder = wrapped if isinstance(wrapped, Mapping) else response_format
    schema = holder.get("schema")
    if schema is None:
        if kind == "json_schema":
            raise BadRequest(
                "response_format has no schema; give json_schema.schema", "response_format"
            )
        return JSON_OBJECT
    return grammar_of_schema(schema)


def grammar_of_schema(schema: Any) -> str:
    """GBNF for JSON texts valid under a schema (parsed, or as text). Raises GrammarError."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise GrammarError("json_schema is text that is no JSON; give a JSON Schema") from None
    if schema == {}:
        return JSON_OBJECT  # llama-server's meaning; by the letter it would be any value
    try:
        return _converted(json.dumps(schema))
    except RecursionError:
        raise GrammarError("the schema nests too deep; simplify it") from None


@lru_cache(maxsize=64)
def _converted(schema: str) -> str:
    return schema_grammar(json.loads(schema))


def _grammar_of(key: str, value: Any) -> str | None:
    try:
        if key == "response_format":
            return form_of(value)
        return grammar_of_schema(value) if key == "json_schema" else _checked(value)
    except GrammarError as error:
        raise GrammarError(str(error), error.param or key) from None


def _checked(grammar: Any) -> str:
    if not isinstance(grammar, str) or not grammar.strip():
        raise GrammarError("the grammar is no text; give GBNF with a rule root")
    gbnf.check(grammar)
    return grammar


def _says(value: Any) -> bool:
    """Whether a field asks for a form; clients send "", null and {"type": "text"} for none."""
    if isinstance(value, Mapping) and value.get("type") == "text" and len(value) == 1:
        return False
    return value is not None and value != ""
