"""Arbitrary JSON at arbitrary places of a chat body is answered or refused, never a failure of ours."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error, assert_well
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import CANARY

from server.api.chat_request import ChatCompletionBody

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

BASE = {"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 1}
TEXTS = st.sampled_from([CANARY, "", "auto", "text", "function", "user", "json_schema", "object"]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=5
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(
            TEXTS | st.sampled_from(["type", "role", "content", "function", "name", "$ref"]), below, max_size=3
        )
    ),
    max_leaves=8,
)
PLACES: list[Any] = [
    *([name] for name in ChatCompletionBody.model_fields if name != "max_tokens"),
    *(["messages", 0, name] for name in ("role", "content", "tool_calls", "tool_call_id", "reasoning_content")),
    ["messages", 0, "content", 0],
    ["messages", 0, "content", 0, "image_url"],
    ["tools", 0],
    ["tools", 0, "function"],
    *(["tools", 0, "function", name] for name in ("name", "description", "parameters", "strict")),
    ["response_format", "type"],
    ["response_format", "json_schema"],
    ["response_format", "json_schema", "schema"],
    ["tool_choice", "function"],
    ["stream_options", "include_usage"],
]


def put(place: list[Any], value: Any) -> dict[str, Any]:
    """The body with `value` at `place`, and what has to surround it there."""
    around: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "tool_choice": {"type": "function"},
        "stream_options": {},
    }
    made = json.loads(json.dumps(BASE | {key: around[key] for key in place[:1] if key in around}))
    if len(place) > 3 and place[2] == "content":
        made["messages"][0]["content"] = [{"type": "image_url"} if "image_url" in place else {}]
    here = made
    for step in place[:-1]:
        here = here[step]
    here[place[-1]] = value
    return made


FEW, MANY = (
    settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture]) for count in (150, 2000)
)
ANYTHING = given(place=st.sampled_from(PLACES), value=VALUES)


@FEW
@ANYTHING
async def test_any_value_in_any_place_is_answered_or_refused_in_our_shape(http: httpx2.AsyncClient, place, value):
    await assert_answered_or_refused(http, place, value)


@pytest.mark.rounds
@MANY
@ANYTHING
async def test_many_values_in_any_place_are_answered_or_refused(http: httpx2.AsyncClient, place, value):
    await assert_answered_or_refused(http, place, value)


async def assert_answered_or_refused(http: httpx2.AsyncClient, place: list[Any], value: Any) -> None:
    response = await http.post(CHAT, json=put(place, value))
    if response.status_code == 200:
        return
    error = response.json()["error"]
    assert response.status_code in {400, 404}, (place, value, error)
    assert_error(response, response.status_code, error["code"], error["param"])
    assert CANARY not in response.text


async def test_the_server_is_well_after_all_that(http: httpx2.AsyncClient):
    await assert_well(http)
