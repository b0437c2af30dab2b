"""The series is whole, within budget, and gives the tree that the libraries are built from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def source(repository: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, repository / "patches" / "source.py", *arguments]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=False)


def test_every_patch_says_why_and_the_series_applies_to_the_pin(repository: Path) -> None:
    done = source(repository, "check")

    assert (0, "") == (done.returncode, done.stderr)
    assert "of at most 300" in done.stdout


def test_the_tests_that_patches_name_exist(repository: Path) -> None:
    for patch in (repository / "patches").glob("*.patch"):
        named = [line[6:] for line in patch.read_text().splitlines() if line.startswith("Test: ")]
        assert named
        for path in named:
            assert (repository / path.split("::")[0]).is_file(), f"{patch.name} names {path}"


def test_a_checkout_refreshes_to_the_same_patches(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "patches"
    copy.mkdir(parents=True)
    for path in (repository / "patches").iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    tree = tmp_path / "tree"

    assert "" == source(copy.parent, "checkout", tree).stderr
    assert "" == source(copy.parent, "refresh", tree).stderr

    assert before == {p.name: p.read_bytes() for p in copy.iterdir() if p.is_file()}


def test_preparing_again_touches_no_file_that_did_not_change(
    repository: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    assert 0 == source(repository, "prepare", tree).returncode
    times = {p: p.stat().st_mtime_ns for p in tree.rglob("*") if p.is_file()}

    (tree / ".digest").write_text("another")
    (tree / "src" / "llama-graph.cpp").write_text("spoiled")
    (tree / "src" / "stray.cpp").write_text("left over")
    assert 0 == source(repository, "prepare", tree).returncode

    changed = {p.name for p, t in times.items() if p.stat().st_mtime_ns != t}
    assert {"llama-graph.cpp", ".digest"} == changed
    assert not (tree / "src" / "stray.cpp").exists()


def test_a_wrong_archive_is_refused_with_both_hashes(repository: Path, tmp_path: Path) -> None:
    import os

    wrong = tmp_path / "llama_cpp_python-0.3.36.tar.gz"
    wrong.write_bytes(b"not it")
    done = subprocess.run(
        [sys.executable, repository / "patches" / "source.py", "prepare", tmp_path / "tree"],
        env=os.environ | {"SPECULOE_LLAMA_SOURCE": str(wrong)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert 1 == done.returncode
    assert 1 == len(done.stderr.splitlines())
    assert "the pin says 832db0699007" in done.stderr
