"""Who is served next when there are more requests than a model can run: the one whose key has had the least lately.

The algorithm is the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024,
arXiv 2401.00588), with its counter lift: a key that comes back after a pause starts at the smallest counter of those
who wait, so that it neither is punished nor has saved anything up. Changed here: an answer is charged by its expected
length when it begins and put right when it ends, where the paper charges every decoding step; counters are divided by
the weight of the key's tier; and classes of urgency stand above the counters. Pure data: no clock, no event loop.
"""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.types import Urgency

# What a token of an answer costs compared to one of the prompt, as in the paper.
ANSWER_TOKEN_COST = 2.0
# A batch that has waited for so long counts as interactive, so that it does not starve behind interactive requests that
# never stop; a background request counts as a batch, and never as more.
PATIENCE_SECONDS = 60.0
_MOST_IDLE_OWNERS = 1024


@dataclass(slots=True, eq=False)
class Claim:
    """A request that waits or runs. `cost` is what its owner's counter was charged; times are monotonic seconds."""

    owner: str
    weight: float
    urgency: Urgency
    sequences: int
    prompt_tokens: int
    expected_answer_tokens: float  # of all sequences together, like the next one
    longest_answer_tokens: int
    arrived_at: float
    cost: float = 0.0

    def urgency_at(self, now: float) -> Urgency:
        if now - self.arrived_at < PATIENCE_SECONDS:
            return self.urgency
        return Urgency.BATCH if self.urgency == Urgency.BACKGROUND else Urgency.INTERACTIVE


@dataclass(slots=True)
class FairQueue:
    """All waiting claims of one model, and the counters of their owners.

    `fair=False` makes it first come, first served (within an urgency): what most servers do, kept to compare with.
    """

    fair: bool = True
    _waiting: dict[tuple[Urgency, str], deque[Claim]] = field(default_factory=dict)
    _counters: dict[str, float] = field(default_factory=dict)
    _last_served: str | None = None

    def __len__(self) -> int:
        return sum(len(claims) for claims in self._waiting.values())

    def count(self, urgency: Urgency) -> int:
        return sum(len(claims) for (kind, _), claims in self._waiting.items() if kind == urgency)

    def arrive(self, claim: Claim) -> None:
        """Lift the owner's counter if nothing of theirs waits. Before `push` or `charge`."""
        if claim.owner not in self._owners():
            self._counters[claim.owner] = max(self._counters.get(claim.owner, 0.0), self._floor())

    def push(self, claim: Claim) -> None:
        self._waiting.setdefault((claim.urgency, claim.owner), deque()).append(claim)

    def remove(self, claim: Claim) -> None:
        claims = self._waiting[claim.urgency, claim.owner]
        claims.remove(claim)
        if not claims:
            del self._waiting[claim.urgency, claim.owner]

    def in_turn(self, now: float) -> Iterator[Claim]:
        """Yield the first claim of every owner, the one to be served next first."""
        heads = (claims[0] for claims in self._waiting.values())
        yield from sorted(heads, key=lambda claim: self._rank(claim, now))

    def charge(self, claim: Claim, answer_tokens: float) -> None:
        """Set what the owner's counter was charged for this claim: when it begins by guess, at its end for sure."""
        cost = (claim.prompt_tokens + ANSWER_TOKEN_COST * answer_tokens) / claim.weight
        self._counters[claim.owner] = self._counters.get(claim.owner, 0.0) + cost - claim.cost
        claim.cost = cost
        self._last_served = claim.owner
        if len(self._counters) > _MOST_IDLE_OWNERS:
            # An owner who is at or below the floor would be lifted to it on arrival: forgetting them changes nothing
            floor, kept = self._floor(), {*self._owners(), self._last_served}
            self._counters = {name: count for name, count in self._counters.items() if count > floor or name in kept}

    def to_refuse(self, urgency: Urgency, owner: str) -> Claim | None:
        """Return the last claim of who has the most waiting; None where one more of `owner` would be that one."""
        queues = {who: claims for (kind, who), claims in self._waiting.items() if kind == urgency}
        longest = max(queues.values(), key=len, default=deque[Claim]())
        return longest[-1] if self.fair and len(longest) > len(queues.get(owner, ())) + 1 else None

    def _rank(self, claim: Claim, now: float) -> tuple[int, float, bool, float]:
        if not self.fair:
            return claim.urgency_at(now), 0.0, False, claim.arrived_at
        # A newcomer is lifted to the smallest counter, often that of a flood: no owner is served twice on a draw.
        just_served = claim.owner == self._last_served
        return claim.urgency_at(now), self._counters[claim.owner], just_served, claim.arrived_at

    def _owners(self) -> set[str]:
        return {owner for _, owner in self._waiting}

    def _floor(self) -> float:
        last = 0.0 if self._last_served is None else self._counters.get(self._last_served, 0.0)
        return min((self._counters[owner] for owner in self._owners()), default=last)


class InFlight(Counter[str | None]):
    """How many requests each owner has in flight. None is an owner like any other: one that is not known."""

    def has_share(self, owner: str | None, most: int) -> bool:
        """Whether `most` are in flight, and of these as many are the owner's as if all had equally many."""
        return self.total() >= most and self[owner] * len(self) >= most

    def add(self, owner: str | None) -> None:
        self[owner] += 1

    def remove(self, owner: str | None) -> None:
        self[owner] -= 1
        if not self[owner]:
            del self[owner]
