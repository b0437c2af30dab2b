"""The installed program with the embedded model: the whole way from a key press to an answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

PROGRAM = Path(sys.executable).parent / "speculoe-local"
ASK = [
    "-p",
    "What is the capital of France?",
    "--temp",
    "0",
    "--max-tokens",
    "12",
    "--threads",
    "1",
]


@pytest.fixture
def real_env(env):
    """As `env`, but with the user's own cache, where the embedded model may already be."""
    import platformdirs

    return {"SPECULOE_CACHE": platformdirs.user_cache_dir("speculoe-local"), **env}


def once(env, *arguments, **more):
    return subprocess.run(
        [PROGRAM, "chat", *arguments],
        env=env,
        capture_output=True,
        timeout=120,
        check=False,
        **({"stdin": subprocess.DEVNULL} | more),
    )


def test_json_and_text_agree_and_json_has_the_promised_keys(real_env):
    text = once(real_env, *ASK)
    found = json.loads(once(real_env, *ASK, "--json", "--logits-hash").stdout)

    assert 0 == text.returncode
    assert found["text"].strip() == text.stdout.decode().strip() != ""
    assert {
        "model",
        "text",
        "finish_reason",
        "usage",
        "timings",
        "experts",
        "logits_sha256",
    } <= found.keys()
    assert {"prompt_tokens", "completion_tokens"} <= found["usage"].keys()
    assert {"load_s", "ttft_s", "prefill_tps", "decode_tps", "tpot_ms"} <= found["timings"].keys()
    assert {
        "tier",
        "mode",
        "exactness",
        "budget_bytes",
        "slots",
        "residency",
        "predictor",
        "requests",
        "hits",
        "hit_rate",
        "predicted",
        "recall",
        "recall_nonresident",
        "precision_nonresident",
        "uploaded_bytes",
        "wasted_bytes",
        "stall_ms_per_token",
    } <= found["experts"].keys()
    assert found["finish_reason"] in ("stop", "length")
    assert re.fullmatch(r"[0-9a-f]{64}", found["logits_sha256"])
    assert not re.search(r"<\|\w+\|>", found["text"])


def test_a_piped_question_is_answered_on_standard_output_alone(real_env):
    piped = once(real_env, *ASK[2:], stdin=None, input=ASK[1].encode())
    given = once(real_env, *ASK)

    assert (0, given.stdout) == (piped.returncode, piped.stdout)
    assert b"\x1b" not in piped.stdout + piped.stderr


def test_an_answer_at_a_terminal_can_be_stopped_and_the_conversation_goes_on(terminal, real_env):
    # So hot that every token is as likely: the answer does not end by itself.
    endless = ["--temp", "100", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    command = [PROGRAM, "chat", "--threads", "1", "--no-history", *endless]
    chat = terminal(command=command, **real_env)
    chat.see("/help lists commands", seconds=60)
    chat.ready()
    chat.enter("Go on for ever.")
    chat.answering()
    chat.press("\x03")
    chat.see("stopped", seconds=30)
    chat.ready()
    chat.enter("/clear")
    chat.see("conversation cleared")
    chat.ready()
    chat.enter("/set max_tokens 4")
    chat.see("max_tokens         4")
    chat.ready()
    chat.enter("Thank you.")
    chat.ready()
    chat.enter("/stats")
    chat.see("usage.prompt_tokens")
    chat.ready()
    chat.press("\x04")

    assert 0 == chat.leaves()


def test_a_file_that_is_no_model_is_one_line_and_code_1(real_env, tmp_path):
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"no model at all")
    done = once(real_env, wrong, *ASK)

    assert (1, b"", 1) == (done.returncode, done.stdout, done.stderr.count(b"\n"))
    assert str(wrong).encode() in done.stderr
