"""smolagents: an agent that calls tools, and whose answer is one too."""

import checks
from checks import API_KEY, BASE_URL, CHAIN, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from smolagents import AgentGenerationError, ChatMessage, OpenAIModel, ToolCallingAgent, tool

SETTINGS = {"api_base": BASE_URL}


@tool
def read_file(path: str) -> str:
    """Reads a file.

    Args:
        path: its name
    """
    checks.called.append({"path": path})
    return str(CHAIN["held"])


def model(name: str = MODEL, key: str = API_KEY) -> OpenAIModel:
    return OpenAIModel(model_id=name, api_base=BASE_URL, api_key=key, retry=False)


HELLO = [ChatMessage(role="user", content=CHAIN["hello"])]
ENDLESS = [ChatMessage(role="user", content=CHAIN["endless"])]


def chat() -> None:
    answer = model().generate(HELLO)
    checks.same(answer.content, CHAIN["greeting"])
    checks.true(answer.token_usage.input_tokens and answer.token_usage.output_tokens, answer.token_usage)


def stream() -> None:
    # Long: an answer of a few tokens is complete before a busy machine has sent its first one, and comes in one piece.
    counted = model().generate_stream(ENDLESS, max_tokens=400)
    pieces = [piece.content for piece in counted if piece.content]
    checks.same("".join(pieces), "".join(CHAIN["count"]) * 100)
    checks.true(len(pieces) > 1, "it came in one piece")


def answer_of_tool(*, stream_outputs: bool) -> None:
    agent = ToolCallingAgent(tools=[read_file], model=model(), stream_outputs=stream_outputs, verbosity_level=0)
    checks.same(agent.run(CHAIN["question"], max_steps=3), CHAIN["answer"])
    checks.same(checks.called, [{"path": CHAIN["file"]}])


def tools() -> None:
    answer_of_tool(stream_outputs=False)


def tools_streamed() -> None:
    answer_of_tool(stream_outputs=True)


def refused(message: str, one: OpenAIModel) -> None:
    agent = ToolCallingAgent(tools=[read_file], model=one, verbosity_level=0)
    checks.raises(AgentGenerationError, message, lambda: agent.run(CHAIN["hello"]))


def wrong_key() -> None:
    refused(DEMO["wrong_key_message"], model(key=WRONG_KEY))


def unknown_model() -> None:
    refused(DEMO["unknown_model_message"], model(UNKNOWN_MODEL))


checks.run(chat, stream, tools, tools_streamed, wrong_key, unknown_model)
