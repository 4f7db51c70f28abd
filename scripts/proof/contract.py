"""The core of the API's contract, checked on a served model: each check returns what it saw, or raises what is wrong.

The checks need forms, not knowledge, so they also pass with weights that were never trained.
"""

from __future__ import annotations

import json
from typing import Any

from bench.load import BenchError
from bench.servers import Server

_CHAT = "/v1/chat/completions"
_CITIES = ["Paris", "Rome"]
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": _CITIES}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_ENDLESS = "one two " * 400_000
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _SCHEMA}}


class Question:
    """Chat requests of one model. `closed`: it is asked not to reason, and reasoning is ignored."""

    def __init__(self, server: Server, model: str, *, closed: bool) -> None:
        self._server, self._model, self.closed = server, model, closed

    def body(self, **more: Any) -> dict[str, Any]:
        asked = {"role": "user", "content": "What is the capital of France?"}
        found = {"model": self._model, "messages": [asked], "temperature": 0, "max_tokens": 400, **more}
        return found | ({"chat_template_kwargs": {"enable_thinking": False}} if self.closed else {})

    def status(self, **more: Any) -> tuple[int, Any]:
        status, answer = self._server.ask(_CHAT, self.body(**more))
        return status, json.loads(answer) if answer else {}

    def whole(self, **more: Any) -> Any:
        """Return a plain answer. Raises `BenchError`."""
        status, answer = self.status(**more)
        if status != 200:
            raise BenchError(f"status {status}: {json.dumps(answer)[:300]}")
        return answer

    def events(self, **more: Any) -> list[str]:
        """Return the data of a stream's events. Raises `BenchError`."""
        status, text = self._server.ask(_CHAT, self.body(stream=True, **more))
        if status != 200:
            raise BenchError(f"status {status}: {text[:300].decode(errors='replace')}")
        return [line[6:] for line in text.decode().splitlines() if line.startswith("data: ")]


def agree(ask: Question) -> dict[str, Any]:
    """A plain and a streamed answer are the same, and the stream has its form."""
    whole = ask.whole(max_tokens=60)
    (choice,) = whole["choices"]
    events = ask.events(max_tokens=60, stream_options={"include_usage": True})
    _check(f"the last event is {events[-1][:80]!r}", right=events[-1] == "[DONE]")
    chunks = [json.loads(event) for event in events[:-1]]
    _check("the last chunk has no usage", right=not chunks[-1]["choices"] and chunks[-1]["usage"] is not None)
    _check("the ids of the chunks differ", right=len({chunk["id"] for chunk in chunks}) == 1)
    deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
    ends = [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
    _check("the first or the last delta is another", right=deltas[0].get("role") == "assistant" and deltas[-1] == {})
    _check(f"plain ends with {choice['finish_reason']}, streamed with {ends}", right=ends == [choice["finish_reason"]])
    streamed = "".join(delta.get("content") or "" for delta in deltas)
    if not ask.closed:
        _check(f"streamed {streamed[:200]!r}, plain otherwise", right=streamed == (choice["message"]["content"] or ""))
    numbers = [one["usage"]["completion_tokens"] for one in (whole, chunks[-1])]
    return {"answer": streamed[:80], "tokens": numbers, "thinks": bool(choice["message"].get("reasoning_content"))}


def fields(ask: Question) -> dict[str, Any]:
    """`n`, `stop`, `logprobs` and `max_tokens` do what they say."""
    several = ask.whole(n=3, max_tokens=8, temperature=1, seed=3, ignore_eos=True)
    _check("n: 3 gave other choices", right=[one["index"] for one in several["choices"]] == [0, 1, 2])
    one = ask.whole(max_tokens=5, logprobs=True, top_logprobs=2)["choices"][0]
    numbers = (one["logprobs"] or {}).get("content") or []
    _check("top_logprobs: 2 gave another number", right=all(len(each["top_logprobs"]) == 2 for each in numbers))
    again = [ask.whole(max_tokens=16, temperature=1, seed=7)["choices"][0]["message"] for _ in range(2)]
    return {"logprobs": len(numbers), "same_seed_same_answer": again[0] == again[1]}


def errors(ask: Question) -> dict[str, Any]:
    """Wrong requests get the status, type and code of the contract."""
    cases: dict[str, tuple[dict[str, Any], int, str]] = {
        "unknown model": ({"model": "no-such-model"}, 404, "model_not_found"),
        "bad field": ({"temperature": 9}, 400, "invalid_value"),
        "engine field": ({"prompt_embeds": "x"}, 400, ""),
        "no messages": ({"messages": []}, 400, ""),
        "endless prompt": ({"messages": [{"role": "user", "content": _ENDLESS}]}, 400, "context_length_exceeded"),
    }
    for name, (change, wanted, code) in cases.items():
        status, answer = ask.status(**change)
        error = answer.get("error", {})
        formed = error.keys() >= {"message", "type", "param", "code"} and code in {error["code"], ""}
        _check(f"{name}: status {status}, {json.dumps(error)[:200]}", right=formed and status == wanted)
    return {"cases": len(cases)}


def schema(ask: Question) -> dict[str, Any]:
    """JSON with a schema follows it, streamed too."""
    wanted = {"type": "json_schema", "json_schema": {"name": "trip", "schema": _SCHEMA, "strict": True}}
    answer = ask.whole(response_format=wanted)["choices"][0]
    _by_schema(answer["message"]["content"] or "", answer)
    return {"content": answer["message"]["content"][:80]}


def forced_call(ask: Question) -> dict[str, Any]:
    """A forced call follows its schema, streamed and whole."""
    forced = {"tools": [_TOOL], "tool_choice": "required"}
    answer = ask.whole(**forced)["choices"][0]
    calls = answer["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
    _by_schema(calls[0]["function"]["arguments"], answer)
    pieces = [json.loads(event) for event in ask.events(**forced)[:-1]]
    deltas = [call for chunk in pieces for one in chunk["choices"] for call in one["delta"].get("tool_calls") or []]
    streamed = "".join(call["function"].get("arguments") or "" for call in deltas if call["index"] == 0)
    _by_schema(streamed, {"finish_reason": "streamed"})
    return {"arguments": calls[0]["function"]["arguments"][:80]}


def batch(ask: Question, server: Server) -> dict[str, Any]:
    """A batch answers in order, and a bad item fails alone."""
    good, bad = ask.body(max_tokens=8), ask.body(temperature=9)
    status, answer = server.ask(f"{_CHAT}/batch", {"requests": [good, bad, good, good]})
    found: Any = json.loads(answer) if status == 200 else {"counts": answer[:200].decode(errors="replace")}
    right = status == 200 and [one["index"] for one in found["responses"]] == [0, 1, 2, 3]
    _check(f"status {status}, {found['counts']}", right=right and found["counts"]["failed"] == 1)
    return {"counts": f"{found['counts']['succeeded']} of {found['counts']['total']}"}


class NeverDoneError(BenchError):
    """The answer was cut before it began: the model reasons first, and was never trained to stop."""


def _by_schema(text: str, answer: dict[str, Any]) -> None:
    if not text.strip() and answer["finish_reason"] == "length":
        raise NeverDoneError("it did not stop thinking")
    try:
        found = json.loads(text)
    except ValueError:
        raise BenchError(f"no JSON: {text[:200]!r}") from None
    _check(
        f"{found}", right=found.keys() == {"city", "days"} and found["city"] in _CITIES and found["days"] in {1, 2, 3}
    )


def _check(problem: str, *, right: bool) -> None:
    if not right:
        raise BenchError(problem)
