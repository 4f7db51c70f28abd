"""The door of a model: never more than it holds, fair between keys, and nobody waits for ever."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skipping_loop import settle

from engine.admission import PATIENCE_SECONDS, SEQUENCE, Admission, KvGroup, Room
from engine.errors import OverloadedError
from engine.types import ChatRequest, Urgency


@dataclass
class House:
    """An admission with a clock that is moved by hand, and a book of who was let in."""

    room: Room
    now: float = 0.0
    served: list[str] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    ends: dict[str, asyncio.Event] = field(default_factory=dict)
    priorities: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.door = Admission(self.room, clock=lambda: self.now)

    async def ask(self, owner: str, *, prompt: int = 10, answer: int = 10, name: str = "", **more: Any) -> str:
        """Start a request that runs until `finish`; return its name when it waits or runs."""
        name = name or f"{owner}{len(self.tasks)}"
        self.ends[name] = asyncio.Event()
        self.tasks.append(asyncio.create_task(self._run(owner, name, prompt, answer, more), name=name))
        await settle()
        return name

    async def finish(self, name: str) -> None:
        self.ends[name].set()
        await settle()

    async def leave(self, name: str) -> None:
        """The client of a request is gone."""
        next(task for task in self.tasks if task.get_name() == name).cancel()
        await settle()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        assert (self.door.running, self.door.waiting) == (0, 0)

    async def _run(self, owner: str, name: str, prompt: int, answer: int, more: dict[str, Any]) -> None:
        async with self.door.enter(owner, prompt_tokens=prompt, max_tokens=answer, **more) as ticket:
            self.served.append(name)
            self.priorities[name] = ticket.priority
            await self.ends[name].wait()
            ticket.answer_tokens = answer


async def test_what_fits_goes_straight_in_and_the_rest_waits_in_order():
    house = House(Room(sequences=2, waiting=10))
    first, second, third, fourth = [await house.ask("a") for _ in range(4)]
    assert house.served == [first, second]
    await house.finish(second)
    assert house.served == [first, second, third]
    await house.finish(first)
    assert house.served == [first, second, third, fourth]
    await house.close()


async def test_who_comes_later_with_one_request_goes_before_the_rest_of_a_flood():
    house = House(Room(sequences=1, waiting=100))
    flood = [await house.ask("a") for _ in range(20)]
    other = await house.ask("b")
    await house.finish(flood[0])
    assert house.served[-1] == other
    await house.close()


async def test_first_come_first_served_lets_the_flood_go_first():
    house = House(Room(sequences=1, waiting=100, fair=False))
    flood = [await house.ask("a") for _ in range(20)]
    other = await house.ask("b")
    for name in flood[:19]:
        await house.finish(name)
    assert other not in house.served
    await house.finish(flood[19])
    assert house.served[-1] == other
    await house.close()


async def test_service_is_shared_by_tokens_and_not_by_requests():
    house = House(Room(sequences=1, waiting=200))
    for _ in range(60):
        await house.ask("long", prompt=100, answer=100)
        await house.ask("short", prompt=10, answer=10)
    for _ in range(60):
        await house.finish(house.served[-1])
    # A long one costs 300, a short one 30.
    assert sum(name.startswith("long") for name in house.served) == pytest.approx(6, abs=2)
    await house.close()


async def test_a_heavier_tier_gets_its_share():
    house = House(Room(sequences=1, waiting=200))
    for _ in range(60):
        await house.ask("heavy", weight=3.0)
        await house.ask("light", weight=1.0)
    for _ in range(40):
        await house.finish(house.served[-1])
    assert sum(name.startswith("heavy") for name in house.served) == pytest.approx(30, abs=3)
    await house.close()


async def test_a_pause_saves_nothing_up():
    house = House(Room(sequences=1, waiting=200))
    first = await house.ask("late")
    await house.finish(first)
    busy = [await house.ask("busy") for _ in range(100)]
    for name in busy[:50]:
        await house.finish(name)
    for _ in range(50):
        await house.ask("late")
    for _ in range(20):
        await house.finish(house.served[-1])
    latest = house.served[-20:]
    assert sum(name.startswith("late") for name in latest) == pytest.approx(10, abs=1)
    await house.close()


async def test_interactive_before_batch_before_background():
    house = House(Room(sequences=1, waiting=10))
    running = await house.ask("x")
    background = await house.ask("a", urgency=Urgency.BACKGROUND)
    batch = await house.ask("b", urgency=Urgency.BATCH)
    interactive = await house.ask("c")
    for name in (running, interactive, batch):
        await house.finish(name)
    assert house.served == [running, interactive, batch, background]
    await house.close()


async def test_a_background_request_that_has_waited_long_counts_as_a_batch_and_never_as_interactive():
    house = House(Room(sequences=1, waiting=100))
    talk = await house.ask("talker")
    background = await house.ask("a", urgency=Urgency.BACKGROUND)
    house.now += 10 * PATIENCE_SECONDS
    batch = await house.ask("b", urgency=Urgency.BATCH)
    chats = [await house.ask("talker") for _ in range(5)]
    for name in (talk, *chats):
        await house.finish(name)
        assert house.served[-1] in {*chats, background}
    assert house.served[-2:] == [chats[-1], background]  # among batches by the tokens of its owner
    await house.finish(background)
    assert house.served[-1] == batch
    await house.close()


async def test_a_batch_that_has_waited_long_enough_counts_as_interactive():
    house = House(Room(sequences=1, waiting=100))
    talk = await house.ask("talker")
    batch = await house.ask("b", urgency=Urgency.BATCH)
    for _ in range(5):
        await house.ask("talker")
    await house.finish(talk)
    assert batch not in house.served
    house.now += PATIENCE_SECONDS
    await house.finish(house.served[-1])
    assert house.served[-1] == batch
    await house.close()


async def test_places_are_kept_for_interactive_requests_and_for_newcomers():
    house = House(Room(sequences=8, waiting=100, kept_for_interactive=3, kept_for_newcomers=1))
    for _ in range(20):
        await house.ask("batcher", urgency=Urgency.BATCH)
    assert house.door.running == 5
    for _ in range(20):
        await house.ask("flooder")
    assert house.door.running == 7
    newcomer = await house.ask("newcomer")
    assert house.served[-1] == newcomer
    assert house.door.running == 8
    await house.close()


async def test_a_large_request_is_not_passed_for_ever_by_small_ones():
    house = House(Room(sequences=8, waiting=100))
    small = [await house.ask("small") for _ in range(8)]
    large = await house.ask("large", sequences=8)
    for _ in range(20):
        await house.ask("small")
    for name in small:
        await house.finish(name)
    assert house.served[-1] == large
    await house.close()


@pytest.mark.parametrize(("urgency", "most"), [(Urgency.INTERACTIVE, 7), (Urgency.BATCH, 6)])
async def test_one_that_needs_all_but_the_kept_places_is_not_passed_for_ever(urgency: Urgency, most: int):
    house = House(Room(sequences=8, waiting=100, kept_for_interactive=2, kept_for_newcomers=1))
    await house.ask("large", urgency=urgency)  # runs on, so that it is no newcomer
    for _ in range(40):
        await house.ask("small", urgency=urgency)
    large = await house.ask("large", sequences=most - 2, urgency=urgency)
    small = iter([name for name in house.ends if name.startswith("small")])
    for _ in range(2 * most):
        await house.finish(next(small))
    assert large in house.served
    assert house.door.running in {most - 1, most}
    await house.close()


async def test_more_sequences_than_there_is_room_for_run_alone():
    house = House(Room(sequences=2, waiting=10))
    one = await house.ask("a")
    many = await house.ask("b", sequences=8)
    await house.finish(one)
    assert house.served == [one, many]
    assert house.door.running == 2
    await house.close()


async def test_conversations_that_do_not_fit_into_the_cache_wait_but_newcomers_do_not():
    house = House(Room(sequences=100, waiting=100, kv_room=1000))
    tiny = await house.ask("a")
    first, second = [await house.ask("a", prompt=600, answer=100) for _ in range(2)]
    assert house.served == [tiny, first]
    newcomer = await house.ask("b", prompt=600, answer=100)
    assert house.served == [tiny, first, newcomer]
    await house.finish(first)
    assert second not in house.served
    await house.finish(newcomer)
    assert house.served[-1] == second
    await house.close()


async def test_many_short_answers_do_not_let_many_long_ones_in_at_once():
    house = House(Room(sequences=100, waiting=100, kv_room=256 * 10))
    for _ in range(200):
        await house.finish(await house.ask("a", prompt=0, answer=1))
    for _ in range(20):
        await house.ask("a", prompt=0, answer=1800)
    assert house.door.running == 10
    await house.close()


async def test_answers_that_grow_beyond_what_was_expected_keep_others_out_but_no_newcomer():
    house = House(Room(sequences=100, waiting=100, kv_room=10_000))
    made = 0
    for _ in range(8):
        await house.ask("a", prompt=0, answer=1800, made=lambda: made)
    house.now, made = 1.0, 700  # so that each of them is expected to become 1,400
    waiting = await house.ask("a", prompt=0, answer=1800)
    assert waiting not in house.served
    newcomer = await house.ask("b", prompt=0, answer=1800)
    assert newcomer in house.served
    house.now, made = 2.0, 200
    await house.finish(newcomer)
    assert waiting in house.served
    await house.close()


async def test_what_an_answer_leaves_is_seen_at_once():
    house = House(Room(sequences=100, waiting=100, kv_room=10_000))
    short = await house.ask("a", prompt=1_400, answer=10, made=lambda: 10)
    large = await house.ask("a", prompt=10, answer=9_990, made=lambda: 4_500)  # is expected to become 9,000
    house.now = 1.0
    waiting = await house.ask("a", prompt=100, answer=10)
    assert house.served == [short, large]
    await house.finish(large)  # at the same moment, and the other one runs on
    assert waiting in house.served
    await house.close()


async def test_a_cache_that_is_nearly_full_takes_only_newcomers():
    house = House(Room(sequences=100, waiting=100, kv_room=10_000))
    await house.ask("a", prompt=9_100, answer=10, made=lambda: 10)
    second, newcomer = await house.ask("a", prompt=10, answer=10), await house.ask("b", prompt=10, answer=10)
    assert second not in house.served
    assert newcomer in house.served
    await house.close()


async def test_each_sequence_takes_blocks_of_every_group_of_the_cache():
    # 100 blocks of 784 tokens: one for the tokens, and two of each of three groups with states
    groups = (KvGroup(784), *3 * [KvGroup(784, most_blocks=2)])
    house = House(Room(sequences=100, waiting=100, kv_room=100, kv_groups=groups))
    short = [await house.ask("a", prompt=100, answer=100) for _ in range(30)]
    assert len(house.served) == 25, "of four blocks each"
    await house.finish(short[0])
    long = await house.ask("a", prompt=7_000, answer=100)
    assert long not in house.served
    for one in short[1:]:
        await house.finish(one)
    assert long in house.served
    several = await house.ask("a", prompt=100, answer=100, sequences=15)
    assert several in house.served, "84 blocks, of which the long one takes 10 and 6"
    waiting = await house.ask("a", prompt=100, answer=100, sequences=7)
    assert waiting not in house.served
    await house.close()


def test_a_group_of_layers_takes_as_many_blocks_as_it_keeps_tokens():
    window = KvGroup(16, most_blocks=9)
    assert [window.blocks_of(tokens) for tokens in (1, 16, 17, 128, 129, 5000)] == [1, 1, 2, 8, 9, 9]
    assert KvGroup(16).blocks_of(5000) == 313


async def test_the_youngest_of_the_owner_with_the_most_is_preempted_first_and_no_newcomer():
    """vLLM preempts what has the largest priority."""
    house = House(Room(sequences=100, waiting=100))
    flood = [await house.ask("a", prompt=1, answer=1) for _ in range(5)]
    several = await house.ask("b", prompt=1, answer=1, sequences=8)
    large = await house.ask("c", prompt=100_000, answer=1)
    heavy = [await house.ask("d", prompt=1, answer=1, weight=2.0) for _ in range(3)]
    batch = await house.ask("e", prompt=1, answer=1, urgency=Urgency.BATCH)
    rank = house.priorities
    assert [*flood] == sorted(flood, key=rank.__getitem__)
    assert rank[several] < rank[large] < rank[heavy[1]] < rank[flood[1]] == rank[heavy[2]] < rank[batch]
    assert rank[flood[1]] // SEQUENCE == rank[several] // SEQUENCE + 1  # like the second sequence of the same request
    await house.finish(flood[0])
    again = await house.ask("a", prompt=1, answer=1)
    assert rank[again] == rank[flood[4]]
    await house.close()


async def test_first_come_first_served_has_the_youngest_preempted():
    house = House(Room(sequences=9, waiting=9, fair=False))
    names = [await house.ask(owner, prompt=prompt) for owner, prompt in (("a", 10), ("a", 20), ("b", 30))]
    assert {house.priorities[name] for name in names} == {0}
    batch = await house.ask("b", urgency=Urgency.BATCH)
    assert house.priorities[batch] > 0
    await house.close()


async def test_a_full_queue_refuses_the_flood_and_not_the_newcomer():
    house = House(Room(sequences=1, waiting=5))
    flood = [await house.ask("a") for _ in range(6)]
    with pytest.raises(OverloadedError) as caught:
        async with house.door.enter("a", prompt_tokens=1, max_tokens=1):
            pass
    assert 1 <= caught.value.retry_after_seconds <= 120
    newcomer = await house.ask("b")
    refused = next(task for task in house.tasks if task.get_name() == flood[-1])
    assert isinstance(refused.exception(), OverloadedError)
    await house.finish(flood[0])
    assert house.served[-1] == newcomer
    await house.close()


async def test_who_leaves_the_queue_leaves_no_hole():
    house = House(Room(sequences=1, waiting=10))
    names = [await house.ask("a") for _ in range(4)]
    await house.leave(names[1])
    await house.leave(names[0])
    assert house.served == [names[0], names[2]]
    await house.close()


async def test_a_client_that_leaves_at_the_moment_of_its_turn_gives_the_place_on():
    house = House(Room(sequences=1, waiting=10))
    first, second, third = [await house.ask("a") for _ in range(3)]
    house.ends[first].set()
    await asyncio.sleep(0)
    await house.leave(second)
    if second in house.served:
        await house.finish(second)
    assert house.served[-1] == third
    await house.close()


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 2), st.integers(0, 2))
def test_in_any_order_of_events_the_room_holds_and_everybody_is_served(seed: int, size: int, kept: int, newcomers: int):
    async def play() -> None:
        rng = random.Random(seed)  # noqa: S311 - repeatable draws, no secrets
        room = Room(size, waiting=1000, kept_for_interactive=min(kept, size), kept_for_newcomers=min(newcomers, size))
        house = House(room)
        for _ in range(60):
            action = rng.random()
            open_names = [name for name in house.served if not house.ends[name].is_set()]
            if action < 0.6 or not open_names:
                await house.ask(
                    rng.choice("abcd"),
                    prompt=rng.randint(1, 100),
                    answer=rng.randint(1, 100),
                    sequences=rng.randint(1, 8),
                    urgency=rng.choice(list(Urgency)),
                )
            elif action < 0.9:
                await house.finish(rng.choice(open_names))
            else:
                await house.leave(rng.choice(house.tasks).get_name())
            assert house.door.running <= size
        while house.door.running:
            for name in house.served:
                house.ends[name].set()
            await settle()
        assert house.door.waiting == 0
        await house.close()

    asyncio.run(play())


async def test_a_thousand_owners_are_let_in_and_forgotten():
    door = Admission(Room(sequences=64, waiting=5000))

    async def one(owner: int) -> None:
        async with AsyncExitStack() as stack:
            ticket = await stack.enter_async_context(door.enter(str(owner), prompt_tokens=owner, max_tokens=5))
            await asyncio.sleep(0)
            ticket.answer_tokens = 5

    await asyncio.gather(*(one(owner) for owner in range(1100)))
    assert (door.running, door.waiting) == (0, 0)
    assert len(door._queue._counters) < 1100


async def test_more_than_a_share_is_refused_before_any_work_is_done_for_it():
    door = Admission(Room(sequences=2, waiting=4))

    def request(owner: str, urgency: Urgency = Urgency.INTERACTIVE) -> ChatRequest:
        return ChatRequest(request_id="r", model="m", messages=[], owner=owner, urgency=urgency)

    flood = [request("flooder") for _ in range(6)]
    for one in flood:  # so many can run or wait; none has been sized yet
        door.arrive(one)
    with pytest.raises(OverloadedError) as refusal:
        door.arrive(request("flooder"))
    assert refusal.value.retry_after_seconds == 13, "five before the next two places, at 5 s each"
    others = [
        request("flooder", Urgency.BATCH),
        *(request("neighbour") for _ in range(3)),
    ]  # a neighbour's share is half
    for one in others:
        door.arrive(one)
    with pytest.raises(OverloadedError):
        door.arrive(request("neighbour"))
    for one in flood + others:
        door.depart(one)
    door.arrive(request("flooder"))
    door.depart(request("flooder"))
    assert not door._in_flight
