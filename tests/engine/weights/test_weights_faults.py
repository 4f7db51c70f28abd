"""A hub and a line that do wrong: in the end there is a whole folder, or none and an error that says what to do."""

import random
import threading
from pathlib import Path

import pytest
from hub_server import Fault, HubServer
from weight_parts import FILES, NAME, PAUSE, REPOSITORY, SHARD, pull, refusal, wanted

from engine.errors import EngineError, WeightsError
from engine.weights.download import Pull, Wanted, prepared
from engine.weights.manifest import is_complete, silent, verify


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([Fault(cut=70_000)], id="cut in mid file"),
        pytest.param([Fault(cut=0), Fault(cut=100_000), Fault(cut=1)], id="cut three times"),
        pytest.param([Fault(status=500), Fault(status=503)], id="in trouble"),
        pytest.param([Fault(status=429, headers={"Retry-After": "0"})] * 3, id="too many requests"),
        pytest.param([Fault(piece=20_000)], id="slow"),
    ],
)
@pytest.mark.parametrize("path", [SHARD, "tokenizer.json"])
def test_a_fault_that_passes_is_waited_out_and_nothing_is_fetched_twice(
    faults: list[Fault], path: str, hub: HubServer, tmp_path: Path
):
    hub.faults[path] = list(faults)
    pull(tmp_path, wanted(hub))
    assert verify(tmp_path / NAME) == []
    assert hub.served_bytes[path] == len(hub.repositories[REPOSITORY].files[path])


def test_a_hub_without_ranges_is_read_again_from_the_start(hub: HubServer, tmp_path: Path):
    hub.knows_ranges = False
    hub.faults[SHARD] = [Fault(cut=600_000)]
    pull(tmp_path, wanted(hub))
    assert verify(tmp_path / NAME) == []


def test_the_list_of_files_is_asked_for_again_too(hub: HubServer, tmp_path: Path):
    hub.api_faults = [Fault(status=429, headers={"Retry-After": "0"}), Fault(status=502)]
    pull(tmp_path, wanted(hub))
    assert is_complete(tmp_path / NAME)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(status=429, headers={"Retry-After": "86400"}), "asks to come back in 86400 seconds"),
        (Fault(status=500), "status 500"),
        (Fault(cut=0), "the connection breaks again and again"),
    ],
)
def test_a_fault_that_stays_is_an_error_that_says_how_to_go_on(fault: Fault, told: str, hub: HubServer, tmp_path: Path):
    hub.faults[SHARD] = [fault] * 10
    message = refusal(tmp_path, wanted(hub))
    assert told in message
    assert "run the same command again" in message
    hub.faults.clear()
    pull(tmp_path, wanted(hub))
    assert verify(tmp_path / NAME) == []


@pytest.mark.parametrize("path", [SHARD, "tokenizer.json"])
def test_a_content_that_is_not_what_its_hash_says_is_never_taken(path: str, hub: HubServer, tmp_path: Path):
    content = hub.repositories[REPOSITORY].files[path]
    hub.repositories[REPOSITORY].served = {path: content[:-1] + bytes([content[-1] ^ 1])}
    assert f"{path} was fetched twice, and its SHA-256 was wrong" in refusal(tmp_path, wanted(hub))
    assert not [part for part in tmp_path.rglob(path) if part.is_file()]
    hub.repositories[REPOSITORY].served = {}
    pull(tmp_path, wanted(hub))
    assert verify(tmp_path / NAME) == []


@pytest.mark.parametrize("more", [b"more", None])
def test_a_file_of_another_size_than_listed_is_refused(more: bytes | None, hub: HubServer, tmp_path: Path):
    content = hub.repositories[REPOSITORY].files[SHARD]
    hub.repositories[REPOSITORY].served = {SHARD: content + more if more else content[:-4]}
    assert f"{SHARD} has {len(content) + (4 if more else -4)} bytes on the server" in refusal(tmp_path, wanted(hub))


def test_what_an_earlier_pull_left_damaged_is_noticed_and_fetched_anew(hub: HubServer, tmp_path: Path):
    hub.faults[SHARD] = [Fault(cut=600_000), *[Fault(status=500)] * 9]
    refusal(tmp_path, wanted(hub))
    (part,) = [path for path in (tmp_path / ".partial").rglob(SHARD) if path.is_file()]
    content = bytearray(part.read_bytes())
    assert len(content) > 2**18
    content[1000:2000] = bytes(1000)
    part.write_bytes(content)
    hub.faults.clear()
    pull(tmp_path, wanted(hub))
    assert verify(tmp_path / NAME) == []


def test_a_hub_that_nobody_reaches_is_explained(tmp_path: Path):
    with HubServer() as gone:
        endpoint = gone.endpoint
    message = refusal(tmp_path, Wanted(REPOSITORY, NAME, endpoint=endpoint, first_pause_seconds=PAUSE))
    assert "HTTPS_PROXY" in message
    assert "HF_ENDPOINT" in message


def test_one_bad_file_ends_the_pull_while_another_is_slow(hub: HubServer, tmp_path: Path):
    hub.faults[SHARD] = [Fault(hold=100_000)]
    hub.faults["tokenizer.json"] = [Fault(status=418)]
    with prepared(tmp_path, wanted(hub), silent) as found:
        assert isinstance(found, Pull)

        def let_go() -> None:
            assert hub.holding.wait(30)
            assert found.stop.wait(30)
            hub.release.set()

        threading.Thread(target=let_go).start()
        with pytest.raises(WeightsError, match="status 418"):
            found.run(silent)
    assert hub.served_bytes[SHARD] == 100_000, "no more of it was fetched"


def test_any_order_of_faults_ends_in_a_whole_folder_or_an_error(hub: HubServer, tmp_path: Path):
    dice = random.Random(4)  # noqa: S311 - the same each time
    choices = [
        Fault(cut=0),
        Fault(cut=300_000),
        Fault(status=500),
        Fault(status=429, headers={"Retry-After": "0"}),
        Fault(status=404),
        Fault(),
    ]
    whole = 0
    for turn in range(12):
        asked = Wanted(REPOSITORY, f"{NAME}-{turn}", endpoint=hub.endpoint, first_pause_seconds=PAUSE)
        for path in FILES:
            hub.faults[path] = dice.choices(choices, k=dice.randrange(5))
        try:
            pull(tmp_path, asked)
        except EngineError:
            assert not (tmp_path / asked.folder).exists()
        else:
            whole += 1
            assert verify(tmp_path / asked.folder) == []
    assert 0 < whole < 12
