"""What a cluster of 1 to 64 replicas would do: a simulation by discrete events, seeded, without any model.

Assumptions (docs/cluster.md has where they were checked): a replica computes one step for all of its answers together,
which takes `step_ms` and `sequence_ms` more for each; tokens of a prompt cost `1 / prefill` of a token of an answer;
conversations come at random, have several turns, and each turn's prompt is the whole conversation so far, of which a
replica has in its cache what it has answered last.
"""

import heapq
import json
import random
import statistics
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import typer
from bench.report import listed, numbers

Policy: TypeAlias = Literal["least", "affinity"]
_Times = Annotated[Sequence[float], listed(numbers, "Of what the replicas can do, the share that is asked.")]


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """Simulate clusters: how long answers wait, with prefix affinity and without, and when a machine is lost."""

    replicas: Annotated[Sequence[float], listed(numbers, "How many replicas.")] = (1, 2, 4, 8, 16, 32, 64)
    load: _Times = (0.5, 0.8)
    seconds: Annotated[float, typer.Option(min=10, help="Simulated time.")] = 600.0
    step_ms: Annotated[float, typer.Option(min=0.01, help="A step with one answer.")] = 12.0
    sequence_ms: Annotated[float, typer.Option(min=0, help="What each further answer adds to it.")] = 0.25
    places: Annotated[int, typer.Option(min=1, help="Answers of a replica at the same time (max_num_seqs).")] = 64
    prefill: Annotated[float, typer.Option(min=1, help="Tokens of a prompt that cost as much as one of an answer.")] = (
        40
    )
    cache_tokens: Annotated[int, typer.Option(min=0, help="Tokens that fit in a replica's prefix cache.")] = 400_000
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, on average.")] = 300
    said_tokens: Annotated[int, typer.Option(min=1, help="Tokens that a user adds each turn, on average.")] = 600
    turns: Annotated[int, typer.Option(min=1, help="Turns of a conversation, on average.")] = 6
    pause_seconds: Annotated[float, typer.Option(min=0, help="Between an answer and the next turn, on average.")] = 20.0
    overflow: Annotated[float, typer.Option(min=0, help="Share of `places` beyond which affinity gives way.")] = 0.8
    restart_seconds: Annotated[float, typer.Option(min=0, help="Until a lost replica is replaced.")] = 90.0
    lose: Annotated[bool, typer.Option(help="Also lose one replica in the middle.")] = True
    seed: int = 1
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def run(self) -> None:
        """Simulate all cases and print them."""
        rows = [
            {
                "replicas": int(count),
                "load": load,
                "policy": policy,
                "lost": lost,
                **Simulation(self, int(count), load, policy, lost=lost).run(),
            }
            for count in self.replicas
            for load in self.load
            for policy in ("least", "affinity")
            for lost in ((False, True) if self.lose and count > 1 else (False,))
        ]
        if self.json:
            sys.stdout.write(json.dumps({"options": asdict(self), "rows": rows}) + "\n")
            return
        print(
            "| replicas | load | policy | replica lost | first token p50, p95 (ms) | from cache | cut off | tokens/s |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for row in rows:
            first = f"{row['first_p50_ms']:.0f}, {row['first_p95_ms']:.0f}"
            cells = (row["replicas"], row["load"], row["policy"], "yes" if row["lost"] else "no", first)
            print(
                "|",
                *(f"{cell} |" for cell in cells),
                f"{row['cached']:.0%} | {row['cut']} | {row['tokens_per_second']:.0f} |",
            )


@dataclass(eq=False, slots=True)
class Turn:
    """One request: `old` tokens of the conversation so far, `new` ones, and the answer's."""

    session: int
    left: int
    asked: float
    old: int
    new: int
    answer: int
    cached: int = 0
    began: float = 0.0
    """When its first token came."""


@dataclass(eq=False)
class Replica:
    """Answers that run share its steps. Progress is counted in tokens that each of them has had since the start."""

    plan: ClusterPlan
    number: int
    alive: bool = True
    progress: float = 0.0
    since: float = 0.0
    running: list[tuple[float, int, Turn]] = field(default_factory=list)
    waiting: list[Turn] = field(default_factory=list)
    cache: "OrderedDict[int, int]" = field(default_factory=OrderedDict)
    version: int = 0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def advance(self, now: float) -> None:
        self.progress += (now - self.since) * self._speed()
        self.since = now

    def next_end(self) -> float | None:
        """When the first of those that run ends, if nothing changes."""
        return self.since + (self.running[0][0] - self.progress) / self._speed() if self.running else None

    def _speed(self) -> float:
        count = len(self.running)
        return 1000 / (self.plan.step_ms + self.plan.sequence_ms * (count - 1)) if count else 0.0

    def begin_waiting(self, order: Iterator[int]) -> None:
        while self.waiting and len(self.running) < self.plan.places:
            turn = self.waiting.pop(0)
            turn.cached = min(self.cache.get(turn.session, 0), turn.old)
            prompt = (turn.old + turn.new - turn.cached) / self.plan.prefill
            turn.began = self.since + (prompt + 1) / max(self._speed(), 1000 / self.plan.step_ms / self.plan.places)
            heapq.heappush(self.running, (self.progress + prompt + turn.answer, next(order), turn))

    def remember(self, turn: Turn) -> None:
        self.cache.pop(turn.session, None)
        self.cache[turn.session] = turn.old + turn.new + turn.answer
        while sum(self.cache.values()) > self.plan.cache_tokens and self.cache:
            self.cache.popitem(last=False)


class Simulation:
    """One case."""

    def __init__(self, plan: ClusterPlan, count: int, load: float, policy: Policy, *, lost: bool) -> None:
        self.plan, self.policy, self.lost = plan, policy, lost
        self.random = random.Random(plan.seed)  # noqa: S311  # repeatable on purpose
        self.replicas = [Replica(plan, number) for number in range(count)]
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = iter(range(1 << 60))
        full = plan.places * 1000 / (plan.step_ms + plan.sequence_ms * (plan.places - 1))  # tokens/s of one replica
        prompts = plan.said_tokens / plan.prefill  # at best: all of what was said before comes from the cache
        self.rate = load * count * full / (plan.answer_tokens + prompts) / plan.turns  # conversations/s
        self.first: list[float] = []
        self.tokens = self.cached = self.prompt = self.cut = self.sessions = 0

    def run(self) -> dict[str, float]:
        """Run it to the end, and return its figures."""
        plan = self.plan
        self._later(self.random.expovariate(self.rate), "conversation")
        if self.lost:
            self._later(plan.seconds / 2, "loss")
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if now > plan.seconds:
                break
            getattr(self, f"_{kind}")(now, what)
        return {
            "first_p50_ms": 1000 * statistics.median(self.first),
            "first_p95_ms": 1000 * sorted(self.first)[int(len(self.first) * 0.95)],
            "cached": self.cached / max(self.prompt, 1),
            "cut": self.cut,
            "tokens_per_second": self.tokens / plan.seconds,
        }

    def _later(self, at: float, kind: str, what: Any = None) -> None:
        heapq.heappush(self.events, (at, next(self.order), kind, what))

    def _length(self, average: int) -> int:
        return max(1, round(self.random.expovariate(1 / average)))

    def _conversation(self, now: float, _: None) -> None:
        self._later(now + self.random.expovariate(self.rate), "conversation")
        self.sessions += 1
        plan = self.plan
        turn = Turn(
            self.sessions,
            self._length(plan.turns),
            now,
            0,
            self._length(plan.said_tokens),
            self._length(plan.answer_tokens),
        )
        self._turn(now, turn)

    def _turn(self, now: float, turn: Turn) -> None:
        turn.asked = now
        replica = self._pick(turn.session)
        replica.advance(now)
        replica.waiting.append(turn)
        self._go_on(replica)

    def _pick(self, session: int) -> Replica:
        alive = [one for one in self.replicas if one.alive]
        two = self.random.sample(alive, min(2, len(alive)))
        least = min(two, key=lambda one: one.load)
        if self.policy == "least":
            return least
        mine = max(alive, key=lambda one: hash((session, one.number)))  # where one is lost, only its own move
        return mine if mine.load < self.plan.overflow * self.plan.places else least

    def _go_on(self, replica: Replica) -> None:
        """Begin what waits, and note when the next answer ends."""
        replica.begin_waiting(self.order)
        replica.version += 1
        if (end := replica.next_end()) is not None:
            self._later(end, "end", (replica, replica.version))

    def _end(self, now: float, what: tuple[Replica, int]) -> None:
        replica, version = what
        if version != replica.version or not replica.alive:  # something has changed since: another end was noted
            return
        replica.advance(now)
        _, _, turn = heapq.heappop(replica.running)
        self.first.append(turn.began - turn.asked)
        self.tokens += turn.answer
        self.cached, self.prompt = self.cached + turn.cached, self.prompt + turn.old + turn.new
        replica.remember(turn)
        if turn.left > 1:
            plan, old = self.plan, turn.old + turn.new + turn.answer
            again = Turn(
                turn.session, turn.left - 1, 0, old, self._length(plan.said_tokens), self._length(plan.answer_tokens)
            )
            self._later(now + self.random.expovariate(1 / max(plan.pause_seconds, 1e-9)), "turn", again)
        self._go_on(replica)

    def _loss(self, now: float, _: None) -> None:
        gone = self.replicas[0]
        gone.alive = False
        self.cut = len(gone.running)
        for turn in gone.waiting:  # what has not begun is sent again
            self._later(now, "turn", turn)
        self._later(now + self.plan.restart_seconds, "replacement")

    def _replacement(self, now: float, _: None) -> None:
        self.replicas[0] = Replica(self.plan, 0, since=now)
