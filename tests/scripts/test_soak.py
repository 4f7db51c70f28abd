"""The soak's judgement: what is right passes, and each thing that must not happen is found."""

import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from soak.invariants import Judge, Level, Outcome, UsageLedger, Window, access_problems, grown, growth
from soak.traffic import MIX, PLUS, PRO, Ask, FailedError, Used, WrongAnswerError, asks, chat, events, exactly

USED = Used(1, 9, 5, 0)
SHAPE = {"message": "Wait a moment.", "type": "server_error", "param": None}


def right(data: bytes) -> tuple[Used, Used]:
    if data != b"right":
        raise WrongAnswerError("another answer")
    return exactly(USED)


def broken(data: bytes) -> tuple[Used, Used]:
    events(data)
    raise AssertionError


ASK = Ask("chat", "/v1/chat/completions", right, {}, frozenset({PLUS}), "chat", Used(1, 100, 100, 100))


def outcome(**how: Any) -> Outcome:
    now = time.monotonic()
    fields = {"ending": "answered", "ended": now, "status": 200, "body": b"right"} | how
    return Outcome(ASK, "key", "id", now - 1, **fields)


def refusal(status: int, code: str, **how: Any) -> Outcome:
    body = json.dumps({"error": SHAPE | {"code": code}}).encode()
    return outcome(status=status, body=body, **({"headers": {"Retry-After": "2"}} | how))


def judged(one: Outcome, *windows: Window) -> list[str]:
    judge = Judge()
    for window in windows:
        window.opened = 0
    judge.windows += windows
    judge.judge(one)
    return [name for name, count in judge.broken.items() if count]


@pytest.mark.parametrize(
    ("one", "invariants"),
    [
        (outcome(), []),
        (outcome(ending="left", status=None), []),
        (outcome(body=b"wrong"), ["answers"]),
        (outcome(ending="hung"), ["hangs"]),
        (outcome(ending="closed"), ["closed"]),
        (outcome(ending="unanswered", status=None), ["closed"]),
        (refusal(503, "engine_unavailable"), ["errors"]),
        (refusal(500, "internal_error"), ["errors"]),
        (refusal(429, "rate_limit_exceeded"), ["errors"]),
        (refusal(429, "rate_limit_exceeded", limited=True), []),
        (refusal(429, "rate_limit_exceeded", limited=True, headers={}), ["errors"]),
        (outcome(status=503, body=b"Service Unavailable"), ["errors"]),
        (outcome(status=503, body=b'{"error": {"message": "no type"}}', headers={"Retry-After": "2"}), ["errors"]),
    ],
)
def test_without_a_fault_an_answer_is_right_and_only_limits_are_met(one: Outcome, invariants: list[str]):
    assert judged(one) == invariants


@pytest.mark.parametrize(
    ("one", "window", "invariants"),
    [
        (refusal(503, "engine_unavailable"), Window(frozenset({PLUS})), []),
        (refusal(503, "engine_unavailable"), Window(frozenset({PRO})), ["errors"]),
        (refusal(503, "engine_unavailable"), Window(None, closed=1), ["errors"]),
        (refusal(503, "engine_unavailable", headers={}), Window(None), ["errors"]),
        (refusal(503, "internal_error"), Window(None), ["errors"]),
        (refusal(500, "internal_error"), Window(None), ["errors"]),
        (refusal(400, "schema_too_complex"), Window(None, schemas=True), []),
        (refusal(400, "schema_too_complex"), Window(None), ["errors"]),
        (outcome(body=b"wrong"), Window(None), ["answers"]),
        (outcome(ending="closed"), Window(None), ["closed"]),
        (outcome(ending="closed"), Window(None, closes="idle"), ["closed"]),
        (outcome(ending="unanswered", status=None), Window(None, closes="idle"), []),
        (outcome(ending="closed"), Window(None, closes="everything"), []),
        (outcome(ending="hung"), Window(None, closes="everything"), ["hangs"]),
    ],
)
def test_around_a_fault_what_it_explains_is_allowed(one: Outcome, window: Window, invariants: list[str]):
    assert judged(one, window) == invariants


def test_a_stream_that_ends_with_an_error_is_allowed_around_a_fault_only():
    event = b"data: " + json.dumps({"error": SHAPE | {"code": "engine_unavailable"}}).encode() + b"\n\n"
    one = replace(outcome(body=b'data: {"choices": []}\n\n' + event), ask=replace(ASK, check=broken))
    assert judged(one) == ["errors"]
    assert judged(one, Window(frozenset({PLUS}))) == []
    with pytest.raises(WrongAnswerError, match="after an error event"):
        events(event + b"data: [DONE]\n\n")
    with pytest.raises(WrongAnswerError, match="in the middle"):
        events(event[:-3])
    with pytest.raises(FailedError):
        events(event)


def recorded(**fields: float) -> dict[str, Any]:
    used = {"requests": 1, "prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 0, "images": 0}
    return {"key": "key", "kind": "chat", "audio_seconds": 0.0} | used | fields


def ledger_with(*outcomes: Outcome) -> UsageLedger:
    ledger, judge = UsageLedger(), Judge()
    for one in outcomes:
        judge.judge(one)
        ledger.add(one)
    return ledger


def test_usage_is_exactly_what_answers_said_and_is_compared_from_the_last_time_on():
    ledger = ledger_with(outcome())
    assert ledger.compare([recorded()]) == []
    (wrong,) = ledger.compare([recorded(completion_tokens=6)])
    assert "completion_tokens of key key, chat: recorded 1, answers say 0 to 0" in wrong
    assert len(ledger_with(outcome()).compare([])) == 3  # requests, prompt and answer


def test_what_a_client_did_not_wait_for_may_count_up_to_what_it_asked_for():
    gone = outcome(ending="left", status=None)
    assert ledger_with(outcome(), gone).compare([recorded()]) == []
    assert ledger_with(outcome(), gone).compare([recorded(requests=2, completion_tokens=105)]) == []
    assert len(ledger_with(outcome(), gone).compare([recorded(completion_tokens=106)])) == 1


def test_a_killed_server_may_lose_the_last_seconds_of_usage_and_nothing_before():
    ledger = ledger_with(outcome(), outcome(ended=time.monotonic() - 30))
    ledger.killed()
    assert ledger.compare([recorded()]) == []
    ledger = ledger_with(outcome(), outcome(ended=time.monotonic() - 30))
    ledger.killed()
    assert len(ledger.compare([])) == 3


def test_each_request_has_one_line_in_the_access_log():
    judge, one = Judge(), outcome()
    line = {"request_id": "id", "status": 200}
    assert access_problems([line], [one], judge) == []
    assert len(access_problems([], [one], judge)) == 1
    assert len(access_problems([line, line], [one], judge)) == 1
    assert len(access_problems([line | {"status": 500}], [one], judge)) == 1
    assert access_problems([line | {"status": 499}], [outcome(ending="left")], judge) == []
    assert len(access_problems([line | {"status": 500}], [outcome(ending="left")], judge)) == 1
    assert access_problems([], [outcome(ending="left")], judge) == []


def levels(pid: int, begin: float, per_hour: float, *, jump: float = 0) -> list[Level]:
    """An hour of a process that first takes `jump` MiB at once, and then grows."""
    return [
        Level("API", pid, begin + at, 500 + (jump if at > 60 else 0) + per_hour * at / 3600, 90, 30)
        for at in range(0, 3600, 5)
    ]


def test_growth_is_one_slope_of_all_lives_without_the_beginning_of_each():
    lives = levels(1, 0, 40, jump=300) + levels(2, 4000, 80, jump=300)
    found = growth(lives, "mib")
    assert found is not None
    assert found.per_hour == pytest.approx(60, rel=0.01)
    assert growth(lives[:10], "mib") is None
    assert grown(lives)[1] == []
    assert len(grown(levels(1, 0, 120))[1]) == 1
    assert grown(levels(1, 0, 0, jump=300))[1] == []


def test_the_traffic_has_every_kind_and_is_the_same_for_the_same_seed():
    first, second = asks(random.Random(3)), asks(random.Random(3))  # noqa: S311  # repeatable on purpose
    kinds = [(next(first), next(second)) for _ in range(400)]
    assert all(one.body == other.body and one.kind == other.kind for one, other in kinds)
    assert len({one.kind for one, _ in kinds}) > len(MIX)


def test_a_promised_sentence_is_right_word_for_word():
    ask = next(one for one in (chat(random.Random(seed)) for seed in range(99)) if one.kind == "chat")  # noqa: S311
    usage = {"prompt_tokens": 9, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 0}}

    def answer(text: str) -> bytes:
        choice = {"index": 0, "message": {"content": text}, "finish_reason": "stop"}
        return json.dumps({"choices": [choice], "usage": usage}).encode()

    with pytest.raises(WrongAnswerError) as error:
        ask.check(answer("another"))
    assert str(error.value)
