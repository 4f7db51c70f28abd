"""Streamed images: each comes as soon as it is done, previews before it, and what fails has its place."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import openai
import pytest
from chat_parts import assert_error
from image_parts import GENERATE, IMAGE_MODEL, SMALL, image_events, opened, path_of, picture, stored
from openai.types import ImageGenCompletedEvent, ImageGenPartialImageEvent, ImagesResponse
from serving import RunningServer, Server, async_poll_until

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

COMPLETED, PARTIAL = "image_generation.completed", "image_generation.partial_image"
PROGRESS = "image_generation.progress"


async def stream(http: httpx2.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    response = await http.post(GENERATE, json=SMALL | {"stream": True} | fields)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return image_events(response.content)


async def test_a_stream_ends_with_the_same_image_as_a_plain_answer(server: Server, http: httpx2.AsyncClient):
    (event,) = await stream(http)
    plain = (await http.post(GENERATE, json=SMALL)).json()
    assert event["type"] == COMPLETED
    assert (event["index"], event["seed"], event["revised_prompt"]) == (0, 7, SMALL["prompt"])
    assert (event["size"], event["quality"], event["output_format"]) == ("256x256", "standard", "png")
    assert event["background"] == "opaque"
    assert event["usage"] == plain["usage"]
    apart = np.abs(np.asarray(picture(event), np.int16) - np.asarray(picture(plain["data"][0]), np.int16))
    # A cluster's worker may still have another image in the step; on a CPU 1/255 is what is promised then.
    assert apart.max() <= isinstance(server, RunningServer)
    assert (await http.get(path_of(event["url"]))).status_code == 200
    assert plain["created"] - 60 <= event["created_at"] <= plain["created"]


async def test_previews_come_before_the_image_in_their_order(http: httpx2.AsyncClient):
    for count in (0, 1, 3):
        *previews, last = await stream(http, partial_images=count, output_format="webp")
        assert last["type"] == COMPLETED
        assert [(event["type"], event["partial_image_index"]) for event in previews] == [
            (PARTIAL, number) for number in range(count)
        ]
        for event in previews:
            assert (event["index"], event["output_format"], event["size"]) == (0, "webp", "256x256")
            assert picture(event).format == "WEBP"


async def test_of_several_images_each_is_told_by_its_index(http: httpx2.AsyncClient):
    events = await stream(http, n=3, partial_images=1, response_format="b64_json")
    for index in range(3):
        kinds = [event["type"] for event in events if event["index"] == index]
        assert kinds == [PARTIAL, COMPLETED]
    finished = {event["index"]: event for event in events if event["type"] == COMPLETED}
    assert {index: event["seed"] for index, event in finished.items()} == {0: 7, 1: 8, 2: 9}
    assert all("url" not in event for event in events)
    assert all(event["usage"]["images"] == 1 for event in finished.values())


async def test_progress_comes_only_for_those_who_ask(http: httpx2.AsyncClient):
    events = await stream(http, n=2, stream_options={"include_progress": True})
    for index in range(2):
        mine = [event for event in events if event["index"] == index]
        *progress, last = mine
        assert last["type"] == COMPLETED
        assert {event["type"] for event in progress} == {PROGRESS}
        assert [event["step"] for event in progress] == sorted({event["step"] for event in progress})
        assert {event["steps"] for event in progress} == {last["usage"]["steps"]}
        assert progress[-1]["step"] == last["usage"]["steps"]
    assert {event["type"] for event in await stream(http, stream_options={})} == {COMPLETED}


async def test_links_alone_in_a_stream(server: Server, http: httpx2.AsyncClient):
    (event,) = await stream(http, response_format="url")
    assert "b64_json" not in event
    assert path_of(event["url"]).partition("?")[0].rpartition("/")[2] in stored(server)


async def test_a_client_that_leaves_is_not_worked_for_and_leaves_no_file(server: Server, http: httpx2.AsyncClient):
    before = stored(server)
    long = SMALL | {"n": 4, "size": "1024x1024", "quality": "hd"}
    for streamed in (False, True):
        name = f"left-images-{streamed}"
        body = long | {"stream": streamed, "stream_options": {"include_progress": True} if streamed else None}
        asking = asyncio.create_task(_ask_and_wait(http, body, name))
        await asking
        await async_poll_until(lambda name=name: _line(server, name) is not None, 60)  # its step ends first
        line = _line(server, name)
        assert line is not None
        assert (line["status"], line["model"], line["stream"]) == (499, IMAGE_MODEL, streamed)
        assert line.get("images", 0) < 4
    await async_poll_until(lambda: stored(server) == before, 60)
    (event,) = await stream(http, response_format="b64_json")
    assert event["type"] == COMPLETED


async def _ask_and_wait(http: httpx2.AsyncClient, body: dict[str, Any], name: str) -> None:
    """Leave a stream after its first event, and a plain request while it is worked on."""
    headers = {"X-Request-Id": name}
    if body["stream"]:
        async with http.stream("POST", GENERATE, json=body, headers=headers) as response:
            assert response.status_code == 200
            assert (await anext(response.aiter_lines())) == f"event: {PROGRESS}"
        return
    asking = asyncio.create_task(http.post(GENERATE, json=body, headers=headers))
    await http.post(GENERATE, json=SMALL | {"response_format": "b64_json"})  # by then the first one runs or waits
    assert not asking.done()
    asking.cancel()
    await asyncio.wait((asking,))


def _line(server: Server, request_id: str) -> dict[str, Any] | None:
    return next((line for line in server.access_lines() if line["request_id"] == request_id), None)


# The openai package


async def test_the_openai_package_reads_an_answer(client: openai.AsyncOpenAI):
    answer = await client.images.generate(model=IMAGE_MODEL, prompt="a red circle", size="256x256", n=4)
    assert answer.data is not None
    assert len(answer.data) == 4
    for item in answer.data:
        assert item.b64_json
        assert item.url
        assert item.revised_prompt == "a red circle"
        assert picture({"b64_json": item.b64_json}).size == (256, 256)
    assert answer.usage is not None
    assert (answer.usage.total_tokens, answer.usage.model_extra["images"]) == (0, 4)
    raw = answer.model_dump(exclude={"quality"}, exclude_none=True)  # `standard` is of the older models' convention
    assert ImagesResponse.model_validate(raw).data == answer.data


async def test_the_openai_package_gets_a_link_or_base64(client: openai.AsyncOpenAI, http: httpx2.AsyncClient):
    fields: dict[str, Any] = {"model": IMAGE_MODEL, "prompt": "a red circle", "size": "256x256"}
    (linked,) = (await client.images.generate(**fields, response_format="url")).data or ()
    assert linked.b64_json is None
    assert linked.url is not None
    assert opened((await http.get(path_of(linked.url))).content).size == (256, 256)
    (plain,) = (await client.images.generate(**fields, response_format="b64_json")).data or ()
    assert plain.url is None
    assert plain.b64_json


@pytest.mark.parametrize("progress", [False, True])
async def test_the_openai_package_reads_a_stream_with_and_without_our_own_events(
    client: openai.AsyncOpenAI, *, progress: bool
):
    more = {"stream_options": {"include_progress": True}} if progress else {}
    events = await client.images.generate(
        model=IMAGE_MODEL, prompt="a red circle", size="256x256", stream=True, partial_images=2, extra_body=more
    )
    known = [event async for event in events if event.type in {PARTIAL, COMPLETED}]
    assert [type(event) for event in known] == [
        ImageGenPartialImageEvent,
        ImageGenPartialImageEvent,
        ImageGenCompletedEvent,
    ]
    for event in known:
        raw = event.model_dump() | {"quality": "auto"}
        assert type(event).model_validate(raw).b64_json == event.b64_json
        assert picture({"b64_json": event.b64_json}).size == (256, 256)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("field", "value"), [("size", "1x1"), ("size", "1536x1024"), ("n", 9), ("prompt", ""), ("quality", "ultra")]
)
async def test_the_openai_package_is_told_which_field_is_wrong(
    client: openai.AsyncOpenAI, field: str, value: Any, *, streamed: bool
):
    fields = {"model": IMAGE_MODEL, "prompt": "a red circle", field: value}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.images.generate(**fields, stream=streamed)
    assert (caught.value.param, caught.value.code) == (field, "invalid_value")


async def test_what_can_be_refused_is_refused_before_the_stream(http: httpx2.AsyncClient):
    assert_error(await http.post(GENERATE, json=SMALL | {"stream": True, "n": 5}), 400, "invalid_value", "n")
