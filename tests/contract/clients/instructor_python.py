"""instructor on top of the openai package: every answer is an object, by a forced tool call or by a JSON schema."""

from __future__ import annotations

from typing import Any, Literal

import checks
import instructor
import openai
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


def client(mode: instructor.Mode, api_key: str = API_KEY) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=api_key, max_retries=0), mode=mode)


def settings(model: str = MODEL) -> dict[str, Any]:
    messages = [{"role": "user", "content": DEMO["person_question"]}]
    return {
        "model": model,
        "messages": messages,
        "temperature": 0,
        "max_tokens": checks.MAX_TOKENS,
        "max_retries": 0,
        "response_model": Person,
    }


def with_usage(mode: instructor.Mode) -> None:
    person, answer = client(mode).create_with_completion(**settings())
    checks.is_person(person.model_dump())
    used = answer.usage
    checks.add_up(used.prompt_tokens, used.completion_tokens, used.total_tokens)


def tools() -> None:
    with_usage(instructor.Mode.TOOLS)


def structured() -> None:
    with_usage(instructor.Mode.JSON_SCHEMA)


def json_object() -> None:
    """Its oldest mode: the schema stands in the prompt, and the server only keeps to JSON."""
    with_usage(instructor.Mode.JSON)


def streamed(mode: instructor.Mode) -> None:
    *_, last = client(mode).create_partial(**settings())
    checks.is_person(last.model_dump())


def tools_streamed() -> None:
    streamed(instructor.Mode.TOOLS)


def stream() -> None:
    streamed(instructor.Mode.JSON_SCHEMA)


def wrong_key() -> None:
    stranger = client(instructor.Mode.TOOLS, WRONG_KEY)
    checks.raises(InstructorRetryException, DEMO["wrong_key_message"], lambda: stranger.create(**settings()))


def unknown_model() -> None:
    ours = client(instructor.Mode.TOOLS)
    checks.raises(
        InstructorRetryException, DEMO["unknown_model_message"], lambda: ours.create(**settings(UNKNOWN_MODEL))
    )


checks.run(tools, structured, json_object, stream, tools_streamed, wrong_key, unknown_model)
