"""Pulling a model: its folder is whole and known again, versions stay, damage is repaired, strangers are left alone."""

import re
import threading
from pathlib import Path

import pytest
from hub_server import COMMIT, OLDER, Fault, HubServer
from weight_parts import (
    FILES,
    NAME,
    PAUSE,
    REPOSITORY,
    SHARD,
    model_files,
    pull,
    refusal,
    safetensors,
    wanted,
)

from engine.errors import WeightsError
from engine.weights.download import Pull, Wanted, prepared
from engine.weights.manifest import is_complete, read_manifest, verify


def test_a_pulled_folder_is_complete_and_says_where_it_is_from(hub: HubServer, tmp_path: Path):
    seen: list[tuple[str, int, int]] = []
    manifest = pull(tmp_path, wanted(hub), lambda *told: seen.append(told))
    folder = tmp_path / NAME
    assert is_complete(folder)
    assert verify(folder) == []
    assert read_manifest(folder) == manifest
    assert (manifest.repository, manifest.revision) == (REPOSITORY, COMMIT)
    assert {file.path for file in manifest.files} == set(FILES)
    assert all((folder / name).read_bytes() == hub.repositories[REPOSITORY].files[name] for name in FILES)
    assert not (tmp_path / ".partial").exists()
    assert {path: done for path, done, _ in seen} == {file.path: file.size_bytes for file in manifest.files}


def test_the_token_is_for_the_hub_and_not_for_its_store(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_ours")
    pull(tmp_path, wanted(hub))
    assert {headers.get("authorization") for headers in hub.hub_headers} == {"Bearer hf_ours"}
    assert hub.store_headers
    assert not any("authorization" in headers for headers in hub.store_headers)
    assert not any("hf_ours" in path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    hub.token = "hf_other"
    asked = Wanted(REPOSITORY, "another", endpoint=hub.endpoint, first_pause_seconds=PAUSE)
    assert "does not know the token" in refusal(tmp_path, asked)


def test_what_is_not_there_is_named(hub: HubServer, tmp_path: Path):
    nobody = Wanted("owner/nothing", NAME, endpoint=hub.endpoint, first_pause_seconds=PAUSE)
    assert "There is no" in refusal(tmp_path, nobody)
    asked = Wanted(REPOSITORY, NAME, "v9", endpoint=hub.endpoint, first_pause_seconds=PAUSE)
    assert "has no such revision" in refusal(tmp_path, asked)
    for name in ("../x", "a/b/c", "owner/..", "-x/y", "owner/na me"):
        with pytest.raises(WeightsError, match="is not a repository"):
            pull(tmp_path, Wanted(name, NAME, endpoint=hub.endpoint))
    for name in ("../x", "/x", "a/../b", ".partial", "a\\b"):
        with pytest.raises(WeightsError, match="is not the name of a folder"):
            pull(tmp_path, Wanted(REPOSITORY, name, endpoint=hub.endpoint))


def test_a_folder_of_ones_own_is_not_touched(hub: HubServer, tmp_path: Path):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "notes.txt").write_text("mine")
    with pytest.raises(WeightsError, match="was not pulled by Hearth"):
        pull(tmp_path, wanted(hub))
    assert [path.name for path in (tmp_path / NAME).iterdir()] == ["notes.txt"]
    (tmp_path / NAME / "notes.txt").unlink()
    pull(tmp_path, wanted(hub))
    assert is_complete(tmp_path / NAME)
    hub.add("owner/other", model_files())
    with pytest.raises(WeightsError, match=f"contains {REPOSITORY}"):
        pull(tmp_path, Wanted("owner/other", NAME, endpoint=hub.endpoint))


def test_a_complete_folder_needs_no_hub(hub: HubServer, tmp_path: Path):
    first = pull(tmp_path, wanted(hub))
    hub.forget_counts()
    assert pull(tmp_path, wanted(hub)) == first
    assert pull(tmp_path, wanted(hub, revision=COMMIT)) == first
    assert hub.paths == []
    assert pull(tmp_path, wanted(hub, revision="main")) == first
    assert not hub.served_bytes


def test_the_revision_of_the_first_pull_stays_until_another_is_asked_for(hub: HubServer, tmp_path: Path):
    pull(tmp_path, wanted(hub, revision=OLDER))
    (tmp_path / NAME / SHARD).unlink()
    hub.forget_counts()
    assert pull(tmp_path, wanted(hub)).revision == OLDER
    assert dict(hub.served_bytes).keys() & {SHARD} == {SHARD}
    hub.forget_counts()
    changed = b'{"version": 2, "model": {}}'
    hub.repositories[REPOSITORY].files["tokenizer.json"] = changed
    assert pull(tmp_path, wanted(hub, revision=COMMIT)).revision == COMMIT
    assert (tmp_path / NAME / "tokenizer.json").read_bytes() == changed
    assert SHARD not in hub.served_bytes, "weights that are the same are not fetched again"


def test_a_damaged_folder_is_repaired_and_nothing_else_is_fetched(hub: HubServer, tmp_path: Path):
    pull(tmp_path, wanted(hub))
    shard = tmp_path / NAME / SHARD
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert is_complete(tmp_path / NAME), "sizes alone do not show it"
    assert verify(tmp_path / NAME) == [f"{SHARD} is damaged: its content has changed"]
    hub.forget_counts()
    pull(tmp_path, wanted(hub, again=True))
    assert verify(tmp_path / NAME) == []
    assert {path for path in hub.served_bytes if path.endswith(".safetensors")} == {SHARD}


def test_files_of_another_revision_are_not_taken_for_those_of_this_one(hub: HubServer, tmp_path: Path):
    hub.faults[SHARD] = [Fault(cut=600_000), *[Fault(status=500)] * 9]
    refusal(tmp_path, wanted(hub, revision=OLDER))
    files = hub.repositories[REPOSITORY].files
    files[SHARD] = safetensors(len(files[SHARD]), seed=7)
    files["tokenizer.json"] = files["tokenizer.json"].replace(b"1", b"2")
    hub.faults.clear()
    assert pull(tmp_path, wanted(hub, revision=COMMIT)).revision == COMMIT
    assert verify(tmp_path / NAME) == []
    assert (tmp_path / NAME / SHARD).read_bytes() == files[SHARD]


def test_there_must_be_room_for_all_of_it_before_the_first_byte(hub: HubServer, tmp_path: Path):
    stored = {"sha256": "0" * 64, "size": 2**60, "pointerSize": 1}
    repository = hub.repositories[REPOSITORY]
    del repository.files["model-00002-of-00002.safetensors"]
    repository.listed = [{"rfilename": "model-00002-of-00002.safetensors", "size": 2**60, "lfs": stored}]
    message = refusal(tmp_path, wanted(hub))
    assert "Not enough room" in message
    assert f"{NAME} 1073741824.00 GiB" in message
    assert re.search(r"free are [\d.]+ GiB, so \d+\.\d\d GiB are lacking", message)
    assert SHARD not in hub.served_bytes


def test_two_pulls_of_one_folder_do_not_meet(hub: HubServer, tmp_path: Path):
    hub.faults[SHARD] = [Fault(hold=100_000)]
    first = threading.Thread(target=pull, args=(tmp_path, wanted(hub)))
    first.start()
    assert hub.holding.wait(30)
    with pytest.raises(WeightsError, match="Another process works on"):
        pull(tmp_path, wanted(hub))
    hub.release.set()
    first.join(30)
    assert verify(tmp_path / NAME) == []


def test_what_is_prepared_says_how_much_is_missing(hub: HubServer, tmp_path: Path):
    with prepared(tmp_path, wanted(hub), lambda *_: None) as found:
        assert isinstance(found, Pull)
        files = hub.repositories[REPOSITORY].files
        looked_at = {name for name in files if name.endswith(("config.json", "index.json"))}
        assert found.missing_bytes == sum(len(content) for name, content in files.items() if name not in looked_at)
