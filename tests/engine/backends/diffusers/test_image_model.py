"""An image model with its worker: the queue, several images, leaving, dying. Real processes; the weights are random."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from image_studio import apart, opened
from serving import async_poll_until

from engine import EngineDiedError, FinishedImage, GenerationError, ImageProgress, ImageRequest, LoadError
from engine.backends.diffusers.model import ImageModel
from engine.config.models import ImageEngineSpec, ImageModelSpec
from engine.media import ImageLimits, Pictures
from engine.stream import ImageStream

pytestmark = pytest.mark.engine

BATCHES = {"256x256": 4, "512x512": 2, "1024x1024": 1}
RENDER = {"256x256": 64, "512x512": 128, "1024x1024": 128}
PROFILE = {"steps": {"standard": 4, "hd": 200}, "render_size": RENDER, "max_batch": BATCHES}


def spec(**engine: Any) -> ImageModelSpec:
    changes = ImageEngineSpec.model_validate({**PROFILE, **engine})
    return ImageModelSpec(
        id="draws",
        tier="t",
        weights="draws",
        task="image",
        capabilities=("image_generation",),
        profile="demo",
        engine=changes,
    )


async def load(folder: Path, **engine: Any) -> ImageModel:
    it = spec(**engine)
    return await ImageModel.load(
        it,
        it.profile_of(demo=False),
        folder,
        Pictures(ImageLimits()),
        threads=1,
        mark=True,
        on_cpu=True,
        report=lambda *_: None,
    )


@pytest.fixture(scope="module")
def folder(folders: Callable[[str], Path]) -> Path:
    return folders("z_image")


@pytest_asyncio.fixture(scope="module")
async def model(folder: Path) -> AsyncIterator[ImageModel]:
    it = await load(folder)
    yield it
    await it.shutdown()


def request(prompt: str = "a red circle", **fields: Any) -> ImageRequest:
    return ImageRequest(**{"request_id": "r", "model": "draws", "prompt": prompt, "size": 256, "owner": "a", **fields})


def images(model: ImageModel, asked: ImageRequest) -> ImageStream:
    stream = ImageStream()
    model.images(asked, stream)
    return stream


async def made(model: ImageModel, asked: ImageRequest) -> dict[int, FinishedImage]:
    return {event.index: event async for event in images(model, asked) if isinstance(event, FinishedImage)}


async def test_several_images_have_their_own_seeds_and_are_told_step_by_step(model: ImageModel):
    events = [event async for event in images(model, request(n=3, seed=2**63 - 1))]
    finished = {event.index: event for event in events if isinstance(event, FinishedImage)}
    assert {index: image.seed for index, image in finished.items()} == {0: 2**63 - 1, 1: 0, 2: 1}
    assert len({opened(image.data).tobytes() for image in finished.values()}) == 3
    for index in range(3):
        steps = [event.step for event in events if isinstance(event, ImageProgress) and event.index == index]
        assert steps == [1, 2, 3, 4]
    assert {opened(image.data).size for image in finished.values()} == {(256, 256)}


async def test_a_seed_gives_the_same_image_alone_and_among_strangers(model: ImageModel):
    alone = (await made(model, request(seed=5)))[0]
    strangers = [request(f"number {number}", seed=number, owner=str(number)) for number in range(7)]
    among, *_ = await asyncio.gather(*(made(model, one) for one in [request(seed=5), *strangers]))
    assert apart(alone.data, among[0].data) <= 1
    other = (await made(model, request(seed=6)))[0]
    assert apart(alone.data, other.data) > 1, "the comparison would notice nothing"


async def test_a_newcomer_does_not_wait_for_the_steps_of_a_stranger(model: ImageModel):
    ended: list[str] = []
    streams = {"long": ImageStream(), "short": ImageStream()}
    os.kill(model.worker.pid, signal.SIGSTOP)  # it sees both at once, however long it takes to ask them
    for name, stream in streams.items():
        stream.on_end(lambda _, name=name: ended.append(name))
        model.images(request(quality="hd" if name == "long" else "standard", size=512, owner=name), stream)
    await async_poll_until(lambda: model.worker.jobs == 2, 60)
    os.kill(model.worker.pid, signal.SIGCONT)
    for stream in streams.values():
        assert isinstance([event async for event in stream][-1], FinishedImage)
    assert ended == ["short", "long"]


async def test_who_leaves_frees_the_place_at_once(model: ImageModel):
    async with aclosing(images(model, request(quality="hd", size=1024, n=4))) as events:
        await anext(events)
        assert model.admission.running == 1
    assert (model.admission.running, model.admission.waiting) == (0, 0)
    assert len(await made(model, request(size=1024, owner="b"))) == 1


async def test_who_waits_is_served_fairly(model: ImageModel):
    ended: list[str] = []

    async def one(owner: str) -> None:
        await made(model, request(size=1024, owner=owner))
        ended.append(owner)

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(one("many"))
        group.create_task(one("few"))
    assert ended.index("few") <= 2, ended


async def test_what_before_turn_raises_refuses_everything_and_nothing_runs(model: ImageModel):
    asked: list[int] = []

    async def refuse(images: int) -> None:
        asked.append(images)
        raise LookupError("no images left")

    with pytest.raises(LookupError):
        await made(model, request(n=4, before_turn=refuse))
    assert asked == [4]
    assert model.admission.running == 0


async def test_an_image_that_takes_too_long_is_given_up(folder: Path):
    model = await load(folder, max_seconds=0.001)
    try:
        with pytest.raises(GenerationError, match=r"longer than 0\.001 s"):
            await made(model, request(quality="hd"))
    finally:
        await model.shutdown()


async def test_a_killed_worker_ends_its_requests_those_that_wait_too(folder: Path):
    model = await load(folder)
    os.kill(model.worker.pid, signal.SIGSTOP)  # none of them ends before
    waits = [asyncio.create_task(made(model, request(size=1024, n=2, owner=owner))) for owner in "abc"]
    await async_poll_until(lambda: bool(model.worker.jobs and model.admission.waiting), 60)
    os.kill(model.worker.pid, signal.SIGKILL)
    outcomes = await asyncio.gather(*waits, return_exceptions=True)
    assert all(isinstance(outcome, EngineDiedError) for outcome in outcomes)
    await model.died.wait()
    with pytest.raises(EngineDiedError):
        await made(model, request())


async def test_a_folder_that_cannot_be_trusted_is_refused_by_name(folder: Path, tmp_path: Path):
    """By the worker; test_diffusers_load.py has every reason."""
    folder = shutil.copytree(folder, tmp_path / "broken")
    config = json.loads((folder / "transformer/config.json").read_text())
    (folder / "transformer/config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "x.Y"}}))
    with pytest.raises(LoadError, match="auto_map"):
        await load(folder)
