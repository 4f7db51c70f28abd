"""OpenAI's Agents SDK, with both of its models: chat and responses."""

from __future__ import annotations

from typing import Any, Literal

import checks
import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from pydantic import BaseModel

set_tracing_disabled(disabled=True)  # else it sends what it did to OpenAI
TOOLS = [function_tool(tool) for tool in (checks.get_weather, checks.find_room, checks.get_phone_number)]
CHAT, RESPONSES = OpenAIChatCompletionsModel, OpenAIResponsesModel


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


def agent(kind: Any, *, model: str = MODEL, api_key: str = API_KEY, **more: Any) -> Agent[None]:
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=api_key, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=checks.MAX_TOKENS)
    return Agent(name="Hearth", model=kind(model, client), model_settings=settings, **more)


async def answered(one: Agent[None], question: Any) -> Any:
    return (await Runner.run(one, question)).final_output


async def streamed(one: Agent[None], question: str) -> Any:
    run = Runner.run_streamed(one, question)
    checks.true(len([event async for event in run.stream_events() if event.type == "raw_response_event"]) > 3)
    return run.final_output


async def chat() -> None:
    for kind in (CHAT, RESPONSES):
        checks.same(await answered(agent(kind), DEMO["question"]), DEMO["answer"])


async def stream() -> None:
    for kind in (CHAT, RESPONSES):
        checks.same(await streamed(agent(kind), DEMO["question"]), DEMO["answer"])


def a_city_was_asked_for() -> None:
    """Not always Paris: it adds to the tools' schemas what the demo model has not seen when it learned."""
    (arguments,) = checks.called
    checks.true(isinstance(arguments["city"], str), arguments)
    checks.called.clear()


async def tools() -> None:
    for kind in (CHAT, RESPONSES):
        checks.same(await answered(agent(kind, tools=TOOLS), DEMO["tool_question"]), DEMO["tool_answer"])
        a_city_was_asked_for()


async def tools_streamed() -> None:
    for kind in (CHAT, RESPONSES):
        checks.same(await streamed(agent(kind, tools=TOOLS), DEMO["tool_question"]), DEMO["tool_answer"])
        a_city_was_asked_for()


async def pictures() -> None:
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{DEMO['picture']}", "detail": "auto"}
    content = [image, {"type": "input_text", "text": DEMO["picture_question"]}]
    for kind in (CHAT, RESPONSES):
        seen = await answered(agent(kind, model=checks.SEEING), [{"role": "user", "content": content}])
        checks.same(seen, DEMO["picture_answer"])


async def structured() -> None:
    for kind in (CHAT, RESPONSES):
        person = await answered(agent(kind, output_type=Person), DEMO["person_question"])
        checks.is_person(person.model_dump())


def refused(kind: type[Exception], message: str, **more: Any) -> None:
    for model in (CHAT, RESPONSES):
        checks.raises(kind, message, lambda model=model: Runner.run_sync(agent(model, **more), "Hello!"))


def wrong_key() -> None:
    refused(openai.AuthenticationError, DEMO["wrong_key_message"], api_key=WRONG_KEY)


def unknown_model() -> None:
    refused(openai.NotFoundError, DEMO["unknown_model_message"], model=UNKNOWN_MODEL)


checks.run(chat, stream, tools, tools_streamed, pictures, structured, wrong_key, unknown_model)
