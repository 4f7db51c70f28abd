"""The access log: a line for every request that ends, written in bunches, none lost at the end."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from serving import async_poll_until

from engine import Usage
from server.observability.access_log import AccessLog, RequestRecord


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "access.jsonl").read_text(encoding="utf-8").splitlines()]


def record(name: str) -> RequestRecord:
    return RequestRecord(name, "POST", "127.0.0.1")


async def test_a_line_holds_what_is_known_and_nothing_else(tmp_path: Path):
    log, ended = AccessLog(tmp_path), record("one")
    ended.status, ended.stream = 200, False
    ended.headers["x-ratelimit-limit-requests"] = "7"
    ended.used(Usage(3, 0))
    log.append(ended)
    log.close()
    (line,) = lines_in(tmp_path)
    assert list(line)[:4] == ["time", "request_id", "method", "client"]
    assert list(line)[-1] == "duration_seconds"
    known = {"request_id": "one", "method": "POST", "client": "127.0.0.1", "stream": False, "status": 200}
    assert line == line | known | {"prompt_tokens": 3, "completion_tokens": 0}
    assert len(line) == 9


@pytest.mark.parametrize(
    ("path", "kept"),
    [
        ("/v1/chat", "/v1/chat"),
        ('/v1/caf\u00e9\n"<b>', "/v1/caf%C3%A9%0A%22%3Cb%3E"),
        ("/v1/hk_AbCdEfGhIjKl_secret/x", "/v1/***/x"),
        ("/hk_mistyped-key\u00e9 more/x", "/***/x"),
        ("/" + "a1" * 16, "/***"),
        ("/short" * 40, ("/short" * 40)[:100]),
    ],
)
def test_the_path_of_what_has_no_route_is_escaped_and_cut_and_names_no_key(path: str, kept: str):
    ended = record("one")
    ended.routed(None, path)
    assert (ended.route, ended.path) == (None, kept)
    ended = record("two")
    ended.routed("/v1/models/{model:path}", path)
    assert ended.path is None


async def test_lines_are_written_soon_and_in_their_order(tmp_path: Path):
    log = AccessLog(tmp_path)
    names = [str(number) for number in range(100)]
    for name in names[:50]:
        log.append(record(name))
    await async_poll_until(lambda: (tmp_path / "access.jsonl").read_bytes().count(b"\n") == 50, 60)
    for name in names[50:]:
        log.append(record(name))
    log.close()
    assert [line["request_id"] for line in lines_in(tmp_path)] == names


async def test_a_full_file_is_put_aside(tmp_path: Path):
    folder = tmp_path / "logs"
    for name in ("old", "new"):
        log = AccessLog(folder, file_bytes=200)
        log.append(record(name))
        log.close()
    assert [line["request_id"] for line in lines_in(folder)] == ["new"]
    assert "old" in (folder / "access.jsonl.1").read_text(encoding="utf-8")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
