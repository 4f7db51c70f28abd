"""Work is sent away from the event loop after it has been slow, and not after it had to wait for the processor."""

from __future__ import annotations

import threading
import time

from engine.backends.swiftness import Swiftness


def work(swiftness: Swiftness, seconds: float) -> None:
    with swiftness:
        began = time.thread_time()
        while time.thread_time() - began < seconds:
            pass


def test_after_slow_work_the_loop_is_spared_for_a_while() -> None:
    swiftness = Swiftness()
    work(swiftness, 0.001)
    assert swiftness.likely()
    work(swiftness, 0.06)
    answers = [swiftness.likely() for _ in range(2000)]
    assert not answers[0]
    assert answers[-1]


def test_work_that_was_held_up_by_others_was_not_slow() -> None:
    swiftness = Swiftness()
    other = threading.Thread(target=work, args=(Swiftness(), 0.1))
    with swiftness:
        other.start()
        other.join()  # time goes by, and none of it is the work's
    assert swiftness.likely()
