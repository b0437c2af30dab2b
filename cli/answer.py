"""One turn: ask the engine, show the answer while it grows, stop it on Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speculoe_local.cli.engine_thread import EngineThread, cancel_on_interrupt

if TYPE_CHECKING:
    from speculoe_local.cli.conversation import Conversation
    from speculoe_local.runtime import Engine, Stats

__all__ = ["Answer", "answer", "as_json", "logits_sha256"]


@dataclass(frozen=True, slots=True)
class Answer:
    """`finish_reason`: stop, length, or cancel when Ctrl-C stopped it and `text` is a part."""

    text: str
    finish_reason: str
    stats: Stats


def answer(
    thread: EngineThread,
    engine: Engine,
    conversation: Conversation,
    *,
    show: Callable[[str], None],
    stop: Sequence[str] = (),
    logits_hash: bool = False,
) -> Answer:
    """The answer to `conversation`, which it leaves as it is. `show` gets the text piece by piece.

    Raises what the engine raises, and `KeyboardInterrupt` at the second Ctrl-C.
    """
    cancel = threading.Event()
    parts: list[str] = []
    last = None
    with cancel_on_interrupt(cancel, engine.interrupt):
        steps = thread.stream(
            lambda: engine.chat(
                conversation.messages(),
                sampling=conversation.sampling,
                max_tokens=conversation.max_tokens,
                stop=stop,
                cancel=cancel,
                logits_hash=logits_hash,
            )
        )
        try:
            for step in steps:
                parts.append(step.text)
                show(step.text)
                last = step
        finally:
            # Also when showing failed: nobody reads on, so the engine need not either.
            cancel.set()
    assert last is not None, "the engine ended an answer without a step"
    assert last.finish_reason is not None, "the engine's last step has no finish_reason"
    return Answer("".join(parts), last.finish_reason, last.stats)


def as_json(model: str, given: Answer) -> dict[str, Any]:
    """The object of `chat --json`."""
    return {
        "model": model,
        "text": given.text,
        "finish_reason": given.finish_reason,
        **given.stats.to_json(given.text, given.finish_reason),
    }


def logits_sha256(given: Answer) -> str:
    """The hash asked for with `--logits-hash`."""
    return str(given.stats.to_json(given.text, given.finish_reason).get("logits_sha256", ""))
