"""How requests of every kind get to models that take turns: nobody waits for ever for what another one has."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from skipping_loop import on_skipping_loop

from engine import Engine, ModelSpec, load_config
from engine.pool.memory import LONGEST_WAIT_SECONDS, SWAP_EVERY_SECONDS, Ledger, MemoryPlan, Share
from engine.pool.pool import Pool
from engine.stream import TokenStream
from engine.types import ChatRequest, TextRequest, Urgency

CONFIG = load_config(Path(__file__).parents[2] / "models.yaml")
# One background sequence at a time.
SPECS = [
    spec.model_copy(update={"engine": spec.engine.model_copy(update={"max_num_seqs": 2})})
    for spec in list(CONFIG.models.values())[:2]
]
PLUS, PRO = (spec.id for spec in SPECS)
ANSWER_SECONDS = 5.0


class Backend:
    """Answers whatever it is asked after a while."""

    def __init__(self) -> None:
        self.died = asyncio.Event()

    async def chat(self, _: ChatRequest, stream: TokenStream) -> None:
        asyncio.get_running_loop().call_later(ANSWER_SECONDS, stream.finish)

    async def text(self, _: TextRequest, stream: TokenStream) -> None:
        asyncio.get_running_loop().call_later(ANSWER_SECONDS, stream.finish)

    async def idle(self) -> None:
        """Nothing runs here."""

    async def sleep(self) -> bool:
        return False

    async def shutdown(self) -> None:
        """It ends at once."""

    def terminate(self) -> None:
        """It ends at once."""


async def load(_: ModelSpec, report: Any) -> Any:
    report("loading", 0.5)
    await asyncio.sleep(4)
    return Backend()


@dataclass
class House:
    """An engine of two chat models with room for one, whose backends are held open."""

    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        config = replace(CONFIG, models={spec.id: spec for spec in SPECS})
        self.engine = Engine(config, weights_dir=Path("nowhere"))
        plan = MemoryPlan({None: 10}, {name: Share({None: 10}, swaps=True) for name in (PLUS, PRO)})
        self.pool = Pool(SPECS, load, Ledger(plan))
        self.engine._pool = self.pool
        self.pool.start()

    async def ask(self, kind: str, model: str, urgency: Urgency, owner: str = "a") -> None:
        stream = TokenStream()
        if kind == "text":
            prompts = ("?",)
            text = TextRequest(request_id="r", model=model, prompts=prompts, owner=owner, urgency=urgency)
            await self.engine.text(text, stream)
        else:
            chat = ChatRequest(request_id="r", model=model, messages=[], owner=owner, urgency=urgency)
            await self.engine.chat(chat, stream)
        assert [step async for step in stream] == []


async def soon(*tasks: asyncio.Task[None], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await asyncio.gather(*tasks)


@on_skipping_loop
async def test_a_text_and_a_batch_of_one_model_that_is_to_make_room_do_not_wait_for_each_other() -> None:
    house = House()
    await asyncio.sleep(2 * SWAP_EVERY_SECONDS)
    # The place as background work is taken all the time, and PLUS never unused, when it is to make room.
    tasks = [
        asyncio.create_task(house.ask(kind, PLUS, Urgency.BATCH, owner))
        for owner in "abcdefgh"
        for kind in ("chat", "text")
    ]
    await asyncio.sleep(0)
    other = asyncio.create_task(house.ask("chat", PRO, Urgency.INTERACTIVE))
    await soon(other, seconds=LONGEST_WAIT_SECONDS + 2 * ANSWER_SECONDS + SWAP_EVERY_SECONDS)
    await soon(*tasks, seconds=300)
    await house.pool.stop()


@on_skipping_loop
async def test_background_work_that_waits_for_its_place_keeps_no_model_from_making_room() -> None:
    house = House()
    await asyncio.sleep(2 * SWAP_EVERY_SECONDS)
    async with asyncio.TaskGroup() as group:
        for owner in "abcdefgh":
            group.create_task(house.ask("text", PLUS, Urgency.BACKGROUND, owner))
        await asyncio.sleep(0)
        began = asyncio.get_running_loop().time()
        await house.ask("chat", PRO, Urgency.INTERACTIVE)
        waited = asyncio.get_running_loop().time() - began
        assert waited < LONGEST_WAIT_SECONDS + 3 * ANSWER_SECONDS
    await house.pool.stop()


REQUESTS = st.tuples(
    st.sampled_from(["chat", "text"]),
    st.sampled_from([PLUS, PRO]),
    st.sampled_from(list(Urgency)),
    st.sampled_from("abc"),
    st.floats(0, 120),
)


@settings(max_examples=60)
@given(st.lists(REQUESTS, min_size=1, max_size=14))
@on_skipping_loop
async def test_whoever_comes_when_and_for_what_is_answered(
    requests: list[tuple[str, str, Urgency, str, float]],
) -> None:
    async def one(house: House, kind: str, model: str, urgency: Urgency, owner: str, after: float) -> None:  # noqa: PLR0917  # what is drawn
        await asyncio.sleep(after)
        await house.ask(kind, model, urgency, owner)

    house = House()
    # A wait of ten minutes ends in an error: whatever waits so long waits for ever.
    await asyncio.gather(*(one(house, *request) for request in requests))
    await house.pool.stop()


@pytest.mark.parametrize("urgency", list(Urgency))
@on_skipping_loop
async def test_a_model_that_was_restarted_meanwhile_answers_what_can_wait(urgency: Urgency) -> None:
    house = House()
    await asyncio.sleep(2 * SWAP_EVERY_SECONDS)
    house.pool.get(PLUS).died.set()
    await asyncio.sleep(0.1)
    if urgency == Urgency.INTERACTIVE:
        with pytest.raises(ExceptionGroup) as refused:
            async with asyncio.TaskGroup() as group:
                group.create_task(house.ask("text", PLUS, urgency))
        assert "again" in str(refused.value.exceptions[0])
    else:
        await house.ask("text", PLUS, urgency)
    await house.pool.stop()
