"""`kill -9` at random moments: every line has exactly one record in the end."""

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from batch_parts import assert_each_once, house_at, jsonl, line, read_jsonl
from serving import Key, Server, poll_until, total_bytes
from store_parts import ready_python

from server.store.batches import ENDED
from server.store.database import Database

# Imports once and forks, because a Python start for each kill would take most of the time. For each line that it reads
# it forks a process that runs batches until it is killed, and says its id, and then that it has ended.
RUNNERS = """
import asyncio, os, sys
from pathlib import Path
sys.path[:0] = ["tests", "tests/server"]
from batch_parts import Answers, house_at
from server.batches.runner import BatchLimits
from server.store.database import Database

class Slow(Answers):
    async def answer(self, *asked):
        await asyncio.sleep(0.02)
        return await super().answer(*asked)

async def run():
    async with await Database.open(sys.argv[1]) as database:
        house = house_at(database, Path(sys.argv[2]), answers=Slow(), limits=BatchLimits(most_running=20))
        async with house.running():
            await asyncio.Event().wait()

def say(line):
    os.write(1, (line + "\\n").encode())

say("ready")
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        asyncio.run(run())
    say(str(child))
    os.wait()
    say("ended")
"""


@pytest.mark.parametrize(("lines", "kills"), [(600, 4), pytest.param(2000, 20, marks=pytest.mark.rounds)])
async def test_a_runner_that_is_killed_again_and_again_misses_no_line_and_doubles_none(
    database: Database, database_url: str, tmp_path: Path, lines: int, kills: int
) -> None:
    dice = random.Random(lines)  # noqa: S311
    house = house_at(database, tmp_path / "batches")
    batch = await house.add(await house.key(), jsonl(line(f"line {number}", n=number) for number in range(lines)))
    journals = house.folder.journal(batch)
    journals.mkdir()

    def journal_bytes() -> int:
        return total_bytes(journals.glob("*"))

    with ready_python(RUNNERS, database_url, house.folder.path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(kills):
            process.stdin.write("\n")
            pid = int(process.stdout.readline())
            more = journal_bytes() + dice.uniform(0, 400) * lines / kills  # a record has some 340 bytes
            poll_until(lambda: journal_bytes() > more or not journals.exists(), 30)  # noqa: B023
            psutil.Process(pid).kill()
            assert process.stdout.readline() == "ended\n"
    async with house.running():
        row = await house.ended(batch)
    output, errors = house.output(row)
    assert (row.status, row.total, row.completed, row.failed) == ("completed", lines, lines, 0)
    assert_each_once((f"line {number}" for number in range(lines)), output, errors)
    assert [one["response"]["body"]["echo"] for one in output] == list(range(lines))
    assert len(house.answers.asked) < lines


def engines(server: Server, headers: dict[str, str]) -> list[int]:
    status = httpx2.get(f"{server.base_url}/admin/status", headers=headers, timeout=20).json()
    return [pid for model in status["models"] if model["id"] == "service-plus" for pid in model["pids"]]


@pytest.mark.engine
@pytest.mark.rounds
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("lines", "kills", "deaths"), [(500, 3, 2), (2000, 20, 10)])
def test_a_server_and_engines_that_are_killed_lose_no_line_of_a_batch(
    tmp_path: Path, lines: int, kills: int, deaths: int
) -> None:
    dice = random.Random(lines)  # noqa: S311
    server = Server(tmp_path)
    asked = [line(f"line {number}", max_tokens=60, ignore_eos=True) for number in range(lines)]
    with server:
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        with httpx2.Client(base_url=server.base_url, headers=headers, timeout=30) as http:
            sent = http.post("/files", files={"file": ("in.jsonl", jsonl(asked))}, data={"purpose": "batch"}).json()
            body = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = http.post("/batches", json=body).json()["id"]
        order = ["server"] * kills + ["engine"] * deaths
        dice.shuffle(order)

        def look() -> dict[str, Any]:
            found: dict[str, Any] = httpx2.get(f"{server.base_url}/batches/{batch}", headers=headers).json()
            return found

        def done() -> int:
            counts = look()["request_counts"]
            return int(counts["completed"] + counts["failed"])

        for victim in order:
            further = done() + dice.randrange(max(1, lines // len(order)))
            poll_until(lambda: done() >= min(further, lines), 120)  # noqa: B023
            if victim == "engine":
                for pid in engines(server, headers):
                    psutil.Process(pid).kill()
                server.wait_until_ready()
            else:
                server.kill()
                server.start()
                server.wait_until_ready()

        poll_until(lambda: look()["status"] in ENDED, 600, describe=lambda: str(look()))
        found = look()
        files = [
            read_jsonl(httpx2.get(f"{server.base_url}/files/{id_}/content", headers=headers).content) if id_ else []
            for id_ in (found["output_file_id"], found["error_file_id"])
        ]
    assert found["status"] == "completed"
    assert_each_once((one["custom_id"] for one in asked), *files)
    assert files[1] == []


@pytest.mark.engine
@pytest.mark.rounds
@pytest.mark.timeout(900)
def test_a_file_of_a_gibibyte_costs_little_memory_and_holds_nobody_up(server: Server, tmp_path: Path) -> None:
    """Upload, validation, some lines, cancellation, deletion; meanwhile others ask for the list of models."""
    key: Key = server.make_key("large files")
    headers = {"Authorization": f"Bearer {key.text}"}
    file = tmp_path / "large.jsonl"
    with file.open("wb") as opened:
        for number in range(40_000):
            opened.write(jsonl([line(f"line {number}", comment="x" * 26_000)]))
    assert 0.9 * 2**30 < file.stat().st_size <= 2**30
    process = psutil.Process(server.pid)

    def asked(http: httpx2.Client, seconds: list[float]) -> None:
        began = time.perf_counter()
        assert http.get("/models", headers=headers).status_code == 200
        seconds.append(time.perf_counter() - began)

    quiet: list[float] = []
    busy: list[float] = []
    with httpx2.Client(base_url=server.base_url, timeout=600) as http:
        for _ in range(200):
            asked(http, quiet)
        before = most = process.memory_info().rss
        upload = [sys.executable, "-c", _UPLOAD, server.base_url, key.text, str(file)]
        with subprocess.Popen(upload, stdout=subprocess.PIPE, text=True) as uploading:
            while uploading.poll() is None:
                asked(http, busy)
                most = max(most, process.memory_info().rss)
            assert uploading.stdout is not None
            sent = uploading.stdout.read().strip()
        body = {"input_file_id": sent, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = http.post("/batches", json=body, headers=headers).json()["id"]
        done = 0
        while done < 100:
            asked(http, busy)
            most = max(most, process.memory_info().rss)
            found = http.get(f"/batches/{batch}", headers=headers).json()
            assert found["status"] in {"validating", "in_progress"}, found
            done = found["request_counts"]["completed"]
        http.post(f"/batches/{batch}/cancel", headers=headers)
        poll_until(lambda: http.get(f"/batches/{batch}", headers=headers).json()["status"] == "cancelled", 120)
        assert http.delete(f"/files/{sent}", headers=headers).status_code == 200
    p95 = [sorted(seconds)[int(0.95 * len(seconds))] * 1000 for seconds in (quiet, busy)]
    print(  # noqa: T201  # what docs/benchmarks.md says
        f"RSS +{(most - before) / 2**20:.0f} MiB, p95 {p95[0]:.1f} -> {p95[1]:.1f} ms, {len(busy)} requests"
    )
    assert most - before < 100 * 10**6
    assert p95[1] < 1.5 * p95[0] + 5  # milliseconds: two cores for the client that sends, too


_UPLOAD = """
import sys, httpx2
base_url, key, path = sys.argv[1:]
with open(path, "rb") as file:
    sent = httpx2.post(f"{base_url}/files", files={"file": ("large.jsonl", file)}, data={"purpose": "batch"},
                       headers={"Authorization": f"Bearer {key}"}, timeout=600)
print(sent.json()["id"])
"""
