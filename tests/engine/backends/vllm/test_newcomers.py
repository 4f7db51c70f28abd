"""Who gets blocks of a full KV cache, and tokens of a step: vLLM's own scheduler, with our patches and without.

No model is run.
"""

import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.admission import BACKGROUND_PRIORITY, BATCH_PRIORITY, SEQUENCE
from engine.backends.vllm import plugin

pytestmark = pytest.mark.engine

with warnings.catch_warnings():  # of what torch imports
    warnings.simplefilter("ignore")
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

DEMO = Path(__file__).parents[4] / "engine" / "demo" / "weights" / "chat"
BLOCK = 16  # tokens
MOST = 8  # blocks that are given out


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patches, undone at the end."""
    monkeypatch.setattr(Scheduler, "schedule", Scheduler.schedule)
    monkeypatch.setattr(KVCacheManager, "allocate_slots", KVCacheManager.allocate_slots)
    for name in ("newcomers", "shared steps", "interactive first"):
        plugin.patches()[name]()


@pytest.fixture
def scheduler() -> Scheduler:
    return made(blocks=MOST)


def made(blocks: int, step: int = 256, places: int = 16, *, states: bool = False) -> Scheduler:
    """`step`: tokens. `states`: a hybrid, with layers that keep a state, which looks for prompts that begin alike."""
    model = ModelConfig(model=str(DEMO), dtype="float32")
    limits = SchedulerConfig(
        max_num_seqs=places,
        max_num_batched_tokens=step,
        max_model_len=256,
        is_encoder_decoder=False,
        policy="priority",
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=states)
    config = VllmConfig(model_config=model, scheduler_config=limits, cache_config=cache)
    layers = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], layers)]
    if states:
        cache.mamba_cache_mode = "align"
        state = MambaSpec(block_size=BLOCK, shapes=((BLOCK,),), dtypes=(torch.float32,), mamba_cache_mode="align")
        groups.append(KVCacheGroupSpec(["state"], state))
    given = KVCacheConfig(num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=groups)
    cache.num_gpu_blocks = blocks + 1
    return Scheduler(config, given, StructuredOutputManager(config), block_size=BLOCK)


def ask(  # noqa: PLR0917
    scheduler: Scheduler, name: str, ahead: int, prompt: int = 4, urgency: int = 0, picture: int = 0, answer: int = 200
) -> Request:
    """`ahead`: sequences of the same owner. `urgency`: the least priority of such requests. `picture`: its tokens."""
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    params.update_from_generation_config({}, 1)
    where = PlaceholderRange(offset=0, length=picture)
    seen = [MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=where, mm_hash=name)]
    features = seen if picture else None
    caches = scheduler.cache_config.enable_prefix_caching
    hasher = get_request_block_hasher(BLOCK, sha256) if caches else None
    priority = urgency + ahead * SEQUENCE
    request = Request(name, [1] * prompt, params, None, priority=priority, mm_features=features, block_hasher=hasher)
    scheduler.add_request(request)
    return request


def step(scheduler: Scheduler) -> None:
    """One token for each sequence that is scheduled and whose prompt has been read."""
    done = scheduler.schedule()
    names = list(done.num_scheduled_tokens)
    tokens = [[] if scheduler.requests[name].is_prefill_chunk else [1] for name in names]
    made = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens)
    scheduler.update_from_output(done, made)


def fill(scheduler: Scheduler) -> list[Request]:
    """Eight sequences of one owner, one block each."""
    flood = [ask(scheduler, f"flood {number}", number) for number in range(MOST)]
    step(scheduler)
    assert [request.status for request in flood] == [RequestStatus.RUNNING] * MOST
    return flood


def steps_until(true: Callable[[], bool], scheduler: Scheduler) -> int:
    for number in range(1, 100):
        step(scheduler)
        if true():
            return number
    raise AssertionError("not within 100 steps")


def test_without_the_patch_a_newcomer_waits_until_an_answer_grows(scheduler):
    fill(scheduler)
    newcomer = ask(scheduler, "newcomer", 0)
    assert steps_until(lambda: newcomer.status == RequestStatus.RUNNING, scheduler) > BLOCK // 2


@pytest.mark.usefixtures("patched")
def test_a_newcomer_gets_the_blocks_of_who_has_the_most_in_the_next_step(scheduler):
    flood = fill(scheduler)
    newcomer = ask(scheduler, "newcomer", 0)
    assert steps_until(lambda: newcomer.status == RequestStatus.RUNNING, scheduler) == 2
    assert [request.status for request in flood] == [RequestStatus.RUNNING] * (MOST - 1) + [RequestStatus.PREEMPTED]
    assert newcomer.num_output_tokens == 1


@pytest.mark.usefixtures("patched")
def test_a_long_prompt_of_a_newcomer_takes_one_sequence_a_step(scheduler):
    flood = fill(scheduler)
    newcomer = ask(scheduler, "newcomer", 0, prompt=3 * BLOCK)
    assert steps_until(lambda: newcomer.status == RequestStatus.RUNNING, scheduler) == 4
    assert [request.status for request in flood].count(RequestStatus.PREEMPTED) == 3


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("ahead", "gets_them"), [(3, True), (4, False)])
def test_only_who_has_less_than_half_as_many_gets_them(scheduler, ahead, gets_them):
    flood = fill(scheduler)  # the last of them has seven ahead
    other = ask(scheduler, "other", ahead)
    for _ in range(BLOCK // 2):
        step(scheduler)
    assert (other.status == RequestStatus.RUNNING) == gets_them
    assert (flood[-1].status == RequestStatus.PREEMPTED) == gets_them


def read_together(prompts: int) -> tuple[Scheduler, list[Request]]:
    """Prompts of 200 tokens that are begun, in steps of 32 tokens."""
    scheduler = made(blocks=100, step=32)
    long = []
    for number in range(prompts):
        long.append(ask(scheduler, f"long {number}", 0, prompt=200))
        step(scheduler)
    return scheduler, long


def test_without_the_patch_a_short_question_waits_for_a_long_prompt():
    scheduler, (long,) = read_together(1)
    short = ask(scheduler, "short", 0)
    assert steps_until(lambda: short.num_output_tokens > 0, scheduler) == 6
    assert long.num_output_tokens > 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("prompts", [1, 2, 5])
def test_a_short_question_is_read_in_the_next_step_beside_long_prompts(prompts):
    scheduler, long = read_together(prompts)
    short = ask(scheduler, "short", 0)
    before = [one.num_computed_tokens for one in long]
    step(scheduler)
    assert short.num_output_tokens == 1
    assert all(one.num_computed_tokens > were for one, were in zip(long, before, strict=True))
    before = sum(one.num_computed_tokens for one in long)
    step(scheduler)  # nobody waits: all of it is for the prompts again
    assert sum(one.num_computed_tokens for one in long) - before == 31


@pytest.mark.usefixtures("patched")
def test_who_comes_after_all_that_are_read_takes_nothing_from_them():
    scheduler, (long,) = read_together(1)
    later = ask(scheduler, "later", 3)
    step(scheduler)
    assert (long.num_computed_tokens, later.num_computed_tokens) == (64, 0)


def batch(scheduler: Scheduler, lines: int, prompt: int = 4) -> list[Request]:
    return [ask(scheduler, f"line {number}", number, prompt, BACKGROUND_PRIORITY) for number in range(lines)]


def answers(requests: list[Request]) -> list[int]:
    """How many tokens each has been given since it was asked."""
    return [request.num_output_tokens for request in requests]


def be_quiet(scheduler: Scheduler) -> None:
    """Let the time pass in which the next question is expected."""
    scheduler.quiet_at = 0.0


def test_without_the_patch_all_lines_have_a_token_in_each_step_of_a_question():
    scheduler = made(blocks=100, places=64)
    lines = batch(scheduler, 8)
    step(scheduler)
    ask(scheduler, "question", 0)
    step(scheduler)
    assert answers(lines) == [2] * 8


@pytest.mark.usefixtures("patched")
def test_beside_a_question_a_few_lines_go_on_and_the_others_later_where_they_were():
    scheduler = made(blocks=100, places=64)
    lines = batch(scheduler, 8)
    step(scheduler)
    question = ask(scheduler, "question", 0)
    for _ in range(5):
        step(scheduler)
    assert question.num_output_tokens == 5
    assert answers(lines) == [6, 6] + [1] * 6
    scheduler.finish_requests([question.request_id], RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert answers(lines) == [7, 7] + [1] * 6  # the next question is expected
    scheduler.finish_requests([lines[0].request_id, lines[5].request_id], RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert answers(lines) == [7, 8, 2] + [1] * 5
    be_quiet(scheduler)
    step(scheduler)
    assert answers(lines) == [7, 9, 3, 2, 2, 1, 2, 2]
    assert [line.num_preemptions for line in lines] == [0] * 8


@pytest.mark.usefixtures("patched")
def test_lines_are_not_paused_for_a_batch_request():
    scheduler = made(blocks=100, places=64)
    lines = batch(scheduler, 8)
    step(scheduler)
    ask(scheduler, "item", 0, urgency=BATCH_PRIORITY)
    step(scheduler)
    assert answers(lines) == [2] * 8


@pytest.mark.usefixtures("patched")
def test_a_question_takes_blocks_of_paused_lines_and_they_answer_later_all_the_same():
    scheduler = made(blocks=MOST, places=64)
    lines = batch(scheduler, MOST)
    step(scheduler)
    question = ask(scheduler, "question", 0, prompt=3 * BLOCK)
    step(scheduler)
    assert question.num_output_tokens == 1
    assert [line.status for line in lines] == [RequestStatus.RUNNING] * 5 + [RequestStatus.PREEMPTED] * 3
    for _ in range(BLOCK):  # it grows, and so do the two that go on
        step(scheduler)
    assert question.num_output_tokens == BLOCK + 1
    assert question.num_preemptions == 0
    assert answers(lines)[:2] == [BLOCK + 2] * 2
    assert [line.status for line in lines[2:]].count(RequestStatus.PREEMPTED) == 6
    scheduler.finish_requests([question.request_id], RequestStatus.FINISHED_ABORTED)
    be_quiet(scheduler)
    for line in lines:  # each ends once it has two tokens more
        before = line.num_output_tokens
        steps_until(lambda line=line, before=before: line.num_output_tokens >= before + 2, scheduler)
        scheduler.finish_requests([line.request_id], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_unfinished_requests()


@pytest.mark.usefixtures("patched")
def test_who_waits_for_a_beginning_that_another_computes_in_this_step_takes_no_blocks_of_others():
    init_none_hash(sha256)
    scheduler = made(blocks=200, places=64, states=True)
    lines = batch(scheduler, 8)
    step(scheduler)
    ask(scheduler, "first", 0)
    step(scheduler)
    questions = [ask(scheduler, f"question {number}", 8 * number, prompt=3 * BLOCK + 1) for number in range(3)]
    step(scheduler)
    assert [one.num_computed_tokens for one in questions] == [3 * BLOCK, 0, 0], "vLLM puts off the others"
    steps_until(lambda: all(answers(questions)), scheduler)
    assert [line.num_preemptions for line in lines] == [0] * 8


@pytest.mark.usefixtures("patched")
def test_prompts_of_lines_are_read_one_at_a_time_in_parts_and_after_that_of_a_question():
    scheduler = made(blocks=200, step=1024, places=64)
    ask(scheduler, "question", 0)
    step(scheduler)
    lines = batch(scheduler, 2, prompt=250)
    step(scheduler)
    assert [line.num_computed_tokens for line in lines] == [250, 0]
    step(scheduler)
    assert [line.num_computed_tokens for line in lines] == [251, 250]
    other = ask(scheduler, "other", 0, prompt=250)
    later = ask(scheduler, "line 2", 2, 250, BACKGROUND_PRIORITY)
    step(scheduler)
    assert (other.num_output_tokens, later.num_computed_tokens) == (1, 0)
    assert answers(lines) == [3, 2]


@pytest.mark.usefixtures("patched")
def test_a_line_that_is_alone_in_the_time_after_a_question_is_read_in_parts_too():
    scheduler = made(blocks=200, step=1024, places=32)
    ask(scheduler, "question", 0, answer=1)
    step(scheduler)
    lines = batch(scheduler, 3, prompt=400)
    step(scheduler)
    assert [line.num_computed_tokens for line in lines] == [256, 0, 0]
    assert scheduler.max_num_scheduled_tokens == 1024
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


@pytest.mark.usefixtures("patched")
def test_a_line_whose_picture_fills_the_cache_is_read_to_its_end_and_then_that_of_a_question():
    scheduler = made(blocks=200, step=300, places=64)
    scheduler.max_num_encoder_input_tokens, scheduler.encoder_cache_manager = 1024, EncoderCacheManager(1024)
    ask(scheduler, "text", 0)
    step(scheduler)
    line = ask(scheduler, "line", 0, 900, BACKGROUND_PRIORITY, picture=800)
    step(scheduler)
    assert line.num_computed_tokens == 256
    question = ask(scheduler, "question", 0, 700, picture=600)
    steps_until(lambda: question.num_output_tokens > 0, scheduler)
    assert line.num_output_tokens > 0


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("seed", range(6))
def test_whatever_comes_and_goes_every_request_ends_with_all_of_its_tokens(seed):
    choose = random.Random(seed)  # noqa: S311  # repeatable on purpose
    scheduler = made(blocks=choose.choice([40, 100]), step=choose.choice([64, 512]), places=choose.choice([4, 40]))
    asked, cut = [], set()
    for number in range(300):
        if choose.random() < 0.4:
            urgency = choose.choice([0, BATCH_PRIORITY, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY])
            sizes = {"prompt": choose.randint(1, 200), "answer": choose.randint(1, 30)}
            asked.append(ask(scheduler, f"{number}", choose.randint(0, 9), urgency=urgency, **sizes))
        if choose.random() < 0.05 and asked and not (one := choose.choice(asked)).is_finished():
            scheduler.finish_requests([one.request_id], RequestStatus.FINISHED_ABORTED)
            cut.add(one.request_id)
        if choose.random() < 0.03:
            be_quiet(scheduler)
        step(scheduler)
    for _ in range(20_000):
        if not scheduler.has_unfinished_requests():
            break
        step(scheduler)
        if not any(request.priority < BATCH_PRIORITY for request in scheduler.running):
            be_quiet(scheduler)
    assert [one.num_output_tokens for one in asked if one.request_id not in cut] == [
        one.max_tokens for one in asked if one.request_id not in cut
    ]
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


@pytest.mark.usefixtures("patched")
def test_with_no_place_left_lines_are_not_paused():
    scheduler = made(blocks=100, places=4)
    lines = batch(scheduler, 4)
    step(scheduler)
    question = ask(scheduler, "question", 0)
    step(scheduler)
    assert answers(lines) == [2] * 4
    scheduler.finish_requests([lines[3].request_id], RequestStatus.FINISHED_ABORTED)
    step(scheduler)
    assert (answers(lines), question.num_output_tokens) == ([3, 2, 2, 2], 1)
