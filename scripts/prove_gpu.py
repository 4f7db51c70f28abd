"""Proves a machine: every model of the plan is loaded, asked, measured, compared with its plan, and killed once.

Writes proof.json and proof.md. Each step says what it saw; one that fails says why, and the others go on. It works on
any machine: without a GPU, and where nothing was fetched, it is a rehearsal with the demo models.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.load import BenchError, load_generator
from bench.servers import Server, model_entries, open_workspace, say, start_hearth

from engine.placement.hardware import GIB, read_hardware
from engine.placement.report import headline

ROOT = Path(__file__).parents[1]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# A white square of 64 pixels, as PNG.
SQUARE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAXklEQVR4nO3PMQ0AMAzAsPInvYLYYVWK"
    "ESTzjhsd8KsBrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BrQGtAa0BbQHKU9LC7/CP1AAAAABJRU5ErkJggg=="
)
_RESTART_SECONDS = 300.0


@dataclass
class Step:
    """One thing that was tried. `figures` are numbers with their unit in the name, or short words."""

    name: str
    passed: bool = True
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass
class Proof:
    """All steps on one machine."""

    machine: str
    driver: str | None
    began_at: str
    rehearsal: bool
    steps: list[Step] = field(default_factory=list)

    async def try_step(self, name: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Do one step; whatever it raises is its problem, and no other step's."""
        say(name)
        step, begun = Step(name), time.monotonic()
        try:
            step.figures = await work()
        except Exception as error:  # noqa: BLE001  # the report says what it was
            step.passed, step.problem = False, f"{type(error).__name__}: {error}"
        step.seconds = round(time.monotonic() - begun, 2)
        self.steps.append(step)


async def prove(given: argparse.Namespace) -> Proof:
    """Run all steps. Raises `BenchError` where no server could be started."""
    hardware = read_hardware()
    names = list(model_entries(given.models))
    weights = given.weights_dir if given.weights_dir.is_dir() else None
    now = datetime.now(UTC).isoformat(timespec="seconds")
    proof = Proof(headline(hardware), hardware.driver, now, rehearsal=not hardware.gpus)
    with open_workspace(given.models, names[0], weights, beside=names[1:]) as place:
        server = await start_hearth(place)
        try:
            await proof.try_step("start: all models answer or await their turn", partial(_ready, server))
            with load_generator(place.environment, place.log("load")) as server.generator:
                for name in names:
                    await _prove_model(proof, server, name, given)
            await proof.try_step("memory: planned and used", partial(_memory, server))
            await proof.try_step("kill -9 of a chat engine", partial(_killed, server))
        finally:
            await server.stop()
    return proof


async def _prove_model(proof: Proof, server: Server, name: str, given: argparse.Namespace) -> None:
    model = _of(await _get(server, "/v1/models"), name)
    capabilities = set(model["capabilities"])
    if "chat" in capabilities:
        await proof.try_step(f"{name}: plain and streamed answers agree", partial(_agree, server, name))
        await proof.try_step(f"{name}: JSON by a schema", partial(_schema, server, name))
        if "function_calling" in capabilities:
            await proof.try_step(f"{name}: a forced call", partial(_call, server, name))
        if "vision" in capabilities:
            await proof.try_step(f"{name}: a picture", partial(_picture, server, name))
        for streams in (1, given.streams):
            await proof.try_step(f"{name}: {streams} streams", partial(_speed, server, name, streams))
    if "image_generation" in capabilities:
        for size in (512, 1024):
            for count in (1, 4):
                await proof.try_step(f"{name}: {count} x {size}", partial(_images, server, name, size, count))
    for capability, (what, work) in _OTHERS.items():
        if capability in capabilities:
            await proof.try_step(f"{name}: {what}", partial(work, server, name))
    await proof.try_step(f"{name}: leaves and comes back", partial(_returns, server, name, capabilities))


def _of(listed: Any, name: str) -> Any:
    return next(one for one in listed["data"] if one["id"] == name)


async def _get(server: Server, path: str) -> Any:
    return _answer(path, await asyncio.to_thread(server.ask, path))


async def _post(server: Server, path: str, body: dict[str, Any]) -> Any:
    return _answer(path, await asyncio.to_thread(server.ask, path, body))


def _answer(path: str, answer: tuple[int, bytes]) -> Any:
    status, body = answer
    if status != 200:
        raise BenchError(f"{path} was answered with {status}: {body[:300].decode(errors='replace')}")
    return json.loads(body)


async def _ready(server: Server) -> dict[str, Any]:
    await server.ready()
    return {"states": await server.states()}


def _question(name: str, **more: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": "What is the capital of France?"}
    return {"model": name, "messages": [asked], "temperature": 0, "max_tokens": 400, **more}


async def _chat(server: Server, body: dict[str, Any]) -> Any:
    return (await _post(server, "/v1/chat/completions", body))["choices"][0]


async def _agree(server: Server, name: str) -> dict[str, Any]:
    whole = (await _chat(server, _question(name)))["message"]
    _, events = await asyncio.to_thread(server.ask, "/v1/chat/completions", _question(name, stream=True))
    lines = [line[6:] for line in events.decode().splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    if streamed != (whole["content"] or ""):
        raise BenchError(f"streamed {streamed[:200]!r}, plain {whole['content']!r}")
    return {"answer": streamed[:80], "thinks": bool(whole.get("reasoning_content"))}


async def _schema(server: Server, name: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "letters": {"type": "integer"}},
        "required": ["city", "letters"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    found = json.loads((await _chat(server, _question(name, response_format=wanted)))["message"]["content"])
    if found["city"] not in {"Paris", "Rome"} or not isinstance(found["letters"], int):
        raise BenchError(f"no such object: {found}")
    return {"city": found["city"]}


async def _call(server: Server, name: str) -> dict[str, Any]:
    (call,) = (await _chat(server, _question(name, tools=[WEATHER], tool_choice="required")))["message"]["tool_calls"]
    if set(json.loads(call["function"]["arguments"])) != {"city"}:
        raise BenchError(f"other arguments: {call['function']['arguments'][:200]}")
    return {"arguments": call["function"]["arguments"][:80]}


async def _picture(server: Server, name: str) -> dict[str, Any]:
    content = [
        {"type": "image_url", "image_url": {"url": SQUARE}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    said = await _chat(server, _question(name, messages=[{"role": "user", "content": content}]))
    return {"answer": (said["message"]["content"] or "")[:80]}


async def _speed(server: Server, name: str, streams: int) -> dict[str, Any]:
    """Measure two answers of each stream; a job ends with the first that is no success."""
    server.model = name
    job = server.chat(f"{name}-{streams}-{time.monotonic_ns()}", 128, streams=streams, requests=2 * streams)
    result, usage = await server.measure(job)
    return {
        "requests_per_second": round(len(result.answers) / result.wall_seconds, 2),
        "tokens_per_second": round(result.tokens / result.wall_seconds, 1),
        "api_cpu_seconds": round(usage.api_cpu_seconds, 1),
    }


async def _images(server: Server, name: str, size: int, count: int) -> dict[str, Any]:
    body = {"model": name, "prompt": "a red square", "size": f"{size}x{size}", "n": count, "seed": 1}
    begun = time.monotonic()
    made = await _post(server, "/v1/images/generations", body)
    if len(made["data"]) != count:
        raise BenchError(f"{len(made['data'])} images came")
    return {"seconds_per_image": round((time.monotonic() - begun) / count, 2)}


async def _speech(server: Server, name: str) -> dict[str, Any]:
    body = {"model": name, "input": "Good morning.", "voice": "alloy", "response_format": "wav"}
    status, sound = await asyncio.to_thread(server.ask, "/v1/audio/speech", body)
    if status != 200 or not sound.startswith(b"RIFF"):
        raise BenchError(f"status {status}")
    return {"bytes": len(sound)}


async def _vectors(server: Server, name: str) -> dict[str, Any]:
    texts = [f"Room {number} has {number % 7} windows." for number in range(256)]
    begun = time.monotonic()
    made = await _post(server, "/v1/embeddings", {"model": name, "input": texts})
    if [one["index"] for one in made["data"]] != list(range(len(texts))):
        raise BenchError("not a vector for each text, in order")
    tokens = made["usage"]["prompt_tokens"]
    return {
        "numbers": len(made["data"][0]["embedding"]),
        "tokens_per_second": round(tokens / (time.monotonic() - begun)),
    }


async def _ranks(server: Server, name: str) -> dict[str, Any]:
    texts = ["Bananas are yellow.", "Paris is the capital of France.", "A week has seven days."]
    body = {"model": name, "query": "What is the capital of France?", "documents": texts}
    found = (await _post(server, "/v1/rerank", body))["results"]
    if found[0]["index"] != 1:
        raise BenchError(f"first came {texts[found[0]['index']]!r}")
    return {"scores": [round(one["relevance_score"], 3) for one in found]}


_OTHERS: dict[str, tuple[str, Callable[[Server, str], Awaitable[dict[str, Any]]]]] = {
    "speech": ("a sentence", _speech),
    "embedding": ("256 texts", _vectors),
    "rerank": ("the right text first", _ranks),
}


async def _returns(server: Server, name: str, capabilities: set[str]) -> dict[str, Any]:
    """Have a model leave that takes turns: it sleeps or is ended, and comes back for the next request."""
    path = f"/v1/admin/models/{quote(name, safe='')}"
    status, _ = await asyncio.to_thread(server.ask, f"{path}/unload", {"model": name})
    if status == 400:
        return {"state": "stays loaded: it has memory of its own"}
    async with asyncio.timeout(_RESTART_SECONDS):
        while (left := _of(await _get(server, "/v1/models"), name)["status"]) == "ready":
            await server.pause(0.5)
    begun = time.monotonic()
    if "chat" in capabilities:
        await _chat(server, _question(name))
    else:
        await asyncio.to_thread(server.ask, f"{path}/load", {"model": name})
    return {"state": left, "seconds_until_it_answered": round(time.monotonic() - begun, 1)}


async def _memory(server: Server) -> dict[str, Any]:
    """Compare for each model what the plan gave it with what it has; of GPUs where there are any."""
    found = {}
    for model in (await _get(server, "/v1/admin/status"))["models"]:
        memory = model["memory"]
        where = "gpu" if memory["planned_gpu_bytes"] else "ram"
        planned, used = memory[f"planned_{where}_bytes"], memory[f"{where}_bytes"]
        if planned and used:
            found[model["id"]] = f"{used / GIB:.2f} of {planned / GIB:.2f} GiB {where.upper()} ({used / planned:.0%})"
    return found


async def _killed(server: Server) -> dict[str, Any]:
    """Kill an engine while it may be asked, and wait until its model answers again."""
    models = (await _get(server, "/v1/admin/status"))["models"]
    chats = {one["id"] for one in (await _get(server, "/v1/models"))["data"] if "chat" in one["capabilities"]}
    model = next(one for one in models if one["id"] in chats and one["status"] == "ready" and one["pids"])
    os.kill(model["pids"][0], signal.SIGKILL)
    begun = time.monotonic()
    async with asyncio.timeout(_RESTART_SECONDS):
        while True:
            status, _ = await asyncio.to_thread(server.ask, "/v1/chat/completions", _question(model["id"]))
            now = next(o for o in (await _get(server, "/v1/admin/status"))["models"] if o["id"] == model["id"])
            if status == 200 and now["restarts"] > model["restarts"]:
                return {"model": model["id"], "seconds_until_it_answered": round(time.monotonic() - begun, 1)}
            await server.pause(0.5)


def as_markdown(proof: Proof) -> str:
    """Return the report as a page."""
    what = "A rehearsal without a GPU." if proof.rehearsal else f"Driver {proof.driver}."
    failed = sum(not step.passed for step in proof.steps)
    lines = [
        f"# Proof of {proof.began_at}",
        "",
        f"{proof.machine}. {what} {failed} of {len(proof.steps)} steps failed.",
    ]
    lines += ["", "| step | | seconds | saw |", "|---|---|---|---|"]
    for step in proof.steps:
        saw = "; ".join(f"{key}: {value}" for key, value in step.figures.items()) or step.problem or ""
        cells = (step.name, "ok" if step.passed else "FAILED", f"{step.seconds}", saw)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Return the exit code: 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="scripts/prove-gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("proof"), help="folder of the report")
    parser.add_argument("--models", type=Path, default=ROOT / "models.yaml")
    parser.add_argument("--weights-dir", type=Path, default=ROOT / "weights")
    parser.add_argument("--streams", type=int, default=256, help="at the same time, beside 1")
    given = parser.parse_args(arguments)
    proof = asyncio.run(prove(given))
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "proof.json").write_text(json.dumps(asdict(proof), indent=2) + "\n", encoding="utf-8")
    (given.out / "proof.md").write_text(as_markdown(proof), encoding="utf-8")
    say(f"The report: {given.out / 'proof.md'}")
    return 0 if all(step.passed for step in proof.steps) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
