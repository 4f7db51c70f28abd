"""`/v1/admin/keys` on the real server: every verb, what is refused, and what is written down of it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import HELLO, MODEL, assert_error
from serving import Key, Server, async_poll_until

from server.store.keys import DEFAULT_SCOPES

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

KEYS = "/v1/admin/keys"
LIMITS = ["requests_per_minute", "tokens_per_minute", "parallel_requests", "batch_items", "images_per_day"]
NO_LIMITS = dict.fromkeys(LIMITS)


async def made(server: Server, http: httpx2.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await http.post(KEYS, json={"name": "made by a test", "tier": "standard", **fields})
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    server.made_keys.append(Key(value["key"]))
    return value


def bearer(value: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {value['key']}"}


async def status(http: httpx2.AsyncClient, value: dict[str, Any], path: str = "/v1/models") -> int:
    return (await http.get(path, headers=bearer(value))).status_code


async def test_a_created_key_works_and_is_shown_once(server: Server, http: httpx2.AsyncClient):
    value = await made(server, http, notes="for Ann", limits={"requests_per_minute": 3}, models=[MODEL])
    assert value["key"].startswith(f"hk_{value['public_id']}_")
    assert value["limits"] == NO_LIMITS | {"requests_per_minute": 3}
    assert (value["models"], value["notes"], value["scopes"]) == ([MODEL], "for Ann", [*DEFAULT_SCOPES])
    assert await status(http, value) == 200
    shown = await http.get(f"{KEYS}/{value['public_id']}")
    listed = await http.get(KEYS)
    assert {name: entry for name, entry in value.items() if name not in {"key", "last_used_at"}} == {
        name: entry for name, entry in shown.json().items() if name != "last_used_at"
    }
    assert value["public_id"] in [key["public_id"] for key in listed.json()["data"]]
    secret = Key(value["key"]).secret
    assert secret not in shown.text + listed.text


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"tier": "standart"}, "invalid_value", "tier", ["Did you mean 'standard'?"]),
        ({"tier": None}, "invalid_value", "tier", ["must be a string"]),
        ({"name": " "}, "invalid_value", "name", ["1 to 64"]),
        ({"name": 1}, "invalid_value", "name", ["must be a string"]),
        ({"scopes": ["chta"]}, "invalid_value", "scopes", ["'chta'", "Did you mean 'chat'?"]),
        ({"scopes": []}, "invalid_value", "scopes", ["at least one"]),
        ({"models": ["service-pro"]}, "invalid_value", "models", ["may not use", "enhanced"]),
        ({"models": []}, "invalid_value", "models", ["leave it out"]),
        ({"expires_at": "2020-01-01T00:00:00Z"}, "invalid_value", "expires_at", ["passed"]),
        ({"expires_at": "2099-01-01"}, "invalid_value", "expires_at", ["with its zone"]),
        ({"expires_at": 4102444800}, "invalid_value", "expires_at", ["with its zone"]),
        ({"limits": {"requests_per_minute": -1}}, "invalid_value", "limits.requests_per_minute", ["at least 0"]),
        ({"limits": {"requests_per_minute": True}}, "invalid_value", "limits.requests_per_minute", ["an integer"]),
        ({"limits": {"request_per_minute": 1}}, "invalid_value", "limits.request_per_minute", ["not known"]),
        ({"limit": {}}, "invalid_value", "limit", ["not known"]),
        ({"notes": "x" * 1001}, "invalid_value", "notes", ["1000"]),
    ],
)
async def test_a_wrong_field_is_named_and_makes_no_key(
    http: httpx2.AsyncClient, fields: dict[str, Any], code: str, param: str, words: list[str]
):
    before = (await http.get(KEYS)).json()["data"]
    response = await http.post(KEYS, json={"name": "nobody", "tier": "standard", **fields})
    assert_error(response, 400, code, param)
    assert [word for word in words if word not in response.json()["error"]["message"]] == []
    assert len((await http.get(KEYS)).json()["data"]) == len(before)


async def test_what_is_missing_is_named(http: httpx2.AsyncClient):
    assert_error(await http.post(KEYS, json={"tier": "standard"}), 400, "missing_field", "name")
    assert_error(await http.post(KEYS, content=b"{"), 400, "invalid_json")


async def test_an_update_changes_what_it_names_and_null_goes_back_to_the_tier(server: Server, http: httpx2.AsyncClient):
    value = await made(server, http, limits={"requests_per_minute": 3, "batch_items": 2})
    path = f"{KEYS}/{value['public_id']}"
    changed = await http.patch(path, json={"tier": "enhanced", "limits": {"requests_per_minute": None}})
    assert changed.status_code == 200, changed.text
    assert changed.json() == (await http.get(path)).json()
    assert changed.json()["tier"] == "enhanced"
    assert changed.json()["limits"] == NO_LIMITS | {"batch_items": 2}
    assert (await http.patch(path, json={})).json() == changed.json()
    await http.patch(path, json={"models": ["service-pro"], "name": "renamed"})
    refused = await http.patch(path, json={"tier": "standard"})
    assert_error(refused, 400, "invalid_value", "models")
    both = await http.patch(path, json={"tier": "standard", "models": None})
    assert (both.json()["tier"], both.json()["models"], both.json()["name"]) == ("standard", None, "renamed")
    assert_error(await http.patch(path, json={"expires_at": None}), 400, "invalid_value", "expires_at")
    assert_error(await http.patch(path, json={"name": None}), 400, "invalid_value", "name")


async def test_a_change_holds_at_once_in_the_process_that_made_it(server: Server, http: httpx2.AsyncClient):
    value = await made(server, http)
    assert await status(http, value) == 200
    await http.patch(f"{KEYS}/{value['public_id']}", json={"scopes": ["chat"]})
    assert await status(http, value) == 403


async def test_a_rotated_key_and_its_successor_work_side_by_side(server: Server, http: httpx2.AsyncClient):
    old = await made(server, http, limits={"batch_items": 2}, notes="kept")
    path = f"{KEYS}/{old['public_id']}"
    response = await http.post(f"{path}/rotate", json={"overlap_seconds": 600})
    new = response.json()
    server.made_keys.append(Key(new["key"]))
    assert (new["limits"]["batch_items"], new["notes"], new["name"]) == (2, "kept", old["name"])
    assert [await status(http, value) for value in (old, new)] == [200, 200]
    replaced = (await http.get(path)).json()
    assert replaced["replaced_by"] == new["public_id"]
    left = datetime.fromisoformat(replaced["expires_at"]) - datetime.now(UTC)
    assert timedelta(seconds=500) < left <= timedelta(seconds=600)
    again = await http.post(f"{path}/rotate", json={})
    assert_error(again, 400, "invalid_value", "public_id")
    assert new["public_id"] in again.json()["error"]["message"]
    assert_error(
        await http.post(f"{path}/rotate", json={"overlap_seconds": -1}), 400, "invalid_value", "overlap_seconds"
    )


async def test_an_end_is_set_moved_and_taken_away(server: Server, http: httpx2.AsyncClient):
    value = await made(server, http)
    path = f"{KEYS}/{value['public_id']}/expire"
    ends = "2099-01-31T12:00:00+02:00"
    assert (await http.post(path, json={"expires_at": ends})).json()["expires_at"] == "2099-01-31T10:00:00Z"
    assert (await http.post(path, json={"expires_at": None})).json()["expires_at"] is None
    assert_error(await http.post(path, json={}), 400, "missing_field", "expires_at")
    assert_error(await http.post(path, json={"expires_at": "2020-01-31T12:00:00Z"}), 400, "invalid_value", "expires_at")


async def test_a_revoked_key_is_refused_at_once(server: Server, http: httpx2.AsyncClient):
    value = await made(server, http)
    assert await status(http, value) == 200
    path = f"{KEYS}/{value['public_id']}"
    revoked = (await http.post(f"{path}/revoke")).json()
    assert await status(http, value) == 401
    assert revoked["revoked_at"] is not None
    assert (await http.post(f"{path}/revoke")).json() == revoked
    for verb, body in (("rotate", {}), ("expire", {"expires_at": None})):
        assert_error(await http.post(f"{path}/{verb}", json=body), 400, "invalid_value", "public_id")
    assert_error(await http.patch(path, json={"notes": "late"}), 400, "invalid_value", "public_id")


@pytest.mark.parametrize("name", ["0123456789Ab", "x", "hk_0123456789Ab", "0123456789Ab%00", "a" * 5000])
async def test_an_unknown_key_is_not_found_by_any_verb_and_not_repeated(http: httpx2.AsyncClient, name: str):
    answers = [
        await http.get(f"{KEYS}/{name}"),
        await http.patch(f"{KEYS}/{name}", json={"name": "new"}),
        await http.post(f"{KEYS}/{name}/rotate", json={}),
        await http.post(f"{KEYS}/{name}/expire", json={"expires_at": None}),
        await http.post(f"{KEYS}/{name}/revoke"),
    ]
    for answer in answers:
        assert_error(answer, 404, "not_found", "public_id")
        assert name == "x" or name not in answer.text


async def test_the_last_admin_key_cannot_be_taken_away_from_afar(
    server: Server, http: httpx2.AsyncClient, admin_key: Key
):
    path = f"{KEYS}/{admin_key.public_id}"
    last = [
        key
        for key in (await http.get(KEYS)).json()["data"]
        if "admin" in key["scopes"] and not key["revoked_at"] and key["public_id"] != admin_key.public_id
    ]
    for key in last:  # of other tests in this run
        await http.post(f"{KEYS}/{key['public_id']}/revoke")
    refusals = [
        (await http.post(f"{path}/revoke"), "public_id"),
        (await http.patch(path, json={"scopes": ["chat"]}), "scopes"),
        (await http.post(f"{path}/expire", json={"expires_at": "2099-01-01T00:00:00Z"}), "expires_at"),
    ]
    for answer, param in refusals:
        assert_error(answer, 400, "invalid_value", param)
        assert "last key with the scope `admin`" in answer.json()["error"]["message"]
    second = await made(server, http, scopes=["admin", "chat"], tier="enhanced")
    mine = {"headers": bearer(second)}
    assert (await http.post(f"{KEYS}/{second['public_id']}/revoke", **mine)).status_code == 200
    assert (await http.get(KEYS, **mine)).status_code == 401
    assert (await http.get(KEYS)).status_code == 200


async def test_every_change_is_in_the_audit_log_with_who_and_from_where(
    server: Server, http: httpx2.AsyncClient, admin_key: Key
):
    value = await made(server, http)
    path = f"{KEYS}/{value['public_id']}"
    await http.patch(path, json={"notes": "private words", "limits": {"batch_items": 0}})
    await http.post(f"{path}/revoke")
    answer = await http.get("/v1/admin/audit", params={"limit": 3})
    entries = answer.json()["data"]
    assert [(entry["action"], entry["object"]) for entry in entries] == [
        (action, value["public_id"]) for action in ("key.revoke", "key.update", "key.create")
    ]
    assert {(entry["actor"], entry["origin"]) for entry in entries} == {(admin_key.public_id, "127.0.0.1")}
    assert entries[1]["detail"] == {"batch_items": [None, 0], "notes": ["changed"]}
    assert "private words" not in answer.text
    assert Key(value["key"]).secret not in answer.text


async def test_a_key_does_what_it_was_made_for_through_the_whole_server(server: Server, http: httpx2.AsyncClient):
    value = await made(server, http, scopes=["chat"])
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    response = await http.post("/v1/chat/completions", json=body, headers=bearer(value))
    assert response.status_code == 200, response.text

    def is_logged() -> bool:
        return any(line.get("key") == value["public_id"] for line in server.access_lines())

    await async_poll_until(is_logged, 60)
    assert await status(http, value, KEYS) == 403
