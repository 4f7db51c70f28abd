"""The mixed traffic of a soak: requests, and the right answers. A check raises `WrongAnswerError`."""

import base64
import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import add
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from demo_models.promised import FixedPrompt, fixed_images, fixed_pictures, fixed_prompts
from PIL import Image

PLUS, PRO, IMAGE, VOICE = "service-plus", "service-pro", "service-image", "service-voice"
_SEED = 7
_ANSWER_TOKENS = 600  # the longest promised answer has some 250
_PICTURE_TOKENS = 4096
_VOICES = {
    "selam": "ሰላም። እንዴት ነህ?",
    "hodan": "Subax wanaagsan.",
    "tolosa": "Akkam jirtu?",
    "emma": "Good morning, all.",
}
_STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_FORMATS = ("mp3", "opus", "aac", "flac", "wav", "pcm")
_PCM_BYTES_PER_SECOND = 48_000
_SECONDS_STEP = 0.011  # the usage of a stream of events has hundredths
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TEXTS = [one for one in fixed_prompts() if one.tools is None and len(one.messages) == 1]
_CALLS = [one for one in fixed_prompts() if one.tools is not None]
_PICTURES = fixed_pictures()


class WrongAnswerError(Exception):
    """A wrong answer with status 200."""


class FailedError(Exception):
    """A stream that ended with an error event, or a failed item of a batch: `error` is its object."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error)[:300])
        self.error = error


class Used(NamedTuple):
    """The usage in an answer, as the usage book counts it."""

    requests: int = 1
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    images: int = 0
    audio_seconds: float = 0.0


NOTHING = Used(requests=0)
Range: TypeAlias = tuple[Used, Used]  # at least, at most
Check: TypeAlias = Callable[[bytes], Range]


@dataclass(frozen=True)
class Ask:
    """A request. `book` is its kind of usage, `most` the most that it can use."""

    kind: str
    path: str
    check: Check
    body: Any = None
    models: frozenset[str] = frozenset()
    book: str = ""
    most: Used = NOTHING
    status: int = 200
    enhanced: bool = False
    """Only for a key of the better tier."""
    careless: bool = False
    """Sent with a key of its own, because its usage depends on where it is refused."""
    without_key: bool = False
    then: "Callable[[bytes], Ask] | None" = None


def exactly(used: Used) -> Range:
    return used, used


def require(fact: object, what: str, seen: object = "") -> None:
    """Raise `WrongAnswerError` unless it is true."""
    if not fact:
        raise WrongAnswerError(f"{what}: {seen!r:.300}" if seen != "" else what)


def events(data: bytes) -> list[Any]:
    """Return the JSON events of a whole stream, `[DONE]` as None. Raises `FailedError` at an error event at its end."""
    found: list[Any] = []
    require(data.endswith(b"\n\n"), "a stream ends in the middle of an event", data[-100:])
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        lines = [line.removeprefix("data: ") for line in block.split("\n") if line.startswith("data: ")]
        if lines:
            found.append(None if lines[0] == "[DONE]" else json.loads(lines[0]))
    failed = [at for at, one in enumerate(found) if one and (one.get("error") or one.get("type") == "response.failed")]
    if failed:
        require(failed == [len(found) - 1], "something comes after an error event", found[-2:])
        last = found[-1]
        raise FailedError(last["error"] if last.get("error") else last["response"]["error"])
    return found


def tokens_of(usage: Mapping[str, Any]) -> Used:
    """Read the `usage` of any of the conventions for chat."""
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens")) or 0
    prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    answer = usage["completion_tokens"] if "completion_tokens" in usage else usage["output_tokens"]
    return Used(1, prompt + usage.get("cache_read_input_tokens", 0), answer, cached)


def _said(prompt: FixedPrompt, message: Mapping[str, Any], finish_reason: str | None) -> None:
    made = [one["function"] for one in message.get("tool_calls") or []]
    calls = [(one["name"], json.loads(one["arguments"])) for one in made]
    if prompt.tool_calls is None:
        right = (message.get("content"), finish_reason) == (prompt.answer, "stop")
    else:
        right = (calls, finish_reason) == (prompt.tool_calls, "tool_calls")
    require(right, prompt.name, (message, finish_reason))


def _check_chat(prompt: FixedPrompt, n: int, data: bytes) -> Range:
    answer = json.loads(data)
    require(len(answer["choices"]) == n, "not so many choices", len(answer["choices"]))
    for choice in answer["choices"]:
        _said(prompt, choice["message"], choice["finish_reason"])
    return exactly(tokens_of(answer["usage"]))


def _check_chat_stream(prompt: FixedPrompt, n: int, data: bytes) -> Range:
    found = events(data)
    require(found and found[-1] is None, "no [DONE]", data[-200:])
    require(len({(one["id"], one["created"]) for one in found[:-1]}) == 1, "several ids in a stream")
    texts, ends = [""] * n, [None] * n
    calls: list[dict[int, dict[str, Any]]] = [{} for _ in range(n)]
    for choice in (choice for one in found[:-1] for choice in one["choices"]):
        place = choice["index"]
        require(ends[place] is None, "something comes after the end of a choice", choice)
        texts[place] += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls") or ():
            call = calls[place].setdefault(piece["index"], {"name": "", "arguments": ""})
            for name in call:
                call[name] += piece["function"].get(name) or ""
        ends[place] = choice["finish_reason"]
    for text, made, end in zip(texts, calls, ends, strict=True):
        _said(prompt, {"content": text, "tool_calls": [{"function": one} for one in made.values()]}, end)
    return exactly(tokens_of(found[-2]["usage"]))


def _chat_body(prompt: FixedPrompt, model: str, **more: Any) -> dict[str, Any]:
    tools = {"tools": prompt.tools} if prompt.tools else {}
    return {"model": model, "messages": prompt.messages, "temperature": 0, **tools, **more}


def _chat(kind: str, prompt: FixedPrompt, model: str, *, streamed: bool, n: int = 1) -> Ask:
    body = _chat_body(prompt, model, n=n, max_tokens=_ANSWER_TOKENS, **(_STREAMED if streamed else {}))
    check = partial(_check_chat_stream if streamed else _check_chat, prompt, n)
    return _generating(kind, "/v1/chat/completions", body, check, model, n=n)


def _generating(  # noqa: PLR0913  # the request's parts
    kind: str, path: str, body: dict[str, Any], check: Check, model: str, *, n: int = 1
) -> Ask:
    pictures = json.dumps(body).count('image_url":')
    prompt = len(json.dumps(body, ensure_ascii=False).encode()) + pictures * _PICTURE_TOKENS
    most = Used(1, prompt, n * _ANSWER_TOKENS, prompt)
    return Ask(kind, path, check, body, frozenset({model}), "chat", most, enhanced=model == PRO)


def chat(source: random.Random) -> Ask:
    streamed = source.random() < 0.5
    prompt = source.choice(_TEXTS)
    return _chat("chat streamed" if streamed else "chat", prompt, source.choice((PLUS, PLUS, PRO)), streamed=streamed)


def several(source: random.Random) -> Ask:
    return _chat("chat n > 1", source.choice(_TEXTS), PLUS, streamed=source.random() < 0.5, n=source.randint(2, 4))


def tools(source: random.Random) -> Ask:
    return _chat("tools", source.choice(_CALLS), source.choice((PLUS, PLUS, PRO)), streamed=source.random() < 0.5)


def vision(source: random.Random) -> Ask:
    return _chat("vision", source.choice(_PICTURES), PRO, streamed=source.random() < 0.5)


def schema(source: random.Random) -> Ask:
    """One in three has a schema that the server has not seen before."""
    person = _PERSON | ({"title": f"{source.getrandbits(64):x}"} if source.random() < 0.3 else {})
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": person}}
    messages = [{"role": "user", "content": "Give me JSON for a person."}]
    body = {
        "model": PLUS,
        "messages": messages,
        "temperature": 0,
        "max_tokens": _ANSWER_TOKENS,
        "response_format": form,
    }

    def check(data: bytes) -> Range:
        answer = json.loads(data)
        found = json.loads(answer["choices"][0]["message"]["content"])
        right = found.keys() == {"name", "age"} and isinstance(found["name"], str) and 0 <= found["age"] <= 150
        require(right, "the answer does not follow its schema", found)
        return exactly(tokens_of(answer["usage"]))

    return _generating("json_schema", "/v1/chat/completions", body, check, PLUS)


def completions(source: random.Random) -> Ask:
    streamed, n = source.random() < 0.5, source.randint(1, 3)
    body = {"model": PLUS, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "n": n}
    body |= _STREAMED if streamed else {}

    def check(data: bytes) -> Range:
        found = events(data) if streamed else [json.loads(data), None]
        require(found[-1] is None, "no [DONE]", data[-200:])
        texts = [""] * n
        for choice in (choice for one in found[:-1] for choice in one["choices"]):
            texts[choice["index"]] += choice["text"]
        require(all("Paris" in text for text in texts), "another text", texts)
        return exactly(tokens_of(found[-2]["usage"]))

    return _generating("completions", "/v1/completions", body, check, PLUS, n=n)


def responses(source: random.Random) -> Ask:
    streamed, prompt = source.random() < 0.5, source.choice(_TEXTS)
    body = {"model": PLUS, "input": prompt.messages, "temperature": 0, "stream": streamed}

    def check(data: bytes) -> Range:
        found = events(data) if streamed else [{"type": "response.completed", "response": json.loads(data)}]
        last = found[-1]
        require(last["type"] == "response.completed", "the last event is another", last)
        text = last["response"]["output"][0]["content"][0]["text"]
        require(text == prompt.answer, prompt.name, text)
        if streamed:
            require([one["sequence_number"] for one in found] == [*range(len(found))], "a gap in the numbers of events")
            deltas = (one["delta"] for one in found if one["type"] == "response.output_text.delta")
            require("".join(deltas) == text, "the deltas are another text")
        return exactly(tokens_of(last["response"]["usage"]))

    return _generating("responses", "/v1/responses", body, check, PLUS, n=4)


def messages(source: random.Random) -> Ask:
    streamed = source.random() < 0.5
    prompt = source.choice([one for one in _TEXTS if one.messages[0]["role"] == "user"])
    body = _chat_body(prompt, PLUS, max_tokens=_ANSWER_TOKENS, stream=streamed)

    def check(data: bytes) -> Range:
        if not streamed:
            answer = json.loads(data)
            said = (answer["content"][0]["text"], answer["stop_reason"])
            require(said == (prompt.answer, "end_turn"), prompt.name, answer)
            return exactly(tokens_of(answer["usage"]))
        found = events(data)
        require(found[-1]["type"] == "message_stop", "the last event is another", found[-1])
        text = "".join(one["delta"].get("text", "") for one in found if one["type"] == "content_block_delta")
        require(text == prompt.answer, prompt.name, text)
        return exactly(tokens_of(found[-2]["usage"]))

    return _generating("messages", "/v1/messages", body, check, PLUS)


def count_tokens(source: random.Random) -> Ask:
    body = {"model": PLUS, "messages": [{"role": "user", "content": source.choice(["Hello!", "Hi " * 200])}]}

    def check(data: bytes) -> Range:
        require(json.loads(data)["input_tokens"] > 5, "too few tokens", data)
        return exactly(Used())

    return _generating("count_tokens", "/v1/messages/count_tokens", body, check, PLUS)


def batch(source: random.Random) -> Ask:
    """Ten items, of which one is wrong."""
    prompts, wrong = source.sample(_TEXTS, 10), source.randrange(10)
    items = [_chat_body(prompt, PLUS, max_tokens=_ANSWER_TOKENS, custom_id=prompt.name) for prompt in prompts]
    items[wrong]["max_tokens"] = "many"

    def check(data: bytes) -> Range:
        answer, used = json.loads(data), Used(0)
        require(len(answer["responses"]) == 10, "not as many answers as items", len(answer["responses"]))
        for place, (prompt, one) in enumerate(zip(prompts, answer["responses"], strict=True)):
            require((one["index"], one["custom_id"]) == (place, prompt.name), "out of order", one)
            if place == wrong:
                require(one.get("status_code") == 400, "a bad item was answered", one)
            elif one.get("error"):
                raise FailedError(one["error"])
            else:
                _said(prompt, one["choices"][0]["message"], one["choices"][0]["finish_reason"])
                used = plus(used, tokens_of(one["usage"]))
        require(answer["counts"] == {"total": 10, "succeeded": 9, "failed": 1}, "wrong counts", answer["counts"])
        return used, used._replace(requests=10)

    whole = _generating("batch", "/v1/chat/completions/batch", {"requests": items}, check, PLUS, n=10)
    return replace(whole, book="batch", most=whole.most._replace(requests=10))


_pictures: dict[tuple[str, str], Any] = {}  # the first of each, which all later ones must match


def _check_png(data: bytes, prompt: str, size: str) -> None:
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB"), dtype=np.int16)
    require(pixels.shape[:2] == tuple(map(int, size.split("x"))), "another size", pixels.shape)
    first = _pictures.setdefault((prompt, size), pixels)
    far = int(np.abs(pixels - first).max())
    require(far <= 2, f"the same seed gave another image of {prompt!r}, {far}/255 apart")  # each within 1 of the truth


def images(source: random.Random) -> Ask:
    streamed, as_link = source.random() < 0.4, source.random() < 0.5
    prompt, size = source.choice(fixed_images()[:12]).prompt, source.choice(["256x256"] * 4 + ["512x512"])
    body = {"model": IMAGE, "prompt": prompt, "size": size, "seed": _SEED, "stream": streamed}
    body |= {"response_format": "url" if as_link else "b64_json"} | ({"partial_images": 1} if streamed else {})

    def image_of(data: bytes) -> Any:
        if not streamed:
            return json.loads(data)["data"][0]
        found = [one for one in events(data) if one["type"] == "image_generation.completed"]
        require(len(found) == 1, "not one image was completed", len(found))
        return found[0]

    def check(data: bytes) -> Range:
        image = image_of(data)
        if not as_link:
            _check_png(base64.b64decode(image["b64_json"]), prompt, size)
        require(image["seed"] == _SEED, "another seed", image["seed"])
        return exactly(Used(images=1))

    def fetched(data: bytes) -> Range:
        _check_png(data, prompt, size)
        return exactly(NOTHING)

    def link(data: bytes) -> Ask:
        path = re.sub(r"^https?://[^/]+", "", image_of(data)["url"])
        return Ask("image link", path, fetched, without_key=True)

    kind, then = "images streamed" if streamed else "images", link if as_link else None
    return Ask(kind, "/v1/images/generations", check, body, frozenset({IMAGE}), "images", Used(images=1), then=then)


_spoken: dict[str, float] = {}  # seconds of each voice's text


def speech(source: random.Random) -> Ask:
    voice, form, by_event = source.choice([*_VOICES]), source.choice((*_FORMATS, "pcm", "pcm")), source.random() < 0.4
    body = {"model": VOICE, "voice": voice, "input": _VOICES[voice], "seed": _SEED, "response_format": form}
    body |= {"stream_format": "sse"} if by_event else {}

    def check(data: bytes) -> Range:
        if by_event:
            last = events(data)[-1]
            require(last["type"] == "speech.audio.done", "the last event is another", last["type"])
            seconds = last["usage"]["seconds"]
        elif form == "pcm":
            seconds = len(data) / _PCM_BYTES_PER_SECOND
        else:
            require(len(data) > 500, "no sound", len(data))
            return Used(audio_seconds=0.1), Used(audio_seconds=30.0)
        known = _spoken.setdefault(voice, seconds)
        require(abs(known - seconds) <= 2 * _SECONDS_STEP, f"{voice} spoke for {known} s before and now for", seconds)
        return Used(audio_seconds=seconds - _SECONDS_STEP), Used(audio_seconds=seconds + _SECONDS_STEP)

    kind = "speech as events" if by_event else "speech"
    most = Used(audio_seconds=30.0)
    return Ask(kind, "/v1/audio/speech", check, body, frozenset({VOICE}), "audio", most)


def reading(source: random.Random) -> Ask:
    def listed(kind: str, path: str, name: str, at_least: int, **how: Any) -> Ask:
        def check(data: bytes) -> Range:
            require(len(json.loads(data)[name]) >= at_least, f"fewer than {at_least}", data)
            return exactly(NOTHING)

        return Ask(kind, path, check, **how)

    return source.choice(
        [
            listed("models", "/v1/models", "data", 4, enhanced=True),
            listed("models", "/v1/models", "data", 3),
            listed("voices", "/v1/audio/voices", "voices", 9),
            listed("voices", "/v1/audio/voices?language=am", "voices", 3),
            listed("usage", "/v1/usage?by=day,model", "data", 0),
            listed("health", "/health/live", "status", 1, without_key=True),
        ]
    )


def careless(source: random.Random) -> Ask:

    def refused(status: int, path: str, body: Any, *, code: str, **how: Any) -> Ask:
        def check(data: bytes) -> Range:
            require(json.loads(data)["error"]["code"] == code, "another code", data)
            return NOTHING, Used()

        return Ask("careless", path, check, body, book="chat", most=Used(), status=status, careless=True, **how)

    path, hello = "/v1/chat/completions", {"model": PLUS, "messages": [{"role": "user", "content": "Hello!"}]}
    return source.choice(
        [
            refused(400, path, b'{"model": NaN}', code="invalid_json"),
            refused(400, path, hello | {"n": True}, code="invalid_value"),
            refused(400, path, {"model": PLUS}, code="missing_field"),
            refused(404, path, hello | {"model": "no-such-model"}, code="model_not_found"),
            refused(404, path, hello | {"model": PRO}, code="model_not_found"),
            refused(401, path, hello, code="invalid_api_key", without_key=True),
            refused(403, "/v1/admin/keys", None, code="insufficient_permissions"),
            refused(404, "/v1/no/such/path", None, code="not_found"),
            refused(
                400, "/v1/images/generations", {"model": IMAGE, "prompt": "x", "size": "3x3"}, code="invalid_value"
            ),
        ]
    )


MIX: dict[Callable[[random.Random], Ask], int] = {
    chat: 26,
    several: 5,
    tools: 10,
    vision: 6,
    schema: 6,
    completions: 5,
    responses: 6,
    messages: 6,
    count_tokens: 2,
    batch: 2,
    images: 6,
    speech: 6,
    reading: 9,
    careless: 5,
}


def asks(source: random.Random) -> Iterator[Ask]:
    while True:
        yield source.choices([*MIX], [*MIX.values()])[0](source)


def plus(one: Used, other: Used) -> Used:
    return Used(*map(add, one, other))
