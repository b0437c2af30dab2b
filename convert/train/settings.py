"""What may be chosen about training. Knows no torch, so that asking for help needs none."""

from __future__ import annotations

from dataclasses import dataclass

from speculoe_local.runtime.errors import OptionError

__all__ = ["Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """`epochs` at most, over all rows to learn from; `rank` of adapters; the network's width is
    n_embd / `narrow`, and `expand` times that inside; `alone` it estimates logits as in the paper,
    otherwise what its base lacks; `dropped` is the share of inputs that each step does without (with
    all of them, 43,000 tokens of the embedded model are learned by heart). `rate` is Adam's highest, `batch` in rows. Same
    `seed` and threads, same result. Raises OptionError for a number below its least."""

    epochs: int = 8
    rank: int = 64
    narrow: int = 4
    expand: int = 4
    alone: bool = False
    dropped: float = 0.3
    seed: int = 0
    rate: float = 1e-3
    batch: int = 1024

    def __post_init__(self) -> None:
        for name in ("epochs", "rank", "narrow", "expand", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}; 1 is the least")
        if self.seed < 0:
            raise OptionError(f"seed is {self.seed}; 0 is the least")
