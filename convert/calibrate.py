"""Calibrate a model: run text through it and write down what predicts its routers (the sidecar).

A pass reads all calibration windows and fills the sums of a *group* of layers: as many as fit into
`memory_bytes`, at least one. A model whose layers fit into one group (the embedded one takes 160 MB)
is read once, then its held-out windows once. Within a pass a layer's default vectors are means over the
windows so far: the first eighth feeds them alone, and the regression never sees a vector that its own
tokens made. Held-out windows measure what is written, after rounding.

Knows the order of things. Sums are `passes`', the regression is `ridge`'s, nodes of the graph are
`runtime.capture`'s, the file is `runtime.sidecar`'s.
"""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.convert import files
from speculoe_local.convert import texts as shipped
from speculoe_local.convert.passes import Arrays, Learn, Link, Score, groups
from speculoe_local.convert.perplexity import usable_cores
from speculoe_local.runtime.capture import Capture
from speculoe_local.runtime.errors import ModelError, OptionError
from speculoe_local.runtime.gating import Unpredictable, load_gates
from speculoe_local.runtime.header import shown
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import LayerCalibration, Sidecar, router_digest

__all__ = ["calibrate", "default_texts", "links", "partial_path"]

WINDOW: Final = 512  # tokens that see each other; also the ubatch
_WINDOWS: Final = 8  # with fewer tokens than so many windows, windows are shorter
_SHORTEST: Final = 16
_CHUNK: Final = 1 << 15  # characters of text that stay together when the order is drawn
_AMPLE: Final = 4  # times the tokens needed are enough to draw windows from
_SEED: Final = 20260319

# Why q = r + d + s is not what the next layer starts from, although the router reads an RMS norm.
NOT_SUMMED: Final[dict[str, str]] = {
    "afmoe": "it norms the sum of its experts before that joins the residual",
    "arctic": "its experts read the residual before attention, beside a dense network",
    "cohere2moe": "its experts run beside attention, on the residual before it",
    "gemma4": "it norms the sum of its experts before that joins the residual",
    "grok": "it norms the sum of its experts before that joins the residual",
}

Windows = npt.NDArray[np.int32]


def calibrate(
    model: Path,
    out: Path,
    *,
    texts: Sequence[str] | None = None,
    tokens: int = 16384,
    held_out: int = 4096,
    threads: int | None = None,
    progress: Callable[[float], None] | None = None,
    memory_bytes: int = 1 << 30,
    save_seconds: float = 30.0,
) -> Sidecar:
    """Calibrate `model` on `tokens` of `texts`, measure on `held_out` others, write `out`, return it.

    Without `texts` those of `default_texts` are taken; with less text than asked for, both shares
    shrink alike. `progress` gets the share done, 0 to 1. `memory_bytes` bounds the sums of one pass
    (see above). Every `save_seconds` they go to `partial_path(out)`: the same call goes on from there
    after an interruption, another one starts anew. `out` appears whole or not at all.

    Raises ModelError for a model without experts, OptionError when the texts fill no window,
    BackendError when llama.cpp refuses.
    """
    mapped = ModelMap.read(model)
    if not mapped.is_moe:
        raise ModelError(f"{shown(model)} has no experts to calibrate; name a MoE model")
    if min(tokens, held_out) < _SHORTEST:
        raise OptionError(
            f"{min(tokens, held_out)} tokens; {_SHORTEST} or more are needed to learn and to measure"
        )
    documents = list(default_texts() if texts is None else texts)
    text, routers = hashlib.sha256("\0".join(documents).encode()).hexdigest(), router_digest(mapped)
    chain = links(mapped)
    parts = groups(mapped, chain, memory_bytes)
    # Weights stay mapped from the file: a model larger than memory is slow here, not impossible.
    with closing(Model(mapped.files[0], lazy_experts=False, repack=False)) as loaded:
        window = min(WINDOW, max(_SHORTEST, tokens // _WINDOWS), loaded.n_ctx_train or WINDOW)
        learn, measure = _windows(loaded, documents, tokens, held_out, window)
        key = repr((mapped.fingerprint, routers, text, learn.shape, measure.shape, parts))
        run = _Run(
            model=loaded,
            shape=Shape(window, window, window, threads or usable_cores()),
            partial=partial_path(out),
            key=hashlib.sha256(key.encode()).hexdigest(),
            save_seconds=save_seconds,
            n_windows=len(parts) * len(learn) + len(measure),
            progress=progress,
        )
        run.resume()
        for stage in range(run.stage, len(parts)):
            sums = Learn(mapped, parts[stage], chain, run.arrays)
            run.feed(learn, sums, stage * len(learn))
        score = Score(chain, run.arrays)
        run.feed(measure, score, len(parts) * len(learn))
    sidecar = Sidecar(
        fingerprint=mapped.fingerprint,
        routers=routers,
        text_sha256=text,
        text_bytes=sum(len(document.encode()) for document in documents),
        tokens=learn.size,
        held_out=measure.size,
        layers=tuple(
            _layer(link, layer.n_expert_used / layer.n_expert, score, run.arrays)
            for link, layer in zip(chain, mapped.layers, strict=True)
        ),
    )
    sidecar.write(out)
    run.partial.unlink(missing_ok=True)
    return sidecar


def default_texts() -> tuple[str, ...]:
    """What ships with Python: its language reference and docstrings, 1 MB of English and code."""
    return shipped.python_topics().documents + shipped.python_docstrings().documents


def partial_path(out: Path) -> Path:
    """Where an unfinished calibration for `out` keeps its sums."""
    return out.with_name(out.name + ".partial.npz")


def links(model: ModelMap) -> list[Link]:
    """What predicts each MoE layer of `model`, in order, or why nothing does."""
    found: list[Link] = []
    gates = load_gates(model)
    source = None
    for layer in model.layers:
        loaded = gates[layer.index]
        gate = None if isinstance(loaded, Unpredictable) else loaded
        reason = ""
        if isinstance(loaded, Unpredictable):
            reason = loaded.reason
        elif model.architecture in NOT_SUMMED:
            reason = f"{model.architecture}: {NOT_SUMMED[model.architecture]}"
        elif source is None:
            reason = "no MoE layer comes before it"
        found.append(Link(source, layer.index, gate, reason))
        source = layer.index
    return found


def _windows(
    model: Model, documents: Sequence[str], tokens: int, held_out: int, window: int
) -> tuple[Windows, Windows]:
    """Windows [W, window] to learn from and others to measure on, from separate parts of the text."""
    rng = np.random.default_rng(_SEED)
    chunks = [doc[i : i + _CHUNK] for doc in documents for i in range(0, len(doc), _CHUNK)]
    stream: list[int] = []
    for chunk in rng.permutation(len(chunks)):
        stream += model.vocab.tokenize(chunks[chunk] + "\n\n", add_bos=False)
        if len(stream) >= _AMPLE * (tokens + held_out):
            break
    count = len(stream) // window
    tail = max(1, round(count * held_out / (tokens + held_out)))
    if count - tail < 1:
        raise OptionError(
            f"texts have {len(stream)} tokens, one window of {window} to learn from and one to measure "
            "on are needed; give more text"
        )
    windows = np.array(stream[: count * window], np.int32).reshape(count, window)
    if bos := model.vocab.tokenize("", add_bos=True)[:1]:
        windows[:, 0] = bos  # what models that want one were trained to see first
    learn, measure = (rng.permutation(part) for part in (windows[:-tail], windows[-tail:]))
    return learn[: max(1, tokens // window)], measure[: max(1, held_out // window)]


@dataclass(slots=True)
class _Run:
    """Windows through the model, stage by stage; `arrays` and where it stands can be saved."""

    model: Model
    shape: Shape
    partial: Path
    key: str
    save_seconds: float
    n_windows: int
    progress: Callable[[float], None] | None
    arrays: Arrays = field(default_factory=dict)
    stage: int = 0
    window: int = 0  # of the stage, those before it are done
    _saved: float = field(default_factory=time.monotonic)

    def feed(self, windows: Windows, sums: Learn | Score, before: int) -> None:
        """Feed `windows` to `sums`, from where this stage stands; `before` were fed in other stages."""
        capture = Capture(sums.blocks, sums.take, outputs=sums.outputs)
        with closing(Context(self.model, self.shape, watch=capture)) as context:
            for number in range(self.window, len(windows)):
                sums.begin(number, len(windows))
                capture.run(context, windows[number].tolist())
                self.window = number + 1
                self._after_window(before + number + 1)
        sums.finish()
        self.stage, self.window = self.stage + 1, 0

    def resume(self) -> None:
        """Go on from the partial file, if it is of this very calibration."""
        try:
            with self.partial.open("rb") as file, np.load(file, allow_pickle=False) as kept:
                arrays = {name: kept[name] for name in kept.files}
        except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
            return  # none, or one that was damaged: start anew
        if str(arrays.pop("key", "")) == self.key and "at" in arrays:
            self.stage, self.window = (int(number) for number in arrays.pop("at"))
            self.arrays.update(arrays)

    def _after_window(self, done: int) -> None:
        if time.monotonic() - self._saved >= self.save_seconds:
            with files.appearing(self.partial) as file:
                at = np.array([self.stage, self.window])
                everything: dict[str, Any] = {"key": np.array(self.key), "at": at, **self.arrays}
                np.savez(file, **everything)
            self._saved = time.monotonic()
        if self.progress is not None:
            self.progress(min(1.0, done / self.n_windows))


def _layer(link: Link, chance: float, score: Score, arrays: Arrays) -> LayerCalibration:
    recall, precision = score.rates(link.target)
    recall["chance"] = chance
    strategy, reason = "none", link.reason
    if not reason and "quasi-hidden" not in recall:
        reason = f"layer {link.source} shows no RMS norm of a residual before its router"
    predictable = not reason
    if predictable:
        strategy = "ridge" if recall.get("ridge", 0) > recall["quasi-hidden"] else "quasi-hidden"
        floor = max(recall.get("previous-token", 0), chance)
        if recall[strategy] <= floor:
            reason = f"{strategy} recalls {recall[strategy]:.3f}, no prediction at all {floor:.3f}"
            strategy = "none"
    block = link.target
    return LayerCalibration(
        block=block,
        default_vectors=arrays[f"{block}.default"],
        counts=arrays[f"{block}.counts"],
        shared_mean=arrays.get(f"{block}.shared_mean"),
        source=link.source,
        delta_w=arrays.get(f"{block}.delta_w"),
        delta_b=arrays.get(f"{block}.delta_b"),
        recall=recall,
        precision_top1=precision,
        strategy=strategy,
        predictable=predictable,
        reason=reason,
    )
