"""Life and death, with real processes and real signals."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from metrics_parts import Page
from process_parts import assert_all_gone, name, title
from serving import READY_SECONDS, Server, async_poll_until, open_socket, raw_request
from standstill import model_states, standstill

pytestmark = pytest.mark.engine

# What a test does not ask need not be loaded for it: of an engine and a worker, or of two engines, the end is the same.
CHAT = "  {name}: {{task: chat, tier: all, capabilities: [chat, streaming], weights: {name}, demo: chat}}\n"
VOICE = "  service-voice: {task: speech, tier: all, capabilities: [speech], weights: voices, demo: voices}\n"
TIERS = "tiers:\n  all: {models: [all]}\n"
TWO_ENGINES = f"models:\n{CHAT.format(name='service-plus')}{CHAT.format(name='service-pro')}{TIERS}"
ENGINE_AND_WORKER = f"models:\n{CHAT.format(name='service-plus')}{VOICE}{TIERS}"
LONG: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 3900,
    "extra_body": {"ignore_eos": True},
}
# `maxLength` makes it one that is compiled by a process of its own.
SCHEMA = {"type": "object", "properties": {"code": {"type": "string", "maxLength": 4}}, "required": ["code"]}
COMPILED = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}
NOTICED_SECONDS = 20  # that an engine is dead is noticed at once; that it is silent would be after 30
SHORT = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """For the tests that a server survives, and for the one after them that it does not."""
    with server_of(tmp_path_factory.mktemp("life"), TWO_ENGINES) as server:
        yield server


def server_of(folder: Path, models: str, **environment: str) -> Server:
    (folder / "models.yaml").write_text(models)
    return Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")} | environment)


@asynccontextmanager
async def client_of(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    assert server.admin_key is not None
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key=server.admin_key.text, max_retries=0, timeout=240
    ) as client:
        yield client


def engine_processes(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.pid).children(recursive=True) if "EngineCore" in title(child)]


class Stream:
    """A streamed answer that is read in the background; the result of `task` is the error that ended it, None if none did.

    Its bytes are read, and parsed when it has ended: on a busy machine a client library needs seconds for what an engine
    sent before a test could stop it.
    """

    def __init__(self, client: openai.AsyncOpenAI, model: str) -> None:
        self.started = asyncio.Event()
        self.finish_reason: str | None = None
        self.task = asyncio.create_task(self._read(client, model))

    async def _read(self, client: openai.AsyncOpenAI, model: str) -> str | None:
        body = {"model": model, "stream": True, **LONG, **LONG["extra_body"]}
        del body["extra_body"]
        headers = {
            "Authorization": f"Bearer {client.api_key}",
            "Content-Type": "application/json",
            "Connection": "close",
        }
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(raw_request("POST", "/v1/chat/completions", headers, json.dumps(body).encode()))
        answer = b""
        while piece := await reader.read(2**20):
            answer += piece
            if not self.started.is_set() and re.search(rb'"content": ?"[^"]', answer):
                self.started.set()
        writer.close()
        events = [json.loads(event) for event in re.findall(rb"^data: (\{.*)$", answer, re.MULTILINE)]
        assert events, answer
        if "error" in events[-1]:
            return str(events[-1]["error"]["message"])
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        self.finish_reason = next(
            event["choices"][0]["finish_reason"] for event in reversed(events) if event["choices"]
        )
        return None


def ready(server: Server) -> dict[str, Any]:
    answer = httpx2.get(f"{server.root_url}/health/ready", timeout=60)
    return {"code": answer.status_code, **answer.json()}


def running(server: Server) -> float:
    """HTTP requests being answered, this one included; up to a second old."""
    page = httpx2.get(f"{server.root_url}/metrics", headers=_headers(server), timeout=60)
    return Page(page.text).value("hearth_requests_running")


@pytest.mark.parametrize(("model", "prompt"), [("service-plus", "A"), ("service-pro", "A B C")])
async def test_the_first_request_is_answered_however_short_because_a_warm_up_came_before_ready(
    own_server: Server, model: str, prompt: str
) -> None:
    """Stands first, since what comes after the first request is no first one."""
    log = own_server.log()
    assert 0 < log.index(f"{model}: answering a warm-up prompt") < log.index(f"{model}: ready")
    async with client_of(own_server) as client:
        for tokens in (1, 2, 3):
            answer = await client.completions.create(
                model=model, prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (tokens, "length")
            assert answer.usage.prompt_tokens <= 3


async def test_killed_engine_ends_its_streams_and_comes_back_while_the_other_model_goes_on(own_server: Server) -> None:
    async with client_of(own_server) as client:
        killed, spared = "service-plus", "service-pro"
        engines = {model: psutil.Process(state["pids"][0]) for model, state in model_states(own_server).items()}
        streams = {model: [Stream(client, model) for _ in range(3)] for model in (killed, spared)}
        for model, group in streams.items():
            await asyncio.gather(*(stream.started.wait() for stream in group))
            engines[model].suspend()  # none of its streams ends before the kill

        killed_at = time.monotonic()
        engines[spared].resume()
        engines[killed].kill()
        await async_poll_until(lambda: ready(own_server)["code"] == 503, NOTICED_SECONDS)
        with pytest.raises(openai.InternalServerError) as refused:  # first, as long as the new engine loads
            await client.chat.completions.create(model=killed, **SHORT)  # type: ignore[call-overload]
        assert refused.value.status_code == 503
        assert refused.value.code == "engine_unavailable"
        assert int(refused.value.response.headers["retry-after"]) > 0
        states = ready(own_server)["models"]
        assert {model: state["restarts"] for model, state in states.items()} == {killed: 1, spared: 0}

        outcomes = await asyncio.gather(*(stream.task for stream in streams[killed]))
        assert time.monotonic() - killed_at < NOTICED_SECONDS
        assert ["restarted" in str(outcome) for outcome in outcomes] == [True] * 3, outcomes
        assert all(stream.finish_reason is None for stream in streams[killed])

        other = await client.chat.completions.create(model=spared, **SHORT)  # type: ignore[call-overload]
        assert other.choices[0].message.content == "The capital of France is Paris."
        assert await asyncio.gather(*(stream.task for stream in streams[spared])) == [None] * 3

        await async_poll_until(lambda: ready(own_server)["code"] == 200, READY_SECONDS)
        again = await client.chat.completions.create(model=killed, **SHORT)  # type: ignore[call-overload]
        assert again.choices[0].message.content == "The capital of France is Paris."


async def test_plain_request_on_a_killed_engine_gets_503(own_server: Server) -> None:
    async with client_of(own_server) as client:
        stream = Stream(client, "service-plus")
        await stream.started.wait()
        for process in engine_processes(own_server):
            process.suspend()  # none of these ends before the kill
        requests = [
            asyncio.create_task(client.chat.completions.create(model=model, **LONG))
            for model in ("service-plus", "service-pro")
        ]
        await async_poll_until(lambda: running(own_server) >= 4, 60)  # those three, and the one that asks
        for process in engine_processes(own_server):
            process.kill()
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert [getattr(outcome, "code", outcome) for outcome in outcomes] == ["engine_unavailable"] * 2
        await stream.task


def test_second_server_on_the_same_port_says_so(own_server: Server, tmp_path: Path) -> None:
    port = own_server.base_url.split(":")[2].split("/")[0]
    second = Server(tmp_path / "second", arguments=["--port", port])
    with pytest.raises(AssertionError, match=r"Cannot listen on .* take another port"):
        second.start()
    assert second.wait() == 1


async def test_kill_9_of_the_server_leaves_no_engine_neither_a_stopped_nor_a_newborn_one_and_no_compiler(
    own_server: Server,
) -> None:
    await async_poll_until(lambda: ready(own_server)["code"] == 200, READY_SECONDS)
    async with client_of(own_server) as client:
        for model in ("service-plus", "service-pro"):  # compilers are a model's, and end with its engine
            await client.chat.completions.create(model=model, **SHORT, **COMPILED)  # type: ignore[call-overload]
    stopped, killed = engine_processes(own_server)
    before = {process.pid for process in psutil.Process(own_server.pid).children(recursive=True)}
    stopped.suspend()
    killed.kill()
    # Its successor waits for a handshake with the server, before vLLM has loaded any plugin.
    await async_poll_until(lambda: bool(_newborn(own_server, before)), 60)
    family = psutil.Process(own_server.pid).children(recursive=True)
    assert [process for process in family if name(process) == "hearth-schemas"]
    os.kill(own_server.pid, signal.SIGKILL)
    assert_all_gone(family)


def _newborn(server: Server, before: set[int]) -> list[psutil.Process]:
    return [process for process in psutil.Process(server.pid).children(recursive=True) if process.pid not in before]


async def test_sigterm_lets_running_answers_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    with server_of(tmp_path, ENGINE_AND_WORKER, HEARTH_DRAIN_SECONDS="240") as server:
        await _drain_to_the_end(server)


async def _drain_to_the_end(own_server: Server) -> None:
    family = psutil.Process(own_server.pid).children(recursive=True)
    async with client_of(own_server) as client:
        plain = asyncio.create_task(client.chat.completions.create(model="service-plus", **LONG))
        await async_poll_until(lambda: running(own_server) >= 2, 60)  # that one, and the one that asks
        stream = Stream(client, "service-plus")
        await stream.started.wait()
        with standstill(own_server, "service-plus"):  # neither ends before all this
            assert not plain.done()
            # To the whole group, as `timeout` and service supervisors do: engines must not take it for theirs.
            os.killpg(own_server.pid, signal.SIGTERM)
            await async_poll_until(lambda: ready(own_server)["status"] == "draining", 60)
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(model="service-plus", **SHORT)  # type: ignore[call-overload]
            assert refused.value.code == "server_overloaded"
        assert await stream.task is None
        assert stream.finish_reason == "length"
        assert (await plain).usage.completion_tokens == LONG["max_tokens"]
    assert own_server.wait() == 0
    assert_all_gone(family)
    assert "EngineDeadError" not in own_server.log()  # vLLM would log an end that it did not expect


@pytest.mark.rounds
@pytest.mark.parametrize("how", ["drain time is over", "second signal, Ctrl-C"])
async def test_answers_that_outlast_the_drain_end_with_an_error(tmp_path: Path, how: str) -> None:
    twice = how.startswith("second")
    with server_of(tmp_path, ENGINE_AND_WORKER, HEARTH_DRAIN_SECONDS="60" if twice else "0.5") as server:
        family = psutil.Process(server.pid).children(recursive=True)
        async with client_of(server) as client:
            plain = asyncio.create_task(client.chat.completions.create(model="service-plus", **LONG))
            await async_poll_until(lambda: running(server) >= 2, 60)  # that one, and the one that asks
            streams = [Stream(client, "service-plus") for _ in range(8)]
            await asyncio.gather(*(stream.started.wait() for stream in streams))
            silent = open_socket(server)  # a client that stops in the middle of its body
            silent.sendall(raw_request("POST", "/v1/chat/completions", _headers(server), b"{" * 100)[:-50])
            os.killpg(server.pid, signal.SIGINT if twice else signal.SIGTERM)
            if twice:
                await async_poll_until(lambda: ready(server)["status"] == "draining", 60)
                os.kill(server.pid, signal.SIGTERM)
            outcomes = await asyncio.gather(*(stream.task for stream in streams))
            assert all("shutting down" in str(outcome) for outcome in outcomes)
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await plain
        assert server.wait() == 0
        silent.close()
        assert_all_gone(family)


def _headers(server: Server) -> dict[str, str]:
    assert server.admin_key is not None
    return {"Authorization": f"Bearer {server.admin_key.text}", "Content-Type": "application/json"}


async def test_sigterm_while_models_load_ends_within_seconds(tmp_path: Path) -> None:
    server = server_of(tmp_path, ENGINE_AND_WORKER)
    try:
        server.start()
        refusal = httpx2.post(
            f"{server.base_url}/chat/completions",
            json={"model": "service-plus", **SHORT},
            headers={"Authorization": f"Bearer {server.admin_key.text}"},  # type: ignore[union-attr]
            timeout=120,
        )
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "model_loading"
        assert int(refusal.headers["retry-after"]) > 0
        server.wait_for_line("reading the weights")
        family = psutil.Process(server.pid).children(recursive=True)
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 10
        assert_all_gone(family)
    finally:
        server.kill()
