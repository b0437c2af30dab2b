"""The wheel holds the packages, our libraries and nothing else, and works outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.models.fixtures import TinyModel

DEVICE_MODULES = ("vulkan", "cuda")


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packaged from the libraries that `make setup` built; compiling them again would prove no more."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "wheel", "--no-deps",
         "--no-build-isolation", "-C", f"build-dir={folder / 'build'}",
         "-C", f"cmake.args=-DSPECULOE_PREBUILT={repository / 'build' / 'native' / 'lib'}",
         "-w", str(folder), str(repository)],
        check=True,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_has_our_packages_and_libraries_only(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    inside = {name.split("/")[1] for name in names if name.startswith("speculoe_local/")}
    libraries = {Path(name).name for name in names if name.endswith(".so")}
    # `make test` says what this build has a module for.
    built = {
        f"libspeculoe-ggml-{k}.so" for k in DEVICE_MODULES if k in os.environ.get("BACKEND", "")
    }

    assert {"speculoe_local"} == {top for top in tops if not top.endswith(".dist-info")}
    assert {"__init__.py", "py.typed", "runtime", "convert", "hub", "server", "cli"} == inside
    assert {
        "libllama.so",
        "libspeculoe.so",
        "libspeculoe-ggml.so",
        "libspeculoe-ggml-base.so",
        "libspeculoe-ggml-cpu.so",
        "libspeculoe-ggml-rpc.so",
    } | built == libraries
    assert any(name.startswith("speculoe_local/convert/data/") for name in names)
    assert wheel.name.startswith("speculoe_local-0.1.0-py3-none-")


def test_the_installed_wheel_answers_without_the_checkout(
    wheel: Path, tiny_model: TinyModel, tmp_path: Path
) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(
        target
    )  # what pip would do; its dependencies are here already
    program = (
        "import speculoe_local, sys\n"
        f"assert speculoe_local.__file__.startswith({str(target)!r}), speculoe_local.__file__\n"
        "from speculoe_local.runtime import Engine, EngineOptions, Sampling\n"
        "with Engine.open(sys.argv[1], options=EngineOptions(expert_budget='50%')) as engine:\n"
        "    *_, last = engine.generate('hello', sampling=Sampling(temp=0), max_tokens=4, ignore_end=True)\n"
        "    print(engine.info.tier, last.stats.completion_tokens)\n"
    )
    done = subprocess.run(
        # -I -S: neither the editable install's import hook nor the working folder takes part.
        [sys.executable, "-I", "-S", "-c",
         f"import sys; sys.path[:0] = [{str(target)!r}, *{[p for p in sys.path if 'site-packages' in p]!r}]\n" + program,
         str(tiny_model("qwen3moe"))],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (0, "") == (done.returncode, done.stderr)
    assert "disk-ram 4" == done.stdout.strip()
