"""What tests of chat share: the demo's promised prompts, answers in one form, and the events of a raw stream."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
from demo_models.promised import FixedPrompt, fixed_prompts

if TYPE_CHECKING:
    import httpx2

MODEL = "service-plus"
CHAT = "/v1/chat/completions"
PROMPTS = {prompt.name: prompt for prompt in fixed_prompts()}
LONGEST = max(PROMPTS.values(), key=lambda prompt: len(prompt.answer or ""))
HELLO = [{"role": "user", "content": "Say hello."}]
HELLO_ANSWER = "Hello! How can I help you today?"


@dataclass(frozen=True)
class Answer:
    """One answer, however it came."""

    content: str | None
    tool_calls: list[tuple[str, dict[str, Any]]] | None
    finish_reason: str | None


def promised(prompt: FixedPrompt) -> Answer:
    """What the demo model has to say."""
    if prompt.tool_calls is None:
        return Answer(prompt.answer, None, "stop")
    return Answer(None, prompt.tool_calls, "tool_calls")


def body(prompt: FixedPrompt, **fields: Any) -> dict[str, Any]:
    """The request for a promised answer."""
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return {"model": MODEL, "messages": prompt.messages, "temperature": 0, **tools, **fields}


async def ask(client: openai.AsyncOpenAI, prompt: FixedPrompt, **fields: Any) -> Answer:
    """Ask with the openai package, plain."""
    (choice,) = (await client.chat.completions.create(**body(prompt, **fields))).choices
    calls = choice.message.tool_calls
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls] if calls else None
    return Answer(choice.message.content, made, choice.finish_reason)


async def ask_streamed(client: openai.AsyncOpenAI, prompt: FixedPrompt, **fields: Any) -> Answer:
    """Ask with the openai package, put together from the chunks like every client does."""
    content, finish_reason = "", None
    calls: dict[int, tuple[str, list[str]]] = {}
    async with await client.chat.completions.create(**body(prompt, **fields), stream=True) as stream:
        async for chunk in stream:
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    calls[piece.index] = (piece.function.name, [])
                calls[piece.index][1].append(piece.function.arguments)
            finish_reason = choice.finish_reason or finish_reason
    made = [(name, json.loads("".join(pieces))) for _, (name, pieces) in sorted(calls.items())]
    return Answer(None if made else content, made or None, finish_reason)


async def raw_stream(http: httpx2.AsyncClient, **fields: Any) -> tuple[httpx2.Response, list[dict[str, Any]]]:
    """Post with `stream: true`; return the response and its events, the framing of which is checked here."""
    response = await http.post(CHAT, json={"model": MODEL, "temperature": 0, "stream": True, **fields})
    assert response.status_code == 200, response.text
    return response, events(response.content)


def events(data: bytes) -> list[dict[str, Any]]:
    """The JSON events of a complete stream: each one line `data: ...` and an empty one, the end marker last."""
    assert data.endswith(b"\n\n")
    lines = data.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def assert_error(response: httpx2.Response, status: int, code: str | None, param: str | None = None) -> None:
    """The answer is an error in the one shape that all of them have."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    (name, error), *more = response.json().items()
    assert (name, more) == ("error", [])
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    kinds = {403: "permission_error", 429: "rate_limit_error"}
    assert error["type"] == ("server_error" if status >= 500 else kinds.get(status, "invalid_request_error"))
    assert (error["param"], error["code"]) == (param, code), error


async def assert_well(http: httpx2.AsyncClient) -> None:
    """It answers as ever, and no engine has been restarted."""
    answer = (await http.post(CHAT, json=body(PROMPTS["say-hello"]))).json()
    assert answer["choices"][0]["message"]["content"] == HELLO_ANSWER
    ready = (await http.get("/health/ready")).json()
    chats = ("service-plus", "service-pro")
    assert [ready["models"][model]["restarts"] for model in chats] == [0, 0]
