"""Which folder of the server may know which: what their docstrings promise, held against their imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVER = "speculoe_local.server"
VALUES = {"errors", "jobs", "settings"}
# What modules of one folder import from each other is its own business.
MAY_KNOW: dict[str, set[str]] = {
    "errors": set(),
    "jobs": set(),
    "settings": set(),
    "http": VALUES,
    "toolcalls": VALUES,
    "grammar": VALUES | {"toolcalls"},
    "prompt": VALUES | {"toolcalls"},
    "batching": VALUES | {"grammar"},
    "catalog": VALUES,
    "models": VALUES | {"catalog", "batching"},
    "dialects": VALUES | {"http", "prompt", "grammar", "toolcalls"},
    "page": VALUES | {"http", "dialects"},
    "app": VALUES | {"http", "dialects", "page"},
    "serving": VALUES | {"app", "http", "models"},
}
# And which dialect may know which others.
DIALECTS: dict[str, set[str]] = {
    "openai": set(),
    "llama": {"openai"},
    "ollama": set(),
    "anthropic": set(),
    "by_path": {"openai", "ollama", "anthropic"},  # the table of all envelopes
}


@pytest.fixture
def folder(repository: Path) -> Path:
    return repository / "server"


def imported(file: Path) -> Iterator[str]:
    """Modules of the server that a file imports, without the server's own name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name[len(SERVER) + 1 :] for name in names if name.startswith(f"{SERVER}."))


def test_every_part_imports_only_what_it_may_know(folder: Path) -> None:
    seen, wrong = set(), []
    for file in folder.rglob("*.py"):
        part = file.relative_to(folder).with_suffix("").parts[0]
        seen.add(part)
        for name in imported(file):
            known = name.split(".")[0]
            if known != part and known not in MAY_KNOW[part]:
                wrong.append(f"{file.relative_to(folder)} imports {name}")

    assert [] == wrong
    assert {*MAY_KNOW, "__init__"} == seen


def test_a_dialect_knows_no_other_but_for_llama_server_which_extends_one(folder: Path) -> None:
    seen, wrong = set(), []
    for file in (folder / "dialects").rglob("*.py"):
        part = file.relative_to(folder / "dialects").with_suffix("").parts[0]
        seen.add(part)
        for name in imported(file):
            other = name.removeprefix("dialects.").split(".")[0]
            if other in DIALECTS and other not in {part, *DIALECTS.get(part, ())}:
                wrong.append(f"{file.relative_to(folder)} imports {name}")

    assert [] == wrong
    assert set(DIALECTS) <= seen


def test_every_folder_says_what_it_knows_nothing_of(folder: Path) -> None:
    files = [file for file in folder.rglob("__init__.py") if file.parent != folder]
    docs = {
        file.parent.name: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files
    }

    assert [] == [name for name, doc in docs.items() if "Knows no" not in " ".join(doc.split())]
    assert {"http", "dialects", "prompt", "grammar", "toolcalls", "batching", "page"} <= set(docs)
