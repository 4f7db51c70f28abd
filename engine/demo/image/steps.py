"""One step of learning for the parts of the demo image model: Muon for matrices and filters, AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch

WARMUP_STEPS = 20
STEADY_SHARE = 0.45
"""Of all steps, usually; from there the learning rate falls to nearly zero."""


class Learning:
    """The optimizers of some modules and their learning rates over a known number of steps."""

    def __init__(
        self, model: Any, matrix_rate: float, other_rate: float, steps: int, steady_share: float = STEADY_SHARE
    ) -> None:
        self._steps, self._steady_share = steps, steady_share
        self.done = 0
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        inner = {name for name, weight in named if weight.ndim in {2, 4} and "embed" not in name}
        self._weights = [weight for _, weight in named]
        self._matrices = [weight for name, weight in named if name in inner]
        # Muon takes matrices only: a filter is one with a row for each of its outputs, in the same memory.
        self._flat = [torch.nn.Parameter(weight.data.view(weight.shape[0], -1)) for weight in self._matrices]
        others = [weight for name, weight in named if name not in inner]
        muon = torch.optim.Muon(self._flat, lr=matrix_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        adam = torch.optim.AdamW(others, lr=other_rate, weight_decay=0.0, betas=(0.9, 0.98))
        self._optimizers = [muon, adam]
        self._schedules = [torch.optim.lr_scheduler.LambdaLR(one, self._share) for one in self._optimizers]

    def _share(self, step: int) -> float:
        left = 1 - step / self._steps
        return min((step + 1) / WARMUP_STEPS, 1.0, left / (1 - self._steady_share) + 0.01)

    def step(self, loss: Any) -> None:
        """Learn from this loss."""
        for weight in self._weights:
            weight.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, 1.0)
        for flat, weight in zip(self._flat, self._matrices, strict=True):
            flat.grad = None if weight.grad is None else weight.grad.view(weight.shape[0], -1)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
        self.done += 1
