"""The official openai package for Python."""

from __future__ import annotations

import json
from typing import Any, Literal

import checks
import openai
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from pydantic import BaseModel

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
QUESTION = [{"role": "user", "content": DEMO["question"]}]
TOOL_QUESTION = [{"role": "user", "content": DEMO["tool_question"]}]


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


def ask(messages: list[dict[str, Any]], *, of: openai.OpenAI = client, model: str = MODEL, **more: Any) -> Any:
    return of.chat.completions.create(model=model, messages=messages, temperature=0, **more)


def chat() -> None:
    answer = ask(QUESTION)
    checks.same(answer.choices[0].message.content, DEMO["answer"])
    checks.add_up(answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens)


def stream() -> None:
    *chunks, last = ask(QUESTION, stream=True, stream_options={"include_usage": True})
    checks.same("".join(chunk.choices[0].delta.content or "" for chunk in chunks), DEMO["answer"])
    checks.add_up(last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens)


def tools() -> None:
    message = ask(TOOL_QUESTION, tools=checks.TOOLS).choices[0].message
    (call,) = message.tool_calls
    checks.same((call.function.name, json.loads(call.function.arguments)), (DEMO["tool_name"], DEMO["tool_arguments"]))
    result = {"role": "tool", "tool_call_id": call.id, "content": DEMO["tool_result"]}
    final = ask([*TOOL_QUESTION, message, result], tools=checks.TOOLS)
    checks.same(final.choices[0].message.content, DEMO["tool_answer"])


def tools_streamed() -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=TOOL_QUESTION, tools=checks.TOOLS, temperature=0
    ) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    checks.same((call.function.name, json.loads(call.function.arguments)), (DEMO["tool_name"], DEMO["tool_arguments"]))


def structured() -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": DEMO["person_question"]}],
        response_format=Person,
        temperature=0,
        max_tokens=checks.MAX_TOKENS,
    )
    checks.is_person(answer.choices[0].message.parsed.model_dump())


def wrong_key() -> None:
    stranger = openai.OpenAI(base_url=BASE_URL, api_key=WRONG_KEY, max_retries=0)
    error = checks.raises(openai.AuthenticationError, DEMO["wrong_key_message"], lambda: ask(QUESTION, of=stranger))
    checks.same(error.code, "invalid_api_key")


def unknown_model() -> None:
    error = checks.raises(
        openai.NotFoundError, DEMO["unknown_model_message"], lambda: ask(QUESTION, model=UNKNOWN_MODEL)
    )
    checks.same((error.code, error.param), ("model_not_found", "model"))


checks.run(chat, stream, tools, tools_streamed, structured, wrong_key, unknown_model)
