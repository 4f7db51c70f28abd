"""One run of chat beside images: the order for it, what its sender saw, and the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.chat_job import ChatJob, Measurement  # msgspec reads them
from benchmarks.figures import milliseconds, percentile

if TYPE_CHECKING:
    from benchmarks.figures import Figures

BESIDE, IDLE = "chat beside images", "chat alone"


class ChatBesideJob(msgspec.Struct, frozen=True):
    """The requests of `chat`, while `clients` clients ask for images, each for its next one when it has its last.

    They begin `lead_seconds` earlier. 0 clients: chat alone.
    """

    chat: ChatJob
    image_model: str
    clients: int
    size: int
    lead_seconds: float

    def image_fields(self, client: int, number: int) -> dict[str, Any]:
        """Return the body of a client's image request; every fourth one is hd."""
        return {
            "model": self.image_model,
            "prompt": f"a red circle on a white background, {client}-{number}",
            "size": f"{self.size}x{self.size}",
            "quality": "hd" if (client + number) % 4 == 0 else "standard",
            "seed": client * 100_000 + number,
            "response_format": "b64_json",
        }


class ChatBesideMeasurement(msgspec.Struct):
    """What was seen. `cpu_seconds` of each process of the server, by its role, while chat was measured."""

    chat: Measurement
    cpu_seconds: dict[str, float] = {}
    image_seconds: list[float] = []


def chat_beside_figures(job: ChatBesideJob, seen: ChatBesideMeasurement) -> Figures:
    """Put a run into figures. CPU is in percent of one core; without clients there are no images, not 0 of them."""
    chat, images = seen.chat, seen.image_seconds
    gaps, wall = chat.inter_token_latency_seconds, chat.wall_seconds
    return {
        "inter_token_latency_p50_ms": milliseconds(percentile(gaps, 50)),
        "inter_token_latency_p95_ms": milliseconds(percentile(gaps, 95)),
        "inter_token_latency_p99_ms": milliseconds(percentile(gaps, 99)),
        "time_to_first_token_p50_ms": milliseconds(percentile(chat.time_to_first_token_seconds, 50)),
        "time_to_first_token_p99_ms": milliseconds(percentile(chat.time_to_first_token_seconds, 99)),
        "tokens_per_second": chat.completion_tokens / wall,
        "images_per_second": len(images) / wall if job.clients else None,
        "image_latency_p50_ms": milliseconds(percentile(images, 50)),
        "image_latency_p95_ms": milliseconds(percentile(images, 95)),
        **{f"{role}_cpu_percent": 100 * cpu / wall for role, cpu in seen.cpu_seconds.items()},
        "load_cpu_percent": 100 * chat.cpu_seconds / wall,
        "tokens": float(chat.completion_tokens),
        "wall_seconds": wall,
    }
