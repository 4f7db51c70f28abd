"""`/v1/files` and `/v1/batches` with the openai package and without, on the real server."""

import asyncio
import base64
import io
import json
import random
import sqlite3
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from batch_parts import jsonl, line, read_jsonl
from chat_parts import HELLO, HELLO_ANSWER, MODEL, assert_error
from openai.types import Batch, FileObject
from pooling_parts import EMBEDDING
from serving import Key, Server, async_poll_until
from small_disks import small_disk
from standstill import standstill

pytestmark = pytest.mark.engine

ENDED = {"completed", "failed", "expired", "cancelled"}


def hello(custom_id: str, **fields: Any) -> dict[str, Any]:
    return line(custom_id, **{"messages": HELLO, "temperature": 0, "max_tokens": 20, **fields})


async def upload(client: openai.AsyncOpenAI, lines: list[Any]) -> FileObject:
    return await client.files.create(file=("questions.jsonl", jsonl(lines)), purpose="batch")


async def begun(client: openai.AsyncOpenAI, file: str, endpoint: Any = "/v1/chat/completions", **fields: Any) -> Batch:
    window: Any = fields.pop("window", "24h")
    return await client.batches.create(input_file_id=file, endpoint=endpoint, completion_window=window, **fields)


async def ended(client: openai.AsyncOpenAI, batch: Batch, seconds: float = 240) -> Batch:
    async with asyncio.timeout(seconds):
        while batch.status not in ENDED:
            batch = await client.batches.retrieve(batch.id)
    return batch


async def content(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, Any]]:
    return [] if file is None else read_jsonl((await client.files.content(file)).content)


@pytest.fixture(scope="module")
async def other(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    """The same with another key."""
    key = server.make_key("a neighbour")
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=key.text, max_retries=0, timeout=60) as opened:
        yield opened


async def test_a_batch_from_upload_to_deletion_with_the_openai_package(client: openai.AsyncOpenAI) -> None:
    lines = [hello("first"), hello("wrong", temperature=7), hello("streamed", stream=True), hello("last", n=2)]
    file = await upload(client, lines)
    assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "questions.jsonl", "processed")
    assert file.bytes == len(jsonl(lines))
    assert file.expires_at == file.created_at + 30 * 86400
    assert (await client.files.content(file.id)).content == jsonl(lines)

    batch = await begun(
        client,
        file.id,
        metadata={"who": "test"},
        extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 3600}},
    )
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"who": "test"})
    assert batch.expires_at == batch.created_at + 86400
    batch = await ended(client, batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    assert batch.model == MODEL
    assert batch.usage is not None
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens > 0

    first, last = await content(client, batch.output_file_id)
    assert (first["custom_id"], last["custom_id"]) == ("first", "last")
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"].startswith("req_")
    alone = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=20)
    answer = openai.types.chat.ChatCompletion.model_validate(first["response"]["body"])
    assert answer.choices[0].message.content == HELLO_ANSWER == alone.choices[0].message.content
    assert len(last["response"]["body"]["choices"]) == 2

    wrong, streamed = await content(client, batch.error_file_id)
    assert (wrong["custom_id"], streamed["custom_id"]) == ("wrong", "streamed")
    assert wrong["response"]["status_code"] == 400
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=7)
    assert wrong["response"]["body"]["error"] == refused.value.body
    assert streamed["response"]["body"]["error"]["param"] == "stream"

    output = await client.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.expires_at) == ("batch_output", output.created_at + 3600)
    listed = [one.id async for one in client.files.list(limit=2)]
    assert {file.id, batch.output_file_id, batch.error_file_id} <= set(listed)
    assert file.id not in [one.id async for one in client.files.list(purpose="batch_output")]
    assert batch.id in [one.id async for one in client.batches.list(limit=1)]
    for id_ in (file.id, batch.output_file_id or "", batch.error_file_id or ""):
        assert (await client.files.delete(id_)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(id_)


async def test_the_other_endpoints_answer_lines_like_requests(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 8},
        "/v1/responses": {"input": "Say hello.", "temperature": 0, "max_output_tokens": 20},
    }
    for endpoint, body in asked.items():
        one = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
        two = one | {"custom_id": "b", "body": {"model": MODEL}}
        batch = await ended(client, await begun(client, (await upload(client, [one, two])).id, endpoint))
        (answered,) = await content(client, batch.output_file_id)
        (failed,) = await content(client, batch.error_file_id)
        assert failed["response"]["body"]["error"]["code"] == "missing_field"
        alone = await client.post(endpoint.removeprefix("/v1"), body={"model": MODEL, **body}, cast_to=dict[str, Any])
        found = answered["response"]["body"]
        assert found.keys() == alone.keys()
        told = "output_text" if endpoint.endswith("responses") else "text"
        assert _texts(found, told) == _texts(alone, told) != []
        assert batch.usage is not None
        assert batch.usage.input_tokens > 0


async def test_lines_of_embeddings_have_the_vectors_of_requests(client: openai.AsyncOpenAI, http: httpx2.AsyncClient):
    bodies: list[dict[str, Any]] = [
        {"input": ["The sea is wide.", "ሰላም"]},
        {"input": "The sea is wide.", "encoding_format": "base64"},
    ]
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/embeddings", "body": {"model": EMBEDDING, **body}}
        for n, body in enumerate([*bodies, {"input": []}])
    ]
    batch = await ended(client, await begun(client, (await upload(client, lines)).id, "/v1/embeddings"))
    answered = [one["response"]["body"] for one in await content(client, batch.output_file_id)]
    for body, found in zip(bodies, answered, strict=True):
        alone = (await http.post("/v1/embeddings", json={"model": EMBEDDING, **body})).json()
        assert found.keys() == alone.keys()
        assert (found["model"], found["usage"]) == (alone["model"], alone["usage"])
        for one, other in zip(_vectors(found), _vectors(alone), strict=True):
            assert one == pytest.approx(other, abs=1e-3)
    (failed,) = await content(client, batch.error_file_id)
    assert (failed["custom_id"], failed["response"]["body"]["error"]["param"]) == ("2", "input")
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (
        sum(one["usage"]["prompt_tokens"] for one in answered),
        0,
    )


def _vectors(answer: dict[str, Any]) -> list[tuple[float, ...]]:
    found = [one["embedding"] for one in answer["data"]]
    return [struct.unpack("<128f", base64.b64decode(one)) if isinstance(one, str) else tuple(one) for one in found]


async def test_lines_of_embeddings_need_their_own_scope(server: Server, batch_only: Key) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=batch_only.text, max_retries=0) as client:
        file = await upload(client, [hello("a")])
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await begun(client, file.id, "/v1/embeddings")
    assert refused.value.code == "insufficient_permissions"


def _texts(answer: dict[str, Any], kind: str) -> list[str]:
    if kind == "text":
        return [choice["text"] for choice in answer["choices"]]
    return [part["text"] for item in answer["output"] for part in item["content"]]


async def test_what_is_wrong_with_a_file_shows_in_the_batch(client: openai.AsyncOpenAI) -> None:
    file = await upload(client, [hello("a"), hello("a"), "no object"])
    batch = await ended(client, await begun(client, file.id))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or ()] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_json_line"),
    ]
    assert batch.output_file_id is batch.error_file_id is None


async def test_another_key_sees_nothing_of_it(client: openai.AsyncOpenAI, other: openai.AsyncOpenAI) -> None:
    file = await upload(client, [hello("a")])
    batch = await ended(client, await begun(client, file.id))
    for ask in (
        lambda: other.files.retrieve(file.id),
        lambda: other.files.content(file.id),
        lambda: other.files.delete(file.id),
        lambda: other.files.content(batch.output_file_id or ""),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: begun(other, file.id),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            await ask()
        assert refused.value.code == "not_found"
    assert [one async for one in other.files.list()] == []
    assert [one async for one in other.batches.list()] == []


async def test_cancelling_ends_it_with_what_is_done(client: openai.AsyncOpenAI) -> None:
    lines = [hello(f"line {number}", max_tokens=400, ignore_eos=True) for number in range(400)]
    batch = await begun(client, (await upload(client, lines)).id)
    with pytest.raises(openai.ConflictError) as refused:
        await client.files.delete(batch.input_file_id)
    assert refused.value.code == "file_in_use"
    while not (batch.request_counts and batch.request_counts.completed):
        batch = await client.batches.retrieve(batch.id)
    began = time.monotonic()
    assert (await client.batches.cancel(batch.id)).status in {"cancelling", "cancelled"}
    batch = await ended(client, batch)
    assert time.monotonic() - began < 10
    assert batch.status == "cancelled"
    output, errors = await content(client, batch.output_file_id), await content(client, batch.error_file_id)
    assert [one["custom_id"] for one in sorted(output + errors, key=lambda one: int(one["custom_id"][5:]))] == [
        f"line {number}" for number in range(400)
    ]
    assert output
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_lines_that_are_paused_for_questions_have_the_answers_of_others(
    client: openai.AsyncOpenAI, server: Server
) -> None:
    """More lines than run beside a question: the others sit out its steps, and go on where they were."""
    lines = [hello("first", max_tokens=1)]
    lines += [hello(f"line {number}", max_tokens=600, ignore_eos=True) for number in range(60)]
    file = await upload(client, lines)
    answers = []
    for questions in (0, 3):
        batch = await begun(client, file.id)
        while not (batch.request_counts and batch.request_counts.completed):
            batch = await client.batches.retrieve(batch.id)
        with standstill(server, MODEL):  # the lines do not end before the questions are there
            asking = [
                asyncio.create_task(
                    client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=20)
                )
                for _ in range(questions)
            ]
            seen = await client.batches.retrieve(batch.id)
            assert seen.status == "in_progress"
        for asked in await asyncio.gather(*asking):
            assert asked.choices[0].message.content == HELLO_ANSWER
        batch = await ended(client, batch)
        assert batch.errors is None
        assert batch.error_file_id is None
        answers.append([one["response"]["body"]["choices"] for one in await content(client, batch.output_file_id)])
    alone, beside = answers
    assert alone == beside


async def test_an_expired_window_ends_it_with_what_is_done(client: openai.AsyncOpenAI, server: Server) -> None:
    lines = [hello(f"line {number}", max_tokens=400, ignore_eos=True) for number in range(400)]
    batch = await begun(client, (await upload(client, lines)).id, window="1h")
    while not (batch.request_counts and batch.request_counts.completed):
        batch = await client.batches.retrieve(batch.id)
    with sqlite3.connect(server.data_dir / "hearth.db") as database:  # an hour later
        database.execute("UPDATE batch SET expires_at = 1 WHERE id = ?", (batch.id,))
    database.close()
    batch = await ended(client, batch)
    assert batch.status == "expired"
    errors = await content(client, batch.error_file_id)
    assert {one["error"]["code"] for one in errors} == {"batch_expired"}
    assert len(errors) + len(await content(client, batch.output_file_id)) == 400


FORMS: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "another purpose": ({"files": {"file": b"{}"}, "data": {"purpose": "vision"}}, 400, "invalid_value", "purpose"),
    "no purpose": ({"files": {"file": b"{}"}}, 400, "missing_field", "purpose"),
    "no file": ({"files": {"other": b"{}"}, "data": {"purpose": "batch"}}, 400, "missing_field", "file"),
    "an empty file": ({"files": {"file": b""}, "data": {"purpose": "batch"}}, 400, "invalid_value", "file"),
    "two files": (
        {"files": [("file", b"1"), ("file", b"2")], "data": {"purpose": "batch"}},
        400,
        "invalid_value",
        "file",
    ),
    "no UTF-8": (
        {"files": {"file": b"{}", "purpose": (None, b"batch\xff")}},
        *(400, "invalid_value", "purpose"),
    ),
    "JSON": ({"json": {"purpose": "batch"}}, 415, "unsupported_media_type", None),
    "its own boundary": (
        {
            "content": b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + b"\r\n--B?" * 100_000,
            "headers": {"Content-Type": "multipart/form-data; boundary=B"},
        },
        *(400, "invalid_value", None),
    ),
    "nothing": ({}, 415, "unsupported_media_type", None),
    "an expiry": (
        {
            "files": {"file": b"{}"},
            "data": {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
        },
        *(400, "invalid_value", "expires_after.seconds"),
    ),
}


@pytest.mark.parametrize("form", FORMS)
async def test_a_wrong_form_is_refused(http: httpx2.AsyncClient, server: Server, form: str) -> None:
    sent, status, code, param = FORMS[form]
    assert_error(await http.post("/v1/files", **sent), status, code, param)
    uploads = server.data_dir / "batches" / "uploads"  # what was refused is deleted beside the answer
    await async_poll_until(lambda: not any(uploads.iterdir()), 60)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "30m"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"input_file_id": 3}, "input_file_id"),
    ],
)
async def test_a_wrong_body_is_refused(http: httpx2.AsyncClient, body: dict[str, Any], param: str) -> None:
    good = {"input_file_id": "file-" + "0" * 32, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    assert_error(await http.post("/v1/batches", json=good | body), 400, "invalid_value", param)
    assert_error(await http.post("/v1/batches", json=good), 404, "not_found", "input_file_id")


@pytest.mark.parametrize("id_", ["file-0", "%00", "..%2f..", "file-" + "0" * 32, "batch_" + "f" * 32, "é"])
async def test_what_is_no_id_is_not_there(http: httpx2.AsyncClient, id_: str) -> None:
    for method, path in (
        *(("GET", f"/v1/files/{id_}"), ("GET", f"/v1/files/{id_}/content"), ("DELETE", f"/v1/files/{id_}")),
        *(("GET", f"/v1/batches/{id_}"), ("POST", f"/v1/batches/{id_}/cancel")),
    ):
        assert_error(await http.request(method, path), 404, "not_found")
    assert (await http.get("/v1/files", params={"after": id_})).status_code in {200, 400}


def hostile(number: int) -> bytes:
    """A file that somebody sends in anger; each number another one, always the same."""
    dice = random.Random(number)  # noqa: S311
    good = json.dumps(hello(f"line {number}")).encode()
    pieces = [
        good,
        dice.randbytes(2000),
        b"\xff\xfe" + good.decode().encode("utf-16-le"),
        b"\xef\xbb\xbf" + good,
        b"[" * 100_000,
        b'{"a":' * 5_000,
        b"\x00" * 1000,
        good.replace(b"{", b"{\x00"),
        good[: dice.randrange(len(good))],
        good.replace(b'"messages"', b'"messages": "\\ud800", "m"'),
        good.replace(b"20", b"1e999"),
        good.replace(b"20", b"9" * 5000),
        json.dumps(hello("deep", messages=[HELLO] * 50)).encode(),
        json.dumps(
            {"custom_id": "c" * 513, "method": "POST", "url": "/v1/chat/completions", "body": {"model": MODEL}}
        ).encode(),
        json.dumps(line("huge", messages=[{"role": "user", "content": "x" * 2_000_000}])).encode(),
        b"\r\n--boundary\r\n" * 20,
        b"\r" * 3000,
        b"",
    ]
    return dice.choice([b"\n", b"\r\n", b"\n\n \n"]).join(dice.choices(pieces, k=dice.randrange(1, 5))) or b"\n"


@pytest.mark.parametrize("files", [12, pytest.param(100, marks=[pytest.mark.rounds, pytest.mark.timeout(900)])])
async def test_hostile_files_fail_their_batch_and_nothing_else(
    client: openai.AsyncOpenAI, server: Server, files: int
) -> None:
    batches = []
    for number in range(files):
        sent = await client.files.create(file=("x\r\n\x00é.jsonl", io.BytesIO(hostile(number))), purpose="batch")
        batches.append(await begun(client, sent.id))
        if number % 50 == 49:
            batches = [await ended(client, batch) for batch in batches]
    for batch in [await ended(client, one) for one in batches]:
        assert batch.status in {"failed", "completed"}
        for one in await content(client, batch.error_file_id):
            assert 400 <= one["response"]["status_code"] < 500, one
    assert server.is_ready()
    assert "Traceback" not in server.log()
    routes = ("/v1/files", "/v1/batches")
    assert not [
        one for one in server.access_lines() if (one.get("route") or "").startswith(routes) and one["status"] >= 500
    ]


@pytest.fixture(scope="module")
def batch_only(server: Server) -> Key:
    return server.make_key("batches only", scopes=["batch"])


async def test_a_batch_is_metered_as_the_keys(server: Server, batch_only: Key, http: httpx2.AsyncClient) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=batch_only.text, max_retries=0) as client:
        batch = await ended(client, await begun(client, (await upload(client, [hello(str(n)) for n in range(5)])).id))
    query = {"key": batch_only.public_id, "since": "1h", "by": ["kind"]}
    rows, deadline = [], time.monotonic() + 60
    while sum(row["requests"] for row in rows) < 5 and time.monotonic() < deadline:
        rows = (await http.get("/v1/usage", params=query)).json()["data"]  # a cluster's other replica: every 5 s
    (used,) = rows
    assert batch.usage is not None
    assert (used["kind"], used["requests"]) == ("batch", 5)
    assert (used["prompt_tokens"], used["completion_tokens"]) == (batch.usage.input_tokens, batch.usage.output_tokens)


async def test_a_batch_leaves_its_owner_what_its_own_requests_need(server: Server) -> None:
    """Also where the key may have one request at a time, and fewer in a minute than the batch has lines."""
    limits = {"parallel_requests": 1, "requests_per_minute": 120, "tokens_per_minute": 20_000}
    key = server.make_key("a batch and a chat", limits=limits)
    lines = [hello(f"line {number}", max_tokens=60, ignore_eos=True) for number in range(400)]
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=key.text, max_retries=0, timeout=60) as own:
        batch = await begun(own, (await upload(own, lines)).id)
        while not (batch.request_counts and batch.request_counts.completed):
            batch = await own.batches.retrieve(batch.id)
        for _ in range(20):
            answer = await own.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=20)
            assert answer.choices[0].message.content == HELLO_ANSWER
        batch = await own.batches.retrieve(batch.id)
        assert batch.status == "in_progress"
        assert batch.request_counts is not None
        assert batch.request_counts.failed == 0
        await own.batches.cancel(batch.id)
        await ended(own, batch)


async def test_a_disk_that_gets_full_refuses_the_upload_and_the_server_lives(
    client: openai.AsyncOpenAI, http: httpx2.AsyncClient, server: Server
) -> None:
    content = jsonl(hello(f"line {number}", comment="x" * 10_000) for number in range(1000))
    form = {"files": {"file": ("large.jsonl", content)}, "data": {"purpose": "batch"}}
    uploads = server.data_dir / "batches" / "uploads"
    with small_disk(uploads, "4m"):
        for _ in range(2):
            assert_error(await http.post("/v1/files", **form), 507, "insufficient_storage")
            await async_poll_until(lambda: not any(uploads.iterdir()), 60)
        answer = await client.chat.completions.create(model=MODEL, messages=HELLO, temperature=0, max_tokens=20)
        assert answer.choices[0].message.content == HELLO_ANSWER
    sent = await http.post("/v1/files", **form)
    assert sent.status_code == 200, sent.text
    assert (await client.files.delete(sent.json()["id"])).deleted


async def test_lines_of_embeddings_leave_half_of_the_tokens_to_others(server: Server) -> None:
    key = server.make_key("half", limits={"tokens_per_minute": 400})
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key=key.text, max_retries=0, timeout=60) as client:
        lines = [
            line(f"{at}", "/v1/embeddings") | {"body": {"model": EMBEDDING, "input": "word " * 40}} for at in range(40)
        ]
        batch = await begun(client, (await upload(client, lines)).id, "/v1/embeddings")

        async def left() -> int:
            return (await client.get("/key", cast_to=httpx2.Response)).json()["left"]["tokens"]

        async with asyncio.timeout(120):
            while await left() > 270:  # until it has to wait
                assert (await client.batches.retrieve(batch.id)).status in {"validating", "in_progress"}
        ends = time.monotonic() + 1
        while time.monotonic() < ends:  # in which it would take the rest
            assert await left() >= 150
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        assert (await client.embeddings.create(model=EMBEDDING, input="word " * 40)).data
        await ended(client, await client.batches.cancel(batch.id))
