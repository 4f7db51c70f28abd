"""What tests of `/v1/responses` share: the events of a raw stream, and what they say."""

import json
from typing import Any

PATH = "/v1/responses"


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a raw stream: each a name and one line of JSON that says the same name, numbered without a gap."""
    assert text.endswith("\n\n")
    made = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        made.append(event)
    return made


def put_together(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Every item's kind and what its deltas say, checked against what its own `done` events say."""
    made: list[list[str]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(made)
            made.append([event["item"]["type"], ""])
        elif kind.endswith(".delta"):
            made[event["output_index"]][1] += event["delta"]
        elif kind.endswith((".output_text.done", ".reasoning_text.done")):
            assert event["text"] == made[event["output_index"]][1]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == made[event["output_index"]][1]
    return [(kind, text) for kind, text in made]


def said_in(response: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (item["type"], item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
        for item in response["output"]
    ]
