"""What `inspect` says of whole, split, foreign and damaged files, and what that costs it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.cli.inspect import table
from speculoe_local.convert.inspect import as_json, inspect
from speculoe_local.runtime.errors import ModelError
from tests.models.fixtures import TinyModel
from tests.models.tiny import split

# Looks at each file named, and prints the slowest look (s), this process's peak (bytes) and outcomes.
LOOK = """
import json, resource, sys, time
from speculoe_local.cli.inspect import table
from speculoe_local.convert.inspect import as_json, inspect
from speculoe_local.runtime.errors import ModelError
slowest, outcomes = 0.0, {"read": 0, "refused": 0}
for path in sys.argv[1:]:
    began = time.perf_counter()
    try:
        found = inspect(path)
        json.dumps(as_json(found), allow_nan=False)
        assert table(found, tensors=True, metadata=True).replace("\\n", "").isprintable()
        outcomes["read"] += 1
    except ModelError as error:
        assert "\\n" not in str(error)
        outcomes["refused"] += 1
    slowest = max(slowest, time.perf_counter() - began)
try:  # ru_maxrss would count what the parent had before this program was loaded
    peak = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps({"slowest": slowest, "peak": peak, **outcomes}))
"""


def look(*paths: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def test_a_model_shows_its_experts_sizes_and_types(tiny_model: TinyModel) -> None:
    found = inspect(tiny_model("deepseek2"))
    facts = as_json(found)
    (experts,) = facts["experts"]

    assert ("deepseek2", True, 4) == (facts["architecture"], facts["is_moe"], facts["layers"])
    assert (1, 3, 3, 8, 2, 3) == tuple(
        experts[key] for key in ("first", "last", "layers", "experts", "used", "reads_per_expert")
    )
    assert experts["expert_bytes"] == sum(m["bytes_per_expert"] for m in experts["matrices"])
    assert facts["sizes"]["routed_experts"] == 3 * 8 * experts["expert_bytes"]
    assert facts["sizes"]["weights"] == sum(tensor["bytes"] for tensor in facts["tensors"])
    assert facts["sizes"]["weights"] == sum(share["bytes"] for share in facts["types"])
    assert {"array_of": "string", "count": 299} == facts["metadata"]["tokenizer.ggml.tokens"]
    assert "2 of 8 experts of 12.8 KiB in 3 places" in table(found)


def test_all_shards_of_a_split_model_count(tiny_model: TinyModel, tmp_path: Path) -> None:
    whole = inspect(tiny_model("qwen3moe"))
    copy = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen3moe"), copy)
    shards = split(copy, 3)
    parts = inspect(shards[1])

    assert (3, len(whole.tensors)) == (len(parts.files), len(parts.tensors))
    assert sum(shard.stat().st_size for shard in shards) == parts.file_bytes
    assert whole.layouts[0].expert_bytes == parts.layouts[0].expert_bytes


def test_a_file_that_is_no_language_model_is_shown_with_a_remark(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    key = b"general.architecture"
    path.write_bytes(
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", len(key))
        + key
        + struct.pack("<IQ", 8, 5)
        + b"a\x1b[2J"
    )
    found = inspect(path)

    assert found.model is None
    assert "is it a language model's GGUF?" in found.remark
    assert "\x1b" not in table(found, metadata=True)
    assert r"a\x1b[2J" in table(found, metadata=True)


def test_a_sidecar_is_matched_by_its_fingerprint(tiny_model: TinyModel, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model("qwen3moe"), model)
    assert inspect(model).sidecar is None

    # Any GGUF there is looked at; this one names no model.
    shutil.copy(tiny_model("llama"), tmp_path / "model.speculoe.gguf")
    sidecar = inspect(model).sidecar
    assert sidecar is not None
    assert "belongs to another model" in sidecar.state

    (tmp_path / "model.speculoe.gguf").write_bytes(b"GGUF")
    sidecar = inspect(model).sidecar
    assert sidecar is not None
    assert "truncated" in sidecar.state


def mutants(model: Path, folder: Path, count: int) -> list[Path]:
    """`count` files with a header that is damaged in one of five ways, by a fixed seed."""
    whole = model.read_bytes()
    header = inspect(model).header.data_offset
    rng = np.random.default_rng(20260319)
    huge = [struct.pack("<Q", n) for n in (1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, 0)]
    paths = []
    for number in range(count):
        raw = bytearray(whole)
        at = int(rng.integers(4, header))
        match number % 5:
            case 0:
                raw[at] ^= 1 << int(rng.integers(8))
            case 1:
                del raw[at:]
            case 2:
                raw[at : at + 8] = huge[int(rng.integers(len(huge)))]
            case 3:
                raw[at:at] = rng.bytes(int(rng.integers(1, 64)))
            case _:
                other = int(rng.integers(4, header))
                raw[at : at + 32] = raw[other : other + 32]
        path = folder / f"{number}.gguf"
        path.write_bytes(raw)
        paths.append(path)
    return paths


def test_two_hundred_damaged_headers_cost_a_line_each(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    found = look(
        *mutants(tiny_model("gpt-oss"), tmp_path, 100), *mutants(tiny_model("gemma4"), other, 100)
    )

    assert 200 == found["read"] + found["refused"]
    assert found["refused"] > 100
    assert found["slowest"] < 1
    assert found["peak"] < 200 << 20


def test_a_header_full_of_the_smallest_tensors_stays_within_bounds(tmp_path: Path) -> None:
    """The most objects that the fewest bytes can ask for."""
    count = 1 << 16
    entries = b"".join(
        struct.pack("<Q6sIQIQ", 6, b"%06x" % number, 1, 1, 0, 32 * number)
        for number in range(count)
    )
    key = b"general.architecture"
    head = struct.pack("<IQQ", 3, count, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "many.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + head + struct.pack("<IQ5s", 8, 5, b"llama") + entries)
        file.truncate(file.tell() + 32 * count + 64)
    found = look(path)

    assert 1 == found["read"]
    assert found["peak"] < 200 << 20


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" * 8, b"GGUF\x09\0\0\0" + b"\xff" * 64])
def test_what_is_no_gguf_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    with pytest.raises(ModelError) as refused:
        inspect(path)
    assert "\n" not in str(refused.value)
