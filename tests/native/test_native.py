"""The tests of native/ under both kinds of sanitizer, and the ABI that Python believes in."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speculoe_local.runtime import native
from speculoe_local.runtime.native import (
    GateMlp,
    GateParams,
    LoopLayer,
    Matrix,
    Params,
    ReplayCounts,
    ReplayParams,
    Span,
    Stats,
)
from tests.models.fixtures import TinyModel


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("name", ["address", "thread"])
def test_native_tests_pass_under_the_sanitizer(
    name: str, repository: Path, tiny_model: TinyModel
) -> None:
    build = repository / "build" / f"sanitize-{name}"
    cmake = Path(sys.executable).parent / "cmake"
    run(
        cmake, "-G", "Ninja", "-S", repository / "native" / "tests", "-B", build,
        f"-DCMAKE_MAKE_PROGRAM={Path(sys.executable).parent / 'ninja'}",
        f"-DSPECULOE_BUILD={repository / 'build' / 'native'}",
        f"-DSPECULOE_SANITIZE={'address,undefined' if name == 'address' else name}",
    )  # fmt: skip
    run(cmake, "--build", build)
    for quant in ("Q8_0", "Q4_K"):  # plain and repacked banks
        model = tiny_model("qwen3moe", quant)

        out = run(
            build / "native_tests",
            SPECULOE_TEST_MODEL=str(model),
            # ggml keeps what it made once until the process ends.
            ASAN_OPTIONS="detect_leaks=0",
        )

        assert re.search(r"^\d+ passed, 0 failed$", out, re.MULTILINE), out


def test_the_mirror_of_every_struct_has_its_size_offsets_and_names(
    repository: Path, tmp_path: Path
) -> None:
    structs = {
        "spo_matrix": Matrix,
        "spo_params": Params,
        "spo_stats": Stats,
        "spo_gate_mlp": GateMlp,
        "spo_gate_params": GateParams,
        "spo_replay_params": ReplayParams,
        "spo_replay_counts": ReplayCounts,
        "spo_loop_layer": LoopLayer,
        "spo_span": Span,
    }
    lines = [
        f'printf("{name} %zu\\n", sizeof({name}));\n'
        + "".join(
            f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));\n'
            for field, *_ in mirror._fields_
        )
        for name, mirror in structs.items()
    ]
    source = tmp_path / "abi.c"
    source.write_text(
        "#include <stdio.h>\n#include <speculoe/speculoe.h>\nint main(void) {\n"
        + "".join(lines)
        + 'printf("abi %d\\n", SPO_ABI_VERSION);\nreturn 0; }\n'
    )
    run("cc", "-I", repository / "native" / "include", source, "-o", tmp_path / "abi")

    expected = run(tmp_path / "abi").split("\n")

    for name, mirror in structs.items():
        assert f"{name} {ctypes.sizeof(mirror)}" in expected
        for field, *_ in mirror._fields_:
            assert f"{name}.{field} {getattr(mirror, field).offset}" in expected
    assert f"abi {native.ABI_VERSION}" in expected


def test_only_the_c_boundary_leaves_the_library(repository: Path) -> None:
    from speculoe_local.runtime.lib import library_folder

    out = run("nm", "-D", "--defined-only", library_folder() / "libspeculoe.so")

    names = {line.split()[-1] for line in out.splitlines()}
    header = (repository / "native" / "include" / "speculoe" / "speculoe.h").read_text()
    assert set(re.findall(r"(spo_\w+)\(", header)) == {n for n in names if n.startswith("spo_")}
    foreign = {n for n in names if not n.startswith("spo_") and "St" not in n and "__gnu" not in n}
    assert foreign <= {"_init", "_fini"}
