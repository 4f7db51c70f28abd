"""Makes the parts of docs/ that come from data: pictures, and the tables of docs/gpu.md.

`.venv/bin/python scripts/pages/figures.py` writes all: plots of docs/benchmarks.json, the memory of a 24 GiB card as
planned, the states of a model, each light or dark like the reader's system; and the plans of the machines of
tests/engine/golden_plans. tests/scripts/test_figures.py keeps them true. Terminals: tests/docs/test_recordings.py.
"""

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any, TypeAlias, get_args

from engine.config import Config, load_config
from engine.placement.hardware import GIB, Prefer, imagined
from engine.placement.plan import plan
from engine.placement.types import Placed, Plan

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Its title, its groups, and for each a value of each series.
Panel: TypeAlias = tuple[str, Sequence[str], Sequence[Sequence[float]]]
_STYLE = """\
  .page { fill: #ffffff } text { fill: #1c222b } .small { fill: #4a5361; font-size: 11.5px }
  .box { fill: #eef3fb; stroke: #2f5d9f; stroke-width: 1.5 }
  .arrow { fill: none; stroke: #38404c; stroke-width: 1.5 } .tip { fill: #38404c } .rare { stroke-dasharray: 5 4 }
  .c0 { fill: #d8572a } .c1 { fill: #5b8fc9 } .c2 { fill: #9aa3af } .axis { stroke: #c4cad3 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #1e2129 } text { fill: #e4e8ee } .small { fill: #aeb6c2 }
    .box { fill: #2a3344; stroke: #7fa8e0 } .arrow { stroke: #c4cad3 } .tip { fill: #c4cad3 }
    .c0 { fill: #e8743f } .c1 { fill: #4f7fb5 } .c2 { fill: #6b7380 } .axis { stroke: #4a5361 }
  }
"""
_TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
)


def svg(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="13">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_STYLE}</style>\n{_TIP}\n"
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f'<text{name} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: int) -> str:
    return f'<rect class="c{colour}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def bars(title: str, series: Sequence[str], panels: Sequence[Panel]) -> str:
    """Return panels of bars beside each other, with one legend."""
    wide, high = 300, 170
    parts: list[str] = []
    for number, name in enumerate(series):
        parts += [bar(24 + number * 170, 14, 12, 12, number), text(42 + number * 170, 25, name)]
    for number, (heading, groups, rows) in enumerate(panels):
        left, floor = 24 + number * (wide + 16), 70 + high
        most = max(map(max, rows))
        step = wide / len(groups)
        parts += [text(left, 56, heading), f'<path class="axis" d="M{left} {floor} h{wide}"/>']
        for place, (group, values) in enumerate(zip(groups, rows, strict=True)):
            width = (step - 12) / len(values)
            parts.append(text(left + place * step + step / 2 - 4, floor + 17, group, anchor="middle", kind="small"))
            for colour, value in enumerate(values):
                tall, x = value / most * (high - 24), left + place * step + colour * width
                parts.append(bar(x, floor - tall, width - 2, tall, colour))
                parts.append(
                    f'<text class="small" style="font-size:9px" text-anchor="middle" x="{x + width / 2 - 1:.1f}" '
                    f'y="{floor - tall - 4:.1f}">{value:g}</text>'
                )
    return svg(32 + len(panels) * (wide + 16), 100 + high, title, parts)


def chat_bars(measured: dict[str, Any]) -> str:

    def panel(title: str, name: str, prefix: str) -> Panel:
        rows = {str(row[0]): row[1:4] for row in measured[name]["rows"]}
        streams = ("1", "8", "32", "128")
        return title, streams, [rows[prefix + stream] for stream in streams]

    panels = (
        panel("First token, ms, by streams", "time_to_first_token_ms", ""),
        panel("Requests/s of 64 tokens", "requests_per_second", "streamed, "),
        panel("API CPU, ms per 1,000 tokens", "api_cpu_ms_per_1000_tokens", "streamed, "),
    )
    return bars("Streams beside vLLM's servers", ("Hearth", "vllm serve", "vLLM's Rust front end"), panels)


def image_bars(measured: dict[str, Any]) -> str:
    rows = measured["images"]["rows"]
    targets = ("steps joined", "requests joined", "one by one")
    cases = ("256x256, load 1.5", "512x512, load 1.5")

    def panel(title: str, column: int, scale: float) -> Panel:
        found = {(row[0], row[1]): float(row[column]) for row in rows}
        values = [[round(found[case, target] / scale, 1) for target in targets] for case in cases]
        return title, [case.partition(",")[0] for case in cases], values

    return bars("Images under load", targets, (panel("Images/s", 2, 1), panel("Wait, p95, s", 4, 1000)))


_PARTS = ("weights", "working memory", "KV cache")


def memory(gib: int) -> str:
    """Return the plans of one GPU, a line for each model."""
    config, scale, left = load_config(ROOT / "models.yaml"), 600 / gib, 24
    parts, y = [text(left + 190 * number + 18, 25, name) for number, name in enumerate(_PARTS)], 44
    parts += [bar(left + 190 * number, 14, 12, 12, number) for number in range(len(_PARTS))]
    for prefer in get_args(Prefer):
        placed = [one for one in _planned(config, f"1x{gib}", prefer) if one.gpus and one.need]
        parts.append(text(left, y + 16, f"HEARTH_PREFER={prefer}, one GPU of {gib} GiB"))
        y, x = y + 28, float(left)
        for one in sorted(placed, key=lambda one: one.state):  # "resident" comes before "swapped"
            parts += _segments(one, x, y, scale)
            before, wide = x > left + 300, one.device_bytes / GIB * scale
            words = f"{_name(one)}{', in turns' if one.state == 'swapped' else ''}"
            at = x - 6 if before else x + wide + 6
            parts.append(text(at, y + 16, words, anchor="end" if before else "start", kind="small"))
            x, y = x + wide if one.state == "resident" else x, y + 30
        parts.append(f'<path class="axis" d="M{left} {y + 4} h{gib * scale:.0f}"/>')
        y += 22
    return svg(900, y, f"Memory of one GPU of {gib} GiB", parts)


def _planned(config: Config, shape: str, prefer: Prefer) -> tuple[Placed, ...]:
    found = plan(config, replace(imagined(shape), prefer=prefer))
    assert isinstance(found, Plan)  # noqa: S101  # the shipped models fit all of them
    return found.models


def _name(one: Placed) -> str:
    return f"{one.id}: {one.variant.id if one.variant else 'demo'}, {one.device_bytes / GIB:.1f} GiB"


def _segments(one: Placed, x: float, y: float, scale: float) -> list[str]:
    need = one.need
    assert need is not None  # noqa: S101  # of models on a GPU
    sizes = (need.weights_bytes, one.device_bytes - need.weights_bytes - one.kv_bytes, one.kv_bytes)
    parts = []
    for colour, size in enumerate(sizes):
        parts.append(bar(x, y, max(0.0, size / GIB * scale - 1), 24, colour))
        x += size / GIB * scale
    return parts


_PLACES = {"unloaded": (30, 90), "loading": (360, 90), "ready": (690, 90), "failed": (360, 250), "sleeping": (690, 250)}
# From, to: the arrow, its label and where that is. Dashed arrows have none.
EDGES: dict[tuple[str, str], tuple[str, str, tuple[int, int] | None]] = {
    ("unloaded", "loading"): ("M150 105 H356", "a request, or a start", (253, 97)),
    ("loading", "unloaded"): ("M360 125 H154", "", None),
    ("loading", "ready"): ("M480 105 H686", "loaded", (583, 97)),
    ("ready", "loading"): ("M690 125 H484", "", None),
    ("loading", "failed"): ("M400 140 V246", "3 starts failed", (345, 190)),
    ("failed", "loading"): ("M440 250 V144", "reload", (465, 190)),
    ("ready", "sleeping"): ("M730 140 V246", "evicted, if RAM has room", (852, 222)),
    ("sleeping", "ready"): ("M770 250 V144", "a request", (812, 190)),
    ("ready", "unloaded"): ("M750 90 C750 20 90 20 90 86", "evicted, or unload_after_seconds", (420, 32)),
    ("ready", "failed"): ("M700 140 L484 252", "", None),
    ("failed", "unloaded"): ("M360 270 C220 270 110 220 110 144", "", None),
    ("sleeping", "failed"): ("M690 275 H484", "", None),
    ("sleeping", "loading"): ("M690 255 L470 144", "", None),
    ("sleeping", "unloaded"): ("M750 290 C750 345 70 345 70 144", "", None),
}


def states() -> str:
    parts = []
    for line, label, at in EDGES.values():
        kind = "arrow" if label else "arrow rare"
        parts.append(f'<path class="{kind}" marker-end="url(#tip)" d="{line}"/>')
        if at:
            parts.append(text(*at, label, anchor="middle", kind="small"))
    for name, (x, y) in _PLACES.items():
        parts.append(f'<rect class="box" x="{x}" y="{y}" width="120" height="50" rx="6"/>')
        parts.append(text(x + 60, y + 30, name, anchor="middle"))
    parts.append(text(30, 366, "Dashed: its process ended, its entry changed, or it was unloaded.", kind="small"))
    return svg(940, 380, "The states of a model", parts)


def pictures() -> dict[str, str]:
    """Return the content of each file in docs/."""
    measured = json.loads((DOCS / "benchmarks.json").read_text(encoding="utf-8"))
    return {
        "bench-chat.svg": chat_bars(measured),
        "bench-images.svg": image_bars(measured),
        "memory-24.svg": memory(24),
        "model-states.svg": states(),
    }


PAGE = DOCS / "gpu.md"
MACHINES = ("1x8", "1x12", "1x16", "1x22.5", "1x24", "1x32", "1x48", "1x80", "1x141", "2x24", "4x24", "8x80")
# A question with its answer, as people chat; agents send ten times as much.
CHAT_TOKENS = 4096
# One in so many people who chat waits for an answer at any moment.
PEOPLE_PER_CHAT = 10
_HEAD = ("GPUs", "`service-plus`", "`service-pro`", "`service-image`", "short chats at once", "people")


def page(written: str, config: Config) -> str:
    """Return the page with new tables, each between its two comments."""
    for prefer in get_args(Prefer):
        made = f"<!-- {prefer} -->\n{table(config, prefer)}<!-- end -->"
        written = re.sub(rf"<!-- {prefer} -->\n.*?<!-- end -->", made, written, count=1, flags=re.DOTALL)
    return written


def table(config: Config, prefer: Prefer) -> str:
    """Return the plans of all machines as a Markdown table; for `quality` only those that it changes."""
    plans = [_row(config, shape, prefer) for shape in MACHINES]
    if prefer == "quality":
        plans = [row for row, shape in zip(plans, MACHINES, strict=True) if row != _row(config, shape, "resident")]
    rows = [_HEAD, ("---",) * len(_HEAD), *plans]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(config: Config, shape: str, prefer: Prefer) -> tuple[str, ...]:
    count, size = shape.split("x")
    placed = {one.id: one for one in _planned(config, shape, prefer)}
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
    argparse.ArgumentParser(description=__doc__).parse_args()  # none but --help
    for name, drawn in pictures().items():
        (DOCS / name).write_text(drawn, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), load_config(ROOT / "models.yaml")), encoding="utf-8")
