"""Numbers and strings of JSON Schema as GBNF: bounds, lengths, patterns, formats.

Pure but for `add`, which names an expression. Raises GrammarError where no grammar can follow; the caller
knows the place in the schema. Knows nothing of arrays, objects or references.
"""

from __future__ import annotations

import math

from speculoe_local.server.errors import GrammarError
from speculoe_local.server.grammar.json_rules import FORMATS, Add, times
from speculoe_local.server.grammar.number import integer_between, number_between
from speculoe_local.server.grammar.regex import pattern_grammar, pattern_width
from speculoe_local.server.grammar.schema_merge import Schema

__all__ = ["number_of", "string_of"]

_LOW = ("minimum", "exclusiveMinimum")
_HIGH = ("maximum", "exclusiveMaximum")


def number_of(name: str, schema: Schema, add: Add) -> str:
    """An integer or number between its bounds."""
    bounds = [key for key in (*_LOW, *_HIGH) if key in schema]
    if not bounds:
        return name
    if name == "integer":
        expression = integer_between(*_integer_bounds(schema))
    else:
        for key in bounds:
            if schema[key] != int(schema[key]):
                raise GrammarError(f"{key} {schema[key]} is no whole number; only those can bound")
        lows = [(int(schema[key]), key != "minimum") for key in _LOW if key in schema]
        highs = [(int(schema[key]), key != "maximum") for key in _HIGH if key in schema]
        expression = number_between(
            max(lows, default=None),
            min(highs, key=lambda bound: (bound[0], not bound[1]), default=None),
        )
    if not expression:
        raise GrammarError("no number lies between its bounds")
    return add(expression, name)


def string_of(schema: Schema, add: Add) -> str:
    """A string in quotes."""
    least = int(schema.get("minLength", 0))
    most = int(schema["maxLength"]) if "maxLength" in schema else None
    if most is not None and most < least:
        raise GrammarError(f"minLength {least} is above maxLength {most}")
    if "pattern" in schema:
        return _pattern(schema, least, most, add)
    if "format" in schema:
        known = FORMATS.get(schema["format"])
        if known is None:
            raise GrammarError(f"format {schema['format']!r} is not known; use a pattern instead")
        if least or most is not None:
            raise GrammarError("minLength and maxLength beside format: no grammar can follow both")
        return add(f'"\\"" {known} "\\""', schema["format"])
    if not least and most is None:
        return "string"
    return add(f'"\\"" char{times(least, most)} "\\""', "string")


def _pattern(schema: Schema, least: int, most: int | None, add: Add) -> str:
    if "format" in schema:
        raise GrammarError("format beside pattern: no grammar can follow both")
    inside = pattern_grammar(schema["pattern"], "char")
    shortest, longest = pattern_width(schema["pattern"])
    if shortest < least or (most is not None and (longest is None or longest > most)):
        raise GrammarError(
            "minLength or maxLength beside pattern: no grammar can follow both; "
            "say it in the pattern"
        )
    return add(f'"\\"" {inside} "\\""', "pattern")


def _integer_bounds(schema: Schema) -> tuple[int | None, int | None]:
    lows, highs = [], []
    if "minimum" in schema:
        lows.append(math.ceil(schema["minimum"]))
    if "exclusiveMinimum" in schema:
        lows.append(math.floor(schema["exclusiveMinimum"]) + 1)
    if "maximum" in schema:
        highs.append(math.floor(schema["maximum"]))
    if "exclusiveMaximum" in schema:
        highs.append(math.ceil(schema["exclusiveMaximum"]) - 1)
    return max(lows, default=None), min(highs, default=None)
