"""Our libraries are the ones that are used, whatever else the process or the environment has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from speculoe_local.runtime.lib import Log, library_folder
from tests.models.fixtures import TinyModel

# What importing our loader in this process has already set.
_OURS = ("GOMP_SPINCOUNT", "LLAMA_CPP_LIB_PATH")

_ANSWER = """
from speculoe_local.runtime import Engine, EngineOptions, Sampling
with Engine.open(sys.argv[1], options=EngineOptions(expert_budget="50%", threads=1)) as engine:
    *_, last = engine.generate("hello", sampling=Sampling(temp=0), max_tokens=4)
    print(engine.info.tier, last.stats.slots.requests > 0)
"""


def run(program: str, *arguments: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "import ctypes, sys\n" + program, *map(str, arguments)],
        env={k: v for k, v in os.environ.items() if k not in _OURS} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_environment_variables_that_name_another_build_do_not_win(
    repository: Path, tiny_model: TinyModel
) -> None:
    other = str(repository / "build" / "upstream" / "lib")

    done = run(_ANSWER, tiny_model("qwen3moe"), LLAMA_CPP_LIB_PATH=other, LD_LIBRARY_PATH=other)

    assert ("disk-ram True\n", "") == (done.stdout, done.stderr)


def test_another_llama_in_the_same_process_does_not_mix_with_ours(
    repository: Path, tiny_model: TinyModel
) -> None:
    other = repository / "build" / "upstream" / "lib"
    load = f"theirs = ctypes.CDLL({str(other / 'libllama.so')!r}, mode=ctypes.RTLD_GLOBAL)\n"

    done = run(load + _ANSWER, tiny_model("qwen3moe"))

    assert ("disk-ram True\n", "") == (done.stdout, done.stderr)


def test_bindings_that_were_imported_too_early_are_refused_by_name(repository: Path) -> None:
    other = repository / "build" / "upstream" / "lib"

    done = run("import llama_cpp\nimport speculoe_local.runtime", LLAMA_CPP_LIB_PATH=str(other))

    assert 1 == done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert str(other) in last
    assert "import speculoe_local.runtime before llama_cpp" in last


def test_a_missing_build_says_what_to_run(tmp_path: Path) -> None:
    done = run("import speculoe_local.runtime", SPECULOE_LIB_PATH=str(tmp_path))

    assert "run `make setup`" in done.stderr.strip().splitlines()[-1]


def test_barriers_do_not_spin_for_milliseconds_unless_asked_to() -> None:
    show = "import os, speculoe_local.runtime.lib\nprint(os.environ.get('GOMP_SPINCOUNT'))"

    assert "1000\n" == run(show).stdout
    assert "7\n" == run(show, GOMP_SPINCOUNT="7").stdout
    assert "None\n" == run(show, OMP_WAIT_POLICY="active").stdout


def test_the_log_keeps_the_last_complaint_in_whole_lines() -> None:
    log = Log()
    log(2, b"loading\n", None)
    log(4, b"cannot read ", None)
    log(4, b"tensor\n", None)

    assert "cannot read tensor" == log.last()
    log.clear()
    assert "llama.cpp gave no reason" == log.last()
    assert library_folder().is_dir()
