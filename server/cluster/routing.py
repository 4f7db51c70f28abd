"""Keeps a conversation with the replica that has cached its beginning, unless that is much busier than others."""

from typing import Any

from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter

_MOST_OF_AVERAGE = 1.25  # as HAProxy's hash-balance-factor is set


class StickyRouter(ConsistentHashRouter):  # type: ignore[misc]  # of Ray, which has no types
    """Serve's consistent hashing by session, with bounded loads: who is over the bound is asked last."""

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        found = await super().choose_replicas(candidate_replicas, pending_request)
        busy = {one.replica_id: self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidate_replicas}
        most = max(1.0, _MOST_OF_AVERAGE * (sum(busy.values()) + 1) / max(len(busy), 1))
        return sorted(found, key=lambda rank: busy.get(rank[0].replica_id, 0) >= most)
