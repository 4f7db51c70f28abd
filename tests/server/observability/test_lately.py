"""What went wrong lately: kept for a while, told to the owner and to administrators, without a word of clients."""

import asyncio
import json
import logging
import os
import pty
import subprocess

import httpx2
import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error
from serving import BIN, CANARY, ROOT, Server

import server.app  # all routes, whose words they are  # noqa: F401
from engine import OverloadedError
from server.errors import ApiError, to_api_error
from server.observability.access_log import RequestRecord
from server.observability.metrics import Metrics
from server.observability.status_server import Lately
from server.validation import own_path


@pytest.fixture
def lately() -> Lately:
    return Lately(Metrics({"known"}))


@pytest.mark.parametrize(
    ("param", "kept"),
    [
        (None, None),
        ("model", "model"),
        ("messages[3].content[12].text", "messages[3].content[12].text"),
        ("tools[0].function.parameters.properties.secret", "tools[0].function.parameters"),
        ("metadata.my secret", "metadata"),
        ("my_secret", None),
        ("messages[1234567]", None),
        ("me\u017f\u017fages", None),
    ],
)
def test_of_a_field_only_our_own_words_are_kept(param: str | None, kept: str | None):
    assert own_path(param) == kept


def test_a_refusal_names_no_model_and_no_method_of_the_clients(lately: Lately):
    for number, model in enumerate(("known", CANARY)):
        record = RequestRecord(str(number), "GET" if number else CANARY, None, model=model, status=404)
        record.refused(ApiError(404, "model_not_found", "There is none.", param=CANARY))
        lately.refuse(record)
    newest, oldest = lately.refused()
    assert (newest.request_id, newest.model, newest.method, newest.param) == ("1", None, "GET", None)
    assert (oldest.model, oldest.method) == ("known", "")


def test_what_a_busy_server_lacks_is_named(lately: Lately):
    record = RequestRecord("1", "POST", None, status=503)
    busy = OverloadedError("The queue is full.", retry_after_seconds=5, limit="max_queued_requests")
    record.refused(to_api_error(busy))
    lately.refuse(record)
    assert lately.refused()[0].param == "max_queued_requests"


def test_no_more_than_a_thousand_are_kept(lately: Lately):
    for number in range(1500):
        lately.refuse(RequestRecord(str(number), "GET", None, error_code="not_found"))
    assert [one.request_id for one in lately.refused()] == [str(number) for number in range(1499, 499, -1)]


def test_warnings_and_errors_of_our_log_are_kept_and_no_others(lately: Lately):
    own = logging.getLogger("hearth")
    own.addHandler(lately)
    logging.getLogger("hearth.x").warning("disk %s", "full")
    logging.getLogger("hearth.x").info("fine")
    logging.getLogger("other").error("not ours")
    own.removeHandler(lately)
    (line,) = lately.log()
    assert (line.level, line.source, line.message) == ("warning", "hearth.x", "disk full")


@pytest.mark.engine
async def test_what_was_refused_is_told_here_and_over_http(http: httpx2.AsyncClient, server: Server):
    ids = [f"lately-{number}" for number in range(3)]
    secret = f"hk_{CANARY}"
    bodies = ({"model": MODEL, "messages": HELLO, "temperature": 9}, {"model": CANARY, "messages": HELLO})
    for request_id, body in zip(ids, bodies, strict=False):
        await http.post(CHAT, json=body, headers={"x-request-id": request_id})
    await http.get(f"/v1/{secret}/b?key={CANARY}", headers={"x-request-id": ids[2]})
    told = (await http.get("/v1/admin/requests?refused=true&since=1h")).json()["data"]
    seen = {one["request_id"]: one for one in told}
    assert [one["request_id"] for one in told[:3]] == ids[::-1]
    expected = {"status": 400, "error_code": "invalid_value", "param": "temperature", "route": CHAT, "model": None}
    assert seen[ids[0]] == seen[ids[0]] | expected | {"method": "POST", "path": None}
    assert (seen[ids[1]]["error_code"], seen[ids[1]]["model"]) == ("model_not_found", None)
    assert (seen[ids[2]]["path"], seen[ids[2]]["route"]) == ("/v1/***/b", None)
    assert CANARY not in json.dumps(told[:3])
    assert_error(await http.get("/v1/admin/requests"), 400, "missing_field", "refused")
    assert_error(await http.get("/v1/admin/requests?refused=false"), 400, "invalid_value", "refused")
    command = [BIN / "hearth", "requests", "--refused", "--json", "--data-dir", server.data_dir]
    said = await asyncio.to_thread(subprocess.check_output, command, timeout=60)
    assert [one for one in json.loads(said)["data"] if one["request_id"] in ids] == told[:3]
    lines = (server.data_dir / "logs" / "access.jsonl").read_text().splitlines()
    logged = {line["request_id"]: line for line in map(json.loads, lines)}
    assert (logged[ids[0]]["param"], logged[ids[2]]["path"]) == ("temperature", "/v1/***/b")


@pytest.mark.engine
async def test_it_is_told_which_limit_was_reached_and_which_model_a_key_may_not_use(
    http: httpx2.AsyncClient, server: Server
):
    key = server.make_key("lately", tier="standard", limits={"requests_per_minute": 1})
    for number, model in enumerate(("service-pro", MODEL, MODEL)):
        headers = {"Authorization": f"Bearer {key.text}", "x-request-id": f"lately-of-a-key-{number}"}
        await http.post(CHAT, json={"model": model, "messages": HELLO, "max_tokens": 1}, headers=headers)
    told = (await http.get("/v1/admin/requests?refused=true&since=1h")).json()["data"]
    seen = {one["request_id"]: (one["error_code"], one["model"], one["param"]) for one in told}
    assert seen["lately-of-a-key-0"] == ("model_not_found", "service-pro", "model")
    assert seen["lately-of-a-key-2"] == ("rate_limit_exceeded", MODEL, "requests_per_minute")


@pytest.mark.engine
def test_the_watch_tells_one_object_a_line_with_all_that_an_admin_looks_at(server: Server):
    command = [BIN / "hearth", "doctor", "--watch", "--json", "--data-dir", str(server.data_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first, second = (json.loads(watching.stdout.readline()) for _ in range(2))
        watching.terminate()  # what starts the tests may have told them to ignore SIGINT
        watching.wait(10)
    assert second["uptime_seconds"] > first["uptime_seconds"]
    assert first["last_minute"].keys() == {"seconds", "requests", "refused", "failed"}
    (chat,) = [model for model in second["models"] if model["id"] == MODEL]
    assert 0 <= chat["kv_cache_usage"] < 1
    assert chat["last_minute"].keys() >= {"answers", "errors", "tokens_per_second"}
    assert {"refused", "log", "ram_available_bytes", "gpus"} <= second.keys()


@pytest.mark.engine
@pytest.mark.parametrize("in_terminal", [False, True])
def test_the_watch_shows_a_picture_at_once_and_again(server: Server, *, in_terminal: bool):
    ours, theirs = pty.openpty() if in_terminal else os.pipe()
    command = [BIN / "hearth", "doctor", "--watch", "--data-dir", str(server.data_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs) as watching, os.fdopen(ours, "rb", buffering=0) as shown:
        os.close(theirs)
        seen = b""
        while seen.count(MODEL.encode()) < 2:
            seen += shown.read(65536)
            assert watching.poll() is None, seen.decode()
        watching.terminate()
        watching.wait(10)
