"""langchain-openai's ChatOpenAI, and LangChain's agent with it."""

from typing import Any

import checks
import openai
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

# With an address of one's own it asks for usage only when told to.
SETTINGS: dict[str, Any] = {"base_url": BASE_URL, "temperature": 0, "max_retries": 0, "stream_usage": True}
llm = ChatOpenAI(model=MODEL, api_key=API_KEY, **SETTINGS)
TOOLS = [tool(function) for function in (checks.get_weather, checks.find_room, checks.get_phone_number)]


def count(message: Any) -> None:
    used = message.usage_metadata
    checks.add_up(used["input_tokens"], used["output_tokens"], used["total_tokens"])


def chat() -> None:
    message = llm.invoke(DEMO["question"])
    checks.same(message.content, DEMO["answer"])
    count(message)


def stream() -> None:
    first, *rest = llm.stream(DEMO["question"])
    checks.true(rest, "it came in one piece")
    message = sum(rest, start=first)
    checks.same(message.content, DEMO["answer"])
    count(message)


def answer_of_tool(ask: Any) -> None:
    question = HumanMessage(DEMO["tool_question"])
    message = ask([question])
    (call,) = message.tool_calls
    checks.same((call["name"], call["args"]), (DEMO["tool_name"], DEMO["tool_arguments"]))
    result = TOOLS[0].invoke(call)
    checks.same(ask([question, message, result]).content, DEMO["tool_answer"])


def tools() -> None:
    answer_of_tool(llm.bind_tools(TOOLS).invoke)


def tools_streamed() -> None:
    def ask(messages: list[Any]) -> Any:
        first, *rest = llm.bind_tools(TOOLS).stream(messages)
        return sum(rest, start=first)

    answer_of_tool(ask)


PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DEMO['picture']}"}}


def agent() -> None:
    (*_, answer) = create_agent(llm, TOOLS).invoke({"messages": [HumanMessage(DEMO["tool_question"])]})["messages"]
    checks.same(answer.content, DEMO["tool_answer"])
    (arguments,) = checks.called
    checks.true(isinstance(arguments["city"], str), arguments)


def pictures() -> None:
    seeing = ChatOpenAI(model=checks.SEEING, api_key=API_KEY, **SETTINGS)
    question = HumanMessage([PICTURE, {"type": "text", "text": DEMO["picture_question"]}])
    checks.same(seeing.invoke([question]).content, DEMO["picture_answer"])

    @tool
    def get_weather(city: str) -> list[dict[str, Any]]:
        """The weather in a city"""
        return [PICTURE]

    shown = create_agent(seeing, [get_weather, *TOOLS[1:]]).invoke({"messages": [HumanMessage(DEMO["tool_question"])]})
    (_, call, result, answer) = shown["messages"]
    checks.same((call.tool_calls[0]["name"], result.content), (DEMO["tool_name"], [PICTURE]))
    checks.true(answer.content)


def structured() -> None:
    schema = checks.PERSON_SCHEMA | {"title": "person"}
    for method in ("json_schema", "function_calling"):
        limited = ChatOpenAI(model=MODEL, api_key=API_KEY, max_tokens=checks.MAX_TOKENS, **SETTINGS)
        checks.is_person(limited.with_structured_output(schema, method=method).invoke(DEMO["person_question"]))


def embeddings() -> None:
    # By itself it sends token ids of OpenAI's models
    model = OpenAIEmbeddings(
        model=checks.EMBEDDING, base_url=BASE_URL, api_key=API_KEY, check_embedding_ctx_length=False
    )
    question, *found = checks.FOUND
    checks.finds_its_text(model.embed_query(question), *model.embed_documents(found))


def wrong_key() -> None:
    stranger = ChatOpenAI(model=MODEL, api_key=WRONG_KEY, **SETTINGS)
    checks.raises(openai.AuthenticationError, DEMO["wrong_key_message"], lambda: stranger.invoke("Hello!"))


def unknown_model() -> None:
    nobody = ChatOpenAI(model=UNKNOWN_MODEL, api_key=API_KEY, **SETTINGS)
    checks.raises(openai.NotFoundError, DEMO["unknown_model_message"], lambda: nobody.invoke("Hello!"))


checks.run(chat, stream, tools, tools_streamed, agent, pictures, structured, embeddings, wrong_key, unknown_model)
