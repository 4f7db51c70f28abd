"""Limits of keys on a real server whose models.yaml sets small ones, that file read again, and who may use its folder."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from chat_parts import CHAT, MODEL, assert_error
from key_clients import client_of, client_with
from limit_parts import LONG, SHORT, TOO_LONG, answers, running, streaming, taken, until_answered
from serving import BIN, ROOT, Server, async_poll_until
from small_models import LIMITED_CHAT
from standstill import standstill, until_asked

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

BATCH = f"{CHAT}/batch"
_REFILL_SECONDS = 3.0  # of one request at 20 a minute


def _seconds(duration: str) -> int:
    if duration.endswith("ms"):
        return 1
    minutes, _, rest = duration.removesuffix("s").rpartition("m")
    return 60 * int(minutes or 0) + int(rest)


@pytest.fixture(scope="module")
def models_file(chat_server: Server) -> Path:
    return chat_server.data_dir.parent / "models.yaml"


def write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture(scope="module")
async def admin(chat_server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    assert chat_server.admin_key is not None
    async with client_with(chat_server, chat_server.admin_key.text) as client:
        yield client


async def test_of_many_requests_at_once_exactly_as_many_pass_as_the_limit_says(
    chat_server: Server, admin: httpx2.AsyncClient
):
    async with client_of(chat_server, admin, "requests") as client, client_of(chat_server, admin, "requests") as other:
        began = time.monotonic()
        responses = await asyncio.gather(*(client.post(CHAT, json=SHORT) for _ in range(50)))
        refilled = (time.monotonic() - began) / _REFILL_SECONDS
        passed = [response for response in responses if response.status_code == 200]
        assert 20 <= len(passed) <= 20 + math.ceil(refilled)
        for response in passed:
            assert response.headers["x-ratelimit-limit-requests"] == "20"
        assert "0" in {response.headers["x-ratelimit-remaining-requests"] for response in passed}
        for response in responses:
            if response.status_code != 200:
                assert_error(response, 429, "rate_limit_exceeded")
                assert 1 <= int(response.headers["retry-after"]) <= math.ceil(_REFILL_SECONDS)
                assert response.headers["x-ratelimit-remaining-requests"] == "0"
                assert 50 <= _seconds(response.headers["x-ratelimit-reset-requests"]) <= 60  # until all 20 are back
                assert "20 requests per minute" in response.json()["error"]["message"]
        assert await answers(other)  # two keys of a tier do not share


async def test_requests_with_limited_tokens_are_as_exact(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "requests", tokens_per_minute=1_000_000) as client:
        began = time.monotonic()
        assert await answers(client)
        responses = await asyncio.gather(*(client.post(CHAT, json=SHORT) for _ in range(60)))
        refilled = (time.monotonic() - began) / _REFILL_SECONDS
        passed = [response for response in responses if response.status_code == 200]
        assert 19 <= len(passed) <= 19 + math.ceil(refilled)
        for response in responses:
            assert response.headers["x-ratelimit-limit-requests"] == "20"
            if response.status_code != 200:
                assert_error(response, 429, "rate_limit_exceeded")
                assert "20 requests per minute" in response.json()["error"]["message"]


async def test_a_request_that_comes_to_no_tokens_counts_all_the_same(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "standard", requests_per_minute=4, tokens_per_minute=100_000) as client:
        left = []
        for body, status in ((SHORT, 200), (TOO_LONG, 400), (TOO_LONG, 400), (SHORT, 200)):
            response = await client.post(CHAT, json=body)
            assert response.status_code == status, response.text
            left.append(response.headers["x-ratelimit-remaining-requests"])
        assert left == ["3", "2", "1", "0"]
        refused = await client.post(CHAT, json=SHORT)
        assert_error(refused, 429, "rate_limit_exceeded")
        tokens = {name: refused.headers[f"x-ratelimit-{name}-tokens"] for name in ("limit", "remaining", "reset")}
        assert (tokens["limit"], _seconds(tokens["reset"]) <= 1) == ("100000", True)
        assert 99_900 <= int(tokens["remaining"]) <= 100_000


async def test_a_request_whose_tokens_are_refused_counts_all_the_same(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "standard", requests_per_minute=6, tokens_per_minute=1000) as client:
        assert await answers(client)
        async with running(chat_server, client):  # it has 700
            for _ in range(2):
                refused = await client.post(CHAT, json=LONG)
                assert_error(refused, 429, "rate_limit_exceeded")
                assert "1000 tokens per minute" in refused.json()["error"]["message"]
            small = await taken(chat_server, client, 1)
        response = await small
        assert response.status_code == 200
        assert response.headers["x-ratelimit-remaining-requests"] == "1"


async def test_after_the_time_that_retry_after_names_the_request_passes(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "standard", requests_per_minute=12) as client:
        while (response := await client.post(CHAT, json=SHORT)).status_code == 200:
            assert response.headers["x-ratelimit-limit-requests"] == "12"
        at = time.monotonic() + int(response.headers["retry-after"])
        assert int(response.headers["retry-after"]) <= 5
        await async_poll_until(lambda: time.monotonic() >= at, 10)
        assert await answers(client)


async def test_tokens_are_reserved_at_the_start_and_given_back_at_the_end(
    chat_server: Server, admin: httpx2.AsyncClient
):
    async with client_of(chat_server, admin, "tokens") as client:
        for _ in range(3):  # 800 of 1,000 each time, nearly all of it given back
            response = await client.post(CHAT, json=SHORT | {"max_tokens": 800})
            assert response.status_code == 200, response.text
            used = response.json()["usage"]
            left = int(response.headers["x-ratelimit-remaining-tokens"])
            assert left <= 1000 - used["prompt_tokens"] - 800
            assert response.headers["x-ratelimit-limit-tokens"] == "1000"
        async with running(chat_server, client):
            refused = await client.post(CHAT, json=SHORT | {"max_tokens": 500})
            assert_error(refused, 429, "rate_limit_exceeded")
            assert "1000 tokens per minute" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            small = await taken(chat_server, client, 1)
        assert (await small).status_code == 200
        await until_answered(client, SHORT | {"max_tokens": 500}, seconds=8)  # else after 12


async def test_what_never_fits_is_a_bad_request_and_what_was_not_asked_for_is_cut(
    chat_server: Server, admin: httpx2.AsyncClient
):
    async with client_of(chat_server, admin, "tokens") as client:
        too_large = await client.post(CHAT, json=SHORT | {"max_tokens": 1500})
        assert_error(too_large, 400, "invalid_value", "max_tokens")
        assert "1000 per minute" in too_large.json()["error"]["message"]
        without = {name: value for name, value in SHORT.items() if name != "max_tokens"}
        assert await answers(client, without)
    for limit in ("requests_per_minute", "tokens_per_minute", "parallel_requests"):
        async with client_of(chat_server, admin, "standard", **{limit: 0}) as client:
            nothing = await client.post(CHAT, json=SHORT)
            assert_error(nothing, 429, "insufficient_quota")
            assert nothing.headers["x-should-retry"] == "false"


async def test_only_so_many_requests_run_at_the_same_time(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "parallel") as client:
        async with running(chat_server, client, 2) as long:
            refused = await client.post(CHAT, json=SHORT)
            assert_error(refused, 429, "rate_limit_exceeded")
            assert "2 requests running" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
            await long.aclose()
            await until_asked(chat_server, MODEL, 0)
            small = await taken(chat_server, client, 0)
        assert (await small).status_code == 200


async def test_the_items_of_a_batch_are_counted_and_bounded(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "batches") as client:
        assert_error(await client.post(BATCH, json={"requests": [SHORT] * 4}), 400, "batch_too_large", "requests")
        assert (await client.post(BATCH, json={"requests": [SHORT] * 3})).json()["counts"]["succeeded"] == 3
    async with client_of(chat_server, admin, "batches", requests_per_minute=2, batch_items=5) as client:
        batch = (await client.post(BATCH, json={"requests": [SHORT] * 5})).json()
        refused = [item for item in batch["responses"] if "error" in item]
        assert (batch["counts"]["succeeded"], len(refused)) == (2, 3)
        assert {(item["status_code"], item["error"]["code"]) for item in refused} == {(429, "rate_limit_exceeded")}


async def test_a_key_without_limits_gets_no_such_headers(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "standard") as client:
        response = await client.post(CHAT, json=SHORT)
        assert not any(name.startswith("x-ratelimit") for name in response.headers)


async def test_a_change_of_a_keys_limits_holds_within_ten_seconds(chat_server: Server, admin: httpx2.AsyncClient):
    async with client_of(chat_server, admin, "requests", requests_per_minute=50) as client:
        response = await client.post(CHAT, json=SHORT)
        assert response.headers["x-ratelimit-limit-requests"] == "50"
        public_id = chat_server.made_keys[-1].public_id
        await admin.patch(f"/v1/admin/keys/{public_id}", json={"limits": {"requests_per_minute": None}})
        await until_limit(client, "20")


async def until_limit(client: httpx2.AsyncClient, limit: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while (response := await client.post(CHAT, json=SHORT)).headers.get("x-ratelimit-limit-requests") != limit:
        assert response.status_code in {200, 429}, response.text
        assert time.monotonic() < deadline


# models.yaml, read again


def hearth(data_dir: Path, models_file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    environment = clean | {"HEARTH_DATA_DIR": str(data_dir), "HEARTH_MODELS": str(models_file)}
    command = [BIN / "hearth", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


async def test_changed_tiers_hold_while_an_answer_goes_on(
    chat_server: Server, admin: httpx2.AsyncClient, models_file: Path
):
    async with client_of(chat_server, admin, "requests") as client, client_of(chat_server, admin, "standard") as talker:
        assert (await client.post(CHAT, json=SHORT)).headers["x-ratelimit-limit-requests"] == "20"
        async with streaming(talker) as lines:
            write(models_file, LIMITED_CHAT.replace("requests_per_minute: 20", "requests_per_minute: 30"))
            with standstill(chat_server, MODEL):  # the answer does not end before
                done = await asyncio.to_thread(hearth, chat_server.data_dir, models_file, "reload")
            assert (done.returncode, done.stderr) == (0, "")
            assert str(chat_server.pid) in done.stdout
            assert "  changed: tier requests\n" in done.stdout
            await until_limit(client, "30", seconds=1)
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        write(models_file, LIMITED_CHAT)
        taken = await admin.post("/v1/admin/reload")
        assert taken.json() == {
            "object": "config",
            "models": [MODEL],
            "tiers": ["standard", "requests", "tokens", "parallel", "batches"],
            "added": [],
            "changed": ["tier requests"],
            "removed": [],
            "voices": {"added": [], "changed": [], "removed": []},
            "warnings": [],
            "again": [],
            "later": [],
            "certificate": None,
        }
        await until_limit(client, "20", seconds=1)
    # By a signal, and by HTTP.
    assert chat_server.log().count("models.yaml was read again: changed: tier requests") == 2
    entries = (await admin.get("/v1/admin/audit")).json()["data"]
    actors = [entry["actor"].partition(":")[0] for entry in entries if entry["action"] == "config.reload"]
    assert chat_server.admin_key is not None
    assert actors == [chat_server.admin_key.public_id, "cli"]


async def test_a_wrong_file_changes_nothing_and_is_reported(
    chat_server: Server, admin: httpx2.AsyncClient, models_file: Path, tmp_path: Path
):
    write(tmp_path / "right.yaml", LIMITED_CHAT)
    async with client_of(chat_server, admin, "requests") as client:
        wrong = LIMITED_CHAT.replace("requests_per_minute: 20", "requests_per_minute: many").replace(
            "task: chat", "task: chta"
        )
        write(models_file, wrong)
        try:
            # Whatever file the command's own settings name, it is the server's that counts
            told = await asyncio.to_thread(hearth, chat_server.data_dir, tmp_path / "right.yaml", "reload")
            refused = await admin.post("/v1/admin/reload")
            chat_server.wait_for_line(r"models\.yaml was not applied: .*2 problems")
        finally:
            write(models_file, LIMITED_CHAT)
        assert told.returncode == 1
        assert "Everything stays as it was" in told.stderr
        assert_error(refused, 400, "invalid_config")
        for text in (told.stderr, refused.json()["error"]["message"]):
            assert "2 problems" in text
            assert "requests_per_minute" in text
            assert "chta" in text
        assert (await client.post(CHAT, json=SHORT)).headers["x-ratelimit-limit-requests"] == "20"
        assert (await admin.get("/health/ready")).status_code == 200


# The data directory


async def test_a_second_server_on_the_same_folder_is_refused_and_harms_nothing(
    chat_server: Server, admin: httpx2.AsyncClient, models_file: Path
):
    second = await asyncio.to_thread(hearth, chat_server.data_dir, models_file, "serve", "--port", "0")
    assert second.returncode == 1
    assert f"process {chat_server.pid}" in second.stderr
    assert "--data-dir" in second.stderr
    assert "Traceback" not in second.stderr
    assert await answers(admin)
    reload = await asyncio.to_thread(hearth, chat_server.data_dir, models_file, "reload")
    assert str(chat_server.pid) in reload.stdout
    assert "nothing has changed" in reload.stdout


def test_reload_without_a_server_says_so(tmp_path: Path, models_file: Path):
    done = hearth(tmp_path, models_file, "reload")
    assert done.returncode == 1
    assert "No Hearth runs on the data directory" in done.stderr
