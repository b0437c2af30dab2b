"""What the dense model does on calibration text: FFN inputs, and how much an error in each output matters.

Needs the extra `train` (torch). Knows nothing about experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from speculoe_local.convert import dense_torch
from speculoe_local.convert.dense_torch import DenseModel

_BATCH = 2


@dataclass(frozen=True, slots=True)
class Observation:
    """Per layer: `inputs` float16 [T, D], normed FFN inputs; `metric` float32 [D, D].

    For a small change d of the layer's FFN output, d @ metric @ d is the expected squared change of the
    log-likelihood (the Fisher information of the output, averaged over tokens).
    """

    inputs: tuple[Tensor, ...]
    metric: tuple[Tensor, ...]


def observe(
    model: DenseModel,
    windows: NDArray[np.integer],
    *,
    fisher_windows: int,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Observation:
    """Run `model` over token `windows` [W, T]; the first `fisher_windows` are run backwards too."""
    ids = torch.from_numpy(windows.astype(np.int64))
    seen: list[list[Tensor]] = [[] for _ in model.layers]
    width = model.embedding.shape[1]
    metric = [torch.zeros(width, width) for _ in model.layers]
    torch.manual_seed(seed)
    for at in range(0, len(ids), _BATCH):
        batch = ids[at : at + _BATCH]
        if at < fisher_windows:
            _run_both_ways(model, batch, seen, metric)
        else:
            with torch.no_grad():
                dense_torch.forward(model, batch, _watching(model, seen))
        if progress is not None:
            progress(min(1.0, (at + _BATCH) / len(ids)))
    tokens = min(len(ids), -(-fisher_windows // _BATCH) * _BATCH) * ids.shape[1]
    return Observation(
        inputs=tuple(torch.cat(pieces) for pieces in seen),
        metric=tuple(total / tokens for total in metric),
    )


def neuron_energy(
    model: DenseModel, observation: Observation, index: int, every: int = 1
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Inputs [T, D] of layer `index` and each neuron's energy [T, N] there, for every `every`-th token.

    Energy is the metric's length of what the neuron adds to the layer's output.
    """
    layer = model.layers[index]
    inputs = observation.inputs[index][::every].float()
    with torch.no_grad():
        active = dense_torch.neurons(layer, inputs.to(model.dtype)).float()
        down = layer.ffn_down.float()
        weight = ((observation.metric[index] @ down) * down).sum(0)
        energy = active.pow(2) * weight
    return inputs.numpy(), energy.numpy()


def _watching(model: DenseModel, seen: list[list[Tensor]]) -> dense_torch.Ffn:
    dense = dense_torch.dense_ffn(model)

    def ffn(index: int, x: Tensor) -> Tensor:
        seen[index].append(x.detach().reshape(-1, x.shape[-1]).half())
        return dense(index, x)

    return ffn


def _run_both_ways(
    model: DenseModel, batch: Tensor, seen: list[list[Tensor]], metric: list[Tensor]
) -> None:
    watching = _watching(model, seen)
    outputs: list[Tensor] = []

    def ffn(index: int, x: Tensor) -> Tensor:
        # Weights are frozen, so the first layer's input starts the graph.
        output = watching(index, x if x.requires_grad else x.requires_grad_())
        output.retain_grad()
        outputs.append(output)
        return output

    scores = dense_torch.logits(model, dense_torch.forward(model, batch, ffn)).flatten(0, 1)
    # Labels drawn from the model itself make this the Fisher information, whatever the text.
    drawn = torch.distributions.Categorical(logits=scores.detach()).sample()
    torch.nn.functional.cross_entropy(scores, drawn, reduction="sum").backward()
    for index, output in enumerate(outputs):
        assert output.grad is not None
        gradient = output.grad.reshape(-1, output.shape[-1])
        metric[index] += gradient.T @ gradient
