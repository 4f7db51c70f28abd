"""anthropic's own client, in the convention of docs/messages.md."""

import json
from typing import Any

import anthropic
import checks
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

ROOT_URL = BASE_URL.removesuffix("/v1")
client = anthropic.Anthropic(base_url=ROOT_URL, api_key=API_KEY, max_retries=0)
QUESTION = [{"role": "user", "content": DEMO["question"]}]
TOOL_QUESTION = [{"role": "user", "content": DEMO["tool_question"]}]
TOOLS = [
    {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
    for one in (tool["function"] for tool in checks.TOOLS)
]


def settings(messages: list[Any], **more: Any) -> dict[str, Any]:
    given = {"model": MODEL, "max_tokens": checks.MAX_TOKENS, "extra_body": {"temperature": 0}}
    return given | {"messages": messages} | more


def streamed(messages: list[Any], **more: Any) -> Any:
    with client.messages.stream(**settings(messages, **more)) as events:
        return events.get_final_message()


def said(message: Any) -> str:
    checks.true(message.usage.input_tokens and message.usage.output_tokens, message.usage)
    (block,) = message.content
    return block.text


def chat() -> None:
    checks.same(said(client.messages.create(**settings(QUESTION))), DEMO["answer"])


def stream() -> None:
    checks.same(said(streamed(QUESTION)), DEMO["answer"])


def answer_of_tool(ask: Any) -> None:
    message = ask(TOOL_QUESTION, tools=TOOLS)
    (call,) = message.content
    checks.same((message.stop_reason, call.name, call.input), ("tool_use", DEMO["tool_name"], DEMO["tool_arguments"]))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": DEMO["tool_result"]}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    checks.same(said(ask([*TOOL_QUESTION, *turns], tools=TOOLS)), DEMO["tool_answer"])


def tools() -> None:
    answer_of_tool(lambda messages, **more: client.messages.create(**settings(messages, **more)))


def tools_streamed() -> None:
    answer_of_tool(streamed)


def pictures() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DEMO["picture"]}}
    question = {"type": "text", "text": DEMO["picture_question"]}
    message = client.messages.create(**settings([{"role": "user", "content": [image, question]}], model=checks.SEEING))
    checks.same(said(message), DEMO["picture_answer"])


def structured() -> None:
    limit = {"format": {"type": "json_schema", "schema": checks.PERSON_SCHEMA}}
    question = [{"role": "user", "content": DEMO["person_question"]}]
    checks.is_person(json.loads(said(client.messages.create(**settings(question, output_config=limit)))))


def wrong_key() -> None:
    stranger = anthropic.Anthropic(base_url=ROOT_URL, api_key=WRONG_KEY, max_retries=0)
    ask = stranger.messages.create
    checks.raises(anthropic.AuthenticationError, DEMO["wrong_key_message"], lambda: ask(**settings(QUESTION)))


def unknown_model() -> None:
    def ask() -> None:
        client.messages.create(**settings(QUESTION, model=UNKNOWN_MODEL))

    checks.raises(anthropic.NotFoundError, DEMO["unknown_model_message"], ask)


checks.run(chat, stream, tools, tools_streamed, pictures, structured, wrong_key, unknown_model)
