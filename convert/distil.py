"""Routers and gains trained end to end: the MoE's next-token distribution against the dense model's.

Starts from a split, moves no neuron. The picks are discrete, so the forward pass uses them as they are
and the backward pass sees a sigmoid around the threshold between the last picked and the first left-out
score; the gates' softmax is differentiable as it is. Needs the extra `train` (torch).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from speculoe_local.convert import dense_torch
from speculoe_local.convert.dense_torch import DenseModel
from speculoe_local.convert.split import Split

# Width of the sigmoid that stands for a pick in the backward pass, in standard deviations of the scores.
PICK_WIDTH = 0.25
# Factor exp(-4.5) on scores of rows of unit size: gates start almost uniform and may grow apart.
FIRST_LOG_SCALE = -4.5
_WARM_STEPS = 10
_SKIPPED = 4  # the first tokens of a window have no context to speak of


@dataclass(frozen=True, slots=True)
class Rates:
    """Peak learning rates of Adam for unit-scale router rows, gains, and the routers' log scales."""

    router: float = 0.006
    gain: float = 0.002
    log_scale: float = 0.02


class _Student:
    """The MoE as seen by autograd: the dense model's weights in the split's order, and what is trained."""

    def __init__(self, model: DenseModel, split: Split) -> None:
        self._model, self._split = model, split
        self._layers = [_reordered(model, split, index) for index in range(split.n_layers)]
        router = torch.from_numpy(split.router.copy())
        size = router.pow(2).mean((1, 2), keepdim=True).sqrt()
        self.router = torch.nn.Parameter(router / size)
        self.log_scale = torch.nn.Parameter(torch.full((split.n_layers,), FIRST_LOG_SCALE))
        order = np.concatenate([split.shared, split.experts.reshape(split.n_layers, -1)], axis=1)
        self._order = order.astype(np.int64)
        gain = np.take_along_axis(split.down_gain, self._order, axis=1)
        self.gain = torch.nn.Parameter(torch.from_numpy(gain.copy()))

    def ffn(self, index: int, x: Tensor) -> Tensor:
        layer, split = self._layers[index], self._split
        gates = pick_gates(x @ self.router[index].T, self.log_scale[index].exp(), split.used)
        always = torch.ones(*x.shape[:-1], split.n_shared)
        factor = torch.cat([always, gates.repeat_interleave(split.expert_width, -1)], -1)
        active = dense_torch.neurons(layer, x.to(self._model.dtype))
        weighted = active * (factor * self.gain[index]).to(active.dtype)
        return (weighted @ layer.ffn_down.T).float()

    def trained(self) -> Split:
        """The split with the present routers and gains."""
        gain = np.empty_like(self._split.down_gain)
        np.put_along_axis(gain, self._order, self.gain.detach().numpy(), axis=1)
        router = self.router.detach() * self.log_scale.detach().exp()[:, None, None]
        return replace(self._split, router=router.numpy().astype(np.float32), down_gain=gain)


def pick_gates(scores: Tensor, scale: Tensor, used: int) -> Tensor:
    """Factors [..., E] on the experts' outputs: `used` times the renormalised softmax, 0 where not picked.

    Left-out experts have a gradient through the sigmoid of their distance to the threshold.
    """
    edge = scores.topk(used + 1, -1).values[..., used - 1 : used + 1]
    threshold = edge.mean(-1, keepdim=True).detach()
    picked = (scores > threshold).float()
    spread = scores.detach().std(-1, keepdim=True).clamp_min(1e-6)
    soft = torch.sigmoid((scores - threshold) / (PICK_WIDTH * spread))
    weights = torch.softmax(scores * scale, -1)
    weights = weights / (weights * picked).sum(-1, keepdim=True) * used
    return weights * (picked + soft - soft.detach())


def distil(
    model: DenseModel,
    split: Split,
    windows: NDArray[np.integer],
    *,
    steps: int,
    rates: Rates | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> Split:
    """Train `split`'s routers and gains for `steps` windows of token ids `windows` [W, T], in their order.

    Minimises KL(dense || MoE) per token, in nats; `progress` gets the step and its loss. Windows are used
    again when there are fewer than steps. Returns a new split.
    """
    rates = rates or Rates()
    student = _Student(model, split)
    peaks = {
        student.router: rates.router,
        student.gain: rates.gain,
        student.log_scale: rates.log_scale,
    }
    groups = [{"params": [parameter], "lr": peak} for parameter, peak in peaks.items()]
    optimiser = torch.optim.Adam(groups, betas=(0.95, 0.98))
    teacher = dense_torch.dense_ffn(model)
    for step in range(steps):
        share = min(1.0, (step + 1) / _WARM_STEPS) * max(0.05, 1 - step / steps)
        for group, peak in zip(optimiser.param_groups, peaks.values(), strict=True):
            group["lr"] = peak * share
        ids = torch.from_numpy(windows[step % len(windows)][None].astype(np.int64))
        with torch.no_grad():
            target = _log_probabilities(model, ids, teacher)
        guess = _log_probabilities(model, ids, student.ffn)
        loss = (target.exp() * (target - guess)).sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if progress is not None:
            progress(step + 1, float(loss.detach()))
    return student.trained()


def _log_probabilities(model: DenseModel, ids: Tensor, ffn: dense_torch.Ffn) -> Tensor:
    hidden = dense_torch.forward(model, ids, ffn)[:, _SKIPPED:]
    return functional.log_softmax(dense_torch.logits(model, hidden), -1)


def _reordered(model: DenseModel, split: Split, index: int) -> dense_torch.Layer:
    layer = model.layers[index]
    order = np.concatenate([split.shared[index], split.experts[index].reshape(-1)])
    at = torch.from_numpy(order.astype(np.int64))
    return replace(
        layer,
        ffn_gate=layer.ffn_gate[at].contiguous(),
        ffn_up=layer.ffn_up[at].contiguous(),
        ffn_down=layer.ffn_down[:, at].contiguous(),
    )
