"""Experts in slots of a device: the same logits as with all of them there, whatever happens meanwhile.

The device is Mesa's software Vulkan (tests/conftest.py points the driver there). It compiles a shader in
seconds, and another one for each number of rows: so ubatches have 4 rows and prompts a multiple of that.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.convert.calibrate import calibrate
from speculoe_local.runtime import Engine, EngineOptions, Sampling, devices, doctor, placement
from speculoe_local.runtime.engine import Step
from speculoe_local.runtime.errors import OptionError
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.needs import needs_of
from speculoe_local.runtime.opened import open_model
from speculoe_local.runtime.plan import Card, Host, Rate, make_plan
from speculoe_local.runtime.trace import record
from tests.models.fixtures import TinyModel
from tests.models.tiny import build
from tests.runtime.reference import Logits

# Mesa 22.3's software driver crashes while it compiles what qwen35moe needs.
FAMILIES = ("qwen3moe", "gpt-oss", "bailingmoe", "deepseek2", "deepseek2-fused", "gemma4", "llama4")
GIB = 1 << 30
ROWS = 4
PROMPT = tuple(range(20, 20 + 3 * ROWS))
LONG = tuple(range(20, 20 + 8 * ROWS))
TEXT = "Every layer asks its router which experts a token needs, and waits for them. " * 20


def options(budget: str = "50%", **more: object) -> EngineOptions:
    chosen: dict[str, object] = {
        "expert_budget": budget,
        "device": "vulkan",
        "threads": 1,
        "ctx": 128,
        "ubatch": ROWS,
    }
    return EngineOptions(**(chosen | more))  # type: ignore[arg-type]


def answer(engine: Engine, prompt: Sequence[int] = PROMPT) -> Step:
    """The last step of an answer from an empty context."""
    engine.forget()
    *_, last = engine.generate(
        prompt, sampling=Sampling(temp=0), max_tokens=6, logits_hash=True, ignore_end=True
    )
    engine.check()
    return last


def hashed(path: Path, chosen: EngineOptions, prompt: Sequence[int] = PROMPT) -> str | None:
    with Engine.open(path, options=chosen) as engine:
        return answer(engine, prompt).stats.logits_sha256


@cache
def resident(path: Path, prompt: tuple[int, ...] = PROMPT, ubatch: int = ROWS) -> str | None:
    """The hash with all experts on the device."""
    return hashed(path, options("100%", ubatch=ubatch), prompt)


def smallest(path: Path) -> str:
    """The smallest budget that works, in bytes."""
    return str(placement.plan(ModelMap.read(path), placement.parse_budget("100%")).smallest_bytes)


def test_the_tests_run_on_the_software_device() -> None:
    device = devices.choose("vulkan")

    assert device is not None
    assert ("vulkan", 0, True) == (device.kind, device.index, device.is_software)
    assert 0 < device.free_bytes <= device.total_bytes
    assert device.overlaps
    assert device.pins


def test_doctor_lists_the_device_with_what_it_can_and_what_uploads_reach() -> None:
    found = {finding.topic: finding for finding in doctor.examine()}

    assert "llvmpipe" in found["vulkan:0"].found
    assert "its driver says: copies beside graphs, pinned memory, events" in found["vulkan:0"].found
    assert "computes in software, so only when named" == found["vulkan:0"].follows
    rates = r"[0-9.]+ [KMG]iB/s from pinned memory, [0-9.]+ [KMG]iB/s from ordinary memory; "
    share = r"[0-9]{1,3}% of a copy's time passes while a graph runs"
    assert re.fullmatch(rates + share, found["vulkan:0 uploads"].found)


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(
        OptionError, match=r"--device vulkan:7: no such device; there are: vulkan:0 "
    ):
        devices.choose("vulkan:7")
    with pytest.raises(OptionError, match="--device vulkan:0,vulkan:1: several devices share"):
        devices.choose("vulkan:0,vulkan:1")  # as `plan` and `rpc-serve` do


def test_auto_does_not_take_a_software_device() -> None:
    assert devices.choose("auto") is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_logits_of_the_device_with_all_experts(
    family: str, tiny_model: TinyModel
) -> None:
    path = tiny_model(family)

    for budget in ("60%", smallest(path)):
        with Engine.open(path, options=options(budget)) as engine:
            stats = answer(engine).stats

            assert resident(path) == stats.logits_sha256
            assert "ram-vram" == engine.info.tier
            assert stats.slots.hits < stats.slots.requests
            assert (1, 1) == (stats.slots.pinned, stats.slots.overlaps)


def test_a_prompt_longer_than_the_slots_gives_the_logits_of_the_device_with_all_experts(
    tiny_model: TinyModel,
) -> None:
    path = tiny_model("qwen3moe")

    with Engine.open(path, options=options(smallest(path))) as engine:
        stats = answer(engine, LONG).stats

        assert resident(path, LONG) == stats.logits_sha256
        assert stats.slots.staged_bytes > 4 * stats.slots.bank_bytes


def test_a_ubatch_of_many_rows_gives_the_logits_of_the_device_with_all_experts(
    tiny_model: TinyModel,
) -> None:
    """Products of more than 8 rows have shaders of their own."""
    path = tiny_model("qwen3moe")

    got = hashed(path, options("40%", ubatch=16), LONG[:16])

    assert resident(path, LONG[:16], ubatch=16) == got


@pytest.mark.parametrize("upload_threads", [1, 3])
def test_uploads_that_overtake_each_other_on_a_slow_link_change_no_logits(
    upload_threads: int, tiny_model: TinyModel
) -> None:
    """Demand goes before predictions that wait, stale ones are dropped, and threads finish in any order."""
    path = tiny_model("bailingmoe")
    slow = options("50%", link="5MB/s,20us", upload_threads=upload_threads)

    with Engine.open(path, options=slow) as engine:
        stats = answer(engine).stats

        assert resident(path) == stats.logits_sha256
        assert 0 < stats.slots.predicted
        assert 0 < stats.slots.stall_ns


@pytest.mark.parametrize(
    "how",
    [{"predict": "none"}, {"policy": "lru", "source": "direct"}, {"source": "mapped"}],
    ids=lambda how: next(iter(how.values())),
)
def test_neither_prediction_nor_policy_nor_source_change_logits(
    how: dict[str, object], tiny_model: TinyModel
) -> None:
    path = tiny_model("qwen3moe")

    assert resident(path) == hashed(path, options("40%", **how))


def test_two_engines_share_a_device_and_disturb_neither_each_other_nor_one_on_the_cpu(
    tiny_model: TinyModel,
) -> None:
    paths = {"first": tiny_model("qwen3moe"), "second": tiny_model("bailingmoe")}
    on_cpu = options("50%", device="cpu")
    expected = {name: resident(path) for name, path in paths.items()}
    expected["cpu"] = hashed(paths["first"], options("100%", device="cpu"))
    got: dict[str, str | None] = {}

    def work(name: str, path: Path, chosen: EngineOptions) -> None:
        with Engine.open(path, options=chosen) as engine:
            answer(engine, LONG[8:16])
            got[name] = answer(engine).stats.logits_sha256

    threads = [
        threading.Thread(target=work, args=("first", paths["first"], options("40%"))),
        threading.Thread(target=work, args=("second", paths["second"], options("60%"))),
        threading.Thread(target=work, args=("cpu", paths["first"], on_cpu)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert expected == got
    assert expected["cpu"] != expected["first"]  # or one of them ran on the wrong device


def decoded_together(path: Path, chosen: EngineOptions, n_parallel: int) -> Logits:
    """Logits of two sequences after their prompts and four steps, two rows a step."""
    with closing(open_model(path, options=chosen, n_parallel=n_parallel, n_sequences=2)) as opened:
        context = opened.context
        prompts = [PROMPT[:ROWS], LONG[-2 * ROWS :]]
        rows: list[Logits] = []
        for sequence, prompt in enumerate(prompts):
            assert 0 == context.decode(prompt, 0, sequence=sequence)
            rows.append(context.logits().copy())
        for step in range(4):
            batch = [
                (int(rows[-2 + sequence].argmax()), len(prompt) + step, sequence)
                for sequence, prompt in enumerate(prompts)
            ]
            assert 0 == context.decode_many(batch)
            rows += [context.logits(row).copy() for row in (0, 1)]
        if opened.slots is not None:
            opened.slots.check()
        return np.stack(rows)


@pytest.mark.parametrize("n_parallel", [1, 2], ids=["streamed", "from slots"])
def test_sequences_decoded_together_give_the_logits_of_the_device_with_all_experts(
    n_parallel: int, tiny_model: TinyModel
) -> None:
    path = tiny_model("qwen3moe")

    expected = decoded_together(path, options("100%"), n_parallel)
    got = decoded_together(path, options("40%"), n_parallel)

    assert expected.tobytes() == got.tobytes()


def test_an_interrupt_ends_an_answer_in_the_middle_of_an_upload(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    with Engine.open(path, options=options("40%", link="200kB/s", predict="none")) as engine:
        steps = engine.generate(PROMPT, sampling=Sampling(temp=0), max_tokens=100)
        before = next(steps).stats.slots.uploaded_bytes
        moving = threading.Event()

        def interrupt() -> None:
            while (
                engine.slot_stats().uploaded_bytes <= before
            ):  # an upload of the second step has landed
                moving.wait(0.001)
            engine.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        last = list(steps)[-1]
        thread.join()

        assert "cancel" == last.finish_reason
        assert last.stats.completion_tokens < 100
        assert resident(path) == answer(engine).stats.logits_sha256


def test_a_lossy_answer_depends_on_neither_budget_nor_link(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("qwen3moe")
    sidecar = tmp_path / "model.speculoe.gguf"
    calibrate(path, sidecar, texts=[TEXT], tokens=128, held_out=32, threads=1)
    lossy = {"mode": "speculate", "unmeasured": True, "sidecar": sidecar}

    with Engine.open(path, options=options("60%", **lossy)) as engine:
        expected = answer(engine).stats.logits_sha256
        assert "speculate" == engine.info.mode

    assert resident(path) != expected
    assert expected == hashed(path, options(smallest(path), link="5MB/s", **lossy))


def test_a_trace_shows_uploads_for_a_layer_while_the_one_before_computes(
    tiny_model: TinyModel,
) -> None:
    with Engine.open(tiny_model("bailingmoe"), options=options("50%", ubatch=1)) as engine:
        found = record(engine, "hi", max_tokens=8)

    computing = [e for e in found.events if e.track == "compute"]
    ahead = [
        (upload, span)
        for upload in found.events
        if upload.track == "uploads: predicted"
        for span in computing
        if span.block + 1 == upload.block
        and span.begin_us <= upload.begin_us
        and upload.end_us <= span.end_us
    ]
    assert ahead


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_auto_takes_of_the_device_what_plan_says_it_will(
    part: float, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen3moe")
    model, found = ModelMap.read(path), devices.choose("vulkan")
    assert found is not None
    needs = needs_of(model, 512, ROWS)
    free = GIB + needs.beside_bytes + needs.context_bytes + int(part * model.routed_bytes)
    small = replace(found, free_bytes=free, total_bytes=2 * GIB)
    monkeypatch.setattr(devices, "choose_all", lambda asked: (small,))
    rate = Rate(1e9, "")
    host = Host(8 * GIB, rate, rate, Card("small", 2 * GIB, free, rate, rate))

    with Engine.open(path, options=options("auto", ctx=512)) as engine:
        planned = make_plan(model, host, ctx=512, ubatch=ROWS).placed

        assert planned == engine._opened.placed
        assert "slotted" == engine._opened.placed.kind
        assert answer(engine).stats.slots.hits


# What a driver is told before it starts needs a process of its own.
WORKER = """
import json, os, sys
from pathlib import Path
from speculoe_local.runtime import devices
from tests.runtime.test_device import answer, options, Engine
from speculoe_local.runtime.errors import SpeculoeError
found = []
if "SPECULOE_TEST_NO_LIMIT" in os.environ:
    devices.most_buffer_bytes = lambda device: None
for budget in sys.argv[2:]:
    try:
        with Engine.open(Path(sys.argv[1]), options=options(budget)) as engine:
            stats = answer(engine).stats
            found.append([stats.logits_sha256, stats.slots.pinned])
    except SpeculoeError as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""


def apart(path: Path, *budgets: str, **environment: str) -> list[list[object]]:
    """For each budget the hash and whether uploads left from pinned memory, or the error's kind and line."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(path), *budgets],
        env=os.environ | environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    found: list[list[object]] = json.loads(done.stdout)
    return found


def test_without_pinned_memory_uploads_stage_in_ordinary_memory(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    limit = 3 << 20  # less than a lane, more than anything else of this model

    found = apart(path, "50%", GGML_VK_FORCE_MAX_BUFFER_SIZE=str(limit))

    assert [[resident(path), 0]] == found


def test_a_bank_that_the_device_refuses_is_one_clear_error_and_less_of_it_works(
    tmp_path: Path,
) -> None:
    path = build("qwen3moe", tmp_path / "wide.gguf", n_layer=4, n_expert=16, n_ff_exp=1024)
    limit = 3 << 20  # bytes; a bank of 90 % takes 4.0 MB, one of 40 % 1.8 MB
    too_large, fits = apart(
        path,
        *("90%", "40%"),
        GGML_VK_FORCE_MAX_BUFFER_SIZE=str(limit),
        SPECULOE_TEST_NO_LIMIT="1",  # as if the device had not said so
    )

    assert [
        "BackendError",
        "expert slots do not fit into memory; use a smaller --expert-budget",
    ] == too_large
    assert [resident(path), 0] == fits


def test_banks_larger_than_the_device_can_address_are_split(tmp_path: Path) -> None:
    path = build("qwen3moe", tmp_path / "wide.gguf", n_layer=4, n_expert=16, n_ff_exp=1024)

    split, alone = apart(path, "90%", "40%", GGML_VK_FORCE_MAX_BUFFER_SIZE=str(3 << 20))
    (refused,) = apart(path, "40%", GGML_VK_FORCE_MAX_BUFFER_SIZE=str(1 << 20))

    assert [[resident(path), 0]] * 2 == [split, alone]
    assert [
        "BudgetError",
        "blk.0.ffn_gate_exps.weight: 16 experts take 1.1 MiB, one buffer of the device 1.0 MiB at most; "
        "use --device cpu",
    ] == refused


def test_several_pools_give_the_logits_of_the_device_with_all_experts(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model("qwen3moe")
    model = ModelMap.read(path)
    limit = 1 + max(matrix.nbytes for layer in model.layers for matrix in layer.matrices)
    monkeypatch.setattr(devices, "most_buffer_bytes", lambda device: limit)

    with Engine.open(path, options=options("80%")) as engine:
        stats = answer(engine, LONG).stats

        assert 1 < len(engine._opened.placed.pools)
        assert resident(path, LONG) == stats.logits_sha256
        assert stats.slots.hits < stats.slots.requests


def test_the_device_says_how_much_it_can_address(tmp_path: Path) -> None:
    device = devices.choose("vulkan")

    assert device is not None
    assert 128 << 20 == devices.most_buffer_bytes(device)  # Mesa's maxStorageBufferRange


def test_a_driver_that_does_not_start_is_an_error_by_name_and_ignored_by_auto() -> None:
    code = (
        "from speculoe_local.runtime import devices\n"
        "print(devices.choose('auto'))\n"
        "devices.choose('vulkan')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"VK_DRIVER_FILES": "/nowhere.json"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "None\n" == done.stdout, done.stderr
    assert "OptionError: --device vulkan" in done.stderr


def test_the_program_gives_the_same_hash_at_a_quarter_of_the_experts(tiny_model: TinyModel) -> None:
    program = Path(sys.executable).parent / "speculoe-local"
    fixed = ["--temp", "0", "--max-tokens", "4", "--ubatch", "1", "--logits-hash", "--json"]
    found = []
    for budget in ("100%", "45%"):
        done = subprocess.run(
            [
                *(program, "chat", tiny_model("qwen3moe"), "-p", "hi", "--device", "vulkan"),
                *("--expert-budget", budget, *fixed),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
        found.append(json.loads(done.stdout))

    assert found[0]["logits_sha256"] == found[1]["logits_sha256"]
    assert ["resident", "ram-vram"] == [one["experts"]["tier"] for one in found]
