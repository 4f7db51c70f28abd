"""The events of `/v1/responses` from engine steps that the demo model does not make: reasoning, failures."""

from typing import Any

import pytest
from responses_parts import events_of, put_together, said_in

from engine import ChatDelta, ChatRequest, ChatStep, GenerationError, ToolCallDelta, Usage
from server.api.responses import ResponseAnswer, ResponseBody
from server.errors import ApiError


def encoder(**fields: Any) -> ResponseAnswer:
    body = ResponseBody.model_validate({"model": "m", "input": "x", **fields})
    return ResponseAnswer(body, ChatRequest(request_id="1", model="m", messages=[]), created=1)


def test_reasoning_text_and_calls_are_items_of_their_own_one_after_the_other():
    made = encoder()
    usage = Usage(3, 4, cached_tokens=2, reasoning_tokens=1)
    deltas = [
        ChatDelta(0, reasoning="Hm"),
        ChatDelta(0, reasoning="m.", content="Look"),
        ChatDelta(0, content=":", tool_calls=(ToolCallDelta(0, "a", "f", "{"), ToolCallDelta(0, arguments="}"))),
        ChatDelta(0, tool_calls=(ToolCallDelta(1, "b", "g", ""),)),
        ChatDelta(0, content="Done", finish_reason="tool_calls"),
    ]
    data = made.start() + b"".join(made.step(ChatStep((delta,), usage)) for delta in deltas) + made.end(usage)
    events = events_of(data.decode())
    expected = [
        ("reasoning", "Hmm."),
        ("message", "Look:"),
        ("function_call", "{}"),
        ("function_call", ""),
        ("message", "Done"),
    ]
    assert put_together(events) == said_in(events[-1]["response"]) == expected
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert [event["item"]["id"] for event in events if event["type"] == "response.output_item.done"] == [
        f"{prefix}_1_{number}" for number, prefix in enumerate(["rs", "msg", "fc", "fc", "msg"])
    ]
    with pytest.raises(GenerationError):
        made.step(ChatStep((ChatDelta(0, tool_calls=(ToolCallDelta(0, arguments="late"),)),), usage))


def test_a_failure_in_the_middle_ends_the_stream_with_the_usual_error_and_what_had_been_said():
    made = encoder(stream=True)
    data = made.start() + made.step(ChatStep((ChatDelta(0, content="Half an"),), Usage(1, 2)))
    data += made.failed(ApiError(503, "engine_unavailable", "Try again."))
    last = events_of(data.decode())[-1]
    assert last["type"] == "response.failed"
    error = {"message": "Try again.", "type": "server_error", "param": None, "code": "engine_unavailable"}
    assert (last["response"]["status"], last["response"]["error"]) == ("failed", error)
    assert said_in(last["response"]) == [("message", "Half an")]
    assert last["response"]["output"][0]["status"] == "incomplete"
