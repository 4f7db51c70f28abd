"""One more token of a plain stream, past vLLM's loop over outputs, is the same text, counts and statistics as in it."""

from __future__ import annotations

import asyncio
import random
import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from engine.backends.plain_steps import PlainSteps

from engine.demo import weights_dir

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
    """A client that takes steps at once."""

    def __call__(self, step: ChatStep) -> bool:
        self.append(step.deltas[0].content)
        return True


class Front:
    """An output processor, ours or vLLM's own, with one request."""

    def __init__(self, vllm: Any, *, ours: bool, stop: Sequence[str] = ()) -> None:
        from engine.backends.vllm_plain_steps import shorten

        self._vllm = vllm
        self._ours = ours
        self._clock = 0.0
        self.processor = vllm.OutputProcessor(vllm.tokenizer, log_stats=True)
        if ours:
            shorten(self.processor)
        self.statistics: list[dict[str, Any]] = []
        self.line = Line()
        self.queue = self.add("r", stop)
        self.state = self.processor.request_states["r"]

    def add(self, name: str, stop: Sequence[str] = ()) -> Any:
        """One request more. Returns where its steps go."""
        from engine.backends.vllm_plain_steps import register

        kind = self._vllm.RequestOutputKind.DELTA
        parameters = self._vllm.SamplingParams(max_tokens=64, output_kind=kind, stop=list(stop))
        request = self._vllm.EngineCoreRequest(name, PROMPT, None, parameters, None, 0.0, None, None, None)
        request.external_req_id = name
        if self._ours:
            queue: Any = PlainSteps(self.line)
            register(self.processor, request, queue, streamed=True)
        else:
            queue = self._vllm.RequestOutputCollector(kind, name)
            self.processor.add_request(request, None, None, 0, queue)
        return queue

    def step(self, token_ids: Sequence[int], **more: Any) -> list[str]:
        """One step of the engine. Returns what vLLM's core is to abort."""
        return self.steps({"r": (token_ids, more)})

    def steps(self, brought: Mapping[str, tuple[Sequence[int], dict[str, Any]]]) -> list[str]:
        """One step of the engine for several requests."""
        self._clock += 0.25
        outputs = [self._vllm.EngineCoreOutput(name, list(ids), **more) for name, (ids, more) in brought.items()]
        statistics = self._vllm.IterationStats()
        statistics.iteration_timestamp = 100.0 + self._clock
        done = self.processor.process_outputs(outputs, self._clock, statistics, "weights")
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
    prefill, (first, *rest, last) = vllm.PrefillStats(3, 3), runs(vllm)[name]
    finish = vllm.FinishReason.LENGTH
    preempted = [vllm.EngineCoreEvent(vllm.EngineCoreEventType.PREEMPTED, 1.0)]
    steps = [(first, {"prefill_stats": prefill}), *((ids, {}) for ids in rest), (last, {"finish_reason": finish})]
    steps.insert(2, (rest[0], {"events": preempted}))
    short = 0
    for ids, more in steps:
        before = detokenized(mine)
        assert mine.step(ids, **more) == theirs.step(ids, **more)
        own, vllms = await mine.queue.get(), theirs.queue.get_nowait()
        assert own.deltas[0].content == vllms.outputs[0].text
        assert (own.deltas[0].finish_reason is not None) == vllms.finished
        assert own.usage.completion_tokens == theirs.state.detokenizer.num_output_tokens()
        passed_by = bool(own.deltas[0].content) and detokenized(mine) == before
        assert not (passed_by and more)
        short += passed_by
    assert short > len(rest) / 3  # the others brought no text, being parts of a character
    assert mine.statistics == theirs.statistics
    assert not mine.processor.request_states


def detokenized(front: Front) -> str:
    """The text that vLLM's loop keeps and the short way does not."""
    return str(front.state.detokenizer.output_text)


async def test_only_tokens_between_the_first_and_the_last_pass_the_loop_by(vllm: Any) -> None:
    mine, theirs = Front(vllm, ours=True), Front(vllm, ours=False)
    (word,) = vllm.tokenizer.encode(" and", add_special_tokens=False)[:1]
    preempted = [vllm.EngineCoreEvent(vllm.EngineCoreEventType.PREEMPTED, 1.0)]
    kinds = [{}, {}, {"events": preempted}, {}, {"finish_reason": vllm.FinishReason.LENGTH}]
    grown = []
    for more in kinds:
        before = [detokenized(front) for front in (mine, theirs)]
        for front in (mine, theirs):
            front.step([word], **more)
        grown.append(tuple(detokenized(front) != old for front, old in zip((mine, theirs), before, strict=True)))
    assert grown == [(True, True), (False, True), (True, True), (False, True), (True, True)]


async def test_what_is_taken_at_once_and_what_is_fetched_make_the_whole_text(vllm: Any) -> None:
    mine = Front(vllm, ours=True)
    first, *rest, last = vllm.tokenizer.encode(TEXT)
    mine.step([first])
    begin = (await mine.queue.get()).deltas[0].content
    reader = asyncio.create_task(mine.queue.get())
    await asyncio.sleep(0)  # it waits now
    for one in rest:
        mine.step([one])
    assert "".join(mine.line)
    assert not reader.done()
    mine.step([last], finish_reason=vllm.FinishReason.LENGTH)
    assert begin + "".join(mine.line) + (await reader).deltas[0].content == TEXT
    assert mine.queue.answer_tokens == len(rest) + 2


async def test_requests_of_one_step_do_not_disturb_each_other(vllm: Any) -> None:
    both = Front(vllm, ours=True), Front(vllm, ours=False)
    names = ("middle", "ends", "stops", "leaves")
    queues = [{name: front.add(name, ["so on"] if name == "stops" else ()) for name in names} for front in both]
    ids = vllm.tokenizer.encode(TEXT)
    texts: list[dict[str, str]] = [dict.fromkeys(names, ""), dict.fromkeys(names, "")]
    for number, one in enumerate(ids):
        brought: dict[str, Any] = {name: ([one], {}) for name in ("unknown", *names)}
        if number == 4:
            brought["ends"] = ([one], {"finish_reason": vllm.FinishReason.LENGTH})
        if number == 6:
            assert both[0].processor.abort_requests(["leaves"], True) == ["leaves"]  # noqa: FBT003
            assert both[1].processor.abort_requests(["leaves"], True) == ["leaves"]  # noqa: FBT003
        assert both[0].steps(brought) == both[1].steps(brought)
        for name in names:
            own, vllms = queues[0][name], queues[1][name].get_nowait()
            if own._step is not None:
                texts[0][name] += (await own.get()).deltas[0].content
            texts[1][name] += "" if vllms is None else vllms.outputs[0].text
    assert texts[0] == texts[1]
    assert texts[0]["middle"] == TEXT
    assert len(texts[0]["leaves"]) > 0
    assert both[0].processor.request_states.keys() == both[1].processor.request_states.keys() == {"r", "middle"}
    assert both[0].statistics == both[1].statistics


class BrokenStream:
    """A tokenizer's stream that has lost its state."""

    def step(self, *_: Any) -> str:
        raise RuntimeError("no such state")


async def test_a_token_that_cannot_be_decoded_ends_its_own_request(vllm: Any) -> None:
    front = Front(vllm, ours=True)
    other = front.add("other")
    (word,) = vllm.tokenizer.encode(" and", add_special_tokens=False)[:1]
    assert front.steps({"r": ([word], {}), "other": ([word], {})}) == []
    front.state.detokenizer.stream = BrokenStream()
    assert front.steps({"r": ([word], {}), "other": ([word], {})}) == ["r"]
    with pytest.raises(RuntimeError, match="no such state"):
        await front.queue.get()
    assert front.steps({"r": ([word], {}), "other": ([word], {})}) == []
    assert (await other.get()).deltas[0].content == " and" * 3
    assert list(front.processor.request_states) == ["other"]
    assert list(front.processor.external_req_ids) == ["other"]


def test_all_that_vllm_says_of_a_token_is_known_here(vllm: Any) -> None:
    """A field more: may a token that has it pass the loop by? See `_PlainStream.take`."""
    assert set(vllm.EngineCoreOutput.__struct_fields__) == {
        *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output"),
        *("finish_reason", "stop_reason", "events", "kv_transfer_params", "ec_transfer_params", "trace_headers"),
        *("prefill_stats", "routed_experts", "num_nans_in_logits", "mm_cache_miss_hashes", "new_sampling_mask"),
        *("spec_decode_metrics", "prompt_token_id_logprobs"),
    }


async def test_a_stop_string_that_lies_across_tokens_is_found_where_vllm_finds_it(vllm: Any) -> None:
    mine, theirs = (Front(vllm, ours=ours, stop=["on, an"]) for ours in (True, False))
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
