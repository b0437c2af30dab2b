"""What calibration adds up: expert outputs and normal equations over a group of layers, then scores.

Knows records of layers and pure arithmetic; nothing of text, files or llama.cpp. All sums live in one
dictionary of arrays, by block and name, so that whoever holds it can save them and go on later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from speculoe_local.convert.ridge import Normal, solve
from speculoe_local.runtime.capture import LayerRecord
from speculoe_local.runtime.gate import Gate
from speculoe_local.runtime.modelmap import ModelMap
from speculoe_local.runtime.sidecar import mean_output, with_delta

__all__ = ["Arrays", "Learn", "Link", "Score", "groups"]

Arrays = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]

MEASURED: Final = ("residual", "quasi-hidden", "ridge", "previous-token")
_HALF_MAX: Final = float(np.finfo(np.float16).max)
_WEIGHS_INPUT: Final = frozenset(("llama4",))  # weights an expert's input instead of its output


@dataclass(frozen=True, slots=True)
class Link:
    """MoE layer `target` and the one before it, which predicts it, unless there is a `reason` why not.

    `gate` is the target's router, None only with a reason.
    """

    source: int | None
    target: int
    gate: Gate | None
    reason: str = ""

    @property
    def usable(self) -> Gate | None:
        return None if self.reason else self.gate


def groups(model: ModelMap, links: Sequence[Link], memory_bytes: int) -> list[list[int]]:
    """All MoE layers in order, in groups whose sums fit into `memory_bytes`; at least one each."""
    sources = {link.source for link in links if link.usable is not None}
    parts: list[list[int]] = []
    room = 0
    for layer in model.layers:
        vectors = layer.n_expert * (model.n_embd + 2)
        side = model.n_embd + 1
        equations = 2 * side * (side + model.n_expert) if layer.index in sources else 0
        cost = 8 * (vectors + equations)
        if not parts or cost > room:
            parts.append([])
            room = memory_bytes
        parts[-1].append(layer.index)
        room -= cost
    return parts


class Learn:
    """A pass over calibration text: default vectors of the layers in `group`, and estimators for the
    layers that those predict."""

    def __init__(
        self, model: ModelMap, group: Collection[int], links: Sequence[Link], arrays: Arrays
    ) -> None:
        self._n_expert = {layer.index: layer.n_expert for layer in model.layers}
        self._n_embd = model.n_embd
        self._weighs_input = model.architecture in _WEIGHS_INPUT
        self._group = frozenset(group)
        self._next = {
            link.source: link
            for link in links
            if link.source in self._group and link.usable is not None
        }
        self._by_target = {link.target: link for link in self._next.values()}
        self._arrays = arrays
        self._phase = ""
        self._before: tuple[int, Floats] | None = None

    @property
    def blocks(self) -> frozenset[int]:
        """The layers whose records `take` needs."""
        return self._group | frozenset(self._by_target)

    @property
    def outputs(self) -> frozenset[int]:
        """Those whose records need the experts' outputs."""
        return self._group

    def begin(self, window: int, n_windows: int) -> None:
        """What follows is window number `window` of `n_windows`."""
        # The first eighth gives default vectors alone, the last eighth chooses the penalty.
        eighth = n_windows // 8
        checks = max(eighth, 1) if n_windows > 1 else 0
        self._before = None
        self._phase = "fit"
        if window < eighth:
            self._phase = ""
        elif window >= n_windows - checks:
            self._phase = "check"

    def take(self, record: LayerRecord) -> None:
        before, self._before = self._before, None
        link = self._by_target.get(record.block)
        if link is not None and link.gate is not None and before and before[0] == link.source:
            self._regress(link.gate, before[1], record)
        if record.block not in self._group:
            return
        if self._phase and record.block in self._next and record.residual is not None:
            self._before = (record.block, self._quasi(record))
        self._add(record)

    def finish(self) -> None:
        """Turn the sums of the group into what the sidecar holds of them, and drop the sums."""
        for block in sorted(self._group):
            self._settle(block)
        for link in self._by_target.values():
            fit, check = (self._equations(phase, link.target) for phase in ("fit", "check"))
            if (found := solve(fit, check)) is not None:
                self._arrays[f"{link.target}.delta_w"] = _halves(found[0])
                self._arrays[f"{link.target}.delta_b"] = found[1].astype(np.float32)
            for phase in ("fit", "check"):
                del self._arrays[f"{link.target}.{phase}.gram"]
                del self._arrays[f"{link.target}.{phase}.cross"]

    def _array(self, name: str, shape: tuple[int, ...], kind: type[Any] = np.float64) -> Any:
        if name not in self._arrays:
            self._arrays[name] = np.zeros(shape, kind)
        return self._arrays[name]

    def _equations(self, phase: str, target: int) -> Normal:
        d, m = self._n_embd, self._n_expert[target]
        return Normal(
            self._array(f"{target}.{phase}.gram", (d + 1, d + 1)),
            self._array(f"{target}.{phase}.cross", (d + 1, m)),
        )

    def _sums(self, block: int) -> tuple[Any, Any]:
        n = self._n_expert[block]
        return self._array(f"{block}.sums", (n, self._n_embd)), self._array(f"{block}.mass", (n,))

    def _quasi(self, record: LayerRecord) -> Floats:
        sums, mass = self._sums(record.block)
        return quasi_hidden(record, sums / np.maximum(mass, _TINY)[:, None])

    def _regress(self, gate: Gate, q: Floats, record: LayerRecord) -> None:
        x = gate.normed(q)
        # Who is picked depends on a token's logits relative to each other, yet a few tokens spread theirs
        # a hundred times wider than others and would decide the fit alone.
        spread = record.logits.std(axis=1)
        weights = 1 / (spread + (np.median(spread) or np.float32(1)))
        self._equations(self._phase, record.block).add(
            x, record.logits - x @ gate.router.T, weights.astype(np.float32)
        )

    def _add(self, record: LayerRecord) -> None:
        if record.outputs is None:
            return
        n = self._n_expert[record.block]
        ids = record.ids.ravel()
        order = np.argsort(ids, kind="stable")
        experts, starts, counts = np.unique(ids[order], return_index=True, return_counts=True)
        outputs = record.outputs.reshape(len(ids), -1)[order]
        sums, mass = self._sums(record.block)
        sums[experts] += np.add.reduceat(outputs, starts, axis=0)
        if self._weighs_input:
            mass[experts] += np.add.reduceat(record.weights.ravel()[order], starts)
        else:
            mass[experts] += counts
        self._array(f"{record.block}.counts", (n,), np.int64)[experts] += counts
        if record.shared is not None:
            self._array(f"{record.block}.shared", (self._n_embd,))[...] += record.shared.sum(axis=0)
            self._array(f"{record.block}.rows", (1,))[...] += len(record.shared)

    def _settle(self, block: int) -> None:
        sums, mass = self._sums(block)
        self._array(f"{block}.counts", mass.shape, np.int64)
        self._arrays[f"{block}.default"] = _halves(sums / np.maximum(mass, _TINY)[:, None])
        if f"{block}.shared" in self._arrays:
            mean = self._arrays.pop(f"{block}.shared") / self._arrays.pop(f"{block}.rows")
            self._arrays[f"{block}.shared_mean"] = mean.astype(np.float32)
        del self._arrays[f"{block}.sums"], self._arrays[f"{block}.mass"]


class Score:
    """A pass over held-out text: how often each of MEASURED names the experts of each layer."""

    def __init__(self, links: Sequence[Link], arrays: Arrays) -> None:
        self._links = {link.target: link for link in links}
        self._arrays = arrays
        self._before: LayerRecord | None = None
        self._estimators = {
            link.target: with_delta(
                link.gate,
                arrays.get(f"{link.target}.delta_w"),
                arrays.get(f"{link.target}.delta_b"),
            )
            for link in links
            if link.gate is not None
        }

    @property
    def blocks(self) -> frozenset[int]:
        return frozenset(self._links)

    @property
    def outputs(self) -> frozenset[int]:
        return frozenset()

    def begin(self, window: int, n_windows: int) -> None:
        self._before = None

    def take(self, record: LayerRecord) -> None:
        before, self._before = self._before, record
        self._count(record.block, "previous-token", record.ids[:-1], record.ids[1:])
        link = self._links[record.block]
        if (
            (gate := link.usable) is None
            or before is None
            or before.block != link.source
            or before.residual is None
        ):
            return
        x = gate.normed(quasi_hidden(before, self._arrays[f"{before.block}.default"]))
        guesses = {
            "residual": gate.route(gate.normed(before.residual)).ids,
            "quasi-hidden": gate.route(x).ids,
        }
        if (estimator := self._estimators[record.block]) is not None:
            guesses["ridge"] = estimator.route(x).ids
        for who, ids in guesses.items():
            self._count(record.block, who, ids, record.ids)

    def finish(self) -> None:
        """Nothing is left to do: `rates` reads the sums as they are."""

    def rates(self, block: int) -> tuple[dict[str, float], dict[str, float]]:
        """Recall, and precision of the most certain expert, of each predictor that was asked."""
        counts = {
            who: self._arrays[key]
            for who in MEASURED
            if (key := f"{block}.{who}") in self._arrays and self._arrays[key][0] > 0
        }
        recall = {who: float(found / wanted) for who, (_, wanted, found, _) in counts.items()}
        precision = {who: float(top / rows) for who, (rows, _, _, top) in counts.items()}
        return recall, precision

    def _count(self, block: int, who: str, guess: Ids, truth: Ids) -> None:
        """Add to rows, experts wanted, experts found, and rows whose first guess was wanted."""
        right = (guess[:, :, None] == truth[:, None, :]).any(axis=2)
        counts = (len(truth), truth.size, int(right.sum()), int(right[:, 0].sum()))
        self._arrays.setdefault(f"{block}.{who}", np.zeros(4, np.int64))[...] += counts


def quasi_hidden(record: LayerRecord, vectors: npt.NDArray[Any]) -> Floats:
    """q = r + d + s of a record whose residual is known: float32 [n, n_embd], not normed."""
    assert record.residual is not None
    q = record.residual + mean_output(vectors, record.ids, record.weights)
    return q if record.shared is None else q + record.shared


def _halves(values: npt.NDArray[Any]) -> npt.NDArray[np.float16]:
    clipped: npt.NDArray[np.float16] = np.clip(values, -_HALF_MAX, _HALF_MAX).astype(np.float16)
    return clipped


_TINY: Final = 1e-30  # stands for no weight at all, whose sum of outputs is 0
