"""A load says how long it takes yet, going by the last load of the same model in the same situation."""

import json
from pathlib import Path

import pytest

from engine import load_config
from engine.pool.model_state import ModelState
from engine.pool.records import TIMES_FILE, LoadTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def slot_of(clock: Clock, times: LoadTimes, models: Path) -> ModelState:
    spec = next(iter(load_config(models).models.values()))
    return ModelState(spec, times=times, clock=clock)


def load(slot: ModelState, clock: Clock) -> list[float | None]:
    """Wait 2 s, import 8 s, warm up 1 s; return what was said to be left halfway through each."""
    said = []
    for phase, progress, seconds in (("", 0.0, 2), ("importing", 0.1, 8), ("warming up", 0.9, 1)):
        if phase:
            slot.load_on(phase, progress)
        clock.now += seconds / 2
        said.append(slot.health().remaining_seconds)
        clock.now += seconds / 2
    slot.become_ready(object())  # type: ignore[arg-type]  # nobody asks it anything
    return said


@pytest.fixture
def models(request: pytest.FixtureRequest) -> Path:
    found: Path = request.config.rootpath / "models.yaml"
    return found


async def test_the_first_load_of_all_says_nothing_and_the_next_start_counts_down(tmp_path: Path, models: Path) -> None:
    clock = Clock()
    assert load(slot_of(clock, LoadTimes(tmp_path), models), clock) == [None, None, None]
    next_start = slot_of(clock, LoadTimes(tmp_path), models)
    assert load(next_start, clock) == [10.0, 5.0, 0.5]
    assert next_start.health().remaining_seconds is None  # it is ready


async def test_a_restart_is_not_taken_for_a_start(tmp_path: Path, models: Path) -> None:
    clock, times = Clock(), LoadTimes(tmp_path)
    slot = slot_of(clock, times, models)
    load(slot, clock)
    slot.lose()
    assert slot.health().remaining_seconds is None  # it was never restarted before
    load(slot, clock)
    slot.lose()
    assert slot.health().remaining_seconds == 11.0


async def test_to_wake_up_is_no_load(tmp_path: Path, models: Path) -> None:
    clock = Clock()
    slot = slot_of(clock, LoadTimes(tmp_path), models)
    load(slot, clock)
    slot.enter("sleeping", "makes room for another model")
    clock.now += 3600
    slot.become_ready(object())  # type: ignore[arg-type]  # nobody asks it anything
    assert load(slot_of(clock, LoadTimes(tmp_path), models), clock) == [10.0, 5.0, 0.5]
    slot.lose()
    assert slot.health().remaining_seconds is None  # it was never loaded a second time


async def test_a_load_that_takes_longer_than_the_last_has_no_time_left_but_goes_on(
    tmp_path: Path, models: Path
) -> None:
    clock = Clock()
    load(slot_of(clock, LoadTimes(tmp_path), models), clock)
    slot = slot_of(clock, LoadTimes(tmp_path), models)
    clock.now += 1000
    assert slot.health().remaining_seconds == 0.0


async def test_who_asks_for_a_model_too_early_is_told_when_to_come_back(tmp_path: Path, models: Path) -> None:
    clock = Clock()
    load(slot_of(clock, LoadTimes(tmp_path), models), clock)
    slot = slot_of(clock, LoadTimes(tmp_path), models)
    clock.now += 3.5
    assert slot.unavailable().retry_after_seconds == 8


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"seconds_to_ready": {"a": 1}}', '{"seconds_to_ready": {"a": {"b": "c"}}}']
)
async def test_a_file_that_makes_no_sense_is_as_good_as_none(tmp_path: Path, models: Path, text: str) -> None:
    (tmp_path / TIMES_FILE).write_text(text, encoding="utf-8")
    clock = Clock()
    assert load(slot_of(clock, LoadTimes(tmp_path), models), clock) == [None, None, None]
    assert json.loads((tmp_path / TIMES_FILE).read_text(encoding="utf-8"))["seconds_to_ready"]


async def test_a_folder_that_cannot_be_written_to_costs_the_estimate_alone(tmp_path: Path, models: Path) -> None:
    clock = Clock()
    load(slot_of(clock, LoadTimes(tmp_path / "missing"), models), clock)
    assert not (tmp_path / "missing").exists()
