"""A device that is lost in the middle of an answer ends the answer, with one line, and nothing else.

losing_driver.c is Mesa's software driver until a file appears; then every submission and wait fails, as a
driver's do after its card hung. Where in a graph that happens is a count of calls that still succeed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.models.fixtures import TinyModel
from tests.runtime.test_device import PROMPT, hashed, options

LINE = (
    "device Vulkan0 was lost (its driver gave up or was restarted); start the program again, "
    "or use --device cpu"
)
WORKER = """
import json, os, sys
from pathlib import Path
from tests.runtime.test_device import LONG, PROMPT, Engine, Sampling, answer, options
from speculoe_local.runtime.errors import SpeculoeError
path, budget, count = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
found = []
try:
    with Engine.open(path, options=options(budget)) as engine:
        answer(engine)
        engine.forget()
        (Path.cwd() / "count").write_text(count)
        (Path.cwd() / "count").rename(os.environ["LOST_WHEN"])
        try:
            for _ in engine.generate(LONG, sampling=Sampling(temp=0), max_tokens=40, ignore_end=True):
                pass
        finally:
            found.append(engine._opened.context.state(0).size)
            engine.check()
except SpeculoeError as error:
    found.append([type(error).__name__, str(error)])
try:
    Engine.open(path, options=options(budget))
except SpeculoeError as error:
    found.append([type(error).__name__, str(error)])
with Engine.open(path, options=options("50%", device="cpu")) as engine:
    found.append(answer(engine).stats.logits_sha256)
print(json.dumps(found))
"""


@cache
def on_the_cpu(path: Path) -> str | None:
    return hashed(path, options("50%", device="cpu"), PROMPT)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which the driver is one that can be lost."""
    folder = tmp_path_factory.mktemp("driver")
    manifest = json.loads(Path(os.environ["VK_DRIVER_FILES"]).read_text())
    library = folder / "liblosing.so"
    source = Path(__file__).with_name("losing_driver.c")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl", "-lpthread"], check=True
    )
    real = manifest["ICD"]["library_path"]
    manifest["ICD"]["library_path"] = str(library)
    (folder / "icd.json").write_text(json.dumps(manifest))
    return {"VK_DRIVER_FILES": str(folder / "icd.json"), "LOST_DRIVER": real}


@pytest.mark.parametrize(
    ("budget", "calls"),
    [("100%", 9), ("50%", 0), ("50%", 13), ("50%", 300)],
    ids=["resident", "at once", "while a prompt streams", "while it answers"],
)
def test_a_device_lost_in_an_answer_ends_it_with_one_line_and_the_process_lives(
    budget: str, calls: int, driver: dict[str, str], tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tiny_model("qwen3moe")
    repository = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(path), budget, str(calls)],
        env=os.environ
        | driver
        | {"LOST_WHEN": str(tmp_path / "lost"), "PYTHONPATH": repository, "GGML_NO_BACKTRACE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stderr[-2000:]
    lost = ["BackendError", LINE]
    assert [0, lost, lost, on_the_cpu(path)] == json.loads(done.stdout)
