"""How a loaded model and its answers look from outside. Values from values; nothing is measured here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from speculoe_local.runtime.opened import Opened
from speculoe_local.runtime.slots import SlotStats
from speculoe_local.runtime.stats import Stats, exactness
from speculoe_local.server.batching.answers import Answer
from speculoe_local.server.jobs import BackendInfo, LaneView, ModelEntry

__all__ = ["experts_of", "info_of", "lane_view"]


def info_of(opened: Opened, entry: ModelEntry, parallel: int) -> BackendInfo:
    """What a dialect may say about a loaded model."""
    quality = opened.quality
    cost = exactness(opened.mode, rounded=opened.rounded)
    if opened.mode != "exact":
        measured = (
            f"KL {quality.kl:.4f} nats, top-1 {quality.top1:.1%}" if quality else "unmeasured"
        )
        cost += f": {measured}"
    return BackendInfo(
        entry=replace(entry, loaded=True),
        n_ctx=opened.context.n_ctx,
        n_parallel=parallel,
        mode=opened.mode,
        exactness=cost,
        tier=opened.tier,
        residency=opened.placed.residency,
        budget_bytes=opened.placed.used_bytes,
        load_s=opened.load_s,
        loaded_at=time.time(),
    )


def experts_of(opened: Opened, answer: Answer, spent: SlotStats) -> Mapping[str, Any]:
    """The `experts` object of `chat --json`; `spent` is what the slots did while the answer ran."""
    placed = opened.placed
    quality = opened.quality
    prompt_s, predicted_s = answer.seconds
    stats = Stats(
        prompt_tokens=answer.n_prompt,
        cached_tokens=answer.place.cached,
        completion_tokens=answer.n_predicted,
        load_s=opened.load_s,
        ttft_s=prompt_s,
        decode_s=predicted_s,
        tier=opened.tier,
        budget_bytes=placed.used_bytes,
        n_slots=placed.slots,
        residency=placed.residency,
        experts_per_token=sum(layer.n_expert_used for layer in opened.model_map.layers),
        predictor=opened.predictor,
        mode=opened.mode,
        kl=quality.kl if quality else None,
        top1=quality.top1 if quality else None,
        rounded=opened.rounded,
        slots=spent,
    )
    found: Mapping[str, Any] = stats.to_json("", "")["experts"]
    return found


def lane_view(lane: int, answer: Answer | None, held: int) -> LaneView:
    """`held` tokens of the answer, prompt included, are in the KV."""
    if answer is None:
        return LaneView(lane)
    return LaneView(
        lane,
        answer.ticket.id,
        answer.job,
        n_prompt=answer.n_prompt,
        n_past=held,
        n_decoded=answer.n_predicted,
    )
