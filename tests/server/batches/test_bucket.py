"""Files and journals in a bucket that speaks S3: any server goes on with a batch, and only one at a time."""

import asyncio
import secrets
from pathlib import Path
from typing import Any

import bucket_server
import httpx2
import psutil
import pytest
from batch_parts import Answers, House, assert_each_once, jsonl, line, read_jsonl
from postgres_parts import Postgres
from serving import Server, async_poll_until, poll_until
from small_models import CHAT_ENTRY, models_yaml

from server.batches.folder import BucketFolder
from server.batches.runner import BatchLimits
from server.store.batches import ENDED
from server.store.database import Database
from server.store.objects import Bucket


@pytest.fixture
def url(bucket_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a part of the bucket for one test."""
    for name, value in bucket_environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{bucket_server.NAME}/{secrets.token_hex(4)}"


def house_of(database: Database, url: str, path: Path, **parts: Any) -> House:
    return House(database, BucketFolder(path, Bucket(url)), **{"answers": Answers(), **parts})


def numbered(count: int) -> list[dict[str, Any]]:
    return [line(f"line {number}", n=number) for number in range(count)]


def test_objects_are_stored_listed_read_in_pieces_and_deleted(url: str, tmp_path: Path) -> None:
    bucket, large = Bucket(url), secrets.token_bytes(9 * 2**20 + 1)
    (tmp_path / "large").write_bytes(large)
    bucket.put("a/small", b"first")
    bucket.put("a/small", b"second")
    bucket.put_file("a/large", tmp_path / "large")
    bucket.put("ab/other", b"")
    assert bucket.get("a/small") == b"second"
    assert b"".join(bucket.pieces("a/large")) == large
    bucket.get_file("a/large", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == large
    assert [(one.name, one.bytes) for one in bucket.list("a")] == [("a/large", len(large)), ("a/small", 6)]
    bucket.delete("a/small", "a/large", "a/never")
    assert bucket.list("a") == bucket.list("none") == []
    for missing in (bucket.get, bucket.size, lambda name: list(bucket.pieces(name))):
        with pytest.raises(FileNotFoundError):
            missing("a/small")


def test_a_bucket_that_does_not_answer_is_an_error_of_the_disk_without_its_secrets(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(OSError, match="the bucket did not answer") as caught:
        Bucket(url).get("a")
    assert not isinstance(caught.value, FileNotFoundError)
    assert "swordfish" not in str(caught.value)


async def test_another_server_goes_on_with_what_one_has_recorded(database: Database, url: str, tmp_path: Path) -> None:
    limits = BatchLimits(most_running=10)
    one = house_of(database, url, tmp_path / "one", limits=limits, answers=Answers(steps=asyncio.Semaphore(120)))
    other = house_of(database, url, tmp_path / "other", limits=limits)
    async with one.running():
        batch = await one.add(await one.key(), jsonl(numbered(200)))
        await one.answers.until(finished=120, running=10)
    async with other.running():
        row = await other.ended(batch)
        await async_poll_until(lambda: not list(other.folder.bucket.list("journals")), 60)  # deleted after the end
    output, errors = other.output(row)
    assert (row.status, row.completed, row.failed) == ("completed", 200, 0)
    assert_each_once((f"line {number}" for number in range(200)), output, errors)
    assert len(other.answers.asked) == 80
    assert not any((other.folder.path / "journals").iterdir())
    await other.folder.delete(row.input_file_id)
    assert [one.name for one in other.folder.bucket.list("files")] == [f"files/{row.output_file_id}"]


async def test_of_two_servers_one_has_a_batch(database: Database, url: str, tmp_path: Path) -> None:
    gate = asyncio.Event()
    houses = [house_of(database, url, tmp_path / name, answers=Answers(gate=gate)) for name in ("one", "other")]
    async with houses[0].running(), houses[1].running():
        batch = await houses[0].add(await houses[0].key(), jsonl(numbered(50)))
        await async_poll_until(lambda: any(house.answers.asked for house in houses), 60)
        gate.set()
        row = await houses[1].ended(batch)
    assert row.completed == 50
    assert sorted(len(house.answers.asked) for house in houses) == [0, 50]


async def test_segments_stay_small_and_are_all_read_again(
    database: Database, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batches.folder.BucketFolder.most_segment_bytes", 1)
    monkeypatch.setattr("server.batches.journal._SYNC_SECONDS", 0.0)
    steps = asyncio.Semaphore(0)
    one = house_of(database, url, tmp_path / "one", answers=Answers(steps=steps))
    async with one.running():
        batch = await one.add(await one.key(), jsonl(numbered(6)))
        for count in (1, 2, 3):
            steps.release()
            await async_poll_until(lambda: len(one.folder.bucket.list("journals")) == count, 60)  # noqa: B023
    other = house_of(database, url, tmp_path / "other")
    async with other.running():
        row = await other.ended(batch)
    assert_each_once((f"line {number}" for number in range(6)), *other.output(row))
    assert len(other.answers.asked) == 3


@pytest.mark.engine
@pytest.mark.rounds
@pytest.mark.timeout(900)
def test_the_other_server_of_a_bucket_goes_on_after_a_kill(
    bucket_environment: dict[str, str], postgres: Postgres, tmp_path: Path
) -> None:
    lines = 600
    (tmp_path / "models.yaml").write_text(models_yaml(CHAT_ENTRY))
    environment = bucket_environment | {
        "HEARTH_MODELS": str(tmp_path / "models.yaml"),
        "HEARTH_DATABASE_URL": postgres.new_schema(),
        "HEARTH_FILES_URL": f"s3://{bucket_server.NAME}/servers",
    }
    asked = [line(f"line {number}", max_tokens=60, ignore_eos=True) for number in range(lines)]
    with Server(tmp_path / "one", environment=environment) as one:
        assert one.admin_key is not None
        headers = {"Authorization": f"Bearer {one.admin_key.text}"}
        with Server(tmp_path / "other", environment=environment) as other:
            sent = httpx2.post(
                f"{one.base_url}/files",
                files={"file": ("in.jsonl", jsonl(asked))},
                data={"purpose": "batch"},
                headers=headers,
                timeout=60,
            ).json()
            body = {"input_file_id": sent["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = httpx2.post(f"{one.base_url}/batches", json=body, headers=headers, timeout=60).json()["id"]

            def look() -> dict[str, Any]:
                found: dict[str, Any] = httpx2.get(
                    f"{other.base_url}/batches/{batch}", headers=headers, timeout=60
                ).json()
                return found

            poll_until(lambda: look()["request_counts"]["completed"] > lines // 5, 300)
            psutil.Process(one.pid).kill()
            poll_until(lambda: look()["status"] in ENDED, 300, describe=lambda: str(look()))
            found = look()
            content = httpx2.get(
                f"{other.base_url}/files/{found['output_file_id']}/content", headers=headers, timeout=60
            ).content
    assert found["status"] == "completed"
    assert_each_once((one["custom_id"] for one in asked), read_jsonl(content))
