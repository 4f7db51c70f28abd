"""LlamaIndex: its model for servers of this kind, and its agent."""

from typing import Any, Literal

import checks
import openai
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from llama_index.postprocessor.jinaai_rerank import JinaRerank
from pydantic import BaseModel

# By itself it puts the signature before the description, which the demo model has not seen when it learned.
TOOLS = [
    FunctionTool.from_defaults(tool, description=tool.__doc__)
    for tool in (checks.get_weather, checks.find_room, checks.get_phone_number)
]
QUESTION = [ChatMessage(role="user", content=DEMO["question"])]


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


def llm(model: str = MODEL, key: str = API_KEY) -> Any:
    return OpenAILike(
        model=model,
        api_base=BASE_URL,
        api_key=key,
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=32768,
        temperature=0,
        max_retries=0,
        max_tokens=checks.MAX_TOKENS,
    )


def chat() -> None:
    checks.same(llm().chat(QUESTION).message.content, DEMO["answer"])


def stream() -> None:
    pieces = [piece.delta for piece in llm().stream_chat(QUESTION) if piece.delta]
    checks.same("".join(pieces), DEMO["answer"])
    checks.true(len(pieces) > 1, "it came in one piece")


async def answer_of_tool(*, streaming: bool) -> None:
    agent = FunctionAgent(tools=TOOLS, llm=llm(), streaming=streaming)
    answer = str(await agent.run(DEMO["tool_question"]))
    checks.true("sunny in Paris" in answer, answer)  # its own texts around the result are new to the demo model
    (arguments,) = checks.called
    checks.true(isinstance(arguments["city"], str), arguments)


async def tools() -> None:
    await answer_of_tool(streaming=False)


async def tools_streamed() -> None:
    await answer_of_tool(streaming=True)


def pictures() -> None:
    blocks = [ImageBlock(url=f"data:image/png;base64,{DEMO['picture']}"), TextBlock(text=DEMO["picture_question"])]
    seen = llm(checks.SEEING).chat([ChatMessage(role="user", blocks=blocks)])
    checks.same(seen.message.content, DEMO["picture_answer"])


def structured() -> None:
    question = [ChatMessage(role="user", content=DEMO["person_question"])]
    checks.is_person(llm().as_structured_llm(Person).chat(question).raw.model_dump())


def embeddings() -> None:
    model = OpenAILikeEmbedding(model_name=checks.EMBEDDING, api_base=BASE_URL, api_key=API_KEY)
    question, *found = checks.FOUND
    checks.finds_its_text(model.get_query_embedding(question), *model.get_text_embedding_batch(found))


def rerank() -> None:
    reranker = JinaRerank(model=checks.RERANKER, base_url=BASE_URL, api_key=API_KEY, top_n=1)
    question, right, wrong = checks.FOUND
    found = [NodeWithScore(node=TextNode(text=text), score=0.0) for text in (wrong, right)]
    (best,) = reranker.postprocess_nodes(found, query_str=question)
    checks.same(best.node.get_content(), right)


def wrong_key() -> None:
    stranger = llm(key=WRONG_KEY)
    checks.raises(openai.AuthenticationError, DEMO["wrong_key_message"], lambda: stranger.chat(QUESTION))


def unknown_model() -> None:
    nobody = llm(UNKNOWN_MODEL)
    checks.raises(openai.NotFoundError, DEMO["unknown_model_message"], lambda: nobody.chat(QUESTION))


checks.run(chat, stream, tools, tools_streamed, pictures, structured, embeddings, rerank, wrong_key, unknown_model)
