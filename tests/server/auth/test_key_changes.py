"""Rotating, expiring and changing keys, and the audit log of it, on both databases."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import text as sql
from store_parts import authenticate

from server.store import KeyFieldError, KeyNotFoundError, StoreError
from server.store.audit import Actor, local_actor, read_entries, write_entry
from server.store.database import Database
from server.store.keys import KeyLimits, KeyStore

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
ADMIN = Actor("adminkey0000", "10.0.0.7")


class Wall:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
async def store(database_url: str, wall: Wall) -> AsyncIterator[KeyStore]:
    async with await Database.open(database_url) as database:
        yield KeyStore(database, clock=wall)


async def test_a_rotated_key_and_its_successor_both_work_until_the_overlap_ends(store: KeyStore, wall: Wall) -> None:
    limits = KeyLimits(requests_per_minute=5, images_per_day=0)
    old_text, old = await store.create("laptop", "enhanced", ["chat"], ["a"], notes="Zoë's", limits=limits)
    new_text, new = await store.rotate(old.public_id, DAY)
    assert new == replace(old, public_id=new.public_id)
    assert new.public_id != old.public_id
    assert await authenticate(store, new_text) == new
    assert await authenticate(store, old_text) == replace(old, expires_at=NOW + DAY, replaced_by=new.public_id)
    wall.now += DAY
    assert await authenticate(store, old_text) is None
    assert await authenticate(store, new_text) == new


async def test_rotation_never_prolongs_the_old_key_and_gives_the_new_one_the_same_time(
    store: KeyStore, wall: Wall
) -> None:
    _, old = await store.create("laptop", "standard", expires_at=NOW + 10 * DAY)
    wall.now += 9 * DAY + 12 * HOUR
    _, new = await store.rotate(old.public_id, 5 * DAY)
    assert (await store.find(old.public_id)).expires_at == NOW + 10 * DAY
    assert new.expires_at == wall.now + 10 * DAY
    _, newest = await store.rotate(new.public_id, timedelta(), expires_at=wall.now + HOUR)
    assert newest.expires_at == wall.now + HOUR
    assert not (await store.find(new.public_id)).usable_at(wall.now)


async def test_a_key_that_ends_with_the_calendar_can_be_rotated(store: KeyStore, wall: Wall) -> None:
    last = datetime.max.replace(tzinfo=UTC)
    _, old = await store.create("laptop", "standard", expires_at=last)
    wall.now += DAY
    _, new = await store.rotate(old.public_id, DAY)
    assert new.expires_at == last


async def test_what_cannot_be_rotated_is_refused_and_stays(store: KeyStore, wall: Wall) -> None:
    _, gone = await store.create("gone", "standard", expires_at=NOW + HOUR)
    _, replaced = await store.create("replaced", "standard")
    _, revoked = await store.create("revoked", "standard")
    await store.rotate(replaced.public_id, DAY)
    await store.revoke(revoked.public_id)
    wall.now += HOUR
    before = await store.list()
    for key, words in ((gone, "has expired"), (replaced, "was replaced by"), (revoked, "is revoked")):
        with pytest.raises(KeyFieldError, match=words):
            await store.rotate(key.public_id, DAY)
    for overlap in (timedelta(seconds=-1), timedelta(days=367)):
        with pytest.raises(KeyFieldError, match="overlap"):
            await store.rotate(replaced.public_id, overlap)
    assert await store.list() == before


async def test_the_end_of_a_key_is_moved_and_taken_away(store: KeyStore, wall: Wall) -> None:
    text, key = await store.create("laptop", "standard")
    assert (await store.expire(key.public_id, NOW + HOUR)).expires_at == NOW + HOUR
    wall.now += HOUR
    assert await authenticate(store, text) is None
    assert await store.expire(key.public_id, None) == key
    assert await authenticate(store, text) == key
    for wrong in (wall.now, datetime(2099, 1, 1)):  # noqa: DTZ001 - that is what is wrong with it
        with pytest.raises(KeyFieldError):
            await store.expire(key.public_id, wrong)
    await store.revoke(key.public_id)
    with pytest.raises(KeyFieldError, match="is revoked"):
        await store.expire(key.public_id, wall.now + HOUR)


async def test_fields_are_changed_one_by_one_and_others_stay(store: KeyStore) -> None:
    text, key = await store.create("laptop", "standard", models=["a"], limits=KeyLimits(tokens_per_minute=7))
    await store.update(key.public_id, tier="enhanced", models=None, requests_per_minute=5, notes="for\nthe train")
    changed = await store.update(key.public_id, scopes=["audio", "chat"], name="tablet", tokens_per_minute=None)
    assert changed == replace(
        key,
        name="tablet",
        tier="enhanced",
        models=None,
        scopes=frozenset({"audio", "chat"}),
        notes="for\nthe train",
        limits=KeyLimits(requests_per_minute=5),
    )
    assert await authenticate(store, text) == changed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("scopes", ["root"]),
        ("models", []),
        ("notes", "x" * 1001),
        ("notes", "a\0b"),
        ("notes", "\ud800"),
        ("requests_per_minute", -1),
        ("tokens_per_minute", 2**31),
        ("parallel_requests", True),
    ],
)
async def test_a_change_that_makes_no_sense_is_not_made(store: KeyStore, field: str, value: Any) -> None:
    _, key = await store.create("laptop", "standard")
    with pytest.raises(KeyFieldError) as caught:
        await store.update(key.public_id, **{field: value})
    assert caught.value.field == field
    assert await store.list() == [key]


@pytest.mark.parametrize("public_id", ["0123456789Ab", "a\0b", "\ud800", "", "x" * 500])
async def test_changing_what_does_not_exist_says_so(store: KeyStore, public_id: str) -> None:
    with pytest.raises(KeyNotFoundError):
        await store.rotate(public_id, DAY)
    with pytest.raises(KeyNotFoundError):
        await store.expire(public_id, NOW + DAY)
    with pytest.raises(KeyNotFoundError):
        await store.update(public_id, name="x")
    with pytest.raises(KeyNotFoundError):
        await store.revoke(public_id)


async def test_every_change_is_audited_with_who_when_and_from_where(store: KeyStore, wall: Wall) -> None:
    text, key = await store.create("laptop", "standard", limits=KeyLimits(batch_items=3), notes="private")
    wall.now += HOUR
    await store.update(key.public_id, by=ADMIN, tier="enhanced", notes="still private")
    await store.update(key.public_id, by=ADMIN, tier="enhanced")  # changes nothing
    await store.expire(key.public_id, wall.now + DAY, by=ADMIN)
    new_text, new = await store.rotate(key.public_id, HOUR, by=ADMIN)
    await store.revoke(key.public_id, by=ADMIN)
    await store.revoke(key.public_id, by=ADMIN)
    async with store._database.writing() as connection:
        await write_entry(connection, wall.now, ADMIN, "config.reload", "models.yaml", {"added": ["b"]})

    entries = (await read_entries(store._database))[::-1]
    assert [entry.action for entry in entries] == [
        "key.create",
        "key.update",
        "key.expire",
        "key.rotate",
        "key.revoke",
        "config.reload",
    ]
    assert [entry.object for entry in entries] == [key.public_id] * 5 + ["models.yaml"]
    assert (entries[0].actor, entries[0].origin, entries[0].at) == (local_actor().name, "local", NOW)
    assert {(entry.actor, entry.origin, entry.at) for entry in entries[1:]} == {(ADMIN.name, ADMIN.origin, NOW + HOUR)}
    assert entries[0].detail["batch_items"] == 3
    assert entries[1].detail == {"tier": ["standard", "enhanced"], "notes": ["changed"]}
    assert entries[2].detail == {"expires_at": [None, (wall.now + DAY).isoformat()]}
    assert entries[3].detail == {"replaced_by": new.public_id, "expires_at": (wall.now + HOUR).isoformat()}
    written = json.dumps([entry.detail for entry in entries])
    assert not any(secret in written for secret in ("private", *(one.split("_")[2] for one in (text, new_text))))


async def test_the_log_is_read_newest_first_from_a_date_on_and_not_without_end(store: KeyStore, wall: Wall) -> None:
    for number in range(5):
        async with store._database.writing() as connection:
            await write_entry(connection, wall.now, None, "config.reload", str(number))
        wall.now += HOUR
    assert [entry.object for entry in await read_entries(store._database, limit=2)] == ["4", "3"]
    assert [entry.object for entry in await read_entries(store._database, since=NOW + 3 * HOUR)] == ["4", "3"]
    assert len(await read_entries(store._database, limit=-5)) == 1


async def test_a_change_whose_entry_cannot_be_written_is_not_made(store: KeyStore) -> None:
    _, key = await store.create("laptop", "standard")
    async with store._database.writing() as connection:
        await connection.execute(sql("ALTER TABLE audit RENAME TO elsewhere"))
    with pytest.raises(StoreError):
        await store.revoke(key.public_id)
    with pytest.raises(StoreError):
        await store.create("tablet", "standard")
    assert await store.list() == [key]


def test_the_local_actor_is_the_user_of_the_process_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("USER", "somebody-else")
    monkeypatch.setenv("LOGNAME", "somebody-else")
    assert local_actor().name.startswith("cli:")
    assert "somebody-else" not in local_actor().name
