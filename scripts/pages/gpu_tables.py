"""Writes the tables of docs/gpu.md anew from the plans: `.venv/bin/python scripts/pages/gpu_tables.py`.

The machines are those of tests/engine/golden_plans; tests/scripts/test_gpu_tables.py keeps the page true.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

from engine.config import Config, load_config
from engine.placement.hardware import Prefer, imagined
from engine.placement.plan import plan
from engine.placement.types import Placed, Plan

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu.md"
MACHINES = ("1x8", "1x12", "1x16", "1x22.5", "1x24", "1x32", "1x48", "1x80", "1x141", "2x24", "4x24", "8x80")
# A question with its answer, as people chat; agents send ten times as much.
CHAT_TOKENS = 4096
# Of people who chat, one in so many waits for an answer at any moment.
PEOPLE_PER_CHAT = 10
_HEAD = ("GPUs", "`service-plus`", "`service-pro`", "`service-image`", "short chats at once", "people")


def page(text: str, config: Config) -> str:
    """Return the page with its tables as they are now, each between its two comments."""
    for prefer in get_args(Prefer):
        made = f"<!-- {prefer} -->\n{table(config, prefer)}<!-- end -->"
        text = re.sub(rf"<!-- {prefer} -->\n.*?<!-- end -->", made, text, count=1, flags=re.DOTALL)
    return text


def table(config: Config, prefer: Prefer) -> str:
    """Return the plans of all machines as a table in Markdown; for `quality` only those that it changes."""
    plans = [_row(config, shape, prefer) for shape in MACHINES]
    if prefer == "quality":
        plans = [row for row, shape in zip(plans, MACHINES, strict=True) if row != _row(config, shape, "resident")]
    rows = [_HEAD, ("---",) * len(_HEAD), *plans]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(config: Config, shape: str, prefer: Prefer) -> tuple[str, ...]:
    found = plan(config, replace(imagined(shape), prefer=prefer))
    assert isinstance(found, Plan)  # noqa: S101  # the shipped models fit all of them
    count, size = shape.split("x")
    placed = {one.id: one for one in found.models}
    plus, pro, image = (placed[name] for name in ("service-plus", "service-pro", "service-image"))
    chats = [_short_chats(one) for one in (plus, pro)]
    people = min(chats) * PEOPLE_PER_CHAT if "swapped" in {plus.state, pro.state} else sum(chats) * PEOPLE_PER_CHAT
    cells = (f"{count}x{size}GiB", _model(plus), _model(pro), _model(image))
    return (*cells, " + ".join(map(str, chats)), str(people))


def _model(one: Placed) -> str:
    name = one.variant.id if one.variant else "the demo"
    context = f", {one.context_length // 1024}k" if one.context_length else ""
    engines = f", {len(one.replicas) + 1} engines" if one.replicas else ""
    return f"{name}{context}{engines}{'*' if one.state == 'swapped' else ''}"


def _short_chats(model: Placed) -> int:
    """Return how many short conversations run at the same time, on all engines of a model."""
    count = 0
    for one in (model, *model.replicas):
        if one.need is not None and one.need.cache is not None:
            room = one.need.cache.coarse().chats(one.kv_bytes, CHAT_TOKENS)
            count += max(1, min(room, one.sequences or one.need.sequences))
    return count


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), load_config(ROOT / "models.yaml")), encoding="utf-8")
