"""The training loop of the demo models that talk, and the measure of how safely they know their answers."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

if TYPE_CHECKING:
    from engine.demo.chat.lessons import Lesson, Lessons

STEPS_PER_ROUND = 10
WARMUP_STEPS = 15
PADDED_TOKENS_PER_GROUP = 3000

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """How long and how fast a model learns.

    Muon for the matrices of the layers, AdamW for embeddings and norms: half the steps of AdamW alone.
    """

    rounds: int = 46
    matrix_learning_rate: float = 5e-3
    embedding_learning_rate: float = 8e-3


def train(model: Any, lessons: Lessons, pace: Pace) -> None:
    """Train in place, on the rounds that `lessons` draws; the learning rate ends near zero."""
    steps = pace.rounds * STEPS_PER_ROUND
    schedules = [one_cycle(optimizer, steps) for optimizer in optimizers(model, pace)]
    started, started_cpu = time.monotonic(), time.process_time()
    for round_number in range(1, pace.rounds + 1):
        drawn = lessons.draw_round()
        loss = 0.0
        for first in range(STEPS_PER_ROUND):
            model.zero_grad()
            loss += _backward(model, drawn[first::STEPS_PER_ROUND]) / STEPS_PER_ROUND
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for schedule in schedules:
                schedule.optimizer.step()
                schedule.step()
        if round_number % 5 == 0 or round_number == pace.rounds:
            _log.info(
                "Round %d of %d, loss %.3f, after %.0f seconds (%.0f of CPU time).",
                *(round_number, pace.rounds, loss, time.monotonic() - started, time.process_time() - started_cpu),
            )


def margins(model: Any, drawn: list[Lesson]) -> list[float]:
    """How far the right token leads the next best, in logits, at the worst place of each answer; in any order."""
    found: list[float] = []
    with torch.no_grad():
        for group in _groups(drawn):
            logits, labels = _logits(model, group)
            logits = logits.float()
            right = logits.gather(1, labels[:, None])[:, 0]
            others = logits.scatter(1, labels[:, None], float("-inf")).amax(dim=1)
            leads = (right - others).split([len(lesson.answer) for lesson in group])
            found += [lead.min().item() for lead in leads]
    return found


def optimizers(model: Any, pace: Pace) -> list[Any]:
    named = list(model.named_parameters())
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=pace.matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=pace.embedding_learning_rate, weight_decay=0.0, betas=(0.9, 0.98)),
    ]


def one_cycle(optimizer: Any, steps: int) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer,
        optimizer.param_groups[0]["lr"],
        total_steps=steps,
        pct_start=WARMUP_STEPS / steps,
        cycle_momentum=False,
    )


def _backward(model: Any, drawn: list[Lesson]) -> float:
    """Add the gradients of one step and return its mean loss per answer token."""
    answer_tokens = sum(len(lesson.answer) for lesson in drawn)
    mean = 0.0
    for group in _groups(drawn):
        logits, labels = _logits(model, group)
        loss = cross_entropy(logits, labels, reduction="sum") / answer_tokens
        loss.backward()
        mean += loss.item()
    return mean


def _groups(drawn: list[Lesson]) -> list[list[Lesson]]:
    """Lessons of similar length together, so that little is computed on padding."""
    groups: list[list[Lesson]] = []
    for lesson in sorted(drawn, key=len):
        group = groups[-1] if groups else []
        similar = group and len(lesson) <= 1.3 * len(group[0]) + 4
        if similar and len(lesson) * (len(group) + 1) <= PADDED_TOKENS_PER_GROUP:
            group.append(lesson)
        else:
            groups.append([lesson])
    return groups


def _logits(model: Any, group: list[Lesson]) -> tuple[Any, Any]:
    """Logits [answer tokens, vocabulary] and the right tokens [answer tokens] of a group of lessons.

    Padding stands on the right, where a causal model does not look, so no mask is needed. The output matrix is
    applied to answer positions only: it is a good part of a model this small.
    """
    longest = max(map(len, group))
    ids = torch.full((len(group), longest), model.config.pad_token_id)
    asked = torch.zeros((len(group), longest), dtype=torch.bool)
    for row, lesson in enumerate(group):
        ids[row, : len(lesson)] = torch.tensor(lesson.prompt + lesson.answer)
        asked[row, len(lesson.prompt) - 1 : len(lesson) - 1] = True
    pictures = [picture for lesson in group for picture in lesson.pictures]
    seen = {"pixel_values": torch.stack(pictures)[None]} if pictures else {}
    hidden = model.model(input_ids=ids, use_cache=False, **seen).last_hidden_state
    return model.lm_head(hidden[asked]), ids[:, 1:][asked[:, :-1]]
