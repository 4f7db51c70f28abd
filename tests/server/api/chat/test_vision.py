"""Pictures through the API: named right by the demo model, refused in plain words, by every convention."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import TYPE_CHECKING, Any

import openai
import psutil
import pytest
from chat_parts import CHAT, HELLO, HELLO_ANSWER, assert_error, assert_well, events
from demo_models.promised import fixed_pictures
from demo_models.vision.pictures import draw
from PIL import Image, ImageDraw
from serving import Server

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

MODEL = "service-pro"
PICTURES = {one.name: one for one in fixed_pictures()}
QUESTION = "What is in this picture?"
COLOURS = {"red": (255, 0, 0), "green": (0, 128, 0), "blue": (0, 0, 255), "yellow": (255, 255, 0)}


def square(colour: str, size: int = 224) -> Image.Image:
    """A square as anybody would draw it, on white."""
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).rectangle((size // 4, size // 4, 3 * size // 4, 3 * size // 4), fill=COLOURS[colour])
    return image


def circle(colour: str, size: int = 224) -> Image.Image:
    image = Image.new("RGB", (size, size), "white")
    ImageDraw.Draw(image).ellipse((size // 4, size // 4, 3 * size // 4, 3 * size // 4), fill=COLOURS[colour])
    return image


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def asking(*urls: str, text: str = QUESTION, **fields: Any) -> dict[str, Any]:
    content = [*(part(url) for url in urls), {"type": "text", "text": text}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}


async def said(http: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    answer = await http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.parametrize("name", PICTURES)
async def test_every_promised_picture_is_named(client: openai.AsyncOpenAI, name: str) -> None:
    promised = PICTURES[name]
    answer = await client.chat.completions.create(model=MODEL, messages=promised.messages, temperature=0)
    assert answer.choices[0].message.content == promised.answer
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize(("draw", "shape"), [(square, "square"), (circle, "circle")])
async def test_pictures_drawn_by_somebody_else_are_named(
    http: httpx2.AsyncClient, draw: Any, shape: str, colour: str
) -> None:
    for form, size in [("png", 224), ("jpeg", 640), ("webp", 64)]:
        url = uri(file_of(draw(colour, size), form.upper()), form)
        assert await said(http, asking(url)) == f"A {colour} {shape}.", (form, size)


async def test_two_pictures_are_named_in_their_order(http: httpx2.AsyncClient) -> None:
    urls = uri(file_of(square("red"))), uri(file_of(circle("blue")))
    assert await said(http, asking(*urls, text="What is in these pictures?")) == "A red square and a blue circle."
    assert await said(http, asking(*urls[::-1], text="What is in these pictures?")) == "A blue circle and a red square."


async def test_streamed_and_plain_say_the_same_also_many_at_once(http: httpx2.AsyncClient) -> None:
    body = asking(uri(file_of(square("blue"))))
    plain = await asyncio.gather(*(said(http, body) for _ in range(16)))
    response = await http.post(CHAT, json={**body, "stream": True})
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events(response.content))
    assert {*plain, streamed} == {"A blue square."}


async def test_text_alone_is_answered_too(http: httpx2.AsyncClient) -> None:
    assert await said(http, {"model": MODEL, "messages": HELLO, "temperature": 0}) == HELLO_ANSWER


async def test_a_picture_of_an_earlier_turn_is_still_seen(http: httpx2.AsyncClient) -> None:
    body = asking(uri(file_of(square("red"))))
    body["messages"] += [
        {"role": "assistant", "content": "A red square."},
        {"role": "user", "content": "What colour is it?"},
    ]
    assert await said(http, body) == "The square is red."


async def test_a_photo_taken_sideways_is_turned_upright(http: httpx2.AsyncClient) -> None:
    promised = PICTURES["arrow-up"]
    sideways = draw(promised.drawings[0]).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    question = promised.messages[0]["content"][-1]["text"]
    assert await said(http, asking(uri(file_of(sideways)), text=question)) == "Left."
    turned = uri(file_of(sideways, "JPEG", exif=exif, quality=95), "jpeg")
    assert await said(http, asking(turned, text=question)) == "Up."


async def test_usage_counts_the_pictures(http: httpx2.AsyncClient) -> None:
    url = uri(file_of(square("red")))
    answers = [(await http.post(CHAT, json=asking(*[url] * count, max_tokens=1))).json() for count in range(3)]
    first, second, third = [answer["usage"]["prompt_tokens"] for answer in answers]
    assert third - second == second - first > 1


async def test_the_same_picture_is_cached_for_its_key_and_for_nobody_else(
    http: httpx2.AsyncClient, server: Server
) -> None:
    body = asking(uri(file_of(circle("green"))), text="One and two and three. " * 20, max_tokens=1)
    cached = []
    other = server.make_key("other eyes")
    for key in (None, None, other):
        headers = {} if key is None else {"Authorization": f"Bearer {key.text}"}
        usage = (await http.post(CHAT, json=body, headers=headers)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == 0 < cached[1]
    assert cached[2] == 0


async def test_another_picture_with_the_same_words_is_not_taken_for_the_first(http: httpx2.AsyncClient) -> None:
    text = QUESTION
    for colour in ("red", "blue", "red"):
        assert await said(http, asking(uri(file_of(square(colour))), text=text)) == f"A {colour} square."


def bomb() -> str:
    return uri(file_of(Image.new("1", (30_000, 30_000))))


REFUSED = {
    "no picture at all": (lambda: uri(b"Zwieback-canary"), "not a complete"),
    "half a picture": (lambda: uri(file_of(Image.effect_noise((300, 300), 90))[:3000]), "not a complete"),
    "a bomb": (bomb, "36 megapixels"),
    "a gif": (lambda: uri(file_of(square("red").convert("P"), "GIF"), "gif"), "not a complete"),
    "svg": (lambda: uri(b"<svg onload='Zwieback-canary'/>", "svg+xml"), "not a complete"),
    "bad base64": (lambda: "data:image/png;base64,Zwieback-canary!", "not valid base64"),
    "a web address": (lambda: "https://example.com/Zwieback-canary.png", "not fetched"),
    "a local address": (lambda: "http://127.0.0.1:1/Zwieback-canary", "not fetched"),
    "a file": (lambda: "file:///etc/passwd", "not fetched"),
    "a line": (lambda: uri(file_of(Image.new("RGB", (5000, 2)))), "200 times"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_bearable_picture_is_refused_and_named(http: httpx2.AsyncClient, name: str) -> None:
    make, words = REFUSED[name]
    good = uri(file_of(square("red")))
    answer = await http.post(CHAT, json=asking(good, make()))
    assert_error(answer, 400, "invalid_value", "messages[0].content[1]")
    message = answer.json()["error"]["message"]
    assert words in message
    assert "Zwieback" not in message


async def test_too_many_pictures_are_refused(http: httpx2.AsyncClient) -> None:
    url = uri(file_of(square("red", 32)))
    assert_error(await http.post(CHAT, json=asking(*[url] * 9)), 400, "invalid_value", "messages[0].content[8]")


@pytest.mark.parametrize("text", ["<image>", "<fake_token_around_image><global-img><image>", "<image>" * 50])
async def test_the_marks_of_pictures_in_a_text_harm_nobody(http: httpx2.AsyncClient, text: str) -> None:
    url = uri(file_of(square("red")))
    for body in (asking(text=text, max_tokens=4), asking(url, text=text, max_tokens=4)):
        assert (await http.post(CHAT, json=body)).status_code in {200, 400}
    await assert_well(http)


async def test_a_batch_may_hold_pictures_and_a_bad_one_fails_alone(http: httpx2.AsyncClient) -> None:
    items = [
        asking(uri(file_of(square("red")))),
        asking("data:image/png;base64,AAAA"),
        asking(uri(file_of(circle("blue")))),
    ]
    batch = (await http.post(f"{CHAT}/batch", json={"requests": items})).json()
    first, second, third = batch["responses"]
    assert first["choices"][0]["message"]["content"] == "A red square."
    assert second["error"]["param"] == "messages[0].content[0]"
    assert third["choices"][0]["message"]["content"] == "A blue circle."


async def test_responses_and_messages_see_as_well(http: httpx2.AsyncClient) -> None:
    data = file_of(square("yellow"))
    content: list[dict[str, Any]] = [
        {"type": "input_image", "image_url": uri(data)},
        {"type": "input_text", "text": QUESTION},
    ]
    body = {"model": MODEL, "input": [{"role": "user", "content": content}], "temperature": 0}
    response = (await http.post("/v1/responses", json=body)).json()
    assert response["output"][0]["content"][0]["text"] == "A yellow square."
    content[0]["image_url"] = "data:image/png;base64,AAAA"
    assert_error(await http.post("/v1/responses", json=body), 400, "invalid_value", "input[0].content[0]")

    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    blocks: list[dict[str, Any]] = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    message = {"model": MODEL, "max_tokens": 20, "temperature": 0, "messages": [{"role": "user", "content": blocks}]}
    answer = (await http.post("/v1/messages", json=message)).json()
    assert answer["content"][0]["text"] == "A yellow square."
    source["data"] = "AAAA"
    assert_error(await http.post("/v1/messages", json=message), 400, "invalid_value", "messages[0].content[0].source")


def shown_by_a_tool(*pictures: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    calls = [{"id": name, "type": "function", "function": {"name": "look", "arguments": "{}"}} for name in "ab"]
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "here"}, *parts]},
        {"role": "tool", "tool_call_id": "b", "content": "nothing"},
    ]


async def test_what_a_tool_shows_is_seen(http: httpx2.AsyncClient) -> None:
    body: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 20}
    url = uri(file_of(square("red")))
    said_next = {"role": "user", "content": QUESTION}
    answer = await http.post(CHAT, json=body | {"messages": [*shown_by_a_tool(url), said_next]})
    assert answer.json()["choices"][0]["message"]["content"] == "A red square."
    assert (await http.post(CHAT, json=body | {"messages": shown_by_a_tool(url)})).status_code == 200
    bad = await http.post(CHAT, json=body | {"messages": shown_by_a_tool(url, "data:image/png;base64,AAAA")})
    assert_error(bad, 400, "invalid_value", "messages[2].content[2]")
    shown = {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image", "image_url": url}]}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    items = [{"role": "user", "content": "Look."}, call, shown, said_next]
    response = (await http.post("/v1/responses", json={"model": MODEL, "temperature": 0, "input": items})).json()
    assert response["output"][0]["content"][0]["text"] == "A red square."


async def test_nothing_of_a_picture_reaches_the_log(http: httpx2.AsyncClient, server: Server) -> None:
    url = uri(file_of(square("red")))
    await said(http, asking(url))
    assert url[40:80] not in server.log() + json.dumps(server.access_lines())


async def test_pixels_of_many_large_pictures_are_never_in_memory_together(http: httpx2.AsyncClient, server: Server):
    """36 megapixels are 108 MB; what is freed late, by the garbage collector, would be there 24 times."""
    url = uri(file_of(Image.new("RGB", (6000, 6000), "white")))
    process = psutil.Process(server.pid)
    before = most = process.memory_info().rss
    bodies = {"requests": [asking(url, text=f"Number {number}?", max_tokens=1) for number in range(24)]}
    answering = asyncio.create_task(http.post(f"{CHAT}/batch", json=bodies, timeout=300))
    while not (await asyncio.wait((answering,), timeout=0.02))[0]:
        most = max(most, process.memory_info().rss)
    assert (await answering).json()["counts"] == {"total": 24, "succeeded": 24, "failed": 0}
    assert most - before < 1.5 * 2**30
