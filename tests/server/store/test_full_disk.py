"""A data directory on a disk that gets full: said once, by /health/ready and in the log, and over by itself."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from chat_parts import assert_error
from serving import Server, poll_until
from small_disks import small_disk
from small_models import VOICES_ONLY
from speech_parts import HELLO_EMMA, SPEECH

from server.store.sqlite import _SPARE_BYTES

KNOWN_SECONDS = 12  # usage is written every 5 s
BACK_SECONDS = 12
BEGINS, ENDS = "The key database cannot be written", "The key database can be written again"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of a server whose data directory is a file system of its own."""
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    with small_disk(data_dir, "8m"):
        yield tmp_path


def fill(ballast: Path, spare_bytes: int = 0) -> None:
    """Take all that is free but so much."""
    try:
        with ballast.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        with ballast.open("r+b") as file:
            file.truncate(ballast.stat().st_size - spare_bytes)


@pytest.mark.engine
def test_a_full_disk_is_named_while_it_lasts_and_costs_two_lines(folder: Path) -> None:
    (folder / "models.yaml").write_text(VOICES_ONLY)
    ballast = folder / "data" / "ballast"
    environment = {"HEARTH_MODELS": str(folder / "models.yaml"), "HEARTH_DISK_RESERVE_GIB": "0"}
    with Server(folder, environment=environment) as server:
        key = server.make_key("emma", tier="standard")
        headers = {"Authorization": f"Bearer {key.text}"}

        def speaks() -> bool:
            return (
                httpx2.post(f"{server.root_url}{SPEECH}", json=HELLO_EMMA, headers=headers, timeout=60).status_code
                == 200
            )

        def degraded() -> str | None:
            answer = httpx2.get(f"{server.root_url}/health/ready", timeout=60)
            assert answer.status_code == 200
            found = answer.json()["degraded"]
            return None if found is None else str(found)

        assert speaks()
        assert degraded() is None
        fill(ballast)
        assert speaks()
        poll_until(lambda: degraded() is not None, KNOWN_SECONDS, describe=server.log)
        assert "cannot be written" in str(degraded())
        assert "cannot be written" in server.hearth("status")
        made = httpx2.post(
            f"{server.base_url}/admin/keys",
            json={"name": "late", "tier": "standard"},
            headers={"Authorization": f"Bearer {server.admin_key and server.admin_key.text}"},
            timeout=60,
        )
        assert_error(made, 503, "server_overloaded")
        fill(ballast, _SPARE_BYTES // 2)  # a page could be written, and no more for long
        for _ in range(3):
            assert speaks()
            poll_until(lambda: degraded() is not None, 60)
        ballast.unlink()
        poll_until(lambda: degraded() is None, BACK_SECONDS, describe=server.log)
        server.make_key("after", tier="standard")
        poll_until(lambda: "5" in server.hearth("usage", "--key", key.public_id), BACK_SECONDS, describe=server.log)
        assert server.stop() == 0, server.log()
    said = server.log()
    assert (said.count(BEGINS), said.count(ENDS)) == (1, 1), said
    assert "not written yet" not in said
