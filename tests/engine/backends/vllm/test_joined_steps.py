"""Steps of an answer that join, because newer ones are there already or nobody reads them one by one.

vLLM's own output processor makes them of what an engine would send.
"""

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm import compat
from engine.demo import weights_dir
from engine.stream import TokenStream
from engine.types import ChatStep

pytestmark = pytest.mark.engine  # imports vLLM

TEXT = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen."


class Processor:
    """vLLM's, with one request. `behind` is how many newer steps its engine has sent."""

    def __init__(self, state: str, kind: str = "DELTA", **sampling: Any) -> None:
        from transformers import AutoTokenizer
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor

        from engine.backends.vllm.outputs import ChatOutputs, Collector, request_states

        self.tokenizer = AutoTokenizer.from_pretrained(weights_dir("chat"))
        self.token_ids = self.tokenizer.encode(TEXT, add_special_tokens=False)
        self.behind, self.stream = 0, TokenStream()
        self._processor = OutputProcessor(self.tokenizer, log_stats=False)
        parameters = SamplingParams(output_kind=RequestOutputKind[kind], **sampling)
        request = EngineCoreRequest("a", [5, 6], None, parameters, None, 0.0, None, None, None, external_req_id="a")
        asked: Any = SimpleNamespace(n=1, logprobs=False, top_logprobs=None)
        outputs = ChatOutputs(None, asked)
        collector = Collector(self.stream, outputs.step, lambda error: error, self.stream.finish)
        self._processor.add_request(request, None, None, 0, collector)
        states = request_states(lambda: self.behind)
        self._processor.request_states["a"].__class__ = getattr(states, state)

    def take(self, token_ids: list[int], *, behind: int = 0, finished: bool = False) -> list[ChatStep]:
        """Return the steps that one output of the engine brings."""
        from vllm.v1.engine import EngineCoreOutput, FinishReason

        self.behind = behind
        reason = FinishReason.LENGTH if finished else None
        self._processor.process_outputs([EngineCoreOutput("a", token_ids, finish_reason=reason)])
        steps, self.stream._items = list(self.stream._items), type(self.stream._items)()
        return steps


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about itself
        import vllm.v1.engine.output_processor  # noqa: F401

        assert compat.fits("text steps")
        yield


def text_of(steps: list[ChatStep]) -> str:
    return "".join(delta.content for step in steps for delta in step.deltas)


@pytest.mark.parametrize("state", ["text", "joined"])
def test_a_step_waits_for_a_newer_one_that_is_there_already(state: str):
    processor = Processor(state)
    first, second, third, *rest = processor.token_ids
    [step] = processor.take([first])
    assert step.usage.completion_tokens == 1
    assert processor.take([second], behind=2) == []
    assert processor.take([third], behind=1) == []
    [joined] = processor.take(rest[:1])
    assert joined.usage.completion_tokens == 4
    assert text_of([step, joined]) == processor.tokenizer.decode(processor.token_ids[:4])
    assert processor.take(rest[1:-1], behind=1) == []
    [last] = processor.take(rest[-1:], behind=1, finished=True)
    assert text_of([step, joined, last]) == TEXT
    assert last.usage.completion_tokens == len(processor.token_ids)
    assert last.deltas[0].finish_reason == "length"
    assert processor.stream.finished


def test_an_answer_that_is_parsed_and_not_streamed_has_few_steps():
    processor = Processor("whole")
    steps = [step for token in processor.token_ids[:-1] for step in processor.take([token])]
    assert [step.usage.completion_tokens for step in steps] == list(range(16, len(processor.token_ids), 16))
    steps += processor.take(processor.token_ids[-1:], finished=True)
    assert text_of(steps) == TEXT
    assert steps[-1].usage.completion_tokens == len(processor.token_ids)


def test_a_stop_text_ends_an_answer_whose_steps_wait():
    processor = Processor("joined", stop=["three"], detokenize=True)
    steps = [step for token in processor.token_ids for step in processor.take([token], behind=1)]
    assert text_of(steps) == "One two "
    assert steps[-1].deltas[0].finish_reason == "stop"


@pytest.mark.parametrize("state", ["text", "joined", "whole"])
def test_an_answer_that_comes_at_once_is_whole(state: str):
    processor = Processor(state, "FINAL_ONLY")
    assert [step for token in processor.token_ids[:-1] for step in processor.take([token])] == []
    steps = processor.take(processor.token_ids[-1:], finished=True)
    assert text_of(steps) == TEXT


THOUGHT, SAID = "hello there my friend, you are a good one and so is the day", "what a day it is, said the old man"
BOUNDS = {"gemma4": ("<|channel>thought\n", "<channel|>"), "seed_oss": ("<seed:think>", "</seed:think>")}
MARKS = (
    "<think>",
    "</think>",
    "<seed:think>",
    "</seed:think>",
    "<|channel>",
    "<channel|>",
    "<tool_call>",
    "</tool_call>",
)
MORE_MARKS = ("<|tool_call>", "<tool_call|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
GEMMAS = ("<|tool_response>", "<|turn>", "<turn|>")


def test_parsers_whose_steps_join_read_the_same_of_them():
    """The tool parsers are in test_tool_parsers.py."""
    from transformers import AutoTokenizer
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.parser_manager import ParserManager

    from engine.backends.vllm.tool_calls import FAMILIES, CallStream, takes_joined_steps

    tokenizer = AutoTokenizer.from_pretrained(weights_dir("chat"))
    tokenizer.add_tokens([mark for mark in (*MARKS, *MORE_MARKS, *GEMMAS) if mark not in tokenizer.get_vocab()])
    request = ChatCompletionRequest.model_validate({"messages": []})
    read = []
    for name in sorted({reasoning for _, reasoning in FAMILIES.values() if reasoning} - {"openai_gptoss", "olmo3"}):
        made = ParserManager.get_parser(reasoning_parser_name=name, tokenizer=tokenizer)
        if not takes_joined_steps(made.reasoning_parser_cls):
            continue
        begin, end = BOUNDS.get(name, ("<think>", "</think>"))
        for prompt, text in ((begin, THOUGHT + end + SAID), ("hello", begin + THOUGHT + end + SAID)):
            found = set()
            for size in (1, 2, 3, 5, 8, 16, 100):
                stream = CallStream(made(tokenizer, None), request, tokenizer)
                tokens, prompt_tokens = tokenizer.encode(text), tokenizer.encode(prompt)
                content, reasoning, done = "", "", ""
                for at in range(0, len(tokens), size):
                    so_far = tokenizer.decode(tokens[: at + size])
                    reason = "stop" if at + size >= len(tokens) else None
                    new = stream.feed(so_far[len(done) :], tokens[at : at + size], prompt_tokens, reason)
                    content, reasoning, done = content + new[0], reasoning + new[1], so_far
                found.add((reasoning, content))
            assert len(found) == 1, (name, prompt)
            assert prompt != begin or found == {(THOUGHT, SAID)}, name
        read.append(name)
    assert {"gemma4", "glm45", "qwen3"} <= set(read)
