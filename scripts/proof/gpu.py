"""Proves a machine: every model of the plan is loaded, asked, measured, compared with its plan, and killed once.

Writes proof.json and proof.md, and the servers' logs beside them. Each step reports what it saw, or why it failed, and
the others go on. It works on any machine: without a GPU it is a rehearsal, with demo models or small random ones.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
import yaml
from bench.load import BenchError, load_generator
from bench.report import versions
from bench.servers import (
    HEARTH,
    SERVE,
    Server,
    Workspace,
    create_key,
    model_entries,
    open_workspace,
    say,
    start_hearth,
    start_vllm,
)
from PIL import Image
from proof import contract
from proof.report import Proof, Skipped, tokens_per_second

from engine import load_config
from engine.config.models import VariantSpec
from engine.placement.hardware import GIB, Hardware, read_cuda, read_hardware
from engine.placement.plan import plan
from engine.placement.report import gib, headline, where
from engine.placement.types import Placed, Plan

ROOT = Path(__file__).parents[2]
_RESTART_SECONDS = 300.0
_LOAD_SECONDS = 1200.0
_ATTEMPTS = 4
_ANSWER_TOKENS = 128
_ANSWERS = 16  # at least so many are measured: two of one stream are over in a second
_TURNS = 2  # of Hearth and `vllm serve`, one after the other: the load of a machine changes
_EDGES = (64, 4096)  # of pictures; the second is more than any model gets unscaled
_OVER = 1.05  # times the planned memory: above that the step fails


class Proving:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.hardware: Hardware = read_hardware()
        self.on_gpu = bool(self.hardware.gpus)
        self.models: Path = given.models
        self.weights: Path | None = given.weights_dir if given.weights_dir.is_dir() else None
        self.placed: tuple[Placed, ...] = ()
        self.bytes_per_second: dict[int, float] = {}
        self.chats: list[str] = []
        """Models whose speed was measured."""
        kind = "random" if given.random else "fetched" if self.weights else "demos"
        began = datetime.now(UTC).isoformat(timespec="seconds")
        self.proof = Proof(
            headline(self.hardware), self.hardware.driver, began, not self.on_gpu, out=given.out, weights=kind
        )

    async def run(self) -> Proof:
        proof = self.proof
        await proof.try_step("first look: GPUs and packages", self._look)
        await proof.try_step("memory: how fast it is", self._probe)
        if await proof.try_step("the plan", self._plan) and self.given.random:
            await self._make_random()
        await proof.try_step("server", self._with_server, limit_seconds=float("inf"))
        profiles = {one.variant.profile for one in self.placed if one.variant and one.variant.profile}
        from proof.images import prove_images  # it loads torch and diffusers

        await prove_images(proof, sorted(profiles) or ["sdxl", "z-image-turbo"], small=not self.on_gpu)
        return proof

    async def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {"cuda of the driver": read_cuda().driver}
        for gpu in self.hardware.gpus:
            free = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
            found[f"GPU {gpu.index}"] = f"{gpu.name}, {gpu.compute_capability}, {free}"
        if self.hardware.problem:
            found["GPUs"] = self.hardware.problem
        return found | versions()

    async def _probe(self) -> dict[str, Any]:
        for gpu in self.hardware.gpus:
            # In a process of its own, so that nothing stays on the GPU.
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu.index)}
            command = [sys.executable, str(ROOT / "scripts/proof/report.py")]
            measured = partial(subprocess.run, command, env=environment, stdout=subprocess.PIPE, check=True)
            self.bytes_per_second[gpu.index] = float((await asyncio.to_thread(measured)).stdout)
        return {f"GPU {index}": f"{value / 1e9:.0f} GB/s" for index, value in self.bytes_per_second.items()}

    async def _plan(self) -> dict[str, Any]:
        config = load_config(self.models)
        found = plan(config, self.hardware)
        if not isinstance(found, Plan):
            raise BenchError(f"{found.message}. Smallest change: {found.change}.")
        self.placed = found.models
        return {one.id: _in_words(one) for one in found.models}

    async def _make_random(self) -> None:
        """Write folders for the planned variants, and a models.yaml with which vLLM fills them."""
        entries = model_entries(self.given.models)
        self.models, self.weights = self.folder / "models.yaml", self.folder / "weights"
        self.weights.mkdir()
        for placed in self.placed:
            variant, entry = placed.variant, entries.get(placed.id)
            if variant is None or entry is None or placed.state == "demo":
                continue
            if entry["task"] == "chat":
                work = partial(self._random_chat, variant, entry)
            elif entry["task"] == "image" and variant.profile:
                work = partial(self._random_images, variant, variant.profile)
            else:
                continue  # small: their demos answer
            await self.proof.try_step(f"{placed.id}: random weights for {variant.id}", work)
        whole = yaml.safe_load(self.given.models.read_text(encoding="utf-8")) | {"models": entries}
        self.models.write_text(yaml.safe_dump(whole, sort_keys=False), encoding="utf-8")

    async def _random_chat(self, variant: VariantSpec, entry: dict[str, Any]) -> dict[str, Any]:
        from proof.random_chat import write

        await asyncio.to_thread(write, variant, self.folder / "weights" / variant.id, small=not self.on_gpu)
        engine = entry.setdefault("engine", {}) or {}
        entry["engine"] = engine | {"engine_args": {**engine.get("engine_args", {}), "load_format": "dummy"}}
        return {"shape": variant.id if self.on_gpu else f"a small one of the parts of {variant.id}"}

    async def _random_images(self, variant: VariantSpec, profile: str) -> dict[str, Any]:
        from proof.images import write_random
        from proof.random_chat import complete

        folder = self.folder / "weights" / variant.id
        found = await asyncio.to_thread(write_random, profile, folder, small=not self.on_gpu)
        await asyncio.to_thread(complete, variant, folder)
        return found

    async def _with_server(self) -> dict[str, Any]:
        """Start Hearth with all models; then each chat model alone, in Hearth and in vLLM's own server."""
        names = list(model_entries(self.models))
        with self._workspace(self.models, names) as place:
            server = await start_hearth(place)
            try:
                await self._prove_server(server, place)
            finally:
                await server.stop()
        for model in self.chats:
            work = partial(self._beside_vllm, model)
            await self.proof.try_step(f"{model}: beside `vllm serve`", work, 2 * _TURNS * _LOAD_SECONDS)
        return {"models": len(names)}

    @contextlib.contextmanager
    def _workspace(self, models: Path, names: list[str], logs: str = "") -> Iterator[Workspace]:
        """Open a workspace, and keep what its servers printed in `logs` of the report's folder."""
        with open_workspace(models, names[0], self.weights, beside=names[1:]) as place:
            try:
                yield place
            finally:
                kept = self.given.out / "logs" / logs
                kept.mkdir(parents=True, exist_ok=True)
                for log in place.folder.glob("*.log"):
                    shutil.copy(log, kept)

    async def _prove_server(self, server: Server, place: Workspace) -> None:
        proof = self.proof
        if not await proof.try_step(
            "start: all models answer or await their turn", partial(_ready, server), _LOAD_SECONDS
        ):
            say("Some models did not load; the others are tested.")
        with load_generator(place.environment, place.log("load")) as server.generator:
            for model in (await _get(server, "/v1/models"))["data"]:
                await self._prove_model(server, model["id"], set(model["capabilities"]))
            await proof.try_step("every endpoint of every model", partial(_doctor, place), 2 * _LOAD_SECONDS)
            turns = partial(_turns, server, self.placed)
            await proof.try_step("models that take turns: one after the other", turns, 2 * _LOAD_SECONDS)
        await proof.try_step("memory: planned and used", partial(self._memory, server))
        await proof.try_step("kill -9 of a chat engine while it streams", partial(_killed_midway, server))

    async def _prove_model(self, server: Server, name: str, capabilities: set[str]) -> None:
        proof = self.proof
        if "chat" in capabilities:
            await self._prove_chat(server, name, capabilities)
        if "image_generation" in capabilities:
            for size in (512, 1024):
                for count in (1, 4):
                    await proof.try_step(f"{name}: {count} x {size}", partial(_images, server, name, size, count))
        if "embedding" in capabilities:
            await proof.try_step(f"{name}: 256 texts", partial(_vectors, server, name))

    async def _prove_chat(self, server: Server, name: str, capabilities: set[str]) -> None:
        proof = self.proof
        question = contract.Question(server, name, closed=self.given.random)
        checks: dict[str, Callable[[], dict[str, Any]]] = {
            "plain and streamed answers agree": partial(contract.agree, question),
            "n, logprobs, seed": partial(contract.fields, question),
            "errors": partial(contract.errors, question),
            "a batch": partial(contract.batch, question, server),
            "JSON by a schema": partial(contract.schema, question),
        }
        if "function_calling" in capabilities:
            checks["a forced call"] = partial(contract.forced_call, question)
        for what, check in checks.items():
            await proof.try_step(f"{name}: {what}", partial(self._checked, check))
        if "vision" in capabilities:
            for edge in _EDGES:
                await proof.try_step(f"{name}: a picture of {edge} x {edge}", partial(_picture, question, edge))
        for streams in (1, self.given.streams):
            await proof.try_step(f"{name}: {streams} streams", partial(self._speed, server, name, streams))

    async def _checked(self, check: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return await asyncio.to_thread(check)
        except contract.NeverDoneError as reason:
            if self.given.random:
                raise Skipped(f"{reason}: random weights never do") from None
            raise

    async def _speed(self, server: Server, name: str, streams: int) -> dict[str, Any]:
        """Measure, and compare with the time for reading the weights."""
        found = await _measured(server, name, streams)
        if name not in self.chats:
            self.chats.append(name)
        limit = self._limit(name, streams)
        return found | ({} if limit is None else {"of_the_memory_limit": f"{found['tokens_per_second'] / limit:.0%}"})

    def _limit(self, name: str, streams: int) -> float | None:
        """Return the tokens a second that the memory allows; None for a demo, whose weights fit into caches."""
        placed = next((one for one in self.placed if one.id == name), None)
        if placed is None or placed.variant is None or not placed.gpus or self.weights is None:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError):
            config = json.loads((self.weights / placed.variant.id / "config.json").read_text(encoding="utf-8"))
            speed = sum(self.bytes_per_second.get(gpu, 0.0) for gpu in placed.gpus)
            return tokens_per_second(config, placed.variant.weights_gib * GIB, streams, speed) or None
        return None

    async def _beside_vllm(self, model: str) -> dict[str, Any]:
        """Measure Hearth and vLLM's own server in turns, with one engine of the same model and settings."""
        only, entry = self.folder / "alone.yaml", model_entries(self.models)[model]
        only.write_text(yaml.safe_dump({"models": {model: entry | {"replicas": 1}}}), encoding="utf-8")
        speeds: dict[tuple[str, int], list[float]] = {}
        loads = []
        with self._workspace(only, [model], model) as place:
            planned = plan(load_config(place.models), self.hardware)
            gpus = planned.models[0].gpus if isinstance(planned, Plan) else ()
            seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else {}
            ours = partial(start_hearth, place, await create_key(place))
            theirs = partial(start_vllm, replace(place, environment=place.environment | seen))
            for start in (ours, theirs) * _TURNS:
                server = await start()
                try:
                    await server.ready()
                    with load_generator(place.environment, place.log(f"load-{server.name}")) as server.generator:
                        for streams in (1, self.given.streams):
                            measured = await _measured(server, model, streams)
                            speeds.setdefault((server.name, streams), []).append(measured["tokens_per_second"])
                            loads.append(measured["load_of_the_machine"])
                finally:
                    await server.stop()
        found: dict[str, Any] = {
            f"{name}_tokens_per_second_{streams}": each for (name, streams), each in speeds.items()
        }
        for streams in (1, self.given.streams):
            pairs = zip(speeds[HEARTH, streams], speeds[SERVE, streams], strict=True)
            found[f"{HEARTH}_of_{SERVE}_{streams}"] = [round(hearth / vllm, 2) for hearth, vllm in pairs]
        return found | {"loads_of_the_machine": loads}

    async def _memory(self, server: Server) -> dict[str, Any]:
        """Compare each model's planned memory with what it has, on GPUs if there are any."""
        found, over = {}, []
        for model in (await _get(server, "/v1/admin/status"))["models"]:
            memory = model["memory"]
            part = "gpu" if memory["planned_gpu_bytes"] else "ram"
            planned, used = memory[f"planned_{part}_bytes"], memory[f"{part}_bytes"]
            if planned and used:
                sizes = f"{used / GIB:.2f} of {planned / GIB:.2f} GiB"
                found[model["id"]] = f"{sizes} {part.upper()} ({used / planned:.0%})"
                over += [model["id"]] if part == "gpu" and used > _OVER * planned else []
        if over:
            raise BenchError(f"more than planned: {'; '.join(f'{name} {found[name]}' for name in over)}")
        return found


def _in_words(placed: Placed) -> str:
    what = placed.variant.id if placed.variant else placed.state
    context = f", {placed.context_length} tokens" if placed.context_length else ""
    return f"{what}, {where(placed)}, {gib(placed.device_bytes)}{context}, {placed.swap_by or placed.state}"


def _of(listed: Any, name: str) -> Any:
    return next(one for one in listed if one["id"] == name)


async def _get(server: Server, path: str) -> Any:
    """Ask again if no answer came within ten seconds: a busy machine must not fail the step."""
    answer = (0, b"")
    for _ in range(_ATTEMPTS):
        if (answer := await asyncio.to_thread(server.ask, path))[0]:
            break
        await server.pause(1.0)
    return _answer(path, answer)


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


async def _picture(question: contract.Question, edge: int) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (edge, edge), "white").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is in this picture?"},
    ]
    answer = await asyncio.to_thread(partial(question.whole, messages=[{"role": "user", "content": content}]))
    said = answer["choices"][0]["message"]["content"] or ""
    return {"answer": said[:80], "tokens": answer["usage"]["prompt_tokens"]}


async def _measured(server: Server, name: str, streams: int) -> dict[str, Any]:
    """Measure two or more answers of each stream; a job ends with the first that is not a success."""
    server.model = name
    label = f"{name}-{streams}-{time.monotonic_ns()}"
    warm = server.chat(f"warm {label}", _ANSWER_TOKENS, streams=streams, requests=streams)
    await server.measure(warm)
    answers = max(2 * streams, _ANSWERS)
    result, usage = await server.measure(server.chat(label, _ANSWER_TOKENS, streams=streams, requests=answers))
    found: dict[str, Any] = {
        "requests_per_second": round(len(result.answers) / result.wall_seconds, 2),
        "tokens_per_second": round(result.tokens / result.wall_seconds, 1),
        "api_cpu_seconds": round(usage.api_cpu_seconds, 1),
        "load_of_the_machine": round(os.getloadavg()[0], 1),
    }
    firsts = sorted(result.first_texts)  # none, if all text is reasoning
    return found | ({"first_token_ms": round(firsts[len(firsts) // 2] * 1000)} if firsts else {})


async def _images(server: Server, name: str, size: int, count: int) -> dict[str, Any]:
    body = {"model": name, "prompt": "a red square", "size": f"{size}x{size}", "n": count, "seed": 1}
    begun = time.monotonic()
    made = await _post(server, "/v1/images/generations", body)
    if len(made["data"]) != count:
        raise BenchError(f"{len(made['data'])} images came")
    return {"seconds_per_image": round((time.monotonic() - begun) / count, 2)}


async def _vectors(server: Server, name: str) -> dict[str, Any]:
    texts = [f"Room {number} has {number % 7} windows." for number in range(256)]
    begun = time.monotonic()
    made = await _post(server, "/v1/embeddings", {"model": name, "input": texts})
    if [one["index"] for one in made["data"]] != list(range(len(texts))):
        raise BenchError("not a vector for each text, in order")
    tokens = made["usage"]["prompt_tokens"]
    return {"tokens_per_second": round(tokens / (time.monotonic() - begun))}


async def _doctor(place: Workspace) -> dict[str, Any]:
    """Have `hearth doctor` test every endpoint with every model."""
    command = (str(place.hearth), "doctor", "--unloaded", "--json")
    done = await anyio.run_process(command, env=place.environment, check=False)
    asked = [one for one in json.loads(done.stdout)["findings"] if one["area"] == "self-test"]
    if wrong := [one["message"] for one in asked if one["verdict"] == "problem"]:
        raise BenchError("; ".join(wrong))
    return {"answered": sum(one["verdict"] == "ok" for one in asked)}


async def _awake(server: Server, name: str, capabilities: set[str]) -> float:
    """Have a model answer, or load; return the seconds."""
    begun = time.monotonic()
    if "chat" in capabilities:
        await asyncio.to_thread(partial(contract.Question(server, name, closed=False).whole, max_tokens=4))
    elif "image_generation" in capabilities:
        await _images(server, name, 512, 1)
    else:
        await asyncio.to_thread(server.ask, f"/v1/admin/models/{quote(name, safe='')}/load", {"model": name})
    return round(time.monotonic() - begun, 1)


async def _turns(server: Server, placed: tuple[Placed, ...]) -> dict[str, Any]:
    """Ask the models that share a device in turns, twice each; report the states of the others meanwhile."""
    known = {one["id"]: set(one["capabilities"]) for one in (await _get(server, "/v1/models"))["data"]}
    names = [one.id for one in placed if one.swap_by is not None and one.id in known]
    if len(names) < 2:
        raise Skipped("all models of this plan have memory of their own")
    found = {}
    for turn in range(2):
        for name in names:
            seconds = await _awake(server, name, known[name])
            states = {one["id"]: one["status"] for one in (await _get(server, "/v1/models"))["data"]}
            others = ", ".join(f"{other} {states[other]}" for other in names if other != name)
            found[f"{turn + 1}. {name}"] = f"{seconds} s ({others})"
    return found


async def _ready_chat(server: Server) -> Any:
    """Return the state of a loaded chat model, after loading one if necessary."""
    chats = [one for one in (await _get(server, "/v1/models"))["data"] if "chat" in one["capabilities"]]
    if not chats:
        raise Skipped("there is no chat model")
    model = next((one for one in chats if one["status"] == "ready"), chats[0])
    await _awake(server, model["id"], {"chat"})
    async with asyncio.timeout(_RESTART_SECONDS):
        while not (found := _of((await _get(server, "/v1/admin/status"))["models"], model["id"]))["pids"]:
            await server.pause(0.5)  # the status may be of a second ago
    return found


async def _answers_again(server: Server, question: contract.Question, model: Any, begun: float) -> float:
    async with asyncio.timeout(_RESTART_SECONDS):
        while True:
            status, _ = await asyncio.to_thread(partial(question.status, max_tokens=4))
            now = _of((await _get(server, "/v1/admin/status"))["models"], model["id"])
            if status == 200 and now["restarts"] > model["restarts"]:
                return round(time.monotonic() - begun, 1)
            await server.pause(0.5)


async def _killed_midway(server: Server) -> dict[str, Any]:
    """Kill an engine while a stream runs: the stream ends with an error event, and the model answers again."""
    model = await _ready_chat(server)
    question = contract.Question(server, model["id"], closed=False)
    stream = asyncio.create_task(asyncio.to_thread(partial(question.events, max_tokens=4000, ignore_eos=True)))
    while not stream.done() and not (await server.counted("hearth_queue_running"))[0]:
        await server.pause(0.1)
    begun = time.monotonic()
    os.kill(model["pids"][0], signal.SIGKILL)
    events = await stream
    if events[-1] == "[DONE]" or "error" not in json.loads(events[-1]):
        raise BenchError(f"the stream ended with {events[-1][:200]}")
    return {
        "seconds_until_the_stream_ended": round(time.monotonic() - begun, 2),
        "seconds_until_it_answered": await _answers_again(server, question, model, begun),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/prove-gpu", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("proof"), help="folder of the report")
    parser.add_argument("--models", type=Path, default=ROOT / "models.yaml")
    parser.add_argument("--weights-dir", type=Path, default=ROOT / "weights")
    parser.add_argument("--streams", type=int, default=256, help="at the same time, beside 1")
    parser.add_argument("--random", action="store_true", help="weights at random, of the planned shapes: no download")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="hearth-proof-") as folder:
        proof = asyncio.run(Proving(given, Path(folder)).run())
    say(f"The report: {given.out / 'proof.md'}")
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
