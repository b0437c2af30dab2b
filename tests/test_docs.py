"""What the documents promise is so."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")


def test_readme_starts_with_the_two_commands(repository: Path) -> None:
    lines = [
        line.strip() for line in (repository / "README.md").read_text().splitlines() if line.strip()
    ]

    assert lines[1].startswith("make chat")
    assert lines[2].startswith("make test")


def test_the_library_example_runs_and_is_ten_lines(repository: Path) -> None:
    block = re.search(r"```python\n(.*?)```", (repository / "README.md").read_text(), re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 10

    done = subprocess.run(
        [sys.executable, "-c", block[1]], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert re.search(r"\n\d+% of experts were there when asked for\n$", done.stdout)
    assert len(done.stdout) > 60


def test_the_json_in_readme_has_the_keys_that_the_program_prints(repository: Path) -> None:
    text = (repository / "README.md").read_text()
    block = re.search(r"--logits-hash --json\n\n((?:    .*\n)+)", text)
    assert block is not None
    shown = json.loads(block[1])
    done = subprocess.run(
        [Path(sys.executable).parent / "speculoe-local", "chat", "-p", "Why is the sky blue?",
         "--expert-budget", "25%", "--temp", "0", "--max-tokens", "8", "--logits-hash", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    printed = json.loads(done.stdout)

    assert shown.keys() == printed.keys()
    for group in ("usage", "timings", "experts"):
        assert shown[group].keys() == printed[group].keys()


def test_the_example_of_a_predictor_is_twenty_lines_and_predicts(
    repository: Path, tmp_path: Path
) -> None:
    text = (repository / "docs" / "predictors.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    assert len([line for line in block[1].splitlines() if line.strip()]) <= 20
    (tmp_path / "mine.py").write_text(block[1])

    done = subprocess.run(
        [Path(sys.executable).parent / "speculoe-local", "chat", "-p", "Why is the sky blue?",
         "--expert-budget", "50%", "--temp", "0", "--max-tokens", "24", "--json", "--device", "cpu",
         "--predict", "mine:PreviousToken"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    experts = json.loads(done.stdout)["experts"]
    assert "mine:PreviousToken" == experts["predictor"]
    assert experts["recall"] > 0.3  # chance is 4 of 16


@pytest.mark.parametrize("name", DOCUMENTS)
def test_paths_named_in_documents_exist(name: str, repository: Path) -> None:
    text = (repository / name).read_text()
    named = set(
        re.findall(
            r"`((?:patches|native|runtime|convert|hub|cli|server|tests|docs)/[\w./-]*)`", text
        )
    )

    missing = [path for path in named if not (repository / path).exists()]

    assert [] == missing


def test_make_targets_named_in_documents_exist(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    for name in DOCUMENTS:
        named = set(
            re.findall(r"(?:`|^    )make ([a-z-]+)", (repository / name).read_text(), re.MULTILINE)
        )
        assert named <= targets, name
