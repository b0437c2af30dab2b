"""A patched library whose hooks nobody sets is the unpatched one, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speculoe_local.runtime.lib import library_folder
from tests.models.fixtures import TinyModel
from tests.models.tiny import FAMILIES

_RUN = """
import hashlib, sys, json
import tests.models.probe as probe
out = {}
for path in sys.argv[1:]:
    with probe.loaded(path) as model:
        tokens = probe.tokenize(model, "The quick brown fox jumps over the lazy dog. " * 3)
        digest = hashlib.sha256()
        for n in (1, len(tokens)):
            digest.update(probe.run(model, tokens[:n]).logits.tobytes())
        out[path] = digest.hexdigest()
print(json.dumps(out))
"""


def hashes(library: Path, models: list[Path], repository: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *map(str, models)],
        env=os.environ | {"LLAMA_CPP_LIB_PATH": str(library), "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def upstream(repository: Path) -> Path:
    folder = repository / "build" / "upstream" / "lib"
    assert (folder / "libllama.so").exists(), "run `make upstream` first; `make test` does"
    return folder


def test_logits_of_every_family_equal_the_unpatched_library(
    repository: Path, tiny_model: TinyModel, upstream: Path
) -> None:
    models = [tiny_model(family) for family in FAMILIES]

    expected = hashes(upstream, models, repository)

    assert expected == hashes(library_folder(), models, repository)
    # All but one differ: the two layouts of deepseek2 hold the same values.
    assert len(models) - 1 == len({*expected.values()})


def test_the_unpatched_library_really_is_another_one(upstream: Path) -> None:
    names = subprocess.run(
        ["nm", "-D", "--defined-only", upstream / "libllama.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "llama_decode" in names
    assert "llama_set_moe_hook" not in names
    ours, theirs = (
        hashlib.sha256((folder / "libllama.so").read_bytes()).hexdigest()
        for folder in (library_folder(), upstream)
    )
    assert ours != theirs
