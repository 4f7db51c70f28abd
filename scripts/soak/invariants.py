"""What must hold throughout a soak, and what broke it: outcomes of requests, usage, memory."""

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any, Literal, TypeAlias

import numpy as np
from bench.servers import say
from soak.traffic import NOTHING, Ask, FailedError, Range, Used, WrongAnswerError, plus

Ending: TypeAlias = Literal["answered", "left", "closed", "unanswered", "hung"]
INVARIANTS = {
    "answers": "every answer with status 200 is right",
    "errors": "errors have the contract's shape, and come only around faults or when provoked",
    "closed": "connections are closed without an answer only when the API process was ended",
    "hangs": "every request ends in time",
    "faults": "after a fault everything comes back in time, and nothing fails without one",
    "reload": "a reload takes effect, and a wrong file changes nothing",
    "keys": "changes of keys take effect in time, survive kill -9, and a revoked key is refused",
    "usage": "recorded usage is the sum of what the answers said",
    "access log": "a request has one line in the access log, with the status that its client saw",
    "places": "no place leaks: in a pause nothing runs or waits",
    "processes": "no process is left behind",
    "memory": "memory, descriptors and threads do not grow",
}
_KEPT_EXAMPLES = 5
_AFTERWARDS_SECONDS = 2.0  # requests that ran when a model came back may still be refused
# docs/keys.md: a running server writes usage every 5 seconds. The write takes some time too.
_UNWRITTEN_SECONDS = 7.0
_SHAPE = {"message", "type", "param", "code"}
_PASSING = {"server_overloaded", "model_loading", "engine_unavailable"}


@dataclass
class Window:
    """The time around a fault in which requests to `models` may fail; None: all requests."""

    models: frozenset[str] | None
    closes: Literal["nothing", "idle", "everything"] = "nothing"
    """Which connections may be closed: those without the beginning of an answer, or all."""
    schemas: bool = False
    """A schema may be refused, because the process that compiles it was killed."""
    opened: float = field(default_factory=time.monotonic)
    closed: float = float("inf")

    def allows(self, ask: Ask, began: float, ended: float) -> bool:
        concerned = self.models is None or bool(self.models & ask.models)
        return concerned and began <= self.closed + _AFTERWARDS_SECONDS and ended >= self.opened


@dataclass
class Outcome:
    """The outcome of one request. `status` is None and `body` empty if no answer began."""

    ask: Ask
    key: str
    request_id: str
    began: float
    ending: Ending = "hung"
    ended: float = 0.0
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    limited: bool = False
    """Its key has a limit that it is meant to reach."""
    verdict: str = ""
    used: Range | None = None


class Judge:
    def __init__(self) -> None:
        self.windows: list[Window] = []
        self.broken: dict[str, int] = dict.fromkeys(INVARIANTS, 0)
        self.examples: dict[str, list[str]] = defaultdict(list)

    def break_(self, invariant: str, what: str) -> None:
        self.broken[invariant] += 1
        if len(self.examples[invariant]) < _KEPT_EXAMPLES:
            self.examples[invariant].append(f"{time.strftime('%H:%M:%S')} {what}")
            say(f"  BROKEN: {INVARIANTS[invariant]}: {what}")

    def windows_of(self, one: Outcome) -> list[Window]:
        return [window for window in self.windows if window.allows(one.ask, one.began, one.ended)]

    def judge(self, one: Outcome) -> None:
        """Set `verdict` (the outcome's name in the report) and `used` (bounds of its usage)."""
        one.used = (NOTHING, one.ask.most)
        near = self.windows_of(one)
        what = f"{one.ask.kind} {one.request_id}, status {one.status}, {one.ended - one.began:.1f} s"
        if one.ending == "left":
            one.verdict = "left"
        elif one.ending == "hung":
            one.verdict = "hung"
            self.break_("hangs", what)
        elif one.ending in {"closed", "unanswered"}:
            one.verdict = "closed"
            # Sound can only be cut to show that it ends early.
            cut = one.ask.book == "audio" and one.status == 200 and bool(near)
            idle = one.ending == "unanswered" and any(window.closes == "idle" for window in near)
            if not cut and not idle and not any(window.closes == "everything" for window in near):
                self.break_("closed", what)
        elif one.status == one.ask.status:
            self._judge_answer(one, near, what)
        else:
            one.verdict = f"refused {one.status}"
            self._judge_refusal(one, near, what)

    def _judge_answer(self, one: Outcome, near: Sequence[Window], what: str) -> None:
        try:
            one.used = one.ask.check(one.body)
            one.verdict = "complete" if one.status == 200 else "error as expected"
        except FailedError as failed:
            one.verdict = "ended with an error"
            if one.limited and isinstance(failed.error, dict) and failed.error.get("code") == "rate_limit_exceeded":
                return  # an item of a batch
            if problem := _shape_problem(failed.error) or ("no fault is near" if not near else ""):
                self.break_("errors", f"{what}: {problem}: {failed.error}")
            elif failed.error["code"] not in _PASSING:
                self.break_("errors", f"{what}: another code: {failed.error}")
        except (WrongAnswerError, LookupError, TypeError, ValueError, OSError) as error:
            one.verdict = "wrong"
            self.break_("answers", f"{what}: {type(error).__name__}: {error}")

    def _judge_refusal(self, one: Outcome, near: Sequence[Window], what: str) -> None:
        try:
            error = json.loads(one.body)["error"]
        except (ValueError, LookupError, TypeError):
            self.break_("errors", f"{what}: not in the contract's shape: {one.body[:200]!r}")
            return
        code, waits = error.get("code"), one.headers.get("Retry-After", "")
        if problem := _shape_problem(error):
            self.break_("errors", f"{what}: {problem}: {error}")
        elif code == "schema_too_complex" and any(window.schemas for window in near):
            pass
        elif one.status not in {429, 503} or (one.status == 503 and code not in _PASSING):
            self.break_("errors", f"{what}: {error}")
        elif not waits.isdigit() or not 1 <= int(waits) <= 600:
            self.break_("errors", f"{what}: Retry-After is {waits!r}: {error}")
        elif one.status == 429 and not one.limited:
            self.break_("errors", f"{what}: the key has no limit: {error}")
        elif one.status == 503 and not near:
            self.break_("errors", f"{what}: no fault is near: {error}")


def _shape_problem(error: Any) -> str:
    if not isinstance(error, dict) or not error.keys() >= _SHAPE:
        return "not in the contract's shape"
    if not all(isinstance(error[name], str) and error[name] for name in ("message", "type")):
        return "no message or type"
    return ""


class UsageLedger:
    """Adds up bounds of each key's usage since the last comparison."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Used] = {}  # recorded at the last comparison
        self._since: dict[tuple[str, str], Range] = {}
        self._late: deque[tuple[float, tuple[str, str], Used]] = deque()

    def add(self, one: Outcome) -> None:
        """Count an outcome that was judged."""
        if one.used is None or not one.ask.book or not one.key:
            return
        line, (low, high) = (one.key, one.ask.book), one.used
        before = self._since.get(line, (NOTHING, NOTHING))
        self._since[line] = plus(before[0], low), plus(before[1], high)
        self._late.append((one.ended, line, low))
        while self._late[0][0] < time.monotonic() - 10 * _UNWRITTEN_SECONDS:
            self._late.popleft()

    def killed(self) -> None:
        """Allow that usage of the last seconds is lost, as documented."""
        for ended, line, low in self._late:
            if ended > time.monotonic() - _UNWRITTEN_SECONDS:
                least, most = self._since[line]
                self._since[line] = Used(*map(sub, least, low)), most
        self._late.clear()

    def compare(self, rows: Iterable[Mapping[str, Any]]) -> list[str]:
        """Compare with rows of `GET /v1/usage?by=key,kind`, and start again. Returns differences."""
        wrong = []
        recorded = {(row["key"], row["kind"]): Used(*(row[name] for name in Used._fields)) for row in rows}
        for line in self._since.keys() | recorded.keys():
            grown = map(sub, recorded.get(line, NOTHING), self._known.get(line, NOTHING))
            bounds = zip(Used._fields, grown, *self._since.get(line, (NOTHING, NOTHING)), strict=True)
            for name, new, low, high in bounds:
                if not low - 1e-6 <= new <= high + 1e-6:
                    said = f"recorded {new:g}, answers say {low:g} to {high:g}"
                    wrong.append(f"{name} of key {line[0]}, {line[1]}: {said}")
        self._known, self._since = recorded, {}
        self._late.clear()
        return wrong


@dataclass(frozen=True)
class Level:
    kind: str
    pid: int
    seconds: float
    mib: float
    descriptors: int
    threads: int


_SETTLING_PART = 0.25  # of the life of a process: caches fill
_SHORTEST_LIFE_SECONDS = 300.0
_JUDGED_HOURS = 0.5
# An hour, of processes that live for minutes: caches still fill. Descriptors and threads go up and down with the load.
_MOST_GROWTH = 0.10
_ERRORS = 3.0


@dataclass(frozen=True)
class Growth:
    """How a kind of process grows: one slope through all of its lives, each around its own mean."""

    hours: float
    mean: float
    per_hour: float
    standard_error: float

    def is_growth(self) -> bool:
        """Whether it surely grows by more than a part of its mean per hour."""
        surely = self.per_hour - _ERRORS * self.standard_error
        return self.hours >= _JUDGED_HOURS and surely > _MOST_GROWTH * self.mean


def growth(levels: Sequence[Level], name: str) -> Growth | None:
    """Fit one slope to all processes of a kind, without the first quarter of each life. None: too few samples."""
    lives: dict[int, list[Level]] = defaultdict(list)
    for level in levels:
        lives[level.pid].append(level)
    times, values, means, hours = [], [], [], 0.0
    for life in lives.values():
        begin, end = life[0].seconds, life[-1].seconds
        late = [one for one in life if one.seconds >= begin + _SETTLING_PART * (end - begin)]
        if end - begin < _SHORTEST_LIFE_SECONDS or len(late) < 3:
            continue
        x, y = np.array([one.seconds / 3600 for one in late]), np.array([getattr(one, name) for one in late])
        times.append(x - x.mean())
        values.append(y - y.mean())
        means.append(y.mean())
        hours += x[-1] - x[0]
    if not means:
        return None
    x, y = np.concatenate(times), np.concatenate(values)
    slope = (x @ y) / (x @ x)
    rest = ((y - slope * x) ** 2).sum() / (len(x) - len(means) - 1)
    return Growth(float(hours), float(np.mean(means)), float(slope), float((rest / (x @ x)) ** 0.5))


def grown(levels: Sequence[Level]) -> tuple[list[tuple[str, str, Growth]], list[str]]:
    """Return how each kind of process grows, and what grows too much."""
    rows, wrong = [], []
    for kind in dict.fromkeys(level.kind for level in levels):
        for name in ("mib", "descriptors", "threads"):
            found = growth([level for level in levels if level.kind == kind], name)
            if found is None:
                continue
            rows.append((kind, name, found))
            if found.is_growth():
                wrong.append(f"{kind}: {name} {found.mean:.1f} grow by {found.per_hour:.1f} an hour")
    return rows, wrong


def access_problems(lines: Iterable[Mapping[str, Any]], outcomes: Sequence[Outcome], judge: Judge) -> list[str]:
    """Compare new lines of the access log with the outcomes since the last time. Returns differences."""
    seen: dict[str, list[int]] = defaultdict(list)
    for line in lines:
        seen[line["request_id"]].append(line["status"])
    wrong = []
    for one in outcomes:
        statuses, near = seen[one.request_id], judge.windows_of(one)
        unsure = one.ending != "answered" or any(window.closes != "nothing" for window in near)
        if (
            len(statuses) > 1
            or (not statuses and not unsure)
            or (statuses and one.ending == "answered" and statuses != [one.status])
            or (statuses and statuses[0] >= 500 and (statuses[0] != 503 or not near))
        ):
            wrong.append(f"{one.ask.kind} {one.request_id}, {one.verdict}: lines with the statuses {statuses}")
    return wrong
