"""scripts/backends: what is chosen, when it is written down, and which line one gets where tools are missing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "backends"
NVCC = """#!/bin/sh
case "$*" in
    --version) echo "Cuda compilation tools, release {release}, V{release}.1" ;;
    *) exit {cublas} ;;
esac
"""
COMPILER = """#!/bin/sh
text=$(cat)
case "$* $text" in {missing}) exit 1 ;; esac
"""


@pytest.fixture
def toolchain(tmp_path):
    """Make programs that stand for a toolchain; gives a call that runs the script among them."""
    tools = tmp_path / "bin"
    tools.mkdir()

    def make(*, vulkan="", cuda="", cublas=True, glslc=True):
        programs = {"c++": COMPILER.format(missing=vulkan or "nothing")}
        if glslc:
            programs["glslc"] = "#!/bin/sh\n"
        if cuda:
            programs["nvcc"] = NVCC.format(release=cuda, cublas=int(not cublas))
        for name, text in programs.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)

        def run(*arguments):
            command, *rest = arguments
            return subprocess.run(
                [sys.executable, SCRIPT, command, tmp_path / "stamp", *rest],
                env={"PATH": f"{tools}:{bare(tmp_path)}"},
                capture_output=True,
                text=True,
                check=False,
            )

        return run

    return make


def bare(folder):
    """A folder with the few programs that the script and its stand-ins need."""
    path = folder / "system"
    if not path.exists():
        path.mkdir()
        for name in ("sh", "cat"):
            for place in os.environ["PATH"].split(":"):
                if (Path(place) / name).exists():
                    (path / name).symlink_to(Path(place) / name)
                    break
    return path


def test_the_choice_is_written_once_and_again_only_when_it_changes(toolchain, tmp_path):
    run = toolchain()
    stamp = tmp_path / "stamp"

    assert "backend: cpu\n" == run("choose", "cpu").stdout
    os.utime(stamp, (1, 1))
    assert "" == run("choose", "cpu").stdout
    assert 1 == stamp.stat()[stat.ST_MTIME]
    assert "backend: vulkan\n" == run("choose", "vulkan").stdout
    assert 1 < stamp.stat()[stat.ST_MTIME]
    assert "-DSPECULOE_BACKENDS=vulkan\n" == run("options", sys.executable).stdout


@pytest.mark.parametrize(
    ("missing", "glslc", "packages"),
    [
        ("*vulkan.hpp*", True, "libvulkan-dev"),
        ("*spirv*", True, "spirv-headers"),
        ("*-lvulkan*", True, "libvulkan-dev"),
        ("nothing", False, "glslc"),
        ("*vulkan*|*spirv*", False, "glslc libvulkan-dev spirv-headers"),
    ],
)
def test_a_missing_toolchain_is_one_line_with_the_packages(
    missing, glslc, packages, toolchain, tmp_path
):
    done = toolchain(vulkan=missing, glslc=glslc)("choose", "vulkan")

    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("setup: BACKEND=vulkan lacks ")
    assert done.stderr.endswith(f"; on Debian: apt-get install {packages}\n")
    assert 1 == done.stderr.count("\n")
    assert not (tmp_path / "stamp").exists()


@pytest.fixture
def module():
    loader = importlib.machinery.SourceFileLoader("backends", str(SCRIPT))
    spec = importlib.util.spec_from_loader("backends", loader)
    found = importlib.util.module_from_spec(spec)
    loader.exec_module(found)
    return found


@pytest.mark.parametrize(
    ("card", "cuda", "vulkan", "expected"),
    [
        (True, True, True, "cuda (card and toolkit are here)"),
        (True, False, True, "vulkan (its toolchain is here)"),
        (True, False, False, "cpu (no cuda; no vulkan)"),
        (False, True, True, "vulkan (its toolchain is here)"),
        (False, True, False, "cpu (no vulkan)"),
    ],
)
def test_auto_takes_what_the_machine_can_build_and_use(
    card, cuda, vulkan, expected, module, monkeypatch, tmp_path
):
    def require(kind):
        if not {"cuda": cuda, "vulkan": vulkan}[kind]:
            raise module.ToolchainError(f"no {kind}")

    monkeypatch.setattr(module, "has_card", lambda: card)
    monkeypatch.setattr(module, "require", require)

    assert f"backend: {expected}" == module.choose(tmp_path / "stamp", "auto")
    assert expected.split()[0] == module.stamped(tmp_path / "stamp")[0]


@pytest.mark.parametrize(("release", "package"), [("12.4", "cublas"), ("13.0", "cu13")])
def test_a_cuda_toolkit_without_cublas_gets_it_from_its_package(release, package, toolchain):
    run = toolchain(cuda=release, cublas=False)

    assert "backend: cuda\n" == run("choose", "cuda", "86, 89").stdout
    lines = run("options", sys.executable).stdout.splitlines()
    assert "-DSPECULOE_BACKENDS=cuda" == lines[0]
    assert lines[1].startswith("-DSPECULOE_CUBLAS=/")
    assert lines[1].endswith(f"/nvidia/{package}")
    assert "-DCMAKE_CUDA_ARCHITECTURES=86;89" == lines[-1]


def test_a_cuda_toolkit_with_cublas_is_used_as_it_is_for_the_usual_architectures(toolchain):
    run = toolchain(cuda="12.8")

    assert "backend: vulkan,cuda\n" == run("choose", "cuda,vulkan").stdout
    lines = run("options", sys.executable).stdout.splitlines()
    assert "-DSPECULOE_BACKENDS=vulkan;cuda" == lines[0]
    assert "-DSPECULOE_CUBLAS=" == lines[1]
    assert "-UCMAKE_CUDA_ARCHITECTURES" == lines[-1]


def test_a_cuda_toolkit_of_another_version_and_no_toolkit_are_refused_in_one_line(toolchain):
    done = toolchain(cuda="11.8")("choose", "cuda")

    assert 1 == done.returncode
    assert "is CUDA 11.8, the module builds with 12 and 13" in done.stderr
    assert 1 == done.stderr.count("\n")


def test_a_backend_that_is_none_is_refused(toolchain):
    done = toolchain()("choose", "abacus")

    assert (1, "") == (done.returncode, done.stdout)
    assert "setup: BACKEND=abacus is not known; use auto, cpu, vulkan, cuda or vulkan,cuda\n" == (
        done.stderr
    )


def test_modules_of_an_earlier_choice_are_removed(toolchain, tmp_path):
    folder = tmp_path / "lib"
    folder.mkdir()
    names = ["libspeculoe-ggml-cuda.so", "libspeculoe-ggml-rpc.so", "libspeculoe-ggml-vulkan.so"]
    for name in names:
        (folder / name).touch()
    run = toolchain()
    run("choose", "vulkan")

    run("prune", str(folder))

    assert names[1:] == sorted(path.name for path in folder.iterdir())
