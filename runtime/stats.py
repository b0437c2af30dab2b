"""What an answer cost, in the terms of the command-line contract. Values only, no measuring."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from speculoe_local.runtime.slots import SlotStats

__all__ = ["Stats", "Tier", "exactness"]

Tier = Literal["resident", "disk-ram", "ram-vram", "disk-ram-vram", "link"]


def exactness(mode: str, *, rounded: bool) -> str:
    """exact: the bits of a fully resident run; rounded: its sums, rounded otherwise; lossy: other sums."""
    return "lossy" if mode != "exact" else "rounded" if rounded else "exact"


@dataclass(frozen=True, slots=True)
class Stats:
    """One answer so far. Durations in seconds; `slots` counts from the answer's start.

    Where all experts are resident, every expert that was asked for counts as a hit. `kl` (nats) and
    `top1` are what `eval` measured of a lossy mode on this model; None in exact mode, or never measured.
    `rounded`: nothing is left out, but sums depend within rounding on where an expert was computed.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    load_s: float
    ttft_s: float
    decode_s: float
    tier: Tier
    budget_bytes: int
    n_slots: int
    residency: float
    experts_per_token: int
    predictor: str = "none"
    mode: str = "exact"
    kl: float | None = None
    top1: float | None = None
    rounded: bool = False
    slots: SlotStats = field(default_factory=SlotStats)
    logits_sha256: str | None = None

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; 0 before there is one."""
        return self.decode_s / (self.completion_tokens - 1) if self.completion_tokens > 1 else 0.0

    @property
    def exactness(self) -> str:
        """exact, rounded or lossy."""
        return exactness(self.mode, rounded=self.rounded)

    @property
    def requests(self) -> int:
        if self.tier != "resident":
            return self.slots.requests
        return self.experts_per_token * max(0, self.completion_tokens - 1)

    @property
    def hits(self) -> int:
        return self.slots.hits if self.tier != "resident" else self.requests

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requests if self.requests else 0.0

    def to_json(self, text: str, finish_reason: str) -> dict[str, Any]:
        """`usage`, `timings` and `experts` of `chat --json`, and `logits_sha256` when hashed."""
        fresh = self.prompt_tokens - self.cached_tokens
        tpot = self.tpot_s
        found: dict[str, Any] = {
            "usage": {
                "prompt_tokens": self.prompt_tokens,
                "completion_tokens": self.completion_tokens,
                "cached_tokens": self.cached_tokens,
            },
            "timings": {
                "load_s": round(self.load_s, 4),
                "ttft_s": round(self.ttft_s, 4),
                "prefill_tps": round(fresh / self.ttft_s, 2) if self.ttft_s else 0.0,
                "decode_tps": round(1 / tpot, 2) if tpot else 0.0,
                "tpot_ms": round(tpot * 1e3, 3),
            },
            "experts": {
                "tier": self.tier,
                "mode": self.mode,
                "exactness": self.exactness,
                "kl": None if self.kl is None else round(self.kl, 5),
                "top1": None if self.top1 is None else round(self.top1, 4),
                "budget_bytes": self.budget_bytes,
                "slots": self.n_slots,
                "residency": round(self.residency, 4),
                "predictor": self.predictor,
                "requests": self.requests,
                "hits": self.hits,
                "hit_rate": round(self.hit_rate, 4),
                "predicted": self.slots.predicted,
                "recall": round(self.slots.recall, 4),
                "recall_nonresident": round(self.slots.recall_nonresident, 4),
                "precision_nonresident": round(self.slots.precision_nonresident, 4),
                "uploaded_bytes": self.slots.uploaded_bytes,
                "wasted_bytes": self.slots.wasted_bytes,
                "cpu_experts": self.slots.cpu_experts,
                "stall_ms_per_token": round(self._stall_ms_per_token(), 3),
                "source": self.slots.source,
                "kernels": "repacked" if self.slots.repacked else "plain",
                "pinned": bool(self.slots.pinned),
                "uploads_overlap": bool(self.slots.overlaps),
            },
        }
        if self.logits_sha256 is not None:
            found["logits_sha256"] = self.logits_sha256
        return found

    def _stall_ms_per_token(self) -> float:
        return self.slots.stall_ns / 1e6 / max(1, self.completion_tokens)

    def _cost(self) -> str:
        if self.kl is None or self.top1 is None:
            return "never measured"
        return f"KL {self.kl:.3f}, top-1 {self.top1:.1%}"

    def line(self) -> str:
        """One line for a person."""
        parts = [f"{self.completion_tokens} tokens"]
        if self.tpot_s:
            parts.append(f"{1 / self.tpot_s:.1f} tokens/s")
        parts.append(f"first after {self.ttft_s:.2f} s")
        if self.mode != "exact":
            parts.append(f"lossy ({self.mode}, {self._cost()})")
        if self.slots.cpu_experts:
            missed = max(1, self.requests - self.hits)
            parts.append(f"{self.slots.cpu_experts / missed:.0%} of misses computed by the CPU")
        if self.cached_tokens:
            parts.append(f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens reused")
        if self.tier == "resident":
            parts.append("all experts resident" if self.experts_per_token else "no experts")
        else:
            parts.append(
                f"{self.residency:.0%} of experts resident, hit rate {self.hit_rate:.0%}, "
                f"stall {self._stall_ms_per_token():.1f} ms/token"
            )
        return ", ".join(parts)
