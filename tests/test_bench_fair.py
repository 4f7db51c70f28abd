"""The arithmetic of `bench fair`: when B sends, what counts of A's flood, its figures and aims, and its sender."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from benchmarks import fair_load
from benchmarks.errors import BenchError
from benchmarks.fair_job import (
    A_ALONE,
    A_ALONE_FIRST_COME,
    B_ALONE,
    FAIR,
    FIRST_COME,
    FairJob,
    FairMeasurement,
    fair_figures,
    verdicts,
)
from benchmarks.verdicts import Verdict
from benchmarks.workplace import open_workplace

from engine import load_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from benchmarks.figures import Figures

JOB = FairJob("m", seconds=0.2, flood=3, every_seconds=0.05, max_tokens=2, label="x", lead_seconds=0.05)
STREAM = (
    b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\ndata: {"choices":[{"delta":{"content":" you"}}]}\n\n'
    b'data: {"choices":[],"usage":{"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)


@dataclass
class Answering:
    """A real server; `status` is what it says to key A. It notes which key sent what."""

    status: str = "200 OK"
    port: int = 0
    prompts: dict[str, list[str]] = field(default_factory=dict)
    together: int = 0
    most_together: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                key = head.split(b"Bearer ")[1].split(b"\r\n")[0].decode()
                self.prompts.setdefault(key, []).append(body["messages"][0]["content"])
                status = self.status if key == "a" else "200 OK"
                self.together += key == "a"
                self.most_together = max(self.most_together, self.together)
                await asyncio.sleep(0)  # the others of the flood come in meanwhile
                self.together -= key == "a"
                lines = f"HTTP/1.1 {status}", "Content-Type: text/event-stream", f"Content-Length: {len(STREAM)}"
                writer.write("\r\n".join([*lines, "", ""]).encode() + STREAM)
                await writer.drain()


@contextlib.asynccontextmanager
async def answering(status: str = "200 OK") -> AsyncIterator[tuple[Answering, fair_load.Address]]:
    parts = Answering(status)
    async with await asyncio.start_server(parts.serve, "127.0.0.1", 0) as server:
        parts.port = server.sockets[0].getsockname()[1]
        yield parts, fair_load.Address("127.0.0.1", parts.port, "a", "b")


def figures(**known: float) -> Figures:
    return {**fair_figures(FairMeasurement(wall_seconds=1.0)), **known}


def one_repeat(fair_p95: float, a_tokens: float) -> dict[str, list[Figures]]:
    together = figures(b_latency_p95_ms=fair_p95, a_tokens_per_second=a_tokens, a_inter_token_latency_p50_ms=3.0)
    return {
        B_ALONE: [figures(b_latency_p95_ms=100.0)],
        A_ALONE: [figures(a_tokens_per_second=1000.0)],
        A_ALONE_FIRST_COME: [figures(a_tokens_per_second=1250.0)],
        FAIR: [together],
        FIRST_COME: [figures(b_latency_p95_ms=9000.0)],
    }


def test_b_sends_once_in_each_interval_at_moments_that_only_the_seed_decides():
    job = FairJob("m", 10.0, 200, 0.5, 64, "x", seed=1)
    moments = job.moments()
    assert len(moments) == 20
    assert all(0 <= moment - number * 0.5 <= 0.1 for number, moment in enumerate(moments))
    assert moments == job.moments()
    assert moments != FairJob("m", 10.0, 200, 0.5, 64, "x", seed=2).moments()


def test_without_an_interval_b_sends_nothing():
    assert FairJob("m", 10.0, 200, 0.0, 64, "x").moments() == []


def test_no_two_prompts_of_a_run_are_the_same():
    prompts = [JOB.requests_of(owner).messages(index)[0]["content"] for owner in "ab" for index in range(5)]
    assert len(set(prompts)) == 10


def test_figures_of_a_run_with_both_keys():
    seen = FairMeasurement(2.0, 10, 640, [0.002, 0.003, 0.010], [0.02, 0.04], [0.1, 0.3], [0.001, 0.001])
    made = fair_figures(seen)
    assert (made["a_requests_per_second"], made["a_tokens_per_second"]) == (5, 320)
    assert made["a_inter_token_latency_p50_ms"] == pytest.approx(3)
    assert made["b_latency_p50_ms"] == pytest.approx(200)
    assert made["b_latency_p95_ms"] == pytest.approx(290)
    assert made["b_time_to_first_token_p50_ms"] == pytest.approx(30)
    assert made["b_requests"] == 2


def test_a_key_that_sent_nothing_has_no_figures():
    alone = fair_figures(FairMeasurement(2.0, 10, 640))
    assert alone["b_latency_p95_ms"] is alone["b_requests"] is None
    other = fair_figures(FairMeasurement(2.0, latency_seconds=[0.1]))
    assert other["a_tokens_per_second"] is other["a_inter_token_latency_p50_ms"] is None


@pytest.mark.parametrize(
    ("p95", "tokens", "met"),
    [(153.0, 900.0, [True, True]), (153.1, 900.0, [False, True]), (150.0, 899.0, [True, False])],
)
def test_the_aims_are_one_and_a_half_times_alone_plus_a_step_and_nine_tenths(
    p95: float, tokens: float, met: list[bool]
):
    judged = verdicts(one_repeat(p95, tokens))
    assert [verdict.met for verdict in judged[:2]] == met
    assert judged[0].value == pytest.approx(p95 / 153)
    assert (judged[2].value, judged[2].met) == (90, True)
    assert (judged[3].value, judged[3].met) == (0.8, None)


def test_ratios_are_taken_within_each_repeat_so_that_a_machine_that_slows_down_does_no_harm():
    first, second, third = one_repeat(153.0, 950.0), one_repeat(306.0, 475.0), one_repeat(153.0, 950.0)
    second[B_ALONE] = [figures(b_latency_p95_ms=202.0)]
    second[A_ALONE] = [figures(a_tokens_per_second=500.0)]
    judged = verdicts({name: first[name] + second[name] + third[name] for name in first})
    assert [verdict.value for verdict in judged[:2]] == pytest.approx([1.0, 0.95])


def test_an_aim_says_what_was_measured():
    assert Verdict.at_most("x", 2.0, 1.0).sentence() == "MISSED: x is 2, aim at most 1"
    assert Verdict.at_least("x", 2.0, 1.0).sentence() == "met: x is 2, aim at least 1"
    assert Verdict.at_most("x", None, 1.0).sentence() == "not measured: x is -, aim at most 1"
    assert Verdict.at_most("x", 2.0, None).sentence() == "to know: x is 2"


async def test_a_floods_while_b_sends_and_both_are_counted():
    async with answering() as (server, address):
        seen = await fair_load.measure(JOB, address=address)
    assert len(seen.latency_seconds) == len(seen.time_to_first_token_seconds) == len(seen.late_seconds) == 4
    assert len(server.prompts["b"]) == 4
    # What was answered before the clock started is not counted.
    assert 0 < seen.flood_requests < len(server.prompts["a"])
    assert seen.flood_tokens == 2 * seen.flood_requests
    assert len(seen.flood_gaps_seconds) == seen.flood_requests
    assert seen.wall_seconds >= JOB.seconds
    assert server.most_together <= JOB.flood


async def test_without_a_flood_only_b_is_seen():
    async with answering() as (server, address):
        seen = await fair_load.measure(FairJob("m", 0.1, 0, 0.05, 2, "x", lead_seconds=0.0), address=address)
    assert set(server.prompts) == {"b"}
    assert (seen.flood_requests, len(seen.latency_seconds)) == (0, 2)


async def test_one_failed_answer_to_the_flood_ends_the_run():
    async with answering("503 Service Unavailable") as (_, address):
        with pytest.raises(BenchError, match="status 503"):
            await fair_load.measure(JOB, address=address)


def test_a_place_of_its_own_takes_engine_settings_and_keeps_the_others(tmp_path: Path):
    models = tmp_path / "models.yaml"
    models.write_text(
        "models:\n  m: {task: chat, tier: t, capabilities: [chat], weights: m, engine: {context_length: 512}}\n"
        "tiers:\n  t: {models: [t]}\n"
    )
    with open_workplace(models, "m", None, engine={"max_num_seqs": 4, "fair_queue": False}) as place:
        settings = load_config(place.models).models["m"].engine
        assert settings == place.spec.engine
    assert (settings.max_num_seqs, settings.fair_queue, settings.context_length) == (4, False, 512)
