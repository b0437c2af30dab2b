"""Memory follows the budget, not the model: a GGUF of more than 2 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.big import build_big

# Peak resident memory of a process includes file pages that it has mapped and touched.
_PROGRAM = """
import json, sys
from speculoe_local.runtime import Engine, EngineOptions, Sampling
options = EngineOptions(expert_budget=sys.argv[2], ctx=256, source=sys.argv[3])
with Engine.open(sys.argv[1], options=options) as engine:
    *_, last = engine.generate("the quick brown fox", sampling=Sampling(temp=0), max_tokens=8,
                               logits_hash=True, ignore_end=True)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"peak": int(peak.split()[1]) * 1024, "hash": last.stats.logits_sha256,
                  "load_s": last.stats.load_s, "source": last.stats.slots.source}))
"""


def measured(path: Path, budget: str, source: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(path), budget, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "big.gguf"
    build_big(path, gib=2.0)
    assert path.stat().st_size >= 2_000_000_000
    return path


@pytest.mark.parametrize("source", ["buffered", "direct"])
def test_a_quarter_of_the_experts_takes_at_most_two_fifths_of_the_memory(
    big: Path, source: str
) -> None:
    resident = measured(big, "100%", "auto")

    quarter = measured(big, "25%", source)

    assert resident["hash"] == quarter["hash"]
    assert quarter["peak"] <= 0.4 * resident["peak"]  # type: ignore[operator]
    assert source == quarter["source"]
