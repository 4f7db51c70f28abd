"""A start that nobody waits for any longer, and the seeds of several answers."""

import multiprocessing
import signal
import time

import numpy as np
import pytest

from engine.backends.vllm.processes import EngineWatch
from engine.backends.vllm.request import seed_of_answer

pytestmark = pytest.mark.engine

LEAST, MOST = -(2**63), 2**63 - 1


async def test_a_process_that_begins_after_its_start_was_given_up_is_killed():
    watch = EngineWatch("a model", None)
    watch.end()
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    watch.started(process)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("seed", [LEAST, -9, -2, -1, 0, 7, MOST - 3, MOST])
def test_each_answer_has_a_seed_of_its_own_that_fits_vllm_and_says_not_none(seed: int):
    seeds = [seed_of_answer(seed, index) for index in range(8)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 8
    assert np.array(seeds, dtype=np.int64).tolist() == seeds
    assert -1 not in seeds[1:]
    if 0 <= seed < MOST - 8:
        assert seeds == list(range(seed, seed + 8))
