"""The Messages convention with its own client library: the same promised answers, whole and streamed, tools, counts."""

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message
from chat_parts import HELLO, HELLO_ANSWER, MODEL, PROMPTS
from serving import CANARY, Key, Server

pytestmark = pytest.mark.engine

MESSAGES = "/v1/messages"
TOOL_PROMPT = PROMPTS["call-weather-paris"]
TOOLS = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOL_PROMPT.tools or ()
]
PARIS = {"role": "user", "content": "What is the weather in Paris?"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}


@pytest.fixture(scope="module")
async def claude(server: Server, admin_key: Key) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=server.root_url, api_key=admin_key.text, max_retries=0, timeout=60
    ) as opened:
        yield opened


def request(messages: Any = HELLO, *, temperature: float | None = 0, **fields: Any) -> dict[str, Any]:
    """Arguments for the client. It has no `temperature` of its own any more, the wire has."""
    extra = {name: fields.pop(name) for name in ("top_k", "top_p", "output_format") if name in fields}
    extra_body = {"temperature": temperature, **extra}
    return {"model": MODEL, "max_tokens": 200, "messages": messages, "extra_body": extra_body, **fields}


async def create(claude: anthropic.AsyncAnthropic, *args: Any, **fields: Any) -> Message:
    return await claude.messages.create(**request(*args, **fields))


async def streamed(claude: anthropic.AsyncAnthropic, *args: Any, **fields: Any) -> Message:
    async with claude.messages.stream(**request(*args, **fields)) as stream:
        return await stream.get_final_message()


def said(message: Message) -> list[Any]:
    """The content without ids, which are new in every answer."""
    return [(block.name, block.input) if block.type == "tool_use" else block.text for block in message.content]


async def test_a_message_has_the_shape_of_the_convention(claude: anthropic.AsyncAnthropic):
    message = await create(claude)
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert message.id.startswith("msg_")
    assert said(message) == [HELLO_ANSWER]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    again = (await create(claude)).usage
    assert again.output_tokens == message.usage.output_tokens > 0
    total = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert again.input_tokens + (again.cache_read_input_tokens or 0) == total > 0


@pytest.mark.parametrize("name", ["hello", "months", "agenda", "translate-amharic", "table", "remember-name-bob"])
async def test_streamed_and_plain_messages_are_the_promised_answer(claude: anthropic.AsyncAnthropic, name: str):
    prompt = PROMPTS[name]
    for answer in (await create(claude, prompt.messages), await streamed(claude, prompt.messages)):
        assert said(answer) == [prompt.answer]
        assert answer.stop_reason == "end_turn"


@pytest.mark.parametrize(
    "system",
    ["You are a pirate.", [{"type": "text", "text": "You are a pirate.", "cache_control": {"type": "ephemeral"}}]],
)
async def test_the_system_prompt_counts_as_string_and_as_blocks(claude: anthropic.AsyncAnthropic, system: Any):
    message = await create(claude, [{"role": "user", "content": "Hello!"}], system=system)
    assert said(message) == [PROMPTS["pirate"].answer]


async def test_instructions_amid_the_conversation_join_the_system_prompt(claude: anthropic.AsyncAnthropic):
    billing = {"type": "text", "text": "x-anthropic-billing-header: cch=1234;"}
    messages = [{"role": "user", "content": "Hello!"}, {"role": "system", "content": "You are a pirate."}]
    assert said(await create(claude, messages, system=[billing])) == [PROMPTS["pirate"].answer]


async def test_messages_of_one_role_in_a_row_are_one_turn(claude: anthropic.AsyncAnthropic):
    one = await claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "Say\nhello."}])
    blocks = [{"type": "text", "text": "Say"}, {"type": "text", "text": ""}]
    parts = [{"role": "user", "content": blocks}, {"role": "user", "content": "hello."}]
    assert await claude.messages.count_tokens(model=MODEL, messages=parts) == one


@pytest.mark.parametrize("name", ["call-weather-paris", "call-room-4-monday", "call-two-cities-paris-tokyo"])
async def test_tools_are_called_alike_streamed_and_plain(claude: anthropic.AsyncAnthropic, name: str):
    prompt = PROMPTS[name]
    for answer in (
        await create(claude, prompt.messages, tools=TOOLS),
        await streamed(claude, prompt.messages, tools=TOOLS),
    ):
        assert said(answer) == prompt.tool_calls
        assert answer.stop_reason == "tool_use"
        assert len({block.id for block in answer.content}) == len(answer.content)


async def test_a_tool_result_is_used_and_the_conversation_goes_on(claude: anthropic.AsyncAnthropic):
    prompt = PROMPTS["use-weather-paris-18-sunny"]
    called = await create(claude, [PARIS], tools=TOOLS)
    (block,) = called.content
    result = '{"degrees": 18, "sky": "sunny"}'
    thoughts = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    for content in (result, [{"type": "text", "text": result}]):
        answer = {"type": "tool_result", "tool_use_id": block.id, "content": content}
        messages = [
            PARIS,
            {"role": "assistant", "content": [thoughts, *(part.model_dump() for part in called.content)]},
            {"role": "user", "content": [answer]},
        ]
        assert said(await create(claude, messages, tools=TOOLS)) == [prompt.answer]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any"}, None),
        ({"type": "tool", "name": "find_room"}, {"find_room"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"get_weather"}),
    ],
    ids=str,
)
async def test_the_choice_of_tools_is_kept_to(claude: anthropic.AsyncAnthropic, choice: Any, names: set[str] | None):
    messages = PROMPTS["call-two-cities-paris-tokyo"].messages
    plain = await create(claude, messages, tools=TOOLS, tool_choice=choice)
    assert said(await streamed(claude, messages, tools=TOOLS, tool_choice=choice)) == said(plain)
    called = [block.name for block in plain.content if block.type == "tool_use"]
    assert called
    assert names is None or set(called) == names
    assert plain.stop_reason == "tool_use"
    assert len(called) == 1 or "disable_parallel_tool_use" not in choice


async def test_no_tool_is_called_when_none_may_be(claude: anthropic.AsyncAnthropic):
    message = await create(claude, [PARIS], tools=TOOLS, tool_choice={"type": "none"})
    assert said(message) == [PROMPTS["weather-without-tool"].answer]


@pytest.mark.parametrize("limit", range(1, 30, 4))
async def test_a_cut_off_call_says_so_and_holds_what_came(claude: anthropic.AsyncAnthropic, limit: int):
    fields = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "find_room"}, "max_tokens": limit}
    plain, stream = await create(claude, [PARIS], **fields), await streamed(claude, [PARIS], **fields)
    assert plain.stop_reason == stream.stop_reason
    assert said(plain) == said(stream)
    assert plain.usage.output_tokens == stream.usage.output_tokens <= limit


async def test_a_stop_sequence_is_named(claude: anthropic.AsyncAnthropic):
    prompt = PROMPTS["one-to-ten"]
    for tools in ([], TOOLS):
        fields = {"stop_sequences": ["ten!", "four, five"], "tools": tools}
        for message in (
            await create(claude, prompt.messages, **fields),
            await streamed(claude, prompt.messages, **fields),
        ):
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "four, five")
            assert all("four, five" not in text for text in said(message))
    message = await create(claude, prompt.messages, stop_sequences=["ten!"])
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


async def test_the_limit_is_a_reason_to_stop(claude: anthropic.AsyncAnthropic):
    for message in (await create(claude, max_tokens=2), await streamed(claude, max_tokens=2)):
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


async def test_an_answer_goes_on_from_what_it_begins_with(claude: anthropic.AsyncAnthropic):
    begun = [{"role": "user", "content": "What is the capital of France?"}]
    begun.append({"role": "assistant", "content": "The capital of France"})
    for message in (await create(claude, begun), await streamed(claude, begun)):
        assert said(message) == [" is Paris."]


async def test_top_k_leaves_only_the_likeliest_tokens(claude: anthropic.AsyncAnthropic):
    assert said(await create(claude, temperature=1, top_k=1)) == [HELLO_ANSWER]


@pytest.mark.parametrize("place", ["output_config", "output_format"])
async def test_an_answer_keeps_to_a_json_schema(claude: anthropic.AsyncAnthropic, place: str):
    schema = {"type": "object", "properties": {"name": {"enum": ["Eve"]}}, "required": ["name"]}
    form = {"type": "json_schema", "schema": schema | {"additionalProperties": False}}
    fields = {place: form if place == "output_format" else {"format": form}}
    message = await create(claude, PROMPTS["json-person"].messages, **fields)
    assert json.loads(said(message)[0]) == {"name": "Eve"}


async def test_tokens_are_counted_as_the_answer_will_count_them(claude: anthropic.AsyncAnthropic):
    for fields in ({}, {"system": "You are a pirate."}, {"tools": TOOLS}):
        counted = await claude.messages.count_tokens(model=MODEL, messages=[PARIS], **fields)
        usage = (await create(claude, [PARIS], max_tokens=1, **fields)).usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0
    only_a_call = [{"role": "assistant", "content": [CALL]}]
    assert (await claude.messages.count_tokens(model=MODEL, messages=only_a_call)).input_tokens > 0


async def test_the_events_come_in_the_order_of_the_convention(http: httpx2.AsyncClient):
    body = {"model": MODEL, "max_tokens": 100, "temperature": 0, "stream": True, "messages": [PARIS], "tools": TOOLS}
    response = await http.post(f"{MESSAGES}?beta=true", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = []
    for text in response.text.removesuffix("\n\n").split("\n\n"):
        first, second = text.split("\n")
        events.append(json.loads(second.removeprefix("data: ")))
        assert first == f"event: {events[-1]['type']}"
    kinds = [event["type"] for event in events]
    start, deltas, stop = "content_block_start", "content_block_delta", "content_block_stop"
    assert kinds[:2] == ["message_start", start]
    assert kinds[-3:] == [stop, "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {deltas}
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    assert events[0]["message"]["usage"]["input_tokens"] + events[0]["message"]["usage"]["cache_read_input_tokens"] > 0
    assert events[1]["content_block"]["input"] == {}
    pieces = "".join(event["delta"]["partial_json"] for event in events[2:-3])
    assert json.loads(pieces) == {"city": "Paris"}
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


async def test_a_key_may_come_as_x_api_key_and_a_bearer_wins(server: Server, admin_key: Key):
    wrong = "hk_" + "a" * 12 + "_" + "b" * 49
    bearer = {"Authorization": f"Bearer {admin_key.text}"}
    cases = [
        ({"x-api-key": admin_key.text}, 200),
        ({"x-api-key": admin_key.text, "Authorization": "Basic dXNlcjpwYXNz"}, 200),
        (bearer | {"x-api-key": wrong}, 200),
        ({"x-api-key": admin_key.text, "Authorization": f"Bearer {wrong}"}, 401),
        ({"x-api-key": wrong}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ]
    body = {"model": MODEL, "max_tokens": 1, "messages": HELLO}
    async with httpx2.AsyncClient(base_url=server.root_url, timeout=60) as anonymous:
        for headers, status in cases:
            response = await anonymous.post(MESSAGES, json=body, headers=headers)
            assert response.status_code == status, headers
            assert (await anonymous.get("/v1/models", headers=headers)).status_code == status


async def test_errors_are_the_clients_own_with_our_message(claude: anthropic.AsyncAnthropic, server: Server):
    with pytest.raises(anthropic.NotFoundError, match="There is no such model") as found:
        await claude.messages.create(**request() | {"model": "no-such"})
    assert found.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await streamed(claude, [{"role": "user", "content": "word " * 40_000}])
    messages = [{"role": "user", "content": f"{CANARY} " * 20_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await claude.messages.count_tokens(model=MODEL, messages=messages)
    with pytest.raises(anthropic.AuthenticationError, match="Incorrect API key"):
        await claude.with_options(api_key="hk_wrong").messages.create(**request())
    models_only = server.make_key("models only, messages", scopes=["models"])
    with pytest.raises(anthropic.PermissionDeniedError, match="scope `chat`"):
        await claude.with_options(api_key=models_only.text).messages.create(**request())
