"""Logits of a model with all experts resident and no hook, and of the engine, at equal batch shape."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from speculoe_local.runtime import placement
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.slots import ExpertSlots, SlotStats

Logits = npt.NDArray[np.float32]
PROMPT = "The quick brown fox jumps over the lazy dog, and then asks why the sky is blue. "


@contextmanager
def opened(
    path: Path, budget: str, shape: Shape, **slot_options: object
) -> Iterator[tuple[Context, ExpertSlots | None, Model]]:
    """A context over `path`; with slots when the budget asks for them."""
    found = ModelMap.read(path)
    placed = placement.plan(found, placement.parse_budget(budget))
    slotted = placed.kind == "slotted"
    with closing(Model(found.files[0], lazy_experts=slotted, repack=True)) as model:
        slots = None
        if slotted:
            options = {"source": "buffered"} | slot_options
            slots = ExpertSlots(found, placed, **options)  # type: ignore[arg-type]
        with closing(Context(model, shape)) as context:
            if slots is not None:
                slots.attach(context.handle)
            try:
                yield context, slots, model
            finally:
                if slots is not None:
                    slots.check()
                    slots.detach(context.handle)
        if slots is not None:
            slots.close()


def answer(context: Context, prompt: Sequence[int], n_tokens: int) -> Logits:
    """Logits [n_tokens, n_vocab] of a prompt and its greedy continuation."""
    rows: list[Logits] = []
    past = 0
    pending = list(prompt)
    for _ in range(n_tokens):
        for at in range(0, len(pending), context.n_batch):
            part = pending[at : at + context.n_batch]
            assert 0 == context.decode(part, past)
            past += len(part)
        rows.append(context.logits().copy())
        pending = [int(rows[-1].argmax())]
    return np.stack(rows)


def run(
    path: Path, budget: str, shape: Shape, n_tokens: int = 12, **slot_options: object
) -> tuple[Logits, SlotStats]:
    with opened(path, budget, shape, **slot_options) as (context, slots, model):
        prompt = model.vocab.tokenize(PROMPT)
        return answer(context, prompt, n_tokens), slots.stats() if slots else SlotStats()
