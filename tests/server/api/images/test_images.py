"""Images over HTTP from the real server: what is asked for is what comes, as a link, as base64, or both."""

import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest
from chat_parts import CHAT, HELLO, MODEL, assert_error
from image_parts import GENERATE, IMAGE_MODEL, SMALL, generate, opened, path_of, picture, stored
from serving import Server
from shape_judge import judge

pytestmark = pytest.mark.engine

DAY_SECONDS = 24 * 3600
TOKENS = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
TOKENS |= {"input_tokens_details": {"text_tokens": 0, "image_tokens": 0}}


@pytest.fixture(scope="module")
async def stranger(server: Server) -> AsyncIterator[httpx2.AsyncClient]:
    """A browser: it has no key."""
    async with httpx2.AsyncClient(base_url=server.root_url, timeout=60) as opened_client:
        yield opened_client


@pytest.mark.parametrize(
    ("asked", "made"), [("auto", "standard"), ("low", "standard"), ("medium", "standard"), ("high", "hd")]
)
async def test_the_qualities_of_newer_models_mean_ours(http: httpx2.AsyncClient, asked: str, made: str):
    answer = await generate(http, quality=asked)
    assert answer["quality"] == made
    assert answer["usage"]["steps"] == (await generate(http, quality=made))["usage"]["steps"]


async def test_the_size_auto_is_the_default(http: httpx2.AsyncClient, client: openai.AsyncOpenAI):
    """Through the openai package, whose own defaults these two are."""
    answer = await client.images.generate(model=IMAGE_MODEL, prompt="a red square", size="auto", quality="auto")
    assert (answer.size, answer.quality) == ("1024x1024", "standard")
    assert picture(answer.data[0].model_dump()).size == (1024, 1024)


async def test_an_answer_has_a_link_and_the_image_itself(server: Server, http: httpx2.AsyncClient):
    before = int(time.time())
    answer = await generate(http)
    assert list(answer) == ["created", "data", "output_format", "quality", "size", "usage"]
    assert before <= answer["created"] <= time.time()
    assert (answer["output_format"], answer["quality"], answer["size"]) == ("png", "standard", "256x256")
    steps = answer["usage"].pop("steps")
    assert steps > 0
    assert answer["usage"] == {"images": 1, **TOKENS}
    (item,) = answer["data"]
    assert set(item) == {"url", "b64_json", "revised_prompt", "seed", "expires_at"}
    assert (item["revised_prompt"], item["seed"]) == (SMALL["prompt"], 7)
    assert before + DAY_SECONDS <= item["expires_at"] <= time.time() + DAY_SECONDS
    assert item["url"].startswith(f"{server.base_url}/images/files/")
    image = picture(item)
    assert (image.format, image.size, image.mode) == ("PNG", (256, 256), "RGB")


async def test_the_image_shows_what_the_prompt_says(http: httpx2.AsyncClient):
    for prompt, seen in (("a red circle", ("red", "circle")), ("a blue square", ("blue", "square"))):
        assert judge(picture((await generate(http, prompt=prompt))["data"][0])) == seen


async def test_a_link_opens_without_a_key_and_names_its_kind(http: httpx2.AsyncClient, stranger: httpx2.AsyncClient):
    for kind in ("png", "jpeg", "webp"):
        (item,) = (await generate(http, output_format=kind))["data"]
        path = path_of(item["url"])
        response = await stranger.get(path)
        assert response.status_code == 200
        assert opened(response.content).format == kind.upper()
        assert opened(response.content).tobytes() == picture(item).tobytes()
        assert response.headers["content-type"] == f"image/{kind}"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"].startswith("private, max-age=86")
        assert response.headers["content-disposition"] == "inline"
        assert response.headers["content-security-policy"] == "default-src 'none'"
        assert response.headers["x-request-id"]
        head = await stranger.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(response.content))
        assert head.headers["content-type"] == f"image/{kind}"


async def test_a_link_opens_whatever_key_comes_with_it(http: httpx2.AsyncClient, stranger: httpx2.AsyncClient):
    (item,) = (await generate(http, response_format="url"))["data"]
    assert (await http.get(path_of(item["url"]))).status_code == 200
    wrong = {"Authorization": "Bearer hk_wrong"}
    assert (await stranger.get(path_of(item["url"]), headers=wrong)).status_code == 200


async def test_a_link_that_was_changed_opens_nothing(http: httpx2.AsyncClient, stranger: httpx2.AsyncClient):
    (item,) = (await generate(http, response_format="url"))["data"]
    path, _, query = path_of(item["url"]).partition("?")
    expires, signature = query.removeprefix("expires=").split("&signature=")
    name = path.rpartition("/")[2]
    other = f"{path.rpartition('/')[0]}/{'0' * 32}.png"
    for changed in (
        path,
        f"{path}?expires={expires}",
        f"{path}?signature={signature}",
        f"{path}?expires={int(expires) + 1}&signature={signature}",
        f"{path}?expires={expires}&signature={signature[:-1]}",
        f"{path}?expires={expires}&signature={signature}&signature=x",
        f"{path}?expires={expires}&signature=%C3%A9",
        f"{path}?expires=%D9%A1&signature={signature}",
        f"{other}?{query}",
        f"{path}.part?{query}",
        f"{path}%00?{query}",
        f"{path.replace(name, '%2e%2e')}?{query}",
        f"{path.replace(name, 'hearth.db')}?{query}",
    ):
        for client in (stranger, http):
            assert_error(await client.get(changed), 404, "not_found")
    refused = await stranger.head(path)
    assert refused.status_code == 404


@pytest.mark.parametrize("trick", ["../hearth.db", "..%2f..%2fhearth.db", "x/y.png", "%2e%2e/%2e%2e/v1/models", ""])
async def test_what_only_looks_like_an_image_file_needs_a_key(stranger: httpx2.AsyncClient, trick: str):
    assert_error(await stranger.get(f"/v1/images/files/{trick}"), 401, "invalid_api_key")
    assert_error(await stranger.post("/v1/images/files/a.png"), 401, "invalid_api_key")


async def test_links_lead_to_where_the_client_has_called_us(http: httpx2.AsyncClient):
    response = await http.post(GENERATE, json=SMALL | {"response_format": "url"}, headers={"Host": "hearth.office"})
    assert response.json()["data"][0]["url"].startswith("http://hearth.office/v1/images/files/")


async def test_only_what_is_asked_for_comes_and_base64_is_not_stored(server: Server, http: httpx2.AsyncClient):
    before = stored(server)
    (item,) = (await generate(http, response_format="b64_json"))["data"]
    assert set(item) == {"b64_json", "revised_prompt", "seed"}
    assert stored(server) == before
    (item,) = (await generate(http, response_format="url"))["data"]
    assert set(item) == {"url", "revised_prompt", "seed", "expires_at"}
    (new,) = stored(server) - before
    assert item["url"].partition("?")[0].endswith(f"/{new}")


async def test_several_images_are_different_and_each_can_be_had_again(http: httpx2.AsyncClient):
    answer = await generate(http, n=4)
    assert [item["seed"] for item in answer["data"]] == [7, 8, 9, 10]
    assert answer["usage"]["images"] == 4
    assert answer["usage"]["steps"] % 4 == 0
    pixels = [picture(item).tobytes() for item in answer["data"]]
    assert len(set(pixels)) == 4
    (third,) = (await generate(http, seed=9))["data"]
    assert _difference(pixels[2], picture(third).tobytes()) < 2


def _difference(one: bytes, other: bytes) -> float:
    """Mean over all pixels and colours, out of 255."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


async def test_without_a_seed_each_image_is_another_and_says_how_to_get_it_again(http: httpx2.AsyncClient):
    first, second = [(await generate(http, seed=None))["data"][0] for _ in range(2)]
    assert first["seed"] != second["seed"]
    assert (await generate(http, seed=first["seed"]))["data"][0]["seed"] == first["seed"]


async def test_the_largest_seed_goes_on_with_nought(http: httpx2.AsyncClient):
    answer = await generate(http, seed=2**63 - 1, n=2)
    assert [item["seed"] for item in answer["data"]] == [2**63 - 1, 0]


@pytest.mark.parametrize("edge", [256, 512, 1024])
async def test_every_size_is_exactly_that(http: httpx2.AsyncClient, edge: int):
    answer = await generate(http, size=f"{edge}x{edge}")
    assert picture(answer["data"][0]).size == (edge, edge)
    assert answer["size"] == f"{edge}x{edge}"


async def test_what_is_left_out_or_null_has_its_default(http: httpx2.AsyncClient):
    nothing = dict.fromkeys(["n", "quality", "response_format", "output_format", "output_compression", "stream"])
    nothing |= dict.fromkeys(["partial_images", "negative_prompt", "size", "seed", "stream_options"])
    answer = (await http.post(GENERATE, json={"model": IMAGE_MODEL, "prompt": "a red circle", **nothing})).json()
    assert picture(answer["data"][0]).size == (1024, 1024)
    assert (answer["size"], answer["quality"], answer["output_format"]) == ("1024x1024", "standard", "png")
    assert len(answer["data"]) == 1


async def test_hd_takes_more_steps_and_compression_makes_files_smaller(http: httpx2.AsyncClient):
    standard, hd = [(await generate(http, quality=name))["usage"]["steps"] for name in ("standard", "hd")]
    assert hd > standard
    for kind in ("jpeg", "webp"):
        small, large = [
            len((await generate(http, output_format=kind, output_compression=quality))["data"][0]["b64_json"])
            for quality in (5, 100)
        ]
        assert small < large


async def test_fields_that_mean_nothing_here_are_ignored(http: httpx2.AsyncClient):
    fields = {"user": "me", "style": "vivid", "background": "auto", "moderation": "low", "metadata": {"a": 1}}
    assert len((await generate(http, **fields))["data"]) == 1


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": "x" * 1001}, "prompt"),
    ({"prompt": ["a red circle"]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"model": 7}, "model"),
    ({"n": 0}, "n"),
    ({"n": 5}, "n"),
    ({"n": True}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.0}, "n"),
    ({"size": "1024x512"}, "size"),
    ({"size": "1024x1536"}, "size"),
    ({"size": 256}, "size"),
    ({"quality": "ultra"}, "quality"),
    ({"response_format": "png"}, "response_format"),
    ({"seed": -1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"negative_prompt": "x" * 1001}, "negative_prompt"),
    ({"output_format": "gif"}, "output_format"),
    ({"output_compression": 101, "output_format": "jpeg"}, "output_compression"),
    ({"output_compression": -1, "output_format": "webp"}, "output_compression"),
    ({"output_compression": 50}, "output_compression"),
    ({"output_compression": 50, "output_format": "png"}, "output_compression"),
    ({"stream": "yes"}, "stream"),
    ({"partial_images": 4, "stream": True}, "partial_images"),
    ({"partial_images": -1, "stream": True}, "partial_images"),
    ({"partial_images": 1}, "partial_images"),
    ({"stream_options": {"include_progress": True}}, "stream_options"),
    ({"stream_options": {"include_progress": 1}, "stream": True}, "stream_options.include_progress"),
    ({"extra_args": {}}, "extra_args"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
async def test_a_wrong_field_is_refused_by_name(http: httpx2.AsyncClient, fields: dict[str, Any], param: str):
    assert_error(await http.post(GENERATE, json=SMALL | fields), 400, "invalid_value", param)


@pytest.mark.parametrize("param", ["model", "prompt"])
async def test_a_missing_field_is_named(http: httpx2.AsyncClient, param: str):
    fields = {name: value for name, value in SMALL.items() if name != param}
    assert_error(await http.post(GENERATE, json=fields), 400, "missing_field", param)


async def test_the_longest_prompt_is_a_thousand_characters_of_any_kind(http: httpx2.AsyncClient):
    """Whether the model has room for so many is its own to say: then it names the prompt."""
    response = await http.post(GENERATE, json=SMALL | {"prompt": "a red circle " + "\N{SPARKLES}" * 987})
    if response.status_code != 200:
        assert_error(response, 400, "invalid_value", "prompt")
        assert "tokens" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_model_cannot_do_is_refused_with_its_status(http: httpx2.AsyncClient, *, stream: bool):
    images = await http.post(GENERATE, json=SMALL | {"model": MODEL, "stream": stream})
    assert_error(images, 400, "unsupported_capability", "model")
    chat = await http.post(CHAT, json={"model": IMAGE_MODEL, "messages": HELLO, "stream": stream})
    assert_error(chat, 400, "unsupported_capability", "model")
    negative = await http.post(GENERATE, json=SMALL | {"negative_prompt": "blue", "stream": stream})
    assert_error(negative, 400, "invalid_value", "negative_prompt")
    nobody = await http.post(GENERATE, json=SMALL | {"model": "nobody", "stream": stream})
    assert_error(nobody, 404, "model_not_found", "model")
