"""Reasoning tokens: counted once, at the end, and none where the prompt has ended the reasoning."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from engine.demo import weights_dir

pytestmark = pytest.mark.engine  # imports vLLM

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
THOUGHT, SAID = "hello there my friend", "what a day it is"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, at import
        import vllm.parser.parser_manager  # noqa: F401
        from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(weights_dir("chat"))
    found.add_tokens([mark for mark in MARKS if mark not in found.get_vocab()])
    return found


class Counted:
    """A parser that counts how often it is asked."""

    def __init__(self, parser: Any) -> None:
        self._parser, self.asked = parser, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def count_reasoning_tokens(self, token_ids: tuple[int, ...]) -> int:
        self.asked += 1
        return self._parser.count_reasoning_tokens(token_ids)


@pytest.mark.parametrize("size", [1, 3, 16])  # tokens of a step
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1"])
@pytest.mark.parametrize(
    ("prompt_ends", "answer", "thought"),
    [
        ("<think>\n", f"{THOUGHT}</think>{SAID}", THOUGHT),  # the template begins the reasoning
        ("", f"<think>{THOUGHT}</think>{SAID}", THOUGHT),
        ("<think>\n\n</think>\n\n", SAID, ""),  # it has switched reasoning off
        ("<think>\n", THOUGHT, THOUGHT),  # cut off
    ],
)
def test_reasoning_is_counted_once_at_the_end(
    tokenizer: Any, reasoning: str, prompt_ends: str, answer: str, thought: str, *, size: int
):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    from engine.backends.vllm.outputs import ChatOutputs
    from engine.backends.vllm.tool_calls import CallStream

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    request = ChatCompletionRequest.model_validate({"messages": []})
    made = ParserManager.get_parser(reasoning_parser_name=reasoning, tokenizer=tokenizer)
    parser = Counted(made(tokenizer, None))
    outputs = ChatOutputs(None, request, [CallStream(parser, request, tokenizer)], count_reasoning=True)
    prompt, tokens = ids("hello" + prompt_ends), ids(answer)
    for at in range(0, len(tokens), size):
        new = tokens[at : at + size]
        reason = ("stop" if SAID in answer else "length") if at + size >= len(tokens) else None
        piece = {"index": 0, "text": tokenizer.decode(new), "token_ids": new, "finish_reason": reason}
        output = SimpleNamespace(
            outputs=[SimpleNamespace(**piece, stop_reason=None, logprobs=None)],
            prompt_token_ids=prompt,
            num_cached_tokens=0,
        )
        step = outputs.step(output)
    assert step.usage.reasoning_tokens == len(ids(thought))
    assert parser.asked == bool(thought)
