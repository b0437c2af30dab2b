"""The process in which chat templates run: a JSON request per line in, a JSON reply per line out.

A chat template comes with a downloaded file and is a program. The sandbox keeps it from Python's
insides but cannot bound its time or memory (`'a' * 10**10` is one instruction), so it runs here,
where the operating system bounds memory and the parent (template.py) can end it at any moment.
Knows nothing of models or tokens, and imports nothing of this project: it is run as a plain file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["RefusedError", "answer", "render_in_process", "serve"]

# What templates are cached for: a server with a few models, each with a few variants.
CACHED_TEMPLATES = 16


class RefusedError(Exception):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks text for training; rendering does as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a plain attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object = "") -> None:
    raise RefusedError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=CACHED_TEMPLATES)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def render_in_process(source: str, variables: dict[str, Any]) -> str:
    """The rendered template, without bounds: call `template.render` instead."""
    return _compiled(source).render(variables)


def answer(source: str, variables: dict[str, Any], max_chars: int) -> dict[str, str]:
    """`{"text": ...}`, or `{"error": ...}` with one sentence that says why not."""
    try:
        text = render_in_process(source, variables)
    except RefusedError as error:
        return {"error": f"refuses this conversation: {error}"}
    except TemplateSyntaxError as error:
        return {"error": f"is malformed at line {error.lineno}: {error.message}"}
    except SecurityError as error:
        return {"error": f"reaches for what it may not{_at_line(error)}: {error}"}
    except MemoryError:
        return {"error": "needs more memory than a chat template may have"}
    except Exception as error:
        return {"error": f"fails{_at_line(error)}: {type(error).__name__}: {error}"}
    if len(text) > max_chars:
        return {"error": f"gives {len(text)} characters, more than the limit of {max_chars}"}
    return {"text": text}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the parent closes its end."""
    replies.write(b"{}\n")  # ready: from now on the parent's clock measures the template
    replies.flush()
    for line in requests:
        request = json.loads(line)
        reply = answer(request["template"], request["variables"], request["max_chars"])
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def _at_line(error: BaseException) -> str:
    """Where in the template: jinja2 rewrites tracebacks so that frames carry template lines."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<template>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" at line {line}" if line is not None else ""


def _limit_memory(memory_bytes: int) -> None:
    """Refuse allocations beyond `memory_bytes`; where the system cannot, the parent watches."""
    setrlimit: Callable[[int, tuple[int, int]], None] | None = None
    with suppress(ImportError):
        import resource

        setrlimit = resource.setrlimit
        kind = resource.RLIMIT_AS
    if setrlimit is not None:
        with suppress(ValueError, OSError):
            setrlimit(kind, (memory_bytes, memory_bytes))


if __name__ == "__main__":
    _limit_memory(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer)
