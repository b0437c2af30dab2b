"""Misses of slots on a device, computed by the CPU: rounded, and said to be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from speculoe_local.runtime import EngineOptions
from tests.models.fixtures import TinyModel
from tests.runtime.reference import Logits
from tests.runtime.test_misses import PROMPT, opened, options

# Mesa 22.3's software driver crashes while it compiles what qwen35moe needs.
FAMILIES = ("qwen3moe", "gpt-oss", "deepseek2-fused", "llama4")


@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_device_answers_differ_by_rounding_alone(family: str, tiny_model: TinyModel) -> None:
    """Two ways to compute the same differ by as much as the device and the CPU do."""
    path = tiny_model(family, None if family == "gpt-oss" else "F16")

    def first(chosen: EngineOptions) -> tuple[Logits, int]:
        with opened(path, chosen) as model:
            assert 0 == model.context.decode(PROMPT[:4], 0)
            assert 0 == model.context.decode([9], 4)
            cpu_experts = model.slots.stats().cpu_experts if model.slots else 0
            return model.context.logits().copy(), cpu_experts

    on_cpu, _ = first(options("upload", expert_budget="100%"))
    resident, _ = first(options("upload", expert_budget="100%", device="vulkan", ubatch=4))
    apart = float(np.abs(on_cpu - resident).max())
    got, cpu_experts = first(options("cpu", device="vulkan", ubatch=4))

    assert 0 < cpu_experts
    assert float(np.abs(got - resident).max()) < max(
        2 * apart, 0.02 * float(np.abs(resident).max())
    )


def test_on_a_device_the_program_says_rounded(tiny_model: TinyModel) -> None:
    done = subprocess.run(
        [
            Path(sys.executable).parent / "speculoe-local", "chat", tiny_model("qwen3moe"), "-p", "hi",
            "--device", "vulkan", "--expert-budget", "45%", "--misses", "split", "--temp", "0",
            "--max-tokens", "6", "--ubatch", "4", "--threads", "1", "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip

    assert 0 == done.returncode, done.stderr
    experts = json.loads(done.stdout)["experts"]
    assert ("ram-vram", "rounded") == (experts["tier"], experts["exactness"])
    assert 0 < experts["cpu_experts"]
