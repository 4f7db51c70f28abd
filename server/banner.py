"""What the person who started the server sees: address, key, progress of the models, and a line to try."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from engine import ANSWERS, SETTLED
from engine.pool.compiled import compiler
from server.terminal import HEARTH, time_left

if TYPE_CHECKING:
    from engine import Engine, ModelHealth, ModelInfo

_CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
# What to try, by a model's first capability: the path, the fields, and where the answer goes.
_REQUESTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/chat/completions", _CHAT, ""),
    "image_generation": ("/images/generations", {"prompt": "a red circle", "response_format": "url"}, ""),
    "speech": ("/audio/speech", {"input": "Hello, world."}, " -o hello.mp3"),
}

_COUNTDOWN_SECONDS = 1.0


class Banner:
    """Prints to stdout: bars on a terminal, a line per change elsewhere. The key is printed once, here."""

    def __init__(
        self, base_url: str, outside_url: str | None, first_key: str | None, *, make_key: str, remark: str | None = None
    ) -> None:
        """`make_key`: the command that makes a key; `remark`: what else whoever starts it should know."""
        self._base_url = base_url
        self._outside_url = outside_url
        self._first_key = first_key
        self._make_key = make_key
        self._remark = remark
        self._console = Console(highlight=False, soft_wrap=True)
        self._said: dict[str, str] = {}
        self._bars = Progress(
            TextColumn("  {task.description:<16}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self._console,
        )

    async def follow(self, engine: Engine) -> None:
        """Greet, show the models coming up, and say when all is ready; then report what changes."""
        self._greet()
        tasks = {health.id: self._bars.add_task(health.id, total=1.0, phase="", left="") for health in engine.health()}
        if self._console.is_terminal:
            self._bars.start()
        announced = False
        while True:
            for health in engine.health():
                task = tasks[health.id]
                left = time_left(health.remaining_seconds)
                self._bars.update(task, completed=health.progress, phase=health.phase, left=left)
                self._report(health)
            settled = all(health.status in SETTLED for health in engine.health())
            if settled and not announced:
                announced = True
                self.close()
                self._announce(engine)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_COUNTDOWN_SECONDS if self._bars.live.is_started else None):
                    await engine.wait_for_change()

    def draining(self, running: int, seconds: float) -> None:
        """Say that the server is ending."""
        requests = "1 running request has" if running == 1 else f"{running} running requests have"
        self._say(
            f"Shutting down: {requests} up to {seconds:.0f} s. A second signal ends at once."
            if running
            else "Shutting down."
        )

    def close(self) -> None:
        """Stop drawing."""
        self._bars.stop()

    def _greet(self) -> None:
        self._say(f"\nHearth listens. Base URL: {self._base_url}")
        if self._outside_url is not None:
            self._say(f"From other machines: {self._outside_url}")
        if self._remark is not None:
            self._say(self._remark)
        if self._first_key is not None:
            self._say(f"API key (admin, shown once, keep it): {self._first_key}")
        self._say("Loading the models:")

    def _report(self, health: ModelHealth) -> None:
        """One line per new phase where bars cannot be drawn, and afterwards everywhere."""
        if self._said.get(health.id) == health.phase:
            return
        self._said[health.id] = health.phase
        if not self._bars.live.is_started:
            left = time_left(health.remaining_seconds)
            self._say(f"  {health.id}: {health.phase}{f' ({left})' if left else ''}")

    def _announce(self, engine: Engine) -> None:
        models = engine.models()
        usable = [model for model in models if model.status in ANSWERS]
        if not usable:
            self._say("No model could be loaded; the lines above say why.")
            return
        demos = [model.id for model in models if model.demo]
        if demos:
            self._say(
                f"On tiny demo models, which know a few dozen sentences and plain shapes: {', '.join(demos)}. For real "
                f"ones: `{HEARTH} plan` shows what fits this machine, and scripts/download-weights fetches it "
                "(docs/weights.md; voices: docs/voices.md)."
            )
        if engine.uncompiled and compiler() is not None:
            self._say(
                f"Faster on this CPU once compiled: {', '.join(engine.uncompiled)}. `{HEARTH} compile` does it, in a "
                "minute or two for each, for the next start."
            )
        failed = len(models) - len(usable)
        self._say(f"Ready, but for {failed} of {len(models)} models, see above. Try:" if failed else "Ready. Try:")
        self._say(f"\n{self._curl(usable, engine)}\n")
        if self._first_key is None:
            self._say(f"(HEARTH_KEY: a key of yours. Make one with: {self._make_key})\n")

    def _curl(self, usable: list[ModelInfo], engine: Engine) -> str:
        """A request to try: a question if any model chats, else whatever the first one does."""
        model = next((one for one in usable if "chat" in one.capabilities), usable[0])
        kind = next(kind for kind in _REQUESTS if kind in model.capabilities)
        path, fields, rest = _REQUESTS[kind]
        voices = [voice.id for voice in engine.voices(model.id)]
        body = json.dumps({"model": model.id, **fields, **({"voice": voices[0]} if voices else {})})
        key = self._first_key or "$HEARTH_KEY"
        return (
            f'curl {self._base_url}{path} -H "Authorization: Bearer {key}" '
            f"-H 'Content-Type: application/json' -d '{body}'{rest}"
        )

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False)
        sys.stdout.flush()
