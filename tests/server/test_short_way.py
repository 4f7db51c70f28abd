"""The short way past FastAPI: who takes it, and that nobody can tell by the answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx2
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.responses import Response

from engine import OverloadedError, load_config
from server import errors
from server.access_log import RequestRecord
from server.app import create_app
from server.bodies import StrictRoute
from server.errors import ApiError
from server.hangup import ClientGoneError, client_gone
from server.schemas.chat import ChatCompletionBody  # FastAPI looks for it
from server.settings import load_settings
from server.short_way import ShortWay

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PATH = "/ask"
GOOD = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def who(request: Request) -> str:
    if "x-refuse" in request.headers:
        raise ApiError(403, "insufficient_permissions", "Not you.")
    return "somebody"


async def ask(body: ChatCompletionBody, asker: Annotated[str, Depends(who)], request: Request) -> Response:
    failures = {
        "full": OverloadedError("Full.", retry_after_seconds=3),
        "gone": ClientGoneError(),
        "odd": LookupError("nobody expected it"),
    }
    if body.model in failures:
        raise failures[body.model]
    if body.model == "begun":
        return Broken()
    return Response(json.dumps([asker, body.model, request.url.path]), media_type="application/json")


class Broken(Response):
    """Fails after its start."""

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LookupError


class Ways:
    """The same app by both ways, with the records of what was asked."""

    def __init__(self) -> None:
        self.app = FastAPI(strict_content_type=False)
        self.app.state.settings = load_settings()
        errors.install(self.app)
        self.app.add_exception_handler(ClientGoneError, client_gone)
        self.app.router.add_api_route(PATH, ask, methods=["POST"], route_class_override=StrictRoute)
        self.records: list[RequestRecord] = []
        long = self.app.build_middleware_stack()
        self.ways: dict[str, ASGIApp] = {
            "long": long,
            "short": ShortWay(long, self.app.routes, self.app.exception_handlers),
        }

    async def post(self, way: str, content: Any, headers: dict[str, str] | None = None) -> tuple[Any, ...]:
        """Ask; return all that can be told of the answer."""

        async def recorded(scope: Scope, receive: Receive, send: Send) -> None:
            self.records.append(record := RequestRecord("req", "POST", None))
            ended = False

            async def sent(message: Any) -> None:
                nonlocal ended
                record.status = message.get("status", record.status)
                ended = message["type"] == "http.response.body"
                await send(message)

            await self.ways[way]({**scope, "app": self.app, "state": {"record": record}}, receive, sent)
            if not ended:
                raise LookupError  # to the client the connection breaks off

        transport = httpx2.ASGITransport(recorded, raise_app_exceptions=False)
        async with httpx2.AsyncClient(transport=transport, base_url="http://hearth") as client:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            answer = await client.post(PATH, content=body, headers=headers)
        record = self.records[-1]
        return answer.status_code, sorted(answer.headers.items()), answer.content, record.status, record.error_code


@pytest.fixture(scope="module")
def ways() -> Ways:
    return Ways()


@pytest.mark.parametrize(
    "content",
    [
        GOOD,
        None,
        [],
        [GOOD],
        "text",
        3,
        True,
        {},
        b"",
        b"{",
        {"model": "m"},
        GOOD | {"model": 3},
        GOOD | {"messages": [{"role": "nobody", "content": "hi"}]},
        GOOD | {"temperature": "hot", "n": 99},
        GOOD | {"tool_choice": "required"},
        GOOD | {"model": "full"},
        GOOD | {"model": "gone"},
        GOOD | {"model": "odd"},
        GOOD | {"model": "begun"},
    ],
    ids=repr,
)
async def test_both_ways_give_the_same_answer(ways: Ways, content: Any):
    assert await ways.post("short", content) == await ways.post("long", content)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "Application/JSON; charset=utf-8"},
        {"Content-Type": "application/x+json"},
        {"Content-Type": ""},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": ""},
        {"X-Refuse": "yes"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("content", [GOOD, {}], ids=repr)
async def test_headers_mean_the_same_both_ways(ways: Ways, headers: dict[str, str], content: Any):
    assert await ways.post("short", content, headers) == await ways.post("long", content, headers)


def test_all_routes_that_models_answer_take_the_short_way():
    app = create_app(load_settings(), load_config(Path(__file__).parents[2] / "models.yaml"))
    short = {route.path for route in app.routes if isinstance(route, StrictRoute) and route.plan is not None}
    assert short == {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/images/generations",
        "/v1/audio/speech",
    }
