"""One answer for a script: only the answer on standard output, and exit codes that mean something."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from speculoe_local.cli import chat as module
from speculoe_local.runtime.errors import OptionError

FAKE = Path(__file__).with_name("fake_program.py")


def test_only_the_answer_is_on_standard_output_and_statistics_are_on_standard_error(run):
    done = run("-p", "hi")

    assert (0, b"You said 'hi'\n") == (done.returncode, done.stdout)
    assert b"1 tokens, 12.5 tokens/s\n" == done.stderr


def test_without_statistics_standard_error_is_silent(run):
    done = run("-p", "hi", "--no-stats")

    assert (b"You said 'hi'\n", b"") == (done.stdout, done.stderr)


def test_piped_input_is_the_prompt_or_follows_it(run):
    assert b"You said 'piped'\n" == run(input=b"piped\n").stdout
    assert b"You said 'sum up:\\n\\na\\nb'\n" == run("-p", "sum up:", input=b"a\nb\n").stdout


def test_markdown_and_control_characters_pass_unchanged_through_a_pipe(run):
    assert b"**bold** and `code`\n" == run("-p", "markdown").stdout
    assert b"a\x1b]0;title\x07b\x1b[2Jc\n" == run("-p", "control").stdout


def test_bytes_that_are_no_text_become_replacement_characters(run):
    assert "You said 'x\ufffdy'\n".encode() == run(input=b"x\xffy").stdout
    assert "You said 'x\ufffdy'\n".encode() == run("-p", b"x\xffy").stdout


def test_an_answer_that_the_output_encoding_lacks_is_no_failure(run):
    done = run("-p", "é漢", PYTHONIOENCODING="latin-1")

    assert (0, b"You said '\xe9?'\n") == (done.returncode, done.stdout)


def test_json_is_one_object_with_the_promised_keys(run):
    done = run("-p", "é\n", "--json", "--logits-hash")
    found = json.loads(done.stdout)

    assert 1 == done.stdout.count(b"\n")
    assert {
        "model",
        "text",
        "finish_reason",
        "usage",
        "timings",
        "experts",
        "logits_sha256",
    } == found.keys()
    assert ("fake", "stop") == (found["model"], found["finish_reason"])
    assert "You said 'é\\n'" == found["text"]
    assert "é".encode() in done.stdout


def test_json_survives_an_output_encoding_without_its_characters(run):
    done = run("-p", "漢", "--json", PYTHONIOENCODING="latin-1")

    assert "You said '漢'" == json.loads(done.stdout)["text"]


def test_the_hash_of_the_logits_is_told_on_standard_error(run):
    done = run("-p", "hi", "--logits-hash")

    assert b"logits_sha256 " + b"ab" * 32 in done.stderr.splitlines()


def test_options_reach_the_engine(run):
    sampling = run("-p", "sampling", "--temp", "0", "--seed", "3", "--max-tokens", "9")
    options = run("-p", "options", "--expert-budget", "25%", "--ctx", "64", "--threads", "1")

    assert b"temp=0.0 seed=3 max=9\n" == sampling.stdout
    assert b"budget=25% ctx=64 threads=1\n" == options.stdout
    assert b"system user\n" == run("-p", "roles", "--system", "Be brief.").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["-p", "overflow"], 1, b"error: prompt has 9 tokens, the context 4: raise --ctx"),
        (["-p", "crash"], 1, b"error: llama_decode failed: 1: out of memory"),
        (["-p", "bug"], 1, b"error: unexpected ZeroDivisionError: division by zero"),
        (["-p", "  "], 2, b"error: prompt '  ' is empty"),
        ([], 2, b"error: standard input is empty"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(run, arguments, code, line):
    done = run(*arguments)

    assert (code, b"") == (done.returncode, done.stdout)
    assert 1 == done.stderr.count(b"\n")
    assert done.stderr.startswith(line)


def test_a_model_that_is_missing_or_damaged_is_one_line_and_code_1(run, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.touch()
    missing = run("-p", "hi", model="owner/repo:Q4_K_M")
    broken = run("-p", "hi", model=damaged)

    assert (1, b"", 1) == (missing.returncode, missing.stdout, missing.stderr.count(b"\n"))
    assert missing.stderr.startswith(b"error: owner/repo:Q4_K_M is not in the cache")
    assert (1, b"", 1) == (broken.returncode, broken.stdout, broken.stderr.count(b"\n"))
    assert b"is no GGUF file" in broken.stderr


@pytest.mark.parametrize(
    "arguments", [["--top-p", "2"], ["--nonsense"], ["--mode", "quick"], ["--ctx", "0"]]
)
def test_wrong_usage_exits_with_2(run, arguments):
    done = run("-p", "hi", *arguments)

    assert (2, b"") == (done.returncode, done.stdout)
    assert arguments[0].encode() in done.stderr


def test_a_reader_that_has_had_enough_is_no_failure(env, model):
    command = [sys.executable, FAKE, "chat", model, "-p", "lines", "--no-stats"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert b"line 0\n" == process.stdout.readline()
        process.stdout.close()

        assert b"" == process.stderr.read()
        assert 0 == process.wait(20)


def test_ctrl_c_stops_the_answer_keeps_what_is_printed_and_exits_with_130(env, model):
    command = [sys.executable, FAKE, "chat", model, "-p", "endless"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        began = process.stdout.read(6)
        process.send_signal(signal.SIGINT)
        rest, remarks = process.communicate(timeout=20)

    assert re.fullmatch(rb"w0 w1 (w\d+ )*\n", began + rest)
    assert b"tokens/s" in remarks
    assert 130 == process.returncode


def test_waiting_for_piped_input_is_told(env, model):
    command = [sys.executable, FAKE, "chat", model, "-p", "hi"]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert b"reading standard input up to its end" in process.stderr.readline()
        answer, _ = process.communicate(b"more", timeout=20)

    assert b"You said 'hi\\n\\nmore'\n" == answer


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"]])
def test_help_is_instant(env, arguments):
    command = [sys.executable, "-c", "from speculoe_local.cli import main; main()", *arguments]
    costs = []
    for _ in range(3):
        before = processor_seconds()
        shown = subprocess.run(command, env=env, capture_output=True, timeout=30, check=True)
        costs.append(processor_seconds() - before)

    assert b"Usage: speculoe-local" in shown.stdout
    # Processor time, as other programs' load is not ours: 0.2 s, and room for a slower machine.
    assert min(costs) < 0.5


def processor_seconds():
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_help_loads_neither_numpy_nor_the_terminal_libraries(env):
    code = (
        "import sys; from speculoe_local.cli import app; "
        "heavy = {'numpy', 'llama_cpp', 'prompt_toolkit', 'rich.console', 'jinja2'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, timeout=30, check=True
    )

    assert b"[]\n" == shown.stdout


def test_the_version_is_printed(env):
    command = [sys.executable, "-c", "from speculoe_local.cli import main; main()", "--version"]
    shown = subprocess.run(command, env=env, capture_output=True, timeout=30, check=True)

    assert shown.stdout.startswith(b"speculoe-local ")


def test_an_empty_prompt_is_refused_before_anything_is_read(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)

    with pytest.raises(OptionError, match="is empty"):
        module._question("\n")
