"""Layers and their slots on several devices: the same logits as with all experts on the same devices.

The devices are Mesa's software one, shown twice; who asks for it twice needs a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from speculoe_local.runtime import placement
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.needs import needs_of
from speculoe_local.runtime.spread import part_of
from tests.models.fixtures import TinyModel
from tests.models.tiny import build
from tests.runtime.test_device import ROWS

BOTH = "vulkan:0,vulkan:1"
WORKER = """
import json, sys
from dataclasses import replace
from pathlib import Path
from tests.runtime.test_device import LONG, Engine, answer, options
from speculoe_local.runtime import devices
from speculoe_local.runtime.errors import SpeculoeError
path, found, choose = Path(sys.argv[1]), [], devices.choose_all
for run in json.loads(sys.argv[2]):
    free = run.pop("free", None)
    devices.choose_all = lambda asked: tuple(
        replace(d, free_bytes=f, total_bytes=2 << 30)
        for d, f in zip(choose(asked), free or [d.free_bytes for d in choose(asked)])
    )
    try:
        with Engine.open(path, options=options(**run)) as engine:
            stats = answer(engine, LONG).stats
            slots = stats.slots
            found.append({
                "hash": stats.logits_sha256,
                "tier": engine.info.tier,
                "pools": [(p.device, p.layers, p.slots) for p in engine.info.placement.pools],
                "hits": slots.hits,
                "requests": slots.requests,
                "predicted": slots.predicted,
                "staged": slots.staged_bytes,
                "bank_bytes": slots.bank_bytes,
                "flags": [slots.pinned, slots.overlaps],
                "reason": engine.info.placement.reason,
            })
    except SpeculoeError as error:
        found.append(f"{type(error).__name__}: {error}")
print(json.dumps(found))
"""


def apart(path: Path, *runs: dict[str, object]) -> list[Any]:
    """What each of several runs gave, options as in test_device, in a process that sees the device twice."""
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(path), json.dumps([{"device": BOTH} | r for r in runs])],
        env=os.environ | {"GGML_VK_VISIBLE_DEVICES": "0,0"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    found: list[Any] = json.loads(done.stdout)
    return found


def test_two_devices_give_the_logits_of_the_same_two_with_all_experts(tmp_path: Path) -> None:
    path = build("qwen3moe", tmp_path / "many.gguf", n_layer=5, n_expert=16)
    whole, quarter, turned = apart(
        path,
        {"budget": "100%"},
        {"budget": "40%"},
        {"budget": "40%", "device": "vulkan:1,vulkan:0", "link": "20MB/s", "upload_threads": 4},
    )

    assert whole["hash"] == quarter["hash"] == turned["hash"]
    assert ["resident", "ram-vram"] == [whole["tier"], quarter["tier"]]
    assert [["Vulkan0", [0, 1, 2]], ["Vulkan1", [3, 4]]] == [p[:2] for p in quarter["pools"]]
    assert [["Vulkan1", [0, 1, 2]], ["Vulkan0", [3, 4]]] == [p[:2] for p in turned["pools"]]
    assert 0 < quarter["hits"] < quarter["requests"]
    assert 0 < quarter["predicted"]
    assert quarter["staged"]
    assert [1, 1] == quarter["flags"]


def test_a_device_that_holds_all_of_its_experts_has_no_slots(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    model = ModelMap.read(path)
    last = part_of(model, range(3, 4), rest=True)
    needs = needs_of(last, 128, ROWS)
    left = needs.beside_bytes + needs.context_bytes + last.routed_bytes * 9 // 10
    roomy, tight = 2 << 30, (1 << 30) + left

    whole, mixed = apart(
        path, {"budget": "100%", "free": [roomy, tight]}, {"budget": "auto", "free": [roomy, tight]}
    )

    assert whole["hash"] == mixed["hash"]
    assert {"Vulkan1"} == {device for device, _, _ in mixed["pools"]}
    assert mixed["reason"].endswith("all fit on Vulkan0")


def test_what_several_devices_cannot_be_asked_for_is_one_line(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")
    model = ModelMap.read(path)
    smallest = placement.plan(model, placement.parse_budget("100%")).smallest_bytes

    there, few, fits = apart(
        path,
        {"device": "vulkan:0,vulkan:2"},
        {"budget": "1%"},
        {"budget": str(2 * smallest)},
    )

    assert there.startswith("OptionError: --device vulkan:2: no such device; there are: vulkan:0 ")
    assert few.startswith("BudgetError: --expert-budget 1% is below the ")
    assert "ram-vram" == fits["tier"]
