"""One more token of a plain stream, past vLLM's loop over outputs, is the same text, counts and statistics as in it."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from engine.backends.plain_steps import PlainSteps
from engine.demo import weights_dir

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.types import ChatStep

TEXT = (
    "Gr\u00fc\u00dfe, \u4f60\u597d \U0001f30d\u200d\U0001f9d1! na\u00efve \u1230\u120b\u121d ... and so on, and so on."
)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """What a front has of vLLM, without an engine behind it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are other people's, at import
        from transformers import AutoTokenizer
        from vllm import sampling_params
        from vllm.v1 import engine
        from vllm.v1.engine import output_processor
        from vllm.v1.metrics import stats
    known: dict[str, Any] = {}
    for module in (sampling_params, engine, output_processor, stats):
        known |= vars(module)
    return SimpleNamespace(**known, tokenizer=AutoTokenizer.from_pretrained(weights_dir("chat")))


class Line(list[str]):
    """A client that takes steps at once. `willing` says whether."""

    willing = True

    def __call__(self, step: ChatStep) -> bool:
        if self.willing:
            self.append(step.deltas[0].content)
        return self.willing


class Front:
    """An output processor with one request, ours or vLLM's own."""

    def __init__(self, vllm: Any, *, ours: bool, stop: Sequence[str] = ()) -> None:
        from engine.backends.vllm_plain_steps import register, shorten

        self._vllm = vllm
        self._clock = 0.0
        self.processor = vllm.OutputProcessor(vllm.tokenizer, log_stats=True)
        self.statistics: list[dict[str, Any]] = []
        kind = vllm.RequestOutputKind.DELTA
        parameters = vllm.SamplingParams(max_tokens=64, output_kind=kind, stop=list(stop))
        request = vllm.EngineCoreRequest("r", PROMPT, None, parameters, None, 0.0, None, None, None)
        request.external_req_id = "r"
        self.line = Line()
        if ours:
            shorten(self.processor)
            self.queue: Any = PlainSteps(self.line)
            register(self.processor, request, self.queue, streamed=True)
        else:
            self.queue = vllm.RequestOutputCollector(kind, "r")
            self.processor.add_request(request, None, None, 0, self.queue)
        self.state = self.processor.request_states["r"]

    def step(self, token_ids: Sequence[int], **more: Any) -> list[str]:
        """One step of the engine. Returns what vLLM's core is to abort."""
        self._clock += 0.25
        output = self._vllm.EngineCoreOutput("r", list(token_ids), **more)
        statistics = self._vllm.IterationStats()
        statistics.iteration_timestamp = 100.0 + self._clock
        done = self.processor.process_outputs([output], self._clock, statistics, "weights")
        self.statistics.append(
            {name: repr(value) for name, value in vars(statistics).items()} | {"state": repr(self.state.stats)}
        )
        assert not done.request_outputs
        return list(done.reqs_to_abort)


def runs(vllm: Any) -> dict[str, list[list[int]]]:
    """What each step brings: text whose characters are cut in the middle, and what no text is made of."""
    chance = random.Random(4)  # noqa: S311  # repeatable on purpose
    known = vllm.tokenizer.encode(TEXT)
    size = len(vllm.tokenizer)
    anything = [chance.randrange(size) for _ in range(400)]
    pieces = list(known)
    several = []
    while pieces:
        taken = chance.randrange(1, 4)
        several.append(pieces[:taken])
        del pieces[:taken]
    return {
        "text": [[one] for one in known],
        "anything": [[one] for one in anything],
        "bytes that are no text": [[one] for one in chance.sample(range(min(size, 260)), 200)],
        "several at a time": several,
        "no such token": [[known[0]], [known[1]], [2**33], [known[2]]],
    }


RUNS = ("text", "anything", "bytes that are no text", "several at a time", "no such token")


@pytest.mark.parametrize("name", RUNS)
async def test_text_counts_and_statistics_are_those_of_vllms_loop(vllm: Any, name: str) -> None:
    mine, theirs = Front(vllm, ours=True), Front(vllm, ours=False)
    mine.line.willing = False  # each step is fetched, as theirs are
    prefill, (first, *rest, last) = vllm.PrefillStats(3, 3), runs(vllm)[name]
    finish = vllm.FinishReason.LENGTH
    preempted = [vllm.EngineCoreEvent(vllm.EngineCoreEventType.PREEMPTED, 1.0)]
    steps = [(first, {"prefill_stats": prefill}), *((ids, {}) for ids in rest), (last, {"finish_reason": finish})]
    steps.insert(2, (rest[0], {"events": preempted}))
    for ids, more in steps:
        assert mine.step(ids, **more) == theirs.step(ids, **more)
        own, vllms = await mine.queue.get(), theirs.queue.get_nowait()
        assert own.deltas[0].content == vllms.outputs[0].text
        assert (own.deltas[0].finish_reason is not None) == vllms.finished
        assert own.usage.completion_tokens == theirs.state.detokenizer.num_output_tokens()
    assert mine.statistics == theirs.statistics
    assert not mine.processor.request_states


async def test_what_is_taken_at_once_and_what_is_fetched_make_the_whole_text(vllm: Any) -> None:
    mine = Front(vllm, ours=True)
    ids = vllm.tokenizer.encode(TEXT)
    mine.step(ids[:1])
    texts = [(await mine.queue.get()).deltas[0].content]
    for number, one in enumerate(ids[1:], 1):
        mine.step([one], finish_reason=vllm.FinishReason.LENGTH if number == len(ids) - 1 else None)
    texts.append((await mine.queue.get()).deltas[0].content)
    assert "".join(texts) == TEXT
    assert mine.queue.answer_tokens == len(ids)


async def test_a_stop_string_that_lies_across_tokens_is_found_where_vllm_finds_it(vllm: Any) -> None:
    mine, theirs = (Front(vllm, ours=ours, stop=["on, an"]) for ours in (True, False))
    mine.line.willing = False
    said: list[tuple[str, str]] = []
    for one in vllm.tokenizer.encode(TEXT):
        aborted = mine.step([one])
        assert aborted == theirs.step([one])
        own, vllms = mine.queue._step, theirs.queue.get_nowait()
        said.append(("" if own is None else (await mine.queue.get()).deltas[0].content, vllms.outputs[0].text))
        if aborted:
            break
    assert aborted == ["r"]
    assert "".join(own for own, _ in said) == "".join(text for _, text in said) == TEXT[: TEXT.index("on, an")]
