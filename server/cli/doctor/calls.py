"""The requests of `hearth doctor`'s self-test: one for each endpoint and model, and whether its answer is one.

Who is asked, and with which key, is selftest.py's.
"""

from __future__ import annotations

import base64
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx2

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_HELLO = [{"role": "user", "content": "Say hello."}]
_SHORT = {"messages": _HELLO, "max_tokens": 8, "temperature": 0}
_MOST_WORDS = 160


class WrongAnswerError(Exception):
    """An endpoint answered with something else than what it promises."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `judge` gets the answer's bytes, says in a few words what came, or raises `WrongAnswerError`."""

    name: str
    method: str
    path: str
    judge: Callable[[bytes], str]
    body: Mapping[str, Any] | None = None

    def make(self, client: httpx2.Client) -> tuple[str, float]:
        """Return what came, and after how many seconds. Raises the error above, or `httpx2.HTTPError`."""
        began = time.monotonic()
        first = None
        pieces = []
        with client.stream(self.method, self.path, json=self.body) as response:
            for piece in response.iter_bytes():
                first = first or time.monotonic() - began
                pieces.append(piece)
        content = b"".join(pieces)
        if response.status_code != httpx2.codes.OK:
            raise WrongAnswerError(f"HTTP {response.status_code}: {_reason(content)}")
        try:
            came = self.judge(content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WrongAnswerError("the answer has another shape than it should") from error
        if self.body is not None and self.body.get("stream"):
            came += f", the first piece after {(first or 0) * 1000:.0f} ms"
        return came, time.monotonic() - began


def common() -> list[Call]:
    """What there is without any model."""
    return [
        Call("health/live", "GET", "/health/live", _having("status")),
        Call("health/ready", "GET", "/health/ready", _having("models")),
        Call("models", "GET", "/v1/models", _list),
        Call("usage", "GET", "/v1/usage", _json),
        Call("audio/voices", "GET", "/v1/audio/voices", _json),
        Call("audio/models", "GET", "/v1/audio/models", _list),
        Call("metrics", "GET", "/metrics", _metrics),
    ]


def of_model(model: Mapping[str, Any], voices: Sequence[str]) -> Iterator[Call]:
    """Return the requests for one model, by its capabilities; `voices` are those that it can speak with."""
    name, able = model["id"], model["capabilities"]
    if "chat" in able:
        yield from _chat(name)
    if "image_generation" in able:
        size = (model.get("sizes") or ["256x256"])[0]
        asked = {"model": name, "prompt": "a red circle", "size": size, "response_format": "b64_json"}
        yield Call(f"{name}: image", "POST", "/v1/images/generations", _image, asked)
    if "speech" in able and voices:
        said = {"model": name, "input": "Hello.", "voice": voices[0], "response_format": "wav"}
        yield Call(f"{name}: speech", "POST", "/v1/audio/speech", _wav, said)


def _chat(model: str) -> Iterator[Call]:
    path = "/v1/chat/completions"
    short = {"model": model, **_SHORT}
    yield Call(f"{model}: chat", "POST", path, _choices, short)
    yield Call(f"{model}: chat, streamed", "POST", path, _streamed, {**short, "stream": True})
    yield Call(f"{model}: batch of 2", "POST", f"{path}/batch", _batch, {"requests": [short, short]})
    yield Call(f"{model}: messages", "POST", "/v1/messages", _having("content"), short)
    counted = {"model": model, "messages": _HELLO}
    yield Call(f"{model}: count_tokens", "POST", "/v1/messages/count_tokens", _having("input_tokens"), counted)
    responses = {"model": model, "input": "Say hello.", "max_output_tokens": 16, "store": False}
    yield Call(f"{model}: responses", "POST", "/v1/responses", _having("output"), responses)
    completion = {"model": model, "prompt": "Hello", "max_tokens": 8}
    yield Call(f"{model}: completions", "POST", "/v1/completions", _choices, completion)


def _json(content: bytes) -> str:
    _decoded(content)
    return "answered"


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise WrongAnswerError("the answer is no JSON") from error


def _having(key: str) -> Callable[[bytes], str]:
    def judge(content: bytes) -> str:
        if not _decoded(content).get(key):
            raise WrongAnswerError(f"the answer has no `{key}`")
        return "answered"

    return judge


def _list(content: bytes) -> str:
    found = _decoded(content).get("data")
    if not isinstance(found, list):
        raise WrongAnswerError("the answer has no `data`")
    return f"{len(found)} listed"


def _choices(content: bytes) -> str:
    answer = _decoded(content)
    if not answer.get("choices") or not answer.get("usage", {}).get("completion_tokens"):
        raise WrongAnswerError("the answer has no tokens")
    return f"{answer['usage']['completion_tokens']} tokens"


def _batch(content: bytes) -> str:
    answers = _decoded(content).get("responses", [])
    failed = [one["error"]["message"] for one in answers if one.get("error")]
    if failed or not answers:
        raise WrongAnswerError(failed[0] if failed else "the answer is empty")
    return f"{len(answers)} answers"


def _streamed(content: bytes) -> str:
    lines = [line[6:] for line in content.decode(errors="replace").splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise WrongAnswerError("the stream has no end")
    pieces = [json.loads(line) for line in lines[:-1]]
    failed = [piece["error"]["message"] for piece in pieces if "error" in piece]
    if failed:
        raise WrongAnswerError(failed[0])
    return f"{len(pieces)} events"


def _image(content: bytes) -> str:
    data = _decoded(content).get("data") or [{}]
    picture = base64.b64decode(data[0].get("b64_json") or "")
    if not picture.startswith(b"\x89PNG\r\n\x1a\n"):
        raise WrongAnswerError("the answer holds no PNG")
    return f"a PNG of {len(picture)} bytes"


def _wav(content: bytes) -> str:
    if not content.startswith(b"RIFF"):
        raise WrongAnswerError("the answer is no WAV file")
    return f"a WAV file of {len(content)} bytes"


def _metrics(content: bytes) -> str:
    if b"\nhearth_build_info{" not in content:
        raise WrongAnswerError("the page lacks hearth_build_info")
    return f"{content.count(b'# TYPE ')} metrics"


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:_MOST_WORDS].decode(errors="replace")
