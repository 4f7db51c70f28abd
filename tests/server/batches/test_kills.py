"""`kill -9` at random moments: every line has exactly one record in the end."""

import random
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from batch_parts import assert_each_once, house_at, jsonl, line, read_jsonl
from serving import Key, Server, poll_until, total_bytes
from small_models import CHAT_ENTRY, models_yaml
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
        with suppress(FileNotFoundError):  # it goes when the last line is answered
            return total_bytes(journals.glob("*"))
        return 0

    with ready_python(RUNNERS, database_url, house.folder.path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(kills):
            process.stdin.write("\n")
            pid = int(process.stdout.readline())
            more = journal_bytes() + dice.uniform(0, 400) * lines / kills  # a record has some 340 bytes
            poll_until(lambda: journal_bytes() > more or not journals.exists(), 60)  # noqa: B023
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
def test_a_server_and_engines_that_are_killed_lose_no_line_of_a_batch(tmp_path: Path, database_url: str) -> None:
    lines, kills, deaths = 2000, 20, 10
    dice = random.Random(lines)  # noqa: S311
    (tmp_path / "models.yaml").write_text(models_yaml(CHAT_ENTRY))
    environment = {"HEARTH_MODELS": str(tmp_path / "models.yaml")}
    if not database_url.startswith("sqlite"):
        environment["HEARTH_DATABASE_URL"] = database_url
    server = Server(tmp_path, environment=environment)
    asked = [line(f"line {number}", max_tokens=60, ignore_eos=True) for number in range(lines)]
    try:
        server.start()
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        with httpx2.Client(base_url=server.base_url, headers=headers, timeout=30) as http:
            sent = http.post("/files", files={"file": ("in.jsonl", jsonl(asked))}, data={"purpose": "batch"}).json()
            body = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = http.post("/batches", json=body).json()["id"]
        looks: list[float] = []
        order = ["server"] * kills + ["engine"] * deaths
        dice.shuffle(order)

        def look() -> dict[str, Any]:
            began = time.perf_counter()
            sent = httpx2.get(f"{server.base_url}/batches/{batch}", headers=headers, timeout=60)
            looks.append(time.perf_counter() - began)
            found: dict[str, Any] = sent.json()
            return found

        def done() -> int:
            counts = look()["request_counts"]
            return int(counts["completed"] + counts["failed"])

        for at, victim in enumerate(order):
            print(f"{time.strftime('%X')} {at}: {victim}, {done()} lines, slowest look {max(looks):.2f} s", flush=True)  # noqa: T201
            if victim == "engine":
                server.wait_until_ready()
            if (
                at % 2
            ):  # while lines are answered; else soon, be it while the model loads or the batch is taken up again
                further = min(lines, done() + dice.randrange(2 * lines // len(order)))
                poll_until(lambda: done() >= further, 300)  # noqa: B023
            else:
                time.sleep(dice.uniform(0, 2))
            if victim == "engine":
                for pid in engines(server, headers):
                    psutil.Process(pid).kill()
            else:
                server.kill()
                server = Server(tmp_path, environment=environment)
                server.start()

        poll_until(lambda: look()["status"] in ENDED, 600, describe=lambda: str(look()))
        found = look()
        files = [
            read_jsonl(httpx2.get(f"{server.base_url}/files/{id_}/content", headers=headers, timeout=60).content)
            if id_
            else []
            for id_ in (found["output_file_id"], found["error_file_id"])
        ]
    finally:
        server.kill()
    assert found["status"] == "completed"
    assert_each_once((one["custom_id"] for one in asked), *files)
    assert files[1] == []


@pytest.mark.engine
@pytest.mark.rounds
@pytest.mark.timeout(900)
def test_a_file_of_a_gibibyte_costs_little_memory_and_holds_nobody_up(server: Server, tmp_path: Path) -> None:
    """Upload, validation, some lines, cancellation, deletion; meanwhile others ask for the list of models, and chat."""
    key: Key = server.make_key("large files")
    headers = {"Authorization": f"Bearer {key.text}"}
    file = tmp_path / "large.jsonl"
    with file.open("wb") as opened:
        for number in range(40_000):
            opened.write(jsonl([line(f"line {number}", comment="x" * 26_000)]))
    assert 0.9 * 2**30 < file.stat().st_size <= 2**30
    process = psutil.Process(server.pid)
    seconds = defaultdict[str, list[float]](list)

    def asked(http: httpx2.Client, when: str, *kinds: str) -> None:
        for kind in kinds:
            began = time.perf_counter()
            if kind == "list":
                answer = http.get("/models")
            else:
                answer = http.post("/chat/completions", json=line("")["body"] | {"max_tokens": 20, "ignore_eos": True})
            assert answer.status_code == 200, answer.text
            seconds[f"{kind} {when}"].append(time.perf_counter() - began)

    with httpx2.Client(base_url=server.base_url, timeout=600, headers=headers) as http:
        for _ in range(100):
            http.get("/batches")  # as between two lists in the last phase
            asked(http, "alone", "list", "chat")
        before = most = process.memory_info().rss
        upload = [sys.executable, "-c", _UPLOAD, server.base_url, key.text, str(file)]
        with subprocess.Popen(upload, stdout=subprocess.PIPE, text=True) as uploading:
            while uploading.poll() is None:
                http.get("/batches")
                asked(http, "upload", "list", "chat")
                most = max(most, process.memory_info().rss)
            assert uploading.stdout is not None
            sent = uploading.stdout.read().strip()
        body = {"input_file_id": sent, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = http.post("/batches", json=body).json()["id"]
        done = 0
        while done < 100:
            asked(http, "lines", "list")
            most = max(most, process.memory_info().rss)
            found = http.get(f"/batches/{batch}").json()
            assert found["status"] in {"validating", "in_progress"}, found
            done = found["request_counts"]["completed"]
        http.post(f"/batches/{batch}/cancel")
        poll_until(lambda: http.get(f"/batches/{batch}").json()["status"] == "cancelled", 120)
        assert http.delete(f"/files/{sent}").status_code == 200
    p95 = {phase: sorted(taken)[int(0.95 * len(taken))] * 1000 for phase, taken in seconds.items()}
    shown = ", ".join(f"{phase} {p95[phase]:.1f} ms of {len(taken)}" for phase, taken in seconds.items())
    print(f"RSS +{(most - before) / 2**20:.0f} MiB, p95 {shown}")  # noqa: T201  # what docs/benchmarks.md says
    assert most - before < 100 * 10**6
    assert p95["chat upload"] < 1.5 * p95["chat alone"]
    assert max(p95["list upload"], p95["list lines"]) < 1.5 * p95["list alone"] + 1  # two cores, also for the clients


_UPLOAD = """
import sys, httpx2
base_url, key, path = sys.argv[1:]
with open(path, "rb") as file:
    sent = httpx2.post(f"{base_url}/files", files={"file": ("large.jsonl", file)}, data={"purpose": "batch"},
                       headers={"Authorization": f"Bearer {key}"}, timeout=600)
print(sent.json()["id"])
"""
