"""What `hearth reload` waits for: the server's word on a reload that began after it was asked for."""

import os
import subprocess
import sys
import time
from pathlib import Path

from server.instance import OUTCOME_FILE, Difference, Outcome, only_one, wait_for_outcome, write_outcome

LONG_SECONDS = 30.0
PID = os.getpid()


def test_what_the_server_writes_comes_back_whole(tmp_path: Path):
    asked_at_ns = time.monotonic_ns()
    outcome = Outcome(PID, asked_at_ns, "models.yaml", None, Difference(changed=("a", "tier b")), warnings=("hidden",))
    write_outcome(tmp_path, outcome)
    assert wait_for_outcome(tmp_path, PID, asked_at_ns, LONG_SECONDS) == outcome
    assert outcome.sentences() == ["changed: a, tier b"]
    assert [file.name for file in tmp_path.iterdir()] == [OUTCOME_FILE]


def test_memory_that_a_model_gets_later_is_said_with_what_changed(tmp_path: Path):
    later = Outcome(PID, 0, "models.yaml", None, Difference(added=("b",)), later=("a",))
    assert later.sentences() == ["added: b", "a: a new share of memory when next loaded"]
    assert Outcome(PID, 0, "models.yaml", later=("a",)).sentences() == []


def test_models_that_have_to_be_loaded_again_are_said():
    done = Outcome(PID, 0, "models.yaml", None, Difference(changed=("a", "b")), again=("a",))
    assert done.sentences() == ["changed: a, b", "a: 503 until loaded again, after the last answer"]


def test_the_outcome_of_a_reload_before_is_no_answer(tmp_path: Path):
    asked_at_ns = time.monotonic_ns()
    write_outcome(tmp_path, Outcome(PID, asked_at_ns - 1, "models.yaml"))
    assert wait_for_outcome(tmp_path, PID, asked_at_ns, 0.2) is None
    write_outcome(tmp_path, Outcome(PID + 1, asked_at_ns, "models.yaml"))
    assert wait_for_outcome(tmp_path, PID, asked_at_ns, 0.2) is None
    (tmp_path / OUTCOME_FILE).write_text("{")
    assert wait_for_outcome(tmp_path, PID, asked_at_ns, 0.2) is None


def test_nobody_waits_for_a_server_that_has_ended(tmp_path: Path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    began = time.monotonic()
    assert wait_for_outcome(tmp_path, ended.pid, time.monotonic_ns(), LONG_SECONDS) is None
    assert time.monotonic() - began < LONG_SECONDS / 2


def test_a_server_that_starts_forgets_what_one_before_it_said(tmp_path: Path):
    write_outcome(tmp_path, Outcome(PID, time.monotonic_ns(), "models.yaml"))
    with only_one(tmp_path):
        assert not (tmp_path / OUTCOME_FILE).exists()
