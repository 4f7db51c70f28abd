"""litellm, with the prefix for servers of this kind."""

import json
import os
from typing import Any

import checks
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a price list from the internet when imported

import litellm

QUESTION = [{"role": "user", "content": DEMO["question"]}]
TOOL_QUESTION = [{"role": "user", "content": DEMO["tool_question"]}]


def ask(messages: list[Any], *, api_key: str = API_KEY, model: str = MODEL, **more: Any) -> Any:
    return litellm.completion(
        model=f"openai/{model}",
        api_base=BASE_URL,
        api_key=api_key,
        messages=messages,
        temperature=0,
        max_retries=0,
        **more,
    )


def count(usage: Any) -> None:
    checks.add_up(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def chat() -> None:
    answer = ask(QUESTION)
    checks.same(answer.choices[0].message.content, DEMO["answer"])
    count(answer.usage)


def stream() -> None:
    chunks = list(ask(QUESTION, stream=True, stream_options={"include_usage": True}))
    answer = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    checks.same(answer.choices[0].message.content, DEMO["answer"])
    count(answer.usage)


def answer_of_tool(**more: Any) -> None:
    def ask_for_tools(messages: list[Any]) -> Any:
        answer = ask(messages, tools=checks.TOOLS, **more)
        if more.get("stream"):
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        return answer.choices[0].message

    message = ask_for_tools(TOOL_QUESTION)
    (call,) = message.tool_calls
    checks.same((call.function.name, json.loads(call.function.arguments)), (DEMO["tool_name"], DEMO["tool_arguments"]))
    result = {"role": "tool", "tool_call_id": call.id, "content": DEMO["tool_result"]}
    checks.same(ask_for_tools([*TOOL_QUESTION, message, result]).content, DEMO["tool_answer"])


def tools() -> None:
    answer_of_tool()


def tools_streamed() -> None:
    answer_of_tool(stream=True)


def structured() -> None:
    answer = ask(
        [{"role": "user", "content": DEMO["person_question"]}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": checks.PERSON_SCHEMA, "strict": True},
        },
        max_tokens=checks.MAX_TOKENS,
    )
    checks.is_person(json.loads(answer.choices[0].message.content))


def wrong_key() -> None:
    checks.raises(litellm.AuthenticationError, DEMO["wrong_key_message"], lambda: ask(QUESTION, api_key=WRONG_KEY))


def unknown_model() -> None:
    checks.raises(litellm.NotFoundError, DEMO["unknown_model_message"], lambda: ask(QUESTION, model=UNKNOWN_MODEL))


checks.run(chat, stream, tools, tools_streamed, structured, wrong_key, unknown_model)
