"""The text form of keys and the rows behind them, on a real SQLite file."""

import asyncio
import hashlib
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from store_parts import authenticate

from server.store import KeyFieldError, KeyNotFoundError
from server.store.database import Database
from server.store.keys import ALPHABET, DEFAULT_SCOPES, SCOPES, KeyStore, ParsedKey, new_key, parse, public_id_in

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


class Wall:
    """A wall clock that a test sets."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[KeyStore]:
    async with await Database.open(database_url) as database:
        yield KeyStore(database, clock=Wall())


# The text


def test_a_new_key_has_the_documented_form_and_is_taken_apart_again() -> None:
    text = new_key()
    prefix, public_id, rest = text.split("_")
    assert (prefix, len(public_id), len(rest)) == ("hk", 12, 49)
    assert parse(text) == ParsedKey(public_id, hashlib.sha256(text.encode()).digest())


def test_the_checksum_is_the_one_that_other_programs_can_compute() -> None:
    body = "hk_" + "0" * 12 + "_" + "0" * 43
    assert parse(body + "0wPnyn") is not None  # CRC-32 0x33730c55


def test_keys_and_their_ids_do_not_repeat() -> None:
    keys = [new_key() for _ in range(2000)]
    assert len({public_id_in(key) for key in keys}) == len(set(keys)) == 2000


def test_the_secret_of_a_key_has_all_of_its_256_bits() -> None:
    seen = 0
    for _ in range(64):
        number = 0
        for digit in new_key().split("_")[2][:43]:
            number = number * 62 + ALPHABET.index(digit)
        seen |= number
    assert seen.bit_length() == 256


def test_the_repr_of_a_key_hides_its_secret() -> None:
    text = new_key()
    parsed = parse(text)
    assert parsed is not None
    shown = f"{parsed!r}"
    assert parsed.public_id in shown
    assert text not in shown
    assert repr(parsed.sha256) not in shown


@given(st.text() | st.text(alphabet=ALPHABET + "hk_", min_size=60, max_size=70))
@example("\ud800" * 65)
@example("\u0661" * 65)
@example("hk_" + "é" * 62)
def test_any_text_that_is_no_key_is_none_and_nothing_is_raised(text: str) -> None:
    assert parse(text) is None


@given(st.data())
def test_a_key_with_one_character_changed_is_refused(data: st.DataObject) -> None:
    text = new_key()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters().filter(lambda character: character != text[at]))
    assert parse(text[:at] + other + text[at + 1 :]) is None


@given(st.text(max_size=5), st.text(max_size=5))
def test_a_key_with_anything_around_it_is_refused(before: str, after: str) -> None:
    text = new_key()
    assert (parse(before + text + after) is None) == bool(before or after)


@given(st.text())
def test_a_public_id_is_found_in_whatever_form_it_is_typed(tail: str) -> None:
    for typed in ("0123456789Ab", "hk_0123456789Ab", " hk_0123456789Ab\n", f"hk_0123456789Ab_{tail}"):
        assert public_id_in(typed) == "0123456789Ab"
    assert public_id_in(f"hk_0123456789A_{tail}") is None


# The rows


async def test_a_created_key_authenticates_and_only_its_hash_is_on_disk(store: KeyStore, file: Path) -> None:
    text, key = await store.create("laptop", "standard")
    assert (key.name, key.tier, key.scopes, key.models) == (
        "laptop",
        "standard",
        frozenset(DEFAULT_SCOPES),
        None,
    )
    assert not key.scopes & {"admin", "metrics"}, "these are the operator's"
    assert await authenticate(store, text) == key
    assert await store.list() == [key]
    secret = text.split("_")[2][:43].encode()
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute("SELECT * FROM api_key").fetchall()
    assert hashlib.sha256(text.encode()).digest() in rows[0]
    assert not any(secret in content for content in all_contents(file.parent))


def all_contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


async def test_what_a_key_was_given_is_kept(store: KeyStore) -> None:
    expires_at = NOW.astimezone(timezone(timedelta(hours=2))) + timedelta(days=1)
    text, _ = await store.create("Zoë's [red] key", "enhanced", ["admin", "chat"], ["b", "a", "b"], expires_at)
    key = await authenticate(store, text)
    assert key is not None
    assert (key.name, key.tier) == ("Zoë's [red] key", "enhanced")
    assert (key.scopes, key.models) == (frozenset({"chat", "admin"}), ("b", "a"))
    assert (key.created_at, key.expires_at, key.last_used_at) == (NOW, expires_at, None)
    assert key.expires_at is not None
    assert key.expires_at.tzinfo is UTC


async def test_a_known_id_with_another_secret_is_refused(store: KeyStore, file: Path) -> None:
    _, key = await store.create("laptop", "standard")
    other = new_key()
    stolen_id = (key.public_id, public_id_in(other))
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE api_key SET public_id = ? WHERE public_id = ?", stolen_id[::-1])
    assert await authenticate(store, other) is None


async def test_a_revoked_key_is_refused_and_keeps_its_first_date(store: KeyStore) -> None:
    text, key = await store.create("laptop", "standard")
    first = await store.revoke(key.public_id)
    assert first.revoked_at == NOW
    store.clock.now += timedelta(hours=1)  # type: ignore[attr-defined]
    assert await store.revoke(key.public_id) == first
    assert await authenticate(store, text) is None
    assert await store.list() == [first]


async def test_revoking_what_does_not_exist_says_so(store: KeyStore) -> None:
    with pytest.raises(KeyNotFoundError, match="no key 0123456789Ab"):
        await store.revoke("0123456789Ab")


async def test_an_expired_key_is_refused_from_its_second_on(store: KeyStore) -> None:
    text, _ = await store.create("laptop", "standard", expires_at=NOW + timedelta(seconds=10))
    store.clock.now += timedelta(seconds=9)  # type: ignore[attr-defined]
    assert await authenticate(store, text)
    assert await store.count_active() == 1
    store.clock.now += timedelta(seconds=1)  # type: ignore[attr-defined]
    assert await authenticate(store, text) is None
    assert await store.count_active() == 0


async def test_active_keys_are_counted_without_revoked_and_expired_ones(store: KeyStore) -> None:
    await store.create("a", "standard")
    await store.create("b", "standard", expires_at=NOW + timedelta(days=1))
    _, key = await store.create("c", "standard")
    await store.revoke(key.public_id)
    assert await store.count_active() == 2
    store.clock.now += timedelta(days=2)  # type: ignore[attr-defined]
    assert await store.count_active() == 1


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("name", {"name": ""}),
        ("name", {"name": "   "}),
        ("name", {"name": "x" * 65}),
        ("name", {"name": "a\nb"}),
        ("name", {"name": "a\x1b[31mb"}),
        ("name", {"name": "\u202eevil"}),
        ("name", {"name": "\ud800"}),
        ("tier", {"tier": ""}),
        ("scopes", {"scopes": []}),
        ("scopes", {"scopes": ["chat", "root"]}),
        ("models", {"models": []}),
        ("models", {"models": [""]}),
        ("expires_at", {"expires_at": NOW}),
        ("expires_at", {"expires_at": datetime(2099, 1, 1)}),  # noqa: DTZ001 - that is what is wrong with it
    ],
)
async def test_a_key_that_makes_no_sense_is_not_made(store: KeyStore, field: str, given: dict[str, Any]) -> None:
    with pytest.raises(KeyFieldError) as caught:
        await store.create(**({"name": "laptop", "tier": "standard", "scopes": SCOPES} | given))
    assert caught.value.field == field
    assert await store.list() == []


async def test_a_later_last_use_on_disk_is_not_overwritten(store: KeyStore) -> None:
    _, key = await store.create("laptop", "standard")
    later = NOW + timedelta(minutes=5)
    await store.record_use({key.public_id: later})
    await store.record_use({key.public_id: NOW, "gone": NOW})
    await store.record_use({})
    assert [key.last_used_at for key in await store.list()] == [later]


async def test_many_keys_made_at_once_are_all_there(store: KeyStore) -> None:
    made = await asyncio.gather(*(store.create(f"key {number}", "standard") for number in range(40)))
    answers = await asyncio.gather(*(authenticate(store, text) for text, _ in made))
    assert answers == [key for _, key in made]
