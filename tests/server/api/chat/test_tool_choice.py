"""Forced tool calls and cut-off answers on a real server, whose models each write and read another tool format.

The formats themselves, in all families, are tested in tests/engine/backends/vllm/test_tool_parsers.py.
"""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import yaml
from chat_parts import PROMPTS
from demo_models.promised import FixedPrompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Server

from engine.demo import weights_dir

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Format:
    """What a parser's tokenizer has to know, and what of its calls may never be seen in `content`."""

    marks: tuple[str, ...]
    tokens: tuple[str, ...] = ()


# The demo model was taught hermes, which test_tools.py tests; in these formats it calls when grammar makes it.
PARSERS = {
    "llama3_json": Format(("python_tag", '{"name"'), ("<|python_tag|>",)),
    "qwen3_coder": Format(("tool_call", "<function", "<parameter")),
    "granite4": Format(("tool_call", '{"name"')),
}
CITIES = {"city": {"type": "string", "enum": ["Paris", "Tokyo"]}, "days": {"type": "integer", "enum": [1, 7]}}
SCHEMAS = {
    "get_weather": {"type": "object", "properties": CITIES, "required": ["city"], "additionalProperties": False},
    "find_room": {
        "type": "object",
        "properties": {"seats": {"type": "integer", "enum": [2, 10]}},
        "required": ["seats"],
        "additionalProperties": False,
    },
}
OFFERED = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = [{"type": "function", "function": {"name": name}} for name in SCHEMAS]
QUESTIONS = [PROMPTS["call-two-cities-paris-tokyo"], PROMPTS["hello-tools-offered"]]

Answer = tuple[str, list[tuple[str, str]], str | None]


def copy_with_tokens(folder: Path, tokens: tuple[str, ...]) -> None:
    """The demo chat model with `tokens` added at the end of its vocabulary, never likely to be said unforced."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(weights_dir("chat"), folder)
    if not tokens:
        return
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    first = config["vocab_size"]
    plain = next(token for token in tokenizer["added_tokens"] if not token["special"])
    tokenizer["added_tokens"] += [{**plain, "id": first + i, "content": token} for i, token in enumerate(tokens)]
    config["vocab_size"] = first + len(tokens)
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]
    more = rows.mean(dim=0, keepdim=True).expand(len(tokens), -1)
    weights["model.embed_tokens.weight"] = torch.cat([rows, more]).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.fixture(scope="module")
def formats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with one model per parser."""
    folder = tmp_path_factory.mktemp("formats")
    models: dict[str, Any] = {}
    for parser, form in PARSERS.items():
        copy_with_tokens(folder / "weights" / parser, form.tokens)
        models[parser] = {
            "task": "chat",
            "tier": "standard",
            "capabilities": ["chat", "streaming", "function_calling"],
            "weights": parser,
            "engine": {"context_length": 2048, "kv_cache_gib": 0.0625, "tool_parser": parser},
        }
    path = folder / "models.yaml"
    path.write_text(
        yaml.safe_dump(
            {"models": models, "tiers": {"standard": {"models": ["standard"]}, "enhanced": {"models": ["standard"]}}}
        )
    )
    with Server(folder, arguments=["--models", str(path)]) as running:
        yield running
        assert running.stop() == 0, running.log()


@pytest.fixture(scope="module")
async def formats_client(formats_server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    assert formats_server.admin_key is not None
    async with openai.AsyncOpenAI(
        base_url=formats_server.base_url, api_key=formats_server.admin_key.text, max_retries=0, timeout=60
    ) as opened:
        yield opened


async def plain(client: openai.AsyncOpenAI, **fields: Any) -> Answer:
    choice = (await client.chat.completions.create(**fields)).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.message.content or "", calls, choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> Answer:
    content, calls, finish_reason = "", {}, None
    async for chunk in await client.chat.completions.create(stream=True, **fields):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish_reason = choice.finish_reason or finish_reason
        for piece in choice.delta.tool_calls or []:
            assert (piece.index in calls) == (piece.id is None)
            name, arguments = calls.get(piece.index, ("", ""))
            calls[piece.index] = (name + (piece.function.name or ""), arguments + (piece.function.arguments or ""))
    return content, list(calls.values()), finish_reason


FEW, MANY = (
    settings(
        max_examples=count,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    for count in (10, 200)
)
ASKED = given(
    question=st.sampled_from(QUESTIONS),
    choice=st.sampled_from(["none", "auto", "required", *NAMED]),
    cut=st.integers(1, 40) | st.just(150),
    parallel=st.booleans(),
)


@FEW
@ASKED
@pytest.mark.parametrize("parser", PARSERS)
async def test_streamed_and_plain_agree_and_calls_hold_their_schema(
    formats_client: openai.AsyncOpenAI, parser: str, **asked: Any
) -> None:
    await assert_both_agree(formats_client, parser, **asked)


@pytest.mark.rounds
@MANY
@ASKED
@pytest.mark.parametrize("parser", PARSERS)
async def test_streamed_and_plain_agree_many_times(
    formats_client: openai.AsyncOpenAI, parser: str, **asked: Any
) -> None:
    await assert_both_agree(formats_client, parser, **asked)


async def assert_both_agree(
    formats_client: openai.AsyncOpenAI, parser: str, question: FixedPrompt, choice: Any, cut: int, *, parallel: bool
) -> None:
    fields = {
        "model": parser,
        "messages": question.messages,
        "tools": OFFERED,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "max_tokens": cut,
        "temperature": 0,
    }
    answer, again = await asyncio.gather(plain(formats_client, **fields), streamed(formats_client, **fields))
    assert again == answer
    check_answer(answer, choice, PARSERS[parser], parallel=parallel)


def check_answer(answer: Answer, choice: Any, form: Format, *, parallel: bool) -> None:
    content, calls, finish_reason = answer
    forced = choice == "required" or isinstance(choice, dict)
    assert choice == "none" or not any(mark in content for mark in form.marks), content
    assert choice != "none" or not calls
    assert parallel or len(calls) <= 1
    if finish_reason == "length":
        return
    assert finish_reason == ("tool_calls" if calls and isinstance(choice, str) else "stop")
    assert calls or not forced
    for name, arguments in calls:
        values = json.loads(arguments)
        jsonschema.validate(values, SCHEMAS[name])
        assert not isinstance(choice, dict) or name == choice["function"]["name"]


@pytest.mark.parametrize("parser", PARSERS)
async def test_required_and_named_are_called_in_every_format(formats_client: openai.AsyncOpenAI, parser: str) -> None:
    for choice in ["required", *NAMED]:
        answer = await plain(
            formats_client,
            model=parser,
            messages=QUESTIONS[1].messages,
            tools=OFFERED,
            tool_choice=choice,
            temperature=0,
            frequency_penalty=2,  # the grammar lets it go on with white space for as long as it likes
            max_tokens=600,
            parallel_tool_calls=False,
        )
        assert answer[1], answer
        assert answer[2] != "length", answer
        check_answer(answer, choice, PARSERS[parser], parallel=False)
