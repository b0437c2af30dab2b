"""From a Hugging Face checkpoint to an answer, with the program alone: convert, quantize, calibrate, chat.

`python -m tests.convert.pipeline` does it for a random Qwen3-MoE and a random gpt-oss, and prints
whether answers from a quarter of the experts' memory have the hash of fully resident ones, and the
largest difference to the logits of transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TEXT = "the cat and the hat is in the house of the dog, and it is not there"
LEARN = "the cat and the dog, the house and the hat: and it is in there. " * 80


@dataclass(frozen=True, slots=True)
class Answers:
    """SHA-256 of all logits of one answer by expert budget, and the experts' bytes."""

    hashes: dict[str, str]
    experts_before: int
    experts_after: int


def program(*arguments: str | Path) -> dict[str, Any]:
    """What `speculoe-local ARGUMENTS --json` prints; RuntimeError with its last line if it fails."""
    command = [Path(sys.executable).parent / "speculoe-local", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments[0]} exited with {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def answer(model: Path, folder: Path, budgets: Sequence[str] = ("100%", "25%")) -> Answers:
    """Quantize `model` into `folder`, calibrate it, and answer once with each budget."""
    small = folder / f"{model.stem}-q.gguf"
    words = folder / "words.txt"
    words.write_text(LEARN)
    made = program("quantize", model, "-o", small, "--experts", "Q4_0", "--rest", "Q8_0")
    program("calibrate", small, "--text", words, "--tokens", "512", "--held-out", "128")
    hashes = {
        budget: program(
            "chat", small, "-p", TEXT, "--expert-budget", budget, "--temp", "0",
            "--max-tokens", "16", "--logits-hash",
        )["logits_sha256"]
        for budget in budgets
    }  # fmt: skip
    return Answers(hashes, made["experts"]["before"], made["experts"]["after"])


def difference(model: Any, converted: Path) -> tuple[float, float]:
    """The largest difference of any logit to `model`'s, and the largest logit."""
    from tests.convert import checkpoints
    from tests.models import probe

    with probe.loaded(converted) as loaded:
        tokens = probe.tokenize(loaded, TEXT)
        found = probe.run(loaded, tokens).logits
    expected = checkpoints.logits(model, tokens)
    return float(np.abs(expected - found).max()), float(np.abs(expected).max())


def main() -> int:
    """Print a line for each family; 1 if any pair of hashes differs."""
    import speculoe_local.runtime.lib  # noqa: F401  # our libraries, before the probe loads any
    from tests.convert import checkpoints

    equal = True
    with tempfile.TemporaryDirectory() as scratch:
        for name in ("qwen3moe", "gpt_oss"):
            folder = Path(scratch) / name
            model = checkpoints.write(getattr(checkpoints, name)(), folder)
            out = folder.with_suffix(".gguf")
            known = ["--tokenizer-pre", "gpt-2"] if name == "gpt_oss" else []
            program("convert", folder, "-o", out, "--outtype", "f16", *known)
            answers = answer(out, Path(scratch))
            largest, scale = difference(model, out)
            equal &= len(set(answers.hashes.values())) == 1
            print(
                f"{name}: {answers.hashes}, experts {answers.experts_before} -> "
                f"{answers.experts_after} bytes, largest difference to torch {largest:.5f} of {scale:.3f}"
            )
    print("hashes are equal" if equal else "HASHES DIFFER")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
