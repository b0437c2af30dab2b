"""Train a model's estimators and put the best predictor of each layer into its sidecar.

1. Calibration text, in windows: most to learn from, an eighth of them to say when to stop; others, which
   neither this nor the calibration of the same text learned from, to measure on.
2. Windows of the first two kinds go through the model; what predicts each router goes to the disk.
3. Where there are more tokens than the sidecar's ridge estimators had, they are fitted anew. Adapters
   and the network are trained (torch).
4. The held-out windows go through the model. What is measured is what the sidecar will hold, after
   rounding. A layer takes the predictor with the best recall, and of equals the one that costs least.

Knows the order of things. Pairs are `spool`'s, torch is `adapter`'s and `network`'s, counts are `score`'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.convert import calibrate as calibration
from speculoe_local.convert.perplexity import usable_cores
from speculoe_local.convert.ridge import Normal, normal, solve
from speculoe_local.convert.train.score import Score
from speculoe_local.convert.train.settings import Settings
from speculoe_local.convert.train.spool import Pairs, spool
from speculoe_local.runtime.capture import Capture, LayerRecord
from speculoe_local.runtime.errors import BackendError, ModelError, OptionError
from speculoe_local.runtime.estimators import BASES, TRAINED, Training, rounded
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.header import shown
from speculoe_local.runtime.llama import Context, Model, Shape
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import LayerCalibration, Sidecar

__all__ = ["best_strategy", "train_estimators"]

_SHORTEST: Final = 16  # tokens of a window
_WINDOWS: Final = 8  # with fewer tokens than so many windows, windows are shorter
_CHUNK: Final = 4096  # rows added to normal equations together
_NOISE: Final = 0.003  # standard error of a layer's recall on the default number of held-out tokens

Windows = npt.NDArray[np.int32]
Progress = Callable[[float], None]


def train_estimators(
    model: Path,
    sidecar: Sidecar,
    out: Path,
    *,
    texts: Sequence[str] | None = None,
    tokens: int = 16384,
    kinds: Collection[str] = TRAINED,
    settings: Settings | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Sidecar:
    """Train `kinds` of TRAINED for `model` on `tokens` of `texts`, write `out`, return it.

    `sidecar` is the model's, from calibration: its default vectors are used, and its text decides what is
    held out, as much as it held out. What it has of kinds that are not asked for stays and is measured
    again. `progress` gets the share done, 0 to 1. `out` appears whole or not at all.

    Raises BackendError without torch or when llama.cpp refuses, ModelError when no layer can be
    predicted, OptionError for a kind that is not known, and for text or disk that does not suffice.
    """
    settings = settings or Settings()
    unknown = sorted(set(kinds) - set(TRAINED))
    if unknown or not kinds:
        raise OptionError(f"kinds {', '.join(unknown) or 'none'}; give one or more of adapter, mlp")
    _need_torch()
    mapped = ModelMap.read(model)
    predicted = [layer.block for layer in sidecar.layers if layer.predictable]
    if not predicted:
        raise ModelError(
            f"{shown(model)} has no layer that can be predicted; nothing can be trained"
        )
    documents = list(calibration.default_texts() if texts is None else texts)
    chain = calibration.links(mapped)
    report = _Report(progress)
    with closing(Model(mapped.files[0], lazy_experts=False, repack=False)) as loaded:
        learn, check, test = _windows(loaded, documents, tokens, sidecar)
        run = _Pass(loaded, learn.shape[1], threads or usable_cores(), [x.target for x in chain])
        vectors = {layer.block: layer.default_vectors for layer in sidecar.layers}
        rows = learn.size + check.size
        with spool(chain, vectors, predicted, rows, out.parent) as kept:
            run.feed(
                np.concatenate([learn, check]),
                lambda number: kept.begin(number * learn.shape[1]),
                kept.take,
                report.stage(0.0, 0.45),
            )
            gates = {link.target: gate for link in chain if (gate := link.usable) is not None}
            trained = replace(
                sidecar, quality={}, layers=_ridge(sidecar, gates, kept.pairs, learn.size)
            )
            with _torch_threads(threads or usable_cores()):
                part = report.stage(0.45, 0.85)
                trained = _train(trained, gates, kept.pairs, learn.size, kinds, settings, part)
        asked = {block: predictors(trained, block, gates[block]) for block in predicted}
        score = Score(chain, vectors, asked)
        run.feed(test, lambda _: score.begin(), score.take, report.stage(0.85, 1.0))
    trained = replace(
        trained,
        layers=tuple(_measured(layer, score) for layer in trained.layers),
        training=Training(
            text_sha256=hashlib.sha256("\0".join(documents).encode()).hexdigest(),
            tokens=learn.size,
            validation=check.size,
            held_out=test.size,
            seed=settings.seed,
        ),
    )
    trained.write(out)
    return trained


def predictors(sidecar: Sidecar, block: int, gate: Gate) -> dict[str, Gate]:
    """All that `sidecar` has to predict layer `block`, whose router is `gate`, the cheapest first."""
    made = {who: sidecar.gate(block, gate, who) for who in (*BASES, *TRAINED)}
    return {who: asked for who, asked in made.items() if asked is not None}


def best_strategy(recall: Mapping[str, float]) -> str:
    """The predictor with the best recall; of equals the one that costs least. The network, tens of times
    a router's work, must win by more than noise."""
    known = [who for who in (*BASES, *TRAINED) if who in recall]
    return max(known, key=lambda who: recall[who] - (_NOISE if who == "mlp" else 0.0))


@dataclass(frozen=True, slots=True)
class _Report:
    """Turns the share done of a stage into the share done of all."""

    progress: Progress | None

    def stage(self, begin: float, end: float) -> Progress:
        def update(share: float) -> None:
            if self.progress is not None:
                self.progress(begin + (end - begin) * min(1.0, share))

        return update


@dataclass(frozen=True, slots=True)
class _Pass:
    """Windows of `window` tokens through the model, with the records of `blocks`."""

    model: Model
    window: int
    threads: int
    blocks: Sequence[int]

    def feed(
        self,
        windows: Windows,
        begin: Callable[[int], None],
        take: Callable[[LayerRecord], None],
        progress: Progress,
    ) -> None:
        """`begin` gets the number of each window before `take` gets its records."""
        capture = Capture(self.blocks, take)
        shape = Shape(self.window, self.window, self.window, self.threads)
        with closing(Context(self.model, shape, watch=capture)) as context:
            for number, tokens in enumerate(windows):
                begin(number)
                capture.run(context, tokens.tolist())
                progress((number + 1) / len(windows))


def _windows(
    model: Model, documents: Sequence[str], tokens: int, sidecar: Sidecar
) -> tuple[Windows, Windows, Windows]:
    """Windows to learn from, to say when to stop, and to measure on.

    The text is cut as calibration cuts it, for no fewer tokens than that took and as many held out: of
    the same text, what is held out here lies behind all that was learned from there.
    """
    most = model.n_ctx_train or calibration.WINDOW
    window = min(calibration.WINDOW, max(_SHORTEST, tokens // _WINDOWS), most)
    learn, test = calibration._windows(
        model,
        documents,
        max(tokens, sidecar.tokens + window),
        max(sidecar.held_out, window),
        window,
    )
    learn = learn[: max(2, tokens // window)]
    if len(learn) < 2:
        raise OptionError(
            f"texts have {learn.size} tokens to learn from, {2 * window} are needed; give more text"
        )
    n_check = max(1, len(learn) // 8)
    return learn[:-n_check], learn[-n_check:], test


def _ridge(
    sidecar: Sidecar, gates: Mapping[int, Gate], pairs: Mapping[int, Pairs], n_train: int
) -> tuple[LayerCalibration, ...]:
    """The layers, with estimators fitted anew where that takes in more tokens than calibration had."""
    n_rows = len(next(iter(pairs.values())).x)
    if n_rows <= sidecar.tokens:
        return sidecar.layers
    layers = []
    for layer in sidecar.layers:
        if layer.block in pairs:
            found = _solved(gates[layer.block], pairs[layer.block], n_train)
            if found is not None:
                w, b = rounded(found[0]), found[1].astype(np.float32)
                layer = replace(_without_ridge(layer), delta_w=w, delta_b=b)
        layers.append(layer)
    return tuple(layers)


def _without_ridge(layer: LayerCalibration) -> LayerCalibration:
    """`layer` without what was trained for its ridge estimator, which goes."""
    if layer.adapter is not None and layer.adapter.base == "ridge":
        layer = replace(layer, adapter=None)
    if layer.mlp_base == "ridge":
        layer = replace(layer, embedding=None, mlp_scale=1.0, mlp_base="none")
    return layer


def _solved(gate: Gate, pairs: Pairs, n_train: int) -> tuple[Any, Any] | None:
    """The ridge estimator of pairs: what is added to the router [n_expert, n_embd] and its bias."""
    sums: list[Normal] = []
    for begin, end in ((0, n_train), (n_train, len(pairs.x))):
        part = normal(gate.n_embd, gate.n_expert)
        for at in range(begin, end, _CHUNK):
            rows = slice(at, min(at + _CHUNK, end))
            x, logits = np.asarray(pairs.x[rows], np.float32), pairs.logits[rows]
            # As `passes.Learn` does: a few tokens spread their logits a hundred times wider.
            spread = logits.std(axis=1)
            weights = 1 / (spread + (np.median(spread) or np.float32(1)))
            part.add(x, logits - x @ gate.router.T, weights.astype(np.float32))
        sums.append(part)
    found = solve(sums[0], sums[1])
    return None if found is None else found[:2]


def _train(
    sidecar: Sidecar,
    gates: Mapping[int, Gate],
    pairs: Mapping[int, Pairs],
    n_train: int,
    kinds: Collection[str],
    settings: Settings,
    progress: Progress,
) -> Sidecar:
    """`sidecar` with trained estimators of `kinds`, each on the better of its bases."""
    from speculoe_local.convert.train.adapter import fit_adapter, loss_of
    from speculoe_local.convert.train.descent import Base, Target
    from speculoe_local.convert.train.network import fit_mlp

    targets: dict[int, Target] = {}
    bases: dict[int, Base] = {}
    layers = {layer.block: layer for layer in sidecar.layers}
    report, share = _Report(progress), 0.4 if "mlp" in kinds else 1.0
    for number, block in enumerate(pairs):
        gate = gates[block]
        targets[block] = Target.of(pairs[block], n_train, gate.gating, gate.bias)
        made = {who: sidecar.gate(block, gate, who) for who in BASES}
        known = [Base.of(who, base) for who, base in made.items() if base is not None]
        bases[block] = min(known, key=lambda base: loss_of(targets[block], base))
        if "adapter" in kinds:
            adapter = fit_adapter(targets[block], bases[block], settings, block)
            layers[block] = replace(layers[block], adapter=adapter)
        progress(share * (number + 1) / len(pairs))
    if "mlp" not in kinds:
        return replace(sidecar, layers=tuple(layers.values()))
    if settings.alone:
        bases = {block: Base.of("none", gates[block]) for block in pairs}
    n_expert = max(len(layer.counts) for layer in sidecar.layers)
    net = fit_mlp(targets, bases, n_expert, settings, report.stage(share, 1.0))
    for block in pairs:
        layers[block] = replace(
            layers[block],
            embedding=net.embeddings[block],
            mlp_scale=net.scales[block],
            mlp_base=bases[block].name,
        )
    return replace(sidecar, mlp=net.shared, layers=tuple(layers.values()))


def _measured(layer: LayerCalibration, score: Score) -> LayerCalibration:
    """`layer` with the rates of the held-out text and the strategy that they name."""
    recall, precision = score.rates(layer.block)
    chance = layer.recall.get("chance", 0.0)
    recall["chance"] = chance
    if not layer.predictable:
        return replace(layer, recall=recall, precision_top1=precision)
    strategy, reason = best_strategy(recall), ""
    floor = max(recall.get("previous-token", 0.0), chance)
    if recall[strategy] <= floor:
        reason = f"{strategy} recalls {recall[strategy]:.3f}, no prediction at all {floor:.3f}"
        strategy = "none"
    return replace(layer, recall=recall, precision_top1=precision, strategy=strategy, reason=reason)


def _need_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        raise BackendError(
            f"training needs the package {error.name}, which is not installed; "
            "run `pip install 'speculoe-local[train]'`"
        ) from error


@contextmanager
def _torch_threads(n: int) -> Iterator[None]:
    """Torch computes with `n` threads inside, and with as many as before afterwards."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
