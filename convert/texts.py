"""Calibration text: what Python itself ships, and what the dense model writes itself.

Any machine with Python 3.10+ and the model's package has both; nothing is fetched. Knows text, not
tokens. The held-out text of the tests is no part of it.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from speculoe_local.convert.selftext import self_text
from speculoe_local.runtime.errors import OptionError

# Modules whose docstrings are prose about many subjects, not lists of signatures.
_DOCUMENTED = (
    "argparse", "asyncio", "collections", "concurrent.futures", "contextlib", "csv", "ctypes", "datetime",
    "decimal", "difflib", "doctest", "email", "fractions", "functools", "heapq", "http.client", "imaplib",
    "inspect", "ipaddress", "json", "locale", "logging", "mailbox", "multiprocessing", "optparse",
    "pathlib", "pickle", "pickletools", "random", "re", "sched", "shelve", "smtplib", "socketserver",
    "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "traceback",
    "turtle", "typing", "unittest", "urllib.parse", "urllib.request", "xmlrpc.client", "zipfile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Source:
    """A named body of text; `licence` says under which terms it may be used."""

    name: str
    licence: str
    documents: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256("\0".join(self.documents).encode()).hexdigest()


def python_topics() -> Source:
    """The language reference that `help()` shows (`pydoc_data.topics`)."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return Source("pydoc_data.topics", "PSF-2.0", tuple(topics[key] for key in sorted(topics)))


def python_docstrings() -> Source:
    """Docstrings of standard modules, their classes and functions, one document per module."""
    documents = []
    for name in _DOCUMENTED:
        module = importlib.import_module(name)
        parts = [inspect.getdoc(module) or ""]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # looking at a deprecated member warns
            for _, member in sorted(vars(module).items()):
                if getattr(member, "__module__", None) == name:
                    parts.append(inspect.getdoc(member) or "")
        documents.append("\n\n".join(part for part in parts if len(part) > 80))
    return Source("standard library docstrings", "PSF-2.0", tuple(documents))


def read_text(file: Path, option: str = "--text") -> str:
    """The UTF-8 text in `file`; raises OptionError, naming `option`, when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"{option} {str(file)!r} is not UTF-8 at byte {error.start}; give a text file"
        ) from error
    except OSError as error:
        raise OptionError(f"{option} {str(file)!r} cannot be read: {error.strerror}") from error


def model_text(
    dense: Path,
    kept: Path | None = None,
    progress: Callable[[float], None] | None = None,
    threads: int | None = None,
) -> Source:
    """What `dense` writes itself; takes minutes. The licence is the model's.

    With `kept`, a JSON list of documents, the text is read from there, or kept there once written.
    """
    if kept is not None and kept.is_file():
        documents: list[str] = json.loads(kept.read_text(encoding="utf-8"))
    else:
        documents = self_text(dense, threads=threads, progress=progress)
        if kept is not None:
            kept.write_text(json.dumps(documents), encoding="utf-8")
    return Source("text written by the dense model", "Apache-2.0", tuple(documents))
