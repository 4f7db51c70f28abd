"""Draws usage over time in a terminal: one line of bars for requests, one for tokens. Knows no database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.bar import Bar
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta

_LEVELS = "▁▂▃▄▅▆▇█"
_LABEL_WIDTH = 10


def bar(value: float, most: float) -> Bar:
    """Return a bar for a table's cell, full at `most`."""
    return Bar(max(most, 1), 0, value, color="cyan")


def charts(
    counts: Sequence[tuple[datetime, int, int]], span: tuple[datetime, datetime], step: timedelta, *, width: int
) -> list[Text]:
    """Draw (start, requests, tokens) of every `step` within `span`; times of which nothing is known are empty.

    Where there are more steps than columns, neighbours are added up.
    """
    first = min(span[0].replace(minute=0, second=0, microsecond=0), *(start for start, _, _ in counts))
    if step.days:
        first = first.replace(hour=0)
    steps = max(1, -((first - span[1]) // step))
    columns = max(1, min(steps, width - _LABEL_WIDTH - 20))
    requests, tokens = [0] * columns, [0] * columns
    for start, some_requests, some_tokens in counts:
        column = min((start - first) // step * columns // steps, columns - 1)
        requests[column] += some_requests
        tokens[column] += some_tokens
    shown = "%m-%d" if step.days else "%m-%d %H:00"
    ends = (first.strftime(shown), (first + (steps - 1) * step).strftime(shown))
    axis = ends[0] if columns <= sum(map(len, ends)) else ends[0] + ends[1].rjust(columns - len(ends[0]))
    return [_line("requests", requests), _line("tokens", tokens), Text(" " * _LABEL_WIDTH + axis, style="dim")]


def _line(name: str, values: Sequence[int]) -> Text:
    most = max(values)
    marks = "".join(" " if not value else _LEVELS[(value * len(_LEVELS) - 1) // most] for value in values)
    return Text.assemble(name.ljust(_LABEL_WIDTH), (marks, "cyan"), f"  most: {most:,}", no_wrap=True)
