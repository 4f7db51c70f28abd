"""What administrators have done over HTTP beyond keys: tiers, models loaded again, plan, doctor and downloads."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import httpx2
import psutil
import pytest
from chat_parts import assert_error
from serving import Key, RunningServer, Server, poll_until

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def admin(server: Server, admin_key: Key) -> Iterator[httpx2.Client]:
    headers = {"Authorization": f"Bearer {admin_key.text}"}
    with httpx2.Client(base_url=f"{server.base_url}/admin", headers=headers, timeout=200) as opened:
        yield opened


def test_tiers_have_their_models_and_limits(admin: httpx2.Client):
    tiers = {tier["id"]: tier for tier in admin.get("/tiers").json()["data"]}
    assert set(tiers) == {"standard", "enhanced"}
    assert "service-pro" in tiers["enhanced"]["models"]
    assert "service-pro" not in tiers["standard"]["models"]
    assert tiers["standard"]["requests_per_minute"] is None


def test_a_model_with_memory_of_its_own_stays_and_an_unknown_one_is_named_so(admin: httpx2.Client):
    assert admin.post("/models/service-plus/load").status_code == 204
    assert_error(admin.post("/models/service-plus/unload"), 400, "invalid_value", param="model")
    for what in ("load", "unload"):
        for name in ("nothing", "team/nothing"):
            assert_error(admin.post(f"/models/{name}/{what}"), 404, "model_not_found", param="model")
    actions = [entry["action"] for entry in admin.get("/audit", params={"limit": 5}).json()["data"]]
    assert "model.load" in actions


def test_the_plan_is_what_the_command_prints(server: Server, admin: httpx2.Client):
    found = admin.get("/plan").json()
    assert [model["id"] for model in found["models"]] == [model["id"] for model in plan_of(server)["models"]]


def plan_of(server: Server) -> dict:
    return json.loads(server.hearth("plan", "--json"))


def test_status_is_the_same_for_all_who_ask_within_a_second(admin: httpx2.Client):
    began, seen = time.monotonic(), set[float]()
    while time.monotonic() - began < 2:  # it says tenths: made anew each time, it would say twenty
        seen.add(admin.get("/status").json()["uptime_seconds"])
    assert 2 <= len(seen) <= 2 + time.monotonic() - began


def test_a_download_that_nothing_can_come_of_says_so_line_by_line(admin: httpx2.Client):
    assert admin.get("/weights/pull").status_code in {200, 404}
    answer = admin.post("/weights/pull", json={"models": ["team/no-such-variant"]})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == {"type": "weights.done", "ok": False}
    assert any("team/no-such-variant" in event.get("text", "") for event in events)
    again = admin.get("/weights/pull")
    assert again.text == answer.text
    assert admin.delete("/weights/pull").status_code == 204


def test_two_downloads_asked_for_at_once_are_one(server: Server, admin: httpx2.Client):
    def pull() -> list[str]:
        answer = admin.post("/weights/pull", json={"models": ["no-such-variant"]})
        return [line for line in answer.text.splitlines() if line.startswith("data: ")]

    def entries() -> int:
        found = admin.get("/audit", params={"limit": 100}).json()["data"]
        return [entry["action"] for entry in found].count("weights.pull")

    before = entries()
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(pull) for _ in range(4)]
        with download_standing_still(server):  # it cannot end before all are there
            if not isinstance(server, RunningServer):
                poll_until(lambda: admin.get("/status").json()["requests_running"] > len(asked), 60)
        first, *others = [each.result() for each in asked]
    assert all(one == first for one in others)
    most = 2 if isinstance(server, RunningServer) else 1  # of a cluster each replica fetches for its machine
    assert before < entries() <= before + most


@contextmanager
def download_standing_still(server: Server) -> Iterator[None]:
    """As soon as its process has begun; a server that is not ours goes on."""
    if isinstance(server, RunningServer):
        yield
        return

    def found() -> list[psutil.Process]:
        children = []
        for child in psutil.Process(server.pid).children():
            with suppress(psutil.NoSuchProcess):
                children += [child] if {"weights", "pull"} <= set(child.cmdline()) else []
        return children

    poll_until(lambda: bool(found()), 60)
    (process,) = found()
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.mark.parametrize("models", [["--help"], ["../x"], ["a b"], [""], [1], "x", None])
def test_a_download_takes_names_and_no_options(admin: httpx2.Client, models: object):
    assert admin.post("/weights/pull", json={"models": models}).status_code == 400


@pytest.mark.rounds
def test_doctor_finds_the_server_that_asks_it(admin: httpx2.Client):
    found = admin.post("/doctor").json()
    assert any(finding["area"] == "server" and finding["verdict"] == "ok" for finding in found["findings"])
