"""What the events of responses and messages make of steps that bring several things at once."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from engine import ChatDelta, ChatRequest, ChatStep, TokenLogprob, ToolCallDelta, Usage
from server.api.messages import MessageAnswer
from server.api.responses import ResponseAnswer, ResponseBody
from server.errors import ApiError

ASKED = ChatRequest(request_id="1", model="m", messages=[{"role": "user", "content": "?"}])
FIRST, SECOND = ToolCallDelta(0, "a", "weather", '{"city": '), ToolCallDelta(1, "b", "now", "{}")
REST = ToolCallDelta(0, arguments='"Adama"}')
WORDS = ChatDelta(0, "Let me see. ")
END = ChatDelta(0, finish_reason="tool_calls")
CALLS = [("weather", {"city": "Adama"}), ("now", {})]


def one_after_the_other(content: str) -> list[list[ChatDelta]]:
    """The same two calls with this between them, as it may come."""
    space = ChatDelta(0, content)
    calls = [ChatDelta(0, tool_calls=(piece,)) for piece in (FIRST, REST, SECOND)]
    return [
        [WORDS, *calls[:2], space, calls[2], END],
        [WORDS, calls[0], ChatDelta(0, content, tool_calls=(REST,)), calls[2], END],
        [WORDS, calls[0], ChatDelta(0, content, tool_calls=(REST, SECOND)), END],
        [ChatDelta(0, "Let me see. ", tool_calls=(FIRST,)), calls[1], ChatDelta(0, content, tool_calls=(SECOND,)), END],
    ]


def steps(deltas: Sequence[ChatDelta]) -> list[ChatStep]:
    return [ChatStep((delta,), Usage(3, count)) for count, delta in enumerate(deltas, 1)]


def events(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def response(deltas: Sequence[ChatDelta]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events, and the items of the last."""
    answer = ResponseAnswer(ResponseBody.model_validate({"model": "m", "input": "?"}), ASKED, created=1)
    data = answer.start() + b"".join(map(answer.step, steps(deltas))) + answer.end(Usage(3, len(deltas)))
    found = events(data)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found, found[-1]["response"]["output"]


@pytest.mark.parametrize("deltas", one_after_the_other("\n") + one_after_the_other("\n\n"))
def test_calls_stay_whole_and_next_to_each_other(deltas: list[ChatDelta]):
    _, items = response(deltas)
    assert [item["type"] for item in items] == ["message", "function_call", "function_call"]
    assert [(item["name"], json.loads(item["arguments"])) for item in items[1:]] == CALLS

    message = MessageAnswer(ASKED)
    found = events(b"".join(map(message.step, steps(deltas))) + message.end(Usage(3, len(deltas))))
    blocks = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
    said = ["", "", ""]
    for one in found:
        if one["type"] == "content_block_delta":
            said[one["index"]] += one["delta"].get("partial_json") or one["delta"].get("text")
    assert said[0] == "Let me see. "
    assert [(block["name"], json.loads(text)) for block, text in zip(blocks[1:], said[1:], strict=True)] == CALLS


def test_words_between_calls_are_a_message_of_their_own():
    _, items = response(one_after_the_other("\nAnd then: ")[0])
    assert [item["type"] for item in items] == ["message", "function_call", "message", "function_call"]
    assert items[2]["content"][0]["text"] == "\nAnd then: "


@pytest.mark.parametrize("text", ["", "\n", " \n "])
def test_an_answer_of_white_space_is_a_message(text: str):
    _, (item,) = response([ChatDelta(0, text, finish_reason="stop")])
    assert item["content"][0]["text"] == text


def test_probabilities_are_those_of_the_text_that_they_come_with():
    entry = {word: (TokenLogprob(word, -1.0, None, ()),) for word in ("think", "mark", "Hello", "there", "call")}
    found, items = response(
        [
            ChatDelta(0, reasoning="think", logprobs=entry["think"]),
            ChatDelta(0, logprobs=entry["mark"]),
            ChatDelta(0, "Hello", logprobs=entry["Hello"]),
            ChatDelta(0, " there", logprobs=entry["there"]),
            ChatDelta(0, logprobs=entry["mark"]),
            ChatDelta(0, tool_calls=(SECOND,), logprobs=entry["call"]),
            ChatDelta(0, finish_reason="tool_calls", logprobs=entry["mark"]),
        ]
    )
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    streamed = [[each["token"] for each in one.get("logprobs") or ()] for one in found if "delta" in one]
    assert streamed == [[], ["Hello"], ["there"], []]
    assert [each["token"] for each in items[1]["content"][0]["logprobs"]] == ["Hello", "there"]


def test_a_response_that_fails_before_its_first_token_begins_all_the_same():
    answer = ResponseAnswer(ResponseBody.model_validate({"model": "m", "input": "?"}), ASKED, created=1)
    found = events(answer.failed(ApiError(503, "engine_unavailable", "Try again.")))
    kinds = ["response.created", "response.in_progress", "response.failed"]
    assert [(one["type"], one["sequence_number"]) for one in found] == [(kind, at) for at, kind in enumerate(kinds)]


def test_a_function_of_a_namespace_comes_back_under_both_names():
    """As Codex offers those of MCP."""
    look = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    offered = [look, {"type": "namespace", "name": "mcp__files", "tools": [look]}]
    body = ResponseBody.model_validate({"model": "m", "input": "?", "tools": offered})
    answer = ResponseAnswer(body, ASKED, created=1)
    pieces = [ToolCallDelta(0, "a", "mcp__files__look", "{}"), ToolCallDelta(1, "b", "look", "{}")]
    data = answer.start() + answer.step(ChatStep((ChatDelta(0, tool_calls=tuple(pieces)),), Usage(3, 1)))
    found = events(data + answer.end(Usage(3, 1)))
    items = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert [(item["name"], item.get("namespace")) for item in items] == [("look", "mcp__files"), ("look", None)]
    assert found[-1]["response"]["output"] == items
    assert [tool["name"] for tool in found[-1]["response"]["tools"]] == ["look", "mcp__files"]
