"""What `GET /v1/models` says about each model."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from chat_parts import assert_error

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

FIELDS = [
    "id",
    "object",
    "created",
    "owned_by",
    "tier",
    "capabilities",
    "status",
    "context_length",
    "max_model_len",
    "max_output_tokens",
    "sizes",
    "dimensions",
    "max_input_tokens",
    "parent",
    "running",
    "waiting",
    "description",
    "demo",
]


async def test_the_list_holds_all_models_in_the_order_of_the_file(http: httpx2.AsyncClient):
    answer = (await http.get("/v1/models")).json()
    assert list(answer) == ["object", "data"]
    assert answer["object"] == "list"
    assert [(model["id"], model["tier"]) for model in answer["data"]] == [
        ("service-plus", "standard"),
        ("service-pro", "enhanced"),
        ("service-embedding", "standard"),
        ("service-rerank", "standard"),
        ("service-transcription", "standard"),
        ("service-image", "standard"),
        ("service-voice", "standard"),
    ]
    assert answer["data"][4]["capabilities"] == ["transcription", "translation"]
    assert answer["data"][5]["capabilities"] == ["image_generation", "image_editing"]
    assert answer["data"][5]["sizes"] == ["256x256", "512x512", "1024x1024"]
    for model in answer["data"]:
        assert list(model) == FIELDS
        assert (model["object"], model["status"], model["owned_by"]) == ("model", "ready", "hearth")
    for model in answer["data"][:2]:
        assert model["sizes"] is None
        sees = ["vision"] if model["id"] == "service-pro" else []
        assert model["capabilities"] == ["chat", "streaming", "function_calling", *sees]
        assert model["context_length"] == model["max_output_tokens"] == model["max_model_len"] == 32768
        assert 0 <= time.time() - model["created"] < 3600
    assert [model["demo"] for model in answer["data"]] == [True, True, True, True, True, True, False]


async def test_one_model_is_shown_as_in_the_list(http: httpx2.AsyncClient):
    moving = ("running", "waiting")  # what a test before has left may still end
    for model in (await http.get("/v1/models")).json()["data"]:
        shown = (await http.get(f"/v1/models/{model['id']}")).json()
        assert list(shown) == FIELDS
        assert shown == model | {name: shown[name] for name in moving}


@pytest.mark.parametrize("name", ["nobody", "SERVICE-PLUS", "service-plus/x", "%00", "..%2f..%2fetc%2fpasswd", "", "é"])
async def test_a_model_that_is_not_there_is_not_found(http: httpx2.AsyncClient, name: str):
    assert_error(await http.get(f"/v1/models/{name}"), 404, "model_not_found", "model")
