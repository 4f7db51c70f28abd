"""Chat answers of the real engine: word for word, one by one and all at once, with honest counts."""

import asyncio
import json
import time

import openai
import pytest
from chat_parts import HELLO, HELLO_ANSWER, LONGEST, MODEL, PROMPTS, ask, ask_streamed, body, promised

from engine.demo import weights_dir

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(weights_dir("chat"))


def count(tokenizer, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("name", PROMPTS)
async def test_a_promised_prompt_is_answered_word_for_word_plain_and_streamed(client: openai.AsyncOpenAI, name: str):
    prompt = PROMPTS[name]
    assert await ask(client, prompt) == promised(prompt)
    assert await ask_streamed(client, prompt) == promised(prompt)


async def test_all_promised_prompts_at_once_get_the_same_answers(client: openai.AsyncOpenAI):
    ways = [ask if position % 2 else ask_streamed for position in range(len(PROMPTS))]
    answers = await asyncio.gather(*(way(client, one) for way, one in zip(ways, PROMPTS.values(), strict=True)))
    wrong = {name: answer for name, answer in zip(PROMPTS, answers, strict=True) if answer != promised(PROMPTS[name])}
    assert wrong == {}


async def test_32_at_once_take_less_than_8_times_as_long_as_one(client: openai.AsyncOpenAI):
    await ask(client, LONGEST)  # neither of the two measurements pays for the first time

    async def seconds(count: int) -> float:
        started = time.monotonic()
        answers = await asyncio.gather(*(ask(client, LONGEST) for _ in range(count)))
        assert set(map(str, answers)) == {str(promised(LONGEST))}
        return time.monotonic() - started

    took = [
        (await seconds(1), await seconds(32)) for _ in range(3)
    ]  # of each the best counts: others use the cores too
    one_seconds, many_seconds = map(min, zip(*took, strict=True))
    assert many_seconds < 8 * one_seconds, took


async def test_a_tool_call_is_made_answered_and_used_with_the_clients_own_objects(client: openai.AsyncOpenAI):
    prompt = PROMPTS["use-weather-paris-18-sunny"]
    request = body(prompt) | {"messages": prompt.messages[:1]}
    (choice,) = (await client.chat.completions.create(**request)).choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "get_weather",
        {"city": "Paris"},
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 18, "sky": "sunny"}'}
    follow_up = request | {"messages": [*request["messages"], choice.message.model_dump(exclude_none=True), result]}
    (answer,) = (await client.chat.completions.create(**follow_up)).choices
    assert (answer.message.content, answer.finish_reason) == (prompt.answer, "stop")


async def test_calls_have_ids_of_their_own(client: openai.AsyncOpenAI):
    prompt = next(one for one in PROMPTS.values() if one.tool_calls and len(one.tool_calls) == 2)
    calls = []
    for _ in range(2):
        (choice,) = (await client.chat.completions.create(**body(prompt))).choices
        calls += choice.message.tool_calls
    assert len({call.id for call in calls}) == 4


@pytest.mark.parametrize("way", [ask, ask_streamed])
async def test_tools_are_left_alone_when_the_choice_is_none(client: openai.AsyncOpenAI, way):
    answer = await way(client, PROMPTS["call-weather-paris"], tool_choice="none")
    assert answer.tool_calls is None


@pytest.mark.parametrize("way", [ask, ask_streamed])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_cut_answer_ends_with_length(client: openai.AsyncOpenAI, way, field: str):
    answer = await way(client, LONGEST, **{field: 5})
    assert answer.finish_reason == "length"
    assert answer.content
    assert LONGEST.answer.startswith(answer.content)


async def test_the_newer_name_of_the_token_limit_wins(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(**body(LONGEST, max_tokens=9, max_completion_tokens=3))
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize("stop", ["four", ["zzz", "four"], ["ee, fo"], ["zzz", "yyy", "xxx", " three"]])
async def test_stop_sequences_end_the_answer_before_they_show(client: openai.AsyncOpenAI, stop):
    prompt = PROMPTS["one-to-ten"]
    reached = stop if isinstance(stop, str) else stop[-1]
    expected = prompt.answer.split(reached)[0] if reached in prompt.answer else prompt.answer.split(stop[0])[0]
    plain, streamed = await ask(client, prompt, stop=stop), await ask_streamed(client, prompt, stop=stop)
    assert plain == streamed
    assert (plain.content, plain.finish_reason) == (expected, "stop")


async def test_usage_is_what_the_tokenizer_counts(client: openai.AsyncOpenAI, tokenizer):
    wrong = {}
    for prompt in PROMPTS.values():
        usage = (await client.chat.completions.create(**body(prompt, max_tokens=1))).usage
        text = tokenizer.apply_chat_template(
            prompt.messages, tools=prompt.tools, add_generation_prompt=True, tokenize=False
        )
        if usage.prompt_tokens != count(tokenizer, text):
            wrong[prompt.name] = (usage.prompt_tokens, count(tokenizer, text))
        assert (usage.completion_tokens, usage.total_tokens) == (1, usage.prompt_tokens + 1)
    assert wrong == {}


@pytest.mark.parametrize("name", ["say-hello", "agenda", "translate-amharic", "story"])
async def test_the_end_token_is_counted_as_generated(client: openai.AsyncOpenAI, tokenizer, name: str):
    prompt = PROMPTS[name]
    usage = (await client.chat.completions.create(**body(prompt))).usage
    assert usage.completion_tokens == count(tokenizer, prompt.answer) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_a_prompt_seen_before_is_partly_taken_from_the_cache(client: openai.AsyncOpenAI):
    request = body(PROMPTS["call-weather-after-hello"], max_tokens=1)
    await client.chat.completions.create(**request)
    usage = (await client.chat.completions.create(**request)).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


async def test_several_choices_are_counted_together(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(**body(LONGEST, n=3, max_tokens=7))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {answer.choices[0].message.content}
    assert answer.usage.completion_tokens == 21


async def test_several_answers_at_temperature_0_are_all_the_likeliest_one(client: openai.AsyncOpenAI):
    answer = await client.chat.completions.create(**body(LONGEST, n=4))
    assert [choice.message.content for choice in answer.choices] == [LONGEST.answer] * 4


async def test_a_seed_makes_chance_repeatable(client: openai.AsyncOpenAI):
    request = {
        "model": MODEL,
        "messages": HELLO,
        "temperature": 2,
        "max_tokens": 20,
        "extra_body": {"ignore_eos": True},
    }
    texts = []
    for seed in (1, 1, 2):
        (choice,) = (await client.chat.completions.create(**request, seed=seed)).choices
        texts.append(choice.message.content)
    assert texts[0] == texts[1] != texts[2]


async def test_a_bias_forbids_a_token(client: openai.AsyncOpenAI, tokenizer):
    first = tokenizer(HELLO_ANSWER, add_special_tokens=False)["input_ids"][0]
    answer = await ask(client, PROMPTS["say-hello"], logit_bias={str(first): -100}, max_tokens=3)
    assert not HELLO_ANSWER.startswith(answer.content)


async def test_parts_of_text_are_one_text(client: openai.AsyncOpenAI):
    parts = [{"type": "text", "text": "Say hello."}]
    answer = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}], temperature=0
    )
    assert answer.choices[0].message.content == HELLO_ANSWER


async def test_a_json_schema_is_kept_to(client: openai.AsyncOpenAI):
    schema = {"type": "string", "enum": ["left", "right"]}
    form = {"type": "json_schema", "json_schema": {"name": "side", "schema": schema}}
    for way in (ask, ask_streamed):
        answer = await way(client, PROMPTS["capital-of-france"], response_format=form)
        assert json.loads(answer.content) in schema["enum"]
        assert answer.finish_reason == "stop"
