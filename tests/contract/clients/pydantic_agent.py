"""pydantic-ai's Agent with its OpenAI chat model."""

from __future__ import annotations

from typing import Any, Literal

import checks
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from pydantic import BaseModel
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

TOOLS = [checks.get_weather, checks.find_room, checks.get_phone_number]


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


def agent(*, model: str = MODEL, api_key: str = API_KEY, **more: Any) -> Agent[None, Any]:
    chosen = OpenAIChatModel(model, provider=OpenAIProvider(base_url=BASE_URL, api_key=api_key))
    return Agent(chosen, model_settings={"temperature": 0, "max_tokens": checks.MAX_TOKENS}, **more)


def count(used: Any) -> None:
    checks.add_up(used.input_tokens, used.output_tokens, used.total_tokens)


def chat() -> None:
    result = agent().run_sync(DEMO["question"])
    checks.same(result.output, DEMO["answer"])
    count(result.usage)


async def stream() -> None:
    async with agent().run_stream(DEMO["question"]) as result:
        pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
    checks.same("".join(pieces), DEMO["answer"])
    checks.true(len(pieces) > 1, "it came in one piece")
    count(result.usage)


def a_city_was_asked_for() -> None:
    """Not always Paris: pydantic-ai adds to the tools' schemas what the demo model has not seen when it learned."""
    (arguments,) = checks.called
    checks.true(isinstance(arguments["city"], str), arguments)


def tools() -> None:
    checks.same(agent(tools=TOOLS).run_sync(DEMO["tool_question"]).output, DEMO["tool_answer"])
    a_city_was_asked_for()


async def tools_streamed() -> None:
    async with agent(tools=TOOLS).run_stream(DEMO["tool_question"]) as result:
        checks.same(await result.get_output(), DEMO["tool_answer"])
    a_city_was_asked_for()


def structured() -> None:
    for kind in (NativeOutput(Person), Person):  # response_format, then a required tool
        checks.is_person(agent(output_type=kind).run_sync(DEMO["person_question"]).output.model_dump())


def wrong_key() -> None:
    stranger = agent(api_key=WRONG_KEY)
    error = checks.raises(ModelHTTPError, DEMO["wrong_key_message"], lambda: stranger.run_sync("Hello!"))
    checks.same(error.status_code, 401)


def unknown_model() -> None:
    nobody = agent(model=UNKNOWN_MODEL)
    error = checks.raises(ModelHTTPError, DEMO["unknown_model_message"], lambda: nobody.run_sync("Hello!"))
    checks.same(error.status_code, 404)


checks.run(chat, stream, tools, tools_streamed, structured, wrong_key, unknown_model)
