"""`inspect`, `quantize`, `repack` and `convert` as a user runs them, and what docs/library.md promises."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(sys.executable).parent / "speculoe-local"


@pytest.fixture
def program(env, tmp_path):
    def start(*arguments):
        return subprocess.run(
            [PROGRAM, *arguments],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return start


@pytest.fixture
def model(tiny_model, tmp_path):
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen3moe"), path)
    return path


def test_inspect_prints_the_layout_or_one_object(program, model):
    text, found = program("inspect", model, "--tensors"), program("inspect", model, "--json")
    facts = json.loads(found.stdout)

    assert (0, "") == (text.returncode, text.stderr)
    assert "4 layers 0 to 3: 2 of 8 experts" in text.stdout
    assert "blk.3.ffn_down_exps.weight" in text.stdout
    assert {"file", "sizes", "types", "experts", "metadata", "tensors", "sidecar"} <= facts.keys()


def test_inspect_of_what_is_no_gguf_is_one_line_and_code_1(program, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\x03\0\0\0" + b"\xff" * 99)
    done = program("inspect", path)

    assert (1, "") == (done.returncode, done.stdout)
    assert re.fullmatch(r"error: .*\n", done.stderr)


def test_quantize_reports_sizes_and_measures(program, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat and the hat is in the house, and the dog is on the mat. " * 40)
    done = program(
        "quantize", model, "-o", "small.gguf", "--experts", "Q4_0", "--text", text, "--json"
    )
    assert (0, "") == (done.returncode, done.stderr)
    facts = json.loads(done.stdout)

    assert facts["experts"]["after"] < facts["experts"]["before"]
    assert facts["bytes"] == (tmp_path / "small.gguf").stat().st_size
    assert {"before", "after", "tokens"} == facts["perplexity"].keys()
    assert [{"before": "Q8_0", "wanted": "Q4_0", "after": "Q4_0", "tensors": 12}] == facts["types"]


def test_calibrate_writes_an_importance_matrix_that_quantize_takes(program, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat and the hat is in the house, and the dog is on the mat. " * 40)
    made = program(
        "calibrate", model, "--text", text, "--tokens", "128", "--held-out", "64",
        "--imatrix", "importance.gguf", "--json",
    )  # fmt: skip
    done = program(
        "quantize", model, "-o", "small.gguf", "--experts", "Q4_0", "--imatrix", "importance.gguf"
    )

    assert "importance.gguf" == json.loads(made.stdout)["imatrix"]
    assert (0, "") == (done.returncode, done.stderr)


def test_a_type_that_is_none_is_a_usage_error(program, model):
    done = program("quantize", model, "-o", "small.gguf", "--experts", "Q4_X")

    assert 2 == done.returncode
    assert done.stderr.startswith("error: --experts Q4_X is unknown, known are ")


def test_repack_writes_beside_the_model_and_says_what_it_saves(program, model, tmp_path):
    done = program("repack", model)

    assert (0, "") == (done.returncode, done.stderr)
    assert (tmp_path / "model.experts.gguf").is_file()
    assert "from the model: 3.00 reads" in done.stdout
    assert "from this file: 1.00 reads" in done.stdout
    assert "expert file" in program("inspect", model).stdout


def test_convert_of_a_folder_without_a_model_is_one_line_and_code_1(program, tmp_path):
    done = program("convert", tmp_path)

    assert 1 == done.returncode
    assert done.stderr.endswith("has no config.json; name a model's folder\n")


def test_the_functions_that_the_library_page_names_exist(repository):
    text = (repository / "docs" / "library.md").read_text()
    named = re.findall(r"`(convert|runtime)\.(\w+)\.(\w+)", text)

    assert len(named) > 8
    for package, module, name in named:
        found = importlib.import_module(f"speculoe_local.{package}.{module}")
        assert hasattr(found, name), f"{package}.{module}.{name}"


def test_the_second_example_of_the_library_page_runs(repository, env):
    text = (repository / "docs" / "library.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for block in blocks:
        compile(block, "docs/library.md", "exec")
    done = subprocess.run(
        [sys.executable, "-c", blocks[1]], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "30 layers, 16 experts of 29952 bytes\n143523072 bytes of weights\n" == done.stdout
