"""Two schemas at once as one schema: what `allOf`, and keywords beside `anyOf` or `$ref`, come to.

Pure functions on parsed JSON Schemas. Raises GrammarError where one schema cannot say both. Knows
nothing of grammars.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import unquote

from speculoe_local.server.errors import GrammarError

__all__ = ["Document", "Schema", "disjoint", "merged", "resolve"]

Schema = dict[str, Any]

_MAX_REFS = 32
_MAX_STEPS = 50_000
_MAX_DEPTH = 24
_LARGER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_ABOUT = frozenset(
    (
        *("title", "description", "default", "examples", "example", "$schema", "$id"),
        *("$anchor", "$comment", "$defs", "definitions", "deprecated", "readOnly"),
        *("writeOnly", "discriminator", "nullable", "contentEncoding", "contentMediaType"),
    )
)
_SCALARS = frozenset(("null", "boolean", "integer", "number", "string"))


class Document:
    """A schema document, and how much work it may still cause.

    References that meet twice at each step would otherwise double it each time.
    """

    def __init__(self, root: Any) -> None:
        self.root = root
        self._steps = _MAX_STEPS

    def spend(self, steps: int = 1) -> None:
        """Raises GrammarError once the work is more than a schema is worth."""
        self._steps -= steps
        if self._steps < 0:
            raise GrammarError("the schema's parts meet too often; simplify it")


def resolve(root: Any, ref: Any) -> Any:
    """What `#/...` points to inside `root`, through references to references."""
    seen = 0
    while True:
        found = _point(root, ref)
        if not (isinstance(found, dict) and set(found) - _ABOUT == {"$ref"}):
            return found
        ref = found["$ref"]
        seen += 1
        if seen > _MAX_REFS:
            raise GrammarError(f"the schema's {ref!r} refers to itself; let it describe something")


def _point(root: Any, ref: Any) -> Any:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise GrammarError(
            f"the schema refers to {str(ref)[:80]!r}; only places inside it (#/...) can be looked up"
        )
    found = root
    for part in ref.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            raise GrammarError(f"the schema refers to {ref[:80]!r}, which is not in it")
    if not isinstance(found, dict | bool):
        raise GrammarError(f"the schema refers to {ref[:80]!r}, which is no schema")
    return found


def merged(parts: Iterable[Any], document: Document) -> Any:
    """One schema that is valid exactly where all of `parts` are. References are looked up."""
    result: Any = {}
    for part in parts:
        result = _both(result, _flat(part, document, 0), document, 0)
    return result


def _flat(schema: Any, document: Document, depth: int) -> Any:
    """Without `$ref` and `allOf` at its top."""
    document.spend()
    if depth > _MAX_DEPTH:
        raise GrammarError("its references and allOf nest too deep; simplify it")
    if not isinstance(schema, dict):
        return schema
    rest = {k: v for k, v in schema.items() if k not in ("$ref", "allOf", *_ABOUT)}
    if "$ref" in schema:
        rest = _both(
            rest,
            _flat(resolve(document.root, schema["$ref"]), document, depth + 1),
            document,
            depth,
        )
    for part in schema.get("allOf", ()):
        rest = _both(rest, _flat(part, document, depth + 1), document, depth)
    return rest


def _both(one: Any, two: Any, document: Document, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise GrammarError("its parts nest too deep to be put together; simplify it")
    if one is False or two is False:
        return False
    if one is True or one == {}:
        return two
    if two is True or two == {}:
        return one
    for side, other in ((one, two), (two, one)):
        if "prefixItems" in side and "prefixItems" not in other and "items" in other:
            # There, items speaks of the first ones too.
            raise GrammarError("prefixItems and items are said apart; say them together")
    out = dict(one)
    if {"properties", "additionalProperties"} & (one.keys() | two.keys()):
        _put_properties(out, one, two, document, depth)
    for key, value in two.items():
        if key in ("properties", "additionalProperties"):
            continue
        out[key] = value if key not in out else _both_say(key, out[key], value, document, depth)
    return out


def _put_properties(out: Schema, one: Schema, two: Schema, document: Document, depth: int) -> None:
    listed = dict(one.get("properties", {}))
    for name, value in two.get("properties", {}).items():
        # Not flattened before they meet another schema: a property may contain the whole.
        listed[name] = _meet(listed[name], value, document, depth) if name in listed else value
    for side, other in ((one, two), (two, one)):
        extra = side.get("additionalProperties", True)
        if extra in (True, {}):
            continue
        new = other.get("properties", {}).keys() - side.get("properties", {}).keys()
        for name in new:
            listed[name] = _meet(listed[name], extra, document, depth)
    if listed:
        out["properties"] = listed
    extras = [s["additionalProperties"] for s in (one, two) if "additionalProperties" in s]
    if extras:
        out["additionalProperties"] = (
            extras[0] if len(extras) == 1 else _meet(extras[0], extras[1], document, depth)
        )


def _meet(one: Any, two: Any, document: Document, depth: int) -> Any:
    if one == two:
        return one
    return _both(
        _flat(one, document, depth + 1), _flat(two, document, depth + 1), document, depth + 1
    )


def _both_say(key: str, one: Any, two: Any, document: Document, depth: int) -> Any:
    if one == two or key in _ABOUT:
        return one
    if key == "type":
        return _common_types(one, two)
    if key == "required":
        return list(dict.fromkeys([*one, *two]))
    if key == "enum":
        texts = [_key(value) for value in two]
        return [value for value in one if _key(value) in texts]
    if key == "items":
        return _meet(one, two, document, depth)
    if key in _LARGER:
        return max(one, two)
    if key in _SMALLER:
        return min(one, two)
    raise GrammarError(f"{key} is said twice, differently; say it once")


def _common_types(one: Any, two: Any) -> Any:
    left = [one] if isinstance(one, str) else one
    right = [two] if isinstance(two, str) else two
    both = [t for t in left if t in right]
    if "number" in left and "integer" in right and "integer" not in both:
        both.append("integer")
    if "integer" in left and "number" in right and "integer" not in both:
        both.append("integer")
    if not both:
        raise GrammarError(f"type {one} and type {two} have nothing in common")
    return both[0] if len(both) == 1 else both


def _key(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.0 and 1 are the same number
    return json.dumps(value, sort_keys=True)


def disjoint(options: Sequence[Any], document: Document) -> bool:
    """Whether it is certain that no value is valid under two of `options`."""
    flat = [_flat(option, document, 0) for option in options]
    document.spend(len(flat) ** 2)
    return all(_apart(a, b) for i, a in enumerate(flat) for b in flat[i + 1 :])


def _apart(one: Any, two: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(two, dict):
        return False
    left, right = _values(one), _values(two)
    if left is not None and right is not None:
        return not left & right
    kinds, others = _types(one), _types(two)
    if not kinds & others:
        return True
    if kinds & others != {"object"}:
        return False
    needed = set(one.get("required", ())) & set(two.get("required", ()))
    return any(
        _apart(one.get("properties", {}).get(name), two.get("properties", {}).get(name))
        for name in needed
    )


def _values(schema: Schema) -> set[str] | None:
    if "const" in schema:
        return {_key(schema["const"])}
    return {_key(value) for value in schema["enum"]} if "enum" in schema else None


def _types(schema: Schema) -> set[str]:
    listed = _values(schema)
    if listed is not None:
        return {_type_of(json.loads(value)) for value in listed}
    named = schema.get("type", ["object", "array", *_SCALARS])
    types = {named} if isinstance(named, str) else set(named)
    return types | {"integer"} if "number" in types else types


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if float(value).is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"
