"""The trainer of all demo models: what makes a run repeatable, optimizers, learning rates, and the one loop.

What is learned is the recipes' business: step after step they yield losses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from transformers.utils.logging import disable_progress_bar

SEED = 7

_log = logging.getLogger(__name__)


def repeatable(threads: int, *, flush_denormal: bool) -> None:
    """The same machine makes the same bytes again; with another number of `threads` it adds up in another order."""
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flush_denormal)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(SEED)
    disable_progress_bar()


def train(
    about: str, steps: int, losses: Iterator[Iterable[Any]], schedules: list[LRScheduler], clipped: Iterable[Any] = ()
) -> None:
    """Take the first `steps` of `losses`; the parts of a step add up. The optimizers are those of `schedules`.

    The gradients of `clipped` are brought to a norm of at most 1.
    """
    clipped = list(clipped)
    for step, parts in zip(range(1, steps + 1), losses, strict=False):
        for schedule in schedules:
            schedule.optimizer.zero_grad()
        loss = 0.0
        for part in parts:
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(clipped, 1.0)
        for schedule in schedules:
            schedule.optimizer.step()
            schedule.step()
        if step % 100 == 0 or step == steps:
            _log.info("%s: step %d of %d, loss %.4f.", about, step, steps, loss)


class Muon(torch.optim.Muon):  # type: ignore[misc]
    """Takes filters, too: such a one is a matrix with a row for each of its outputs, in the same memory."""

    def __init__(self, weights: list[Any], rate: float) -> None:
        self._weights = weights
        self._flat = [torch.nn.Parameter(weight.data.view(weight.shape[0], -1)) for weight in weights]
        super().__init__(self._flat, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")

    def step(self, closure: Any = None) -> Any:
        for flat, weight in zip(self._flat, self._weights, strict=True):
            flat.grad = None if weight.grad is None else weight.grad.view(flat.shape)
            weight.grad = None
        return super().step(closure)


def optimizers(model: Any, matrix_rate: float, other_rate: float) -> list[Any]:
    """Muon for matrices and filters of the layers, AdamW for embeddings and norms: half the steps of AdamW alone."""
    inner: list[Any] = []
    others: list[Any] = []
    for name, weight in model.named_parameters():
        (inner if weight.ndim in {2, 4} and "embed" not in name else others).append(weight)
    return [Muon(inner, matrix_rate), torch.optim.AdamW(others, lr=other_rate, weight_decay=0.0, betas=(0.9, 0.98))]


def one_cycle(optimizer: Any, steps: int, warmup_share: float, *, cycle_momentum: bool = False) -> LRScheduler:
    """From a low rate up to the optimizer's, and down to nearly zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, rates, steps, pct_start=warmup_share, cycle_momentum=cycle_momentum)


def plateau(optimizer: Any, steps: int, steady_share: float) -> LRScheduler:
    """The optimizer's rate for a share of the steps, then down to nearly zero in a straight line."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1.0, (1 - step / steps) / (1 - steady_share) + 0.01))
