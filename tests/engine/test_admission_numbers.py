"""What an admission reckons with: how long answers become, how full the cache is, and when to come again."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from skipping_loop import settle

from engine.admission import SEQUENCE, Admission, ChatTicket, Room, Ticket
from engine.errors import NotStartedError, OverloadedError
from engine.stream import TokenStream
from engine.types import ChatDelta, ChatRequest, ChatStep, Urgency, Usage


@dataclass
class Model:
    """An admission with a clock that is moved by hand."""

    room: Room
    now: float = 0.0
    waiting: list[asyncio.Task[Ticket]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.door = Admission(self.room, clock=lambda: self.now)
        self.runs = AsyncExitStack()

    async def ask(self, owner: str, *, prompt: int = 10, answer: int = 10, **more: Any) -> Ticket | None:
        """Return what was dispatched; None where it waits."""
        ticket = self.door.enter(owner, prompt_tokens=prompt, max_tokens=answer, **more)
        task = asyncio.create_task(self.runs.enter_async_context(ticket))
        await settle()
        if task.done():
            return await task
        self.waiting.append(task)
        return None

    def end(self, ticket: Ticket, answer: int, seconds: float = 0.0) -> None:
        """End it after so many seconds. It must not be ended again."""
        self.now = ticket.begun_at + seconds
        ticket.answer_tokens = answer
        self.door.end(ticket, cut_off=False)

    async def waits(self) -> float:
        """How long the next request of somebody is told to wait."""
        with pytest.raises(OverloadedError) as told:
            await self.door.enter("new", prompt_tokens=1, max_tokens=1).__aenter__()
        return told.value.retry_after_seconds


@pytest.fixture
async def model() -> AsyncIterator[Callable[..., Model]]:
    made: list[Model] = []

    def make(**room: Any) -> Model:
        made.append(Model(Room(**({"sequences": 4, "waiting": 8} | room))))
        return made[-1]

    yield make
    for one in made:
        for task in one.waiting:
            task.cancel()
        await asyncio.gather(*one.waiting, return_exceptions=True)


async def expected(model: Model, answer: int, **more: Any) -> float:
    return model.door.enter("x", prompt_tokens=1, max_tokens=answer, **more).expected_answer_tokens


async def test_an_answer_is_expected_as_long_as_the_mean_but_no_shorter_than_256_tokens_unless_asked(model):
    one = model()
    assert await expected(one, 100) == 100
    assert await expected(one, 5000) == 256
    assert await expected(one, 5000, sequences=3) == 3 * 256
    assert await expected(one, 5000, sequences=9) == 4 * 256, "no more than there are places"
    assert one.door.enter("x", prompt_tokens=1, max_tokens=7, sequences=3).longest_answer_tokens == 21
    one.end(await one.ask("a", answer=5000), 2256, seconds=5)
    assert await expected(one, 5000) == pytest.approx(256 + 0.05 * 2000)
    one.end(await one.ask("a", answer=5000, sequences=2), 200, seconds=5)
    assert await expected(one, 5000) == pytest.approx(356 - 0.05 * 256), "100 each"
    for _ in range(40):
        one.end(await one.ask("a"), 1, seconds=5)
    assert await expected(one, 5000) == 256


async def test_an_answer_that_was_cut_off_or_took_no_time_says_nothing_of_the_next(model):
    one = model()
    ticket = await one.ask("a", answer=5000)
    ticket.answer_tokens = 4000
    one.now = 60
    one.door.end(ticket, cut_off=True)
    one.end(await one.ask("a", answer=5000), 4000, seconds=0)
    one.end(await one.ask("a", answer=5000), 0, seconds=9)
    assert await expected(one, 5000) == 256


async def test_what_was_cut_off_is_charged_by_its_tokens_or_by_the_guess(model):
    one = model()
    ticket = await one.ask("a", answer=5000)
    ticket.answer_tokens = 30
    one.door.end(ticket, cut_off=True)
    assert ticket.cost == 10 + 2 * 30
    ticket = await one.ask("a", answer=5000)
    one.door.end(ticket, cut_off=True)
    assert ticket.cost == 10 + 2 * 256


@pytest.mark.parametrize(
    ("sequences", "waiting", "seconds"),
    [(1, 0, 5), (1, 1, 10), (2, 1, 5), (2, 2, 8), (4, 2, 4), (1, 40, 120), (99, 0, 1)],
)
async def test_a_refusal_tells_when_those_before_will_have_ended(model, sequences: int, waiting: int, seconds: int):
    one = model(sequences=sequences, waiting=waiting)
    for number in range(sequences + waiting):
        await one.ask(f"{number}")
    assert await one.waits() == seconds


async def test_how_long_answers_take_is_learned(model):
    one = model(sequences=1, waiting=0)
    one.end(await one.ask("a"), 10, seconds=105)
    await one.ask("a")
    assert await one.waits() == 5 + 0.05 * 100


async def test_what_takes_several_places_counts_for_as_many(model):
    one = model(sequences=8, waiting=0)
    one.end(await one.ask("a", sequences=8), 80, seconds=100)
    await one.ask("a", sequences=8)
    assert await one.waits() == math.ceil((5 + 0.05 * (8 * 100 - 5)) / 8)


def request(owner: str, urgency: Urgency = Urgency.INTERACTIVE) -> ChatRequest:
    return ChatRequest(model="m", request_id="r", messages=[], owner=owner, urgency=urgency)


async def test_it_is_idle_when_all_that_arrived_has_departed(model):
    one = model()
    assert one.door._idle.is_set()
    asked = request("a")
    one.door.arrive(asked)
    one.door.begin_work()
    one.door.depart(asked)
    assert not one.door._idle.is_set()
    one.door.end_work()
    await one.door.idle()


async def test_the_cache_is_filled_to_the_token(model):
    one = model(sequences=9, kv_room=300)
    await one.ask("a", prompt=100, answer=50)
    assert await one.ask("a", prompt=100, answer=51) is None
    two = model(sequences=9, kv_room=300)
    await two.ask("a", prompt=100, answer=50)
    assert await two.ask("a", prompt=100, answer=50) is not None


async def test_a_cache_nine_tenths_full_with_what_there_is_takes_no_more(model):
    for made, goes_in in ((80, True), (81, False)):
        one = model(sequences=9, kv_room=1000)
        await one.ask("a", prompt=20, answer=100, made=lambda made=made: made)
        assert (await one.ask("a", prompt=800, answer=1) is not None) == goes_in


async def test_who_has_less_than_an_equal_share_of_a_full_cache_is_let_in(model):
    one = model(sequences=99, kv_room=1000)
    await one.ask("a", prompt=900, answer=50)
    assert await one.ask("b", prompt=90) is not None
    second = await one.ask("b", prompt=340)  # 100 and 350 of 900 for two
    assert second is not None
    assert await one.ask("b", prompt=1) is None
    assert await one.ask("a", prompt=1) is None
    one.door.end(second, cut_off=False)
    assert one.door._kv_taken == {"a": 950, "b": 100 + 11}, "what waited is let in"


async def test_who_has_too_much_of_a_full_cache_holds_up_nobody_who_has_less(model):
    one = model(sequences=99, kv_room=1000)
    await one.ask("a", prompt=900, answer=50)
    assert await one.ask("b", prompt=90) is not None
    assert await one.ask("a", prompt=1) is None  # it is at the head of the queue: b has had the last turn
    assert await one.ask("b", prompt=1) is not None
    assert await one.ask("b", prompt=400) is None, "that would be more than half"
    assert await one.ask("b", prompt=1) is None, "a key's own requests keep their order"
    assert await one.ask("c", prompt=900) is not None, "a newcomer"


async def test_behind_one_with_too_much_of_a_full_cache_a_smaller_one_with_too_much_waits_and_others_do_not(model):
    one = model(sequences=99, kv_room=1000)
    await one.ask("first", prompt=500, weight=1000.0)
    await one.ask("second", prompt=290)
    await one.ask("third", prompt=10, weight=0.01)
    assert await one.ask("first", prompt=400, weight=1000.0) is None
    assert await one.ask("second", prompt=50, answer=0) is None, "it would be 350 of 300, and 880 of 1000"
    assert await one.ask("third", prompt=10, weight=0.01) is not None


async def test_one_that_is_refused_and_left_at_the_same_moment_takes_no_place(model):
    one = model(sequences=1)
    await one.ask("a")
    assert await one.ask("a") is None
    one.door.close()
    one.waiting[0].cancel()
    await asyncio.gather(*one.waiting, return_exceptions=True)
    assert one.door.running == 1


async def test_a_batch_has_no_share_of_a_full_cache(model):
    one = model(sequences=99, kv_room=1000)
    first = await one.ask("a", prompt=950, answer=50)
    assert await one.ask("b", prompt=1, urgency=Urgency.BATCH) is None
    assert await one.ask("a", prompt=1) is None
    assert await one.ask("b", prompt=1) is not None, "a newcomer"
    one.door.end(first, cut_off=False)
    assert one.door._kv_taken == {"a": 11, "b": 22}


async def test_where_places_lack_nobody_of_the_same_standing_goes_past(model):
    one = model(sequences=8, kv_room=100_000)
    await one.ask("a")
    await one.ask("b")
    assert await one.ask("a", sequences=7) is None
    assert await one.ask("b") is None


async def test_what_outgrew_its_expectation_counts_for_its_owner(model):
    for prompt, goes_in in ((390, True), (391, False)):  # 100 and 400 of 900 for two are taken, and 10 expected
        one = model(sequences=99, kv_room=2000)
        await one.ask("a", prompt=1990)
        await one.ask("b", prompt=100, answer=9999, made=lambda: 200)
        assert (await one.ask("b", prompt=prompt) is not None) == goes_in


async def test_an_answer_longer_than_expected_is_expected_to_become_twice_as_long_but_no_longer_than_asked(model):
    for made, longest, most in ((200, 9999, 589), (256, 9999, 477), (300, 400, 589)):
        for prompt, goes_in in ((most, True), (most + 1, False)):
            one = model(sequences=9, kv_room=1000)
            await one.ask("a", prompt=10, answer=longest, made=lambda made=made: made)
            assert (await one.ask("a", prompt=prompt, answer=1) is not None) == goes_in


async def test_how_full_the_cache_is_is_read_at_most_every_50_ms_and_whenever_something_ends(model):
    reads = []
    one = model(sequences=9, kv_room=100_000)
    first = await one.ask("a", made=lambda: len(reads.append(1) or reads))
    for now, read in ((0.0, 1), (0.04, 1), (0.05, 2), (0.09, 2), (0.2, 3)):
        one.now = now
        await one.ask("a")
        assert len(reads) == read, now
    assert await one.ask("a", prompt=200_000) is None
    one.door.end(first, cut_off=False)
    one.waiting.clear()


async def test_places_are_kept_to_the_last_one(model):
    one = model(sequences=8, kept_for_interactive=3, kept_for_newcomers=1)
    await one.ask("a")
    assert await one.ask("a", sequences=5, urgency=Urgency.BATCH) is None
    two = model(sequences=8, kept_for_interactive=3, kept_for_newcomers=1)
    await two.ask("a")
    assert await two.ask("a", sequences=4, urgency=Urgency.BATCH) is not None
    assert await two.ask("a", sequences=3) is None
    three = model(sequences=8, kept_for_interactive=3, kept_for_newcomers=1)
    await three.ask("a")
    assert await three.ask("a", sequences=6) is not None
    assert await three.ask("b", sequences=2) is None
    four = model(sequences=8, kept_for_interactive=0, kept_for_newcomers=2)
    await four.ask("a")
    assert await four.ask("a", sequences=6, urgency=Urgency.BATCH) is None, "kept for newcomers from batches, too"


async def test_priorities_go_by_urgency_then_by_sequences_then_by_size(model):
    one = model(sequences=100)
    first = await one.ask("a", prompt=100, answer=20)
    assert first.priority == 120
    second = await one.ask("a", prompt=100, answer=20, sequences=3, weight=2.0)
    assert second.priority == SEQUENCE // 2 + (100 + 3 * 20) // 3
    large = await one.ask("b", prompt=2 * SEQUENCE, answer=20)
    assert large.priority == SEQUENCE - 1
    batch = await one.ask("c", prompt=1, answer=1, urgency=Urgency.BATCH)
    assert batch.priority == 2**40 + 2
    background = await one.ask("d", prompt=1, answer=1, urgency=Urgency.BACKGROUND)
    assert background.priority == 2**41 + 2


async def test_an_admission_that_is_closed_refuses_all(model):
    one = model(sequences=1)
    await one.ask("a")
    assert await one.ask("a") is None
    one.door.close()
    with pytest.raises(NotStartedError):
        await one.waiting[0]
    with pytest.raises(NotStartedError):
        await one.ask("b")
    assert one.door.waiting == 0


async def test_a_larger_room_lets_in_what_waits(model):
    one = model(sequences=1)
    await one.ask("a")
    assert await one.ask("a") is None
    one.door.resize(Room(sequences=2, waiting=8))
    assert (await one.waiting[0]).begun_at == 0.0
    assert one.door.running == 2


def chat_step(tokens: int) -> ChatStep:
    return ChatStep((ChatDelta(0, "x"),), Usage(10, tokens))


async def test_a_request_is_at_the_admission_until_its_stream_ends(model):
    one, stream, charged = model(), TokenStream(), []

    async def charge(prompt: int, answer: int) -> None:
        charged.append((prompt, answer))

    asked = replace(request("a"), before_turn=charge, queue_share=2.0)
    with ChatTicket(one.door, asked, 2, stream) as ticket:
        assert await ticket.enter(100, 5000) == (100 + 2 * 256) // 2
    assert charged == [(100, 5000)]
    assert ticket._ticket.longest_answer_tokens == 5000
    assert (one.door.running, one.door._idle.is_set()) == (2, False)
    stream.put(chat_step(700))
    assert ticket._ticket.made() == 700
    one.now = 1.0
    stream.finish()
    assert (one.door.running, one.door._idle.is_set()) == (0, True)
    assert ticket._ticket.cost == (100 + 2 * 700) / 2
    assert await expected(one, 5000) == pytest.approx(256 + 0.05 * (350 - 256))


async def test_a_request_whose_stream_breaks_off_or_that_never_got_that_far_leaves_too(model):
    one, stream = model(), TokenStream()
    with ChatTicket(one.door, request("a"), 1, stream) as ticket:
        await ticket.enter(100, 5000)
    stream.put(chat_step(4000))
    one.now = 1.0
    stream.close()
    with suppress(ValueError), ChatTicket(one.door, request("a"), 1, TokenStream()):
        assert not one.door._idle.is_set()
        raise ValueError
    assert (one.door.running, one.door._idle.is_set()) == (0, True)
    assert await expected(one, 5000) == 256


async def test_one_that_is_left_by_an_error_was_cut_off(model):
    one = model()
    with suppress(ValueError):
        async with one.door.enter("a", prompt_tokens=1, max_tokens=5000) as ticket:
            ticket.answer_tokens, one.now = 4000, 1.0
            raise ValueError
    assert await expected(one, 5000) == 256
    async with one.door.enter("a", prompt_tokens=1, max_tokens=5000) as ticket:
        ticket.answer_tokens, one.now = 2256, 2.0
    assert await expected(one, 5000) == 356
