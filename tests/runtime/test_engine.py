"""The engine as a library: answers, reuse, cancellation, statistics, and what goes wrong."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from speculoe_local.runtime import Engine, EngineOptions, Message, Sampling
from speculoe_local.runtime.errors import (
    BudgetError,
    ContextError,
    ModelError,
    OptionError,
    SourceError,
    SpeculoeError,
)
from speculoe_local.runtime.options import parse_link
from tests.models.fixtures import TinyModel

GREEDY = Sampling(temp=0)
PROMPT = "The quick brown fox jumps over the lazy dog."


def options(budget: str = "50%", **more: object) -> EngineOptions:
    return EngineOptions(expert_budget=budget, threads=1, ctx=256, **more)  # type: ignore[arg-type]


def text_of(engine: Engine, prompt: str = PROMPT, n: int = 24, **more: object) -> str:
    steps = list(engine.generate(prompt, sampling=GREEDY, max_tokens=n, **more))  # type: ignore[arg-type]
    return "".join(step.text for step in steps)


def hash_of(engine: Engine, prompt: str = PROMPT, n: int = 24) -> str | None:
    *_, last = engine.generate(prompt, sampling=GREEDY, max_tokens=n, logits_hash=True)
    return last.stats.logits_sha256


def test_the_hash_is_the_same_at_every_budget(tiny_model: TinyModel) -> None:
    path = tiny_model("bailingmoe")
    found = set()
    for budget in ("100%", "60%", "33%"):
        with Engine.open(path, options=options(budget)) as engine:
            found.add(hash_of(engine))

    assert 1 == len(found)
    assert None not in found


def test_statistics_say_what_an_answer_cost(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        *_, last = engine.generate(PROMPT, sampling=GREEDY, max_tokens=9)
        found = last.stats.to_json("", "length")

    assert "length" == last.finish_reason
    assert 9 == found["usage"]["completion_tokens"]
    experts = found["experts"]
    assert "disk-ram" == experts["tier"]
    # 4 layers x 2 experts for each of 8 decoded tokens, and the prompt's last row in the last layer.
    assert 8 * 4 * 2 + 2 == experts["requests"]
    assert 0 <= experts["hits"] < experts["requests"]
    assert experts["uploaded_bytes"] > 0
    assert 0 < experts["residency"] < 0.5


def test_a_conversation_reuses_what_the_context_holds(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        messages = [Message("user", "Hello there")]
        answer = "".join(s.text for s in engine.chat(messages, sampling=GREEDY, max_tokens=4))
        messages += [Message("assistant", answer), Message("user", "And again")]
        *_, last = engine.chat(messages, sampling=GREEDY, max_tokens=4)

        assert last.stats.cached_tokens > 5
        assert last.stats.prompt_tokens > last.stats.cached_tokens


@pytest.mark.parametrize("family", ["qwen3moe", "qwen35moe"])  # the second cannot take tokens back
def test_an_answer_does_not_depend_on_what_was_asked_before(
    family: str, tiny_model: TinyModel
) -> None:
    with Engine.open(tiny_model(family), options=options()) as engine:
        expected = text_of(engine)
        text_of(engine, "Something else " * 5)

        assert expected == text_of(engine)


def test_stop_strings_end_an_answer_and_stay_out_of_it(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        whole = text_of(engine)
        stop = whole[6:9]

        steps = list(engine.generate(PROMPT, sampling=GREEDY, max_tokens=24, stop=[stop]))

    assert "stop" == steps[-1].finish_reason
    assert whole[: whole.index(stop)] == "".join(step.text for step in steps)


def test_another_thread_cancels_within_one_token(tiny_model: TinyModel) -> None:
    cancel = threading.Event()
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=100, cancel=cancel)
        seen = [next(steps), next(steps)]
        thread = threading.Thread(target=cancel.set)
        thread.start()
        thread.join()
        rest = list(steps)

        assert [None, None] == [step.finish_reason for step in seen]
        assert ["cancel"] == [step.finish_reason for step in rest]
        assert text_of(engine)  # the next request works


def test_an_interrupt_ends_an_answer_that_waits_for_a_slow_link(tiny_model: TinyModel) -> None:
    slow = options("33%", link="100kB/s")
    with Engine.open(tiny_model("qwen3moe"), options=slow) as engine:
        assert "link" == engine.info.tier
        timer = threading.Timer(0.3, engine.interrupt)
        timer.start()
        steps = list(engine.generate(PROMPT, sampling=GREEDY, max_tokens=200))

        assert "cancel" == steps[-1].finish_reason
        assert steps[-1].stats.completion_tokens < 200


def test_an_abandoned_generator_frees_the_engine(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        steps = engine.generate(PROMPT, sampling=GREEDY, max_tokens=50)
        next(steps)
        steps.close()  # type: ignore[attr-defined]

        assert text_of(engine)


def test_a_file_that_shrinks_ends_the_request_and_the_next_one_works(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    whole = tiny_model("qwen3moe").read_bytes()
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    with Engine.open(path, options=options("33%")) as engine:
        expected = text_of(engine)
        os.truncate(path, len(whole) // 2)

        with pytest.raises(SourceError) as caught:
            text_of(engine, "Other words bring other experts. " * 3)

        assert str(path) in str(caught.value)
        assert "layer " in str(caught.value)
        assert "offset " in str(caught.value)
        assert "\n" not in str(caught.value)
        path.write_bytes(whole)
        assert expected == text_of(engine)
        engine.check()


def test_a_read_error_mid_answer_ends_the_request_and_the_next_one_works(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_model("qwen3moe").read_bytes())
    with Engine.open(path, options=options("33%")) as engine:
        expected = text_of(engine)
        ours = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd) == str(path)]
        assert 1 == len(ours)
        kept = os.dup(ours[0])
        folder = os.open(tmp_path, os.O_RDONLY)
        steps = engine.generate(PROMPT * 2, sampling=GREEDY, max_tokens=100)
        next(steps)
        os.dup2(folder, ours[0])  # from here on every read fails with EISDIR

        with pytest.raises(SourceError, match="Is a directory"):
            list(steps)

        os.dup2(kept, ours[0])
        assert expected == text_of(engine)
        os.close(kept)
        os.close(folder)


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_opening_and_closing_leaves_no_thread_and_no_file_open(tiny_model: TinyModel) -> None:
    path = tiny_model("qwen3moe")

    def census() -> tuple[int, int]:
        files = [fd for fd in os.listdir("/proc/self/fd") if _target(int(fd)) == str(path)]
        return len(os.listdir("/proc/self/task")), len(files)

    with Engine.open(path, options=options()) as engine:
        text_of(engine)
    before = census()
    for _ in range(5):
        first = Engine.open(path, options=options("40%"))
        second = Engine.open(path, options=options("60%"))
        text_of(first)
        first.close()
        text_of(second)
        second.close()
        second.close()

    assert before == census()


def test_a_model_swap_gives_each_model_its_own_answer(tiny_model: TinyModel) -> None:
    answers = []
    for _ in range(2):
        for family in ("qwen3moe", "gemma4", "llama"):
            with Engine.open(tiny_model(family), options=options()) as engine:
                answers.append(hash_of(engine))

    assert answers[:3] == answers[3:]
    assert 3 == len(set(answers))


def test_a_dense_model_answers_without_slots(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("llama"), options=options("10%")) as engine:
        assert "dense" == engine.info.placement.kind
        assert text_of(engine)


def test_a_path_that_is_no_utf8_works(tiny_model: TinyModel, tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/mod\xe8le.gguf"
    with open(raw, "wb") as file:  # noqa: PTH123  # bytes path
        file.write(tiny_model("qwen3moe").read_bytes())

    with Engine.open(raw, options=options()) as engine:
        assert text_of(engine)


def test_what_cannot_work_is_refused_in_one_line(tiny_model: TinyModel, tmp_path: Path) -> None:
    good = tiny_model("qwen3moe")
    half = tmp_path / "half.gguf"
    half.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    nonsense = tmp_path / "nonsense.gguf"
    nonsense.write_bytes(b"this is no model at all, but long enough to have a header" * 10)
    cases: list[tuple[type[SpeculoeError], Path, EngineOptions]] = [
        (ModelError, tmp_path / "missing.gguf", options()),
        (ModelError, half, options()),
        (ModelError, nonsense, options()),
        (ModelError, tmp_path, options()),
        (BudgetError, good, options("1KiB")),
        (OptionError, good, options("much")),
        (OptionError, good, options("100%", link="1GB/s")),
    ]
    for kind, path, chosen in cases:
        with pytest.raises(kind) as caught:
            Engine.open(path, options=chosen)
        assert "\n" not in str(caught.value)


def test_a_prompt_that_does_not_fit_names_both_numbers(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        with pytest.raises(ContextError, match=r"has \d{3,} tokens, the context holds 256"):
            engine.generate("far too long " * 200)
        with pytest.raises(ContextError, match="empty"):
            engine.generate([])


def test_an_answer_ends_where_the_context_does(tiny_model: TinyModel) -> None:
    with Engine.open(tiny_model("qwen3moe"), options=options()) as engine:
        *_, last = engine.generate(PROMPT, sampling=Sampling(temp=0))

    assert last.finish_reason in ("length", "stop")
    assert last.stats.prompt_tokens + last.stats.completion_tokens <= 256


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [("2GB/s", 2e9, 0.0), ("1GiB/s,10us", 2.0**30, 1e-5), ("500 kB/s, 2 ms", 5e5, 2e-3)],
)
def test_links_are_read_as_written(text: str, rate: float, latency: float) -> None:
    link = parse_link(text)

    assert (rate, pytest.approx(latency)) == (link.rate, link.latency)


@pytest.mark.parametrize("text", ["fast", "2GB", "0GB/s", "1..2GB/s", "2GB/s,soon", "-1GB/s"])
def test_links_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_link(text)


@pytest.mark.parametrize(
    "wrong",
    [{"mode": "fast"}, {"source": "tape"}, {"device": "abacus"}, {"ctx": 0}, {"threads": -1}],
)
def test_options_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        EngineOptions(**wrong)  # type: ignore[arg-type]
