"""The short way to a place for one more token takes, keeps and gives back the same blocks as vLLM's own way."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.backends.vllm import patches

BLOCK, BLOCKS, LONGEST = 4, 24, 60


@pytest.fixture(scope="module", autouse=True)
def _short_way() -> None:
    with warnings.catch_warnings(action="ignore"):  # other people's deprecations, while they are imported
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash

        init_none_hash(sha256)
        patches.spare_searches()
        patches.spare_searches()


@dataclass
class Side:
    """A manager of blocks, asked in vLLM's own way or in ours, with requests of its own."""

    own_way: bool
    caching: bool = True
    lag: int = 0  # steps until a token is known: engines schedule ahead of what they sample
    requests: dict[str, Any] = field(default_factory=dict)
    unknown: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(
            config, LONGEST, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=self.caching
        )
        inherited = KVCacheManager.hearth_inherited
        self._allocate = inherited if self.own_way else KVCacheManager.allocate_slots

    def let_in(self, name: str, prompt: list[int]) -> Any:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request, RequestStatus

        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(name, prompt, SamplingParams(max_tokens=50), None, block_hasher=hasher)
        computed, cached, _ = self.manager.get_computed_blocks(request)
        new = len(prompt) - cached
        given = self._allocate(self.manager, request, new, cached, computed, num_lookahead_tokens=0)
        if given is not None:
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = len(prompt)
            self.requests[name], self.unknown[name] = request, []
            self._sampled(name, 1)
        return self._told(given)

    def go_on(self, name: str, token: int, ahead: int) -> Any:
        request = self.requests[name]
        given = self._allocate(self.manager, request, 1, num_lookahead_tokens=ahead)
        if given is not None:
            request.num_computed_tokens += 1
            self._sampled(name, token)
        return self._told(given)

    def _sampled(self, name: str, token: int) -> None:
        self.unknown[name].append(token)
        if len(self.unknown[name]) > self.lag:
            self.requests[name].append_output_token_ids(self.unknown[name].pop(0))

    def end(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))

    def _told(self, given: Any) -> Any:
        held = {name: self.manager.get_block_ids(name) for name in self.requests}
        pool = self.manager.block_pool
        kept = list(pool.cached_block_hash_to_block._cache)
        return None if given is None else given.get_block_ids(), held, pool.get_num_free_blocks(), kept


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
@pytest.mark.parametrize(("caching", "lag"), [(True, 0), (True, 1), (True, 2), (False, 0)])
def test_both_ways_hold_and_keep_the_same_blocks_whatever_is_asked(seed: int, lag: int, *, caching: bool):
    chance = random.Random(seed)  # noqa: S311  # repeatable on purpose
    sides = [Side(own_way, caching, lag) for own_way in (True, False)]
    refused = 0
    for number in range(400):
        names = list(sides[0].requests)
        if not names or chance.random() < 0.06:
            # Few different beginnings: many are found again, some to the end.
            prompt = [chance.randrange(2)] * chance.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 14])
            told = [side.let_in(f"r{number}", prompt) for side in sides]
        elif chance.random() < 0.03:
            name = chance.choice(names)
            told = [side.end(name) for side in sides]
        else:
            name, token, ahead = chance.choice(names), chance.randrange(3), chance.choice([0] * 9 + [2])
            if sides[0].requests[name].num_computed_tokens >= LONGEST - 3:
                told = [side.end(name) for side in sides]
            else:
                told = [side.go_on(name, token, ahead) for side in sides]
        assert told[0] == told[1]
        if told[0] is not None and told[0][0] is None and names:
            refused += 1
            for side in sides:
                side.end(names[0])
    assert refused


def test_the_short_way_is_taken_where_a_token_has_room_and_only_there(monkeypatch: pytest.MonkeyPatch):
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    long_ways: list[int] = []

    def count(manager: Any, request: Any, *given: Any, **named: Any) -> Any:
        long_ways.append(request.num_tokens)
        return inherited(manager, request, *given, **named)

    inherited = KVCacheManager.hearth_inherited
    monkeypatch.setattr(KVCacheManager, "allocate_slots", patches._short(count))
    side = Side(own_way=False)
    side.let_in("one", [7] * 5)
    assert long_ways == [5]
    for token in range(11):
        side.go_on("one", token, 0)
    # Tokens 8, 12 and 16 fill a block, 9 and 13 begin one.
    assert long_ways == [5, 8, 9, 12, 13, 16]
    side.go_on("one", 1, ahead=1)
    assert long_ways[-1] == 17
