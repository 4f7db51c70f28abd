"""`/metrics`: vLLM's own names beside ours, every model at once, and nothing in it that a client wrote."""

import asyncio
import re
import time

import httpx2
import pytest
import yaml
from chat_parts import CHAT, HELLO, MODEL, PROMPTS, assert_error, body, raw_stream
from metrics_parts import Page
from serving import CANARY, ROOT, Server, async_poll_until

from server.observability.access_log import RequestRecord
from server.observability.metrics import PAGE_SECONDS, Kept, Metrics
from server.store.usage import Usage

CHATS = ("service-plus", "service-pro")


async def read(http: httpx2.AsyncClient) -> Page:
    """A page that was made from here on: the first page does not count its own reading, but the next one does."""
    pages = [await read_kept(http)]
    before = pages[0].value("hearth_requests_total", route="/metrics")
    deadline = time.monotonic() + 60
    while pages[-1].value("hearth_requests_total", route="/metrics") == before:
        assert time.monotonic() < deadline, "no other page within 60 s"
        pages.append(await read_kept(http))
    return pages[-1]


async def read_kept(http: httpx2.AsyncClient) -> Page:
    answer = await http.get("/metrics")
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Page(answer.text)


@pytest.mark.engine
async def test_an_answer_is_counted_by_us_and_by_vllm(http: httpx2.AsyncClient):
    before = await read(http)
    _, chunks = await raw_stream(http, messages=HELLO, stream_options={"include_usage": True})
    usage = chunks[-1]["usage"]
    after = await read(http)

    def more(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    ours = {"model": MODEL, "kind": "chat"}
    assert more("hearth_answers_total", **ours, outcome="ok") == 1
    assert more("hearth_prompt_tokens_total", **ours) == usage["prompt_tokens"]
    assert more("hearth_completion_tokens_total", **ours) == usage["completion_tokens"]
    assert more("hearth_queue_wait_seconds_count", **ours) == 1
    assert more("hearth_time_to_first_token_seconds_count", model=MODEL) == 1
    assert more("hearth_requests_total", model=MODEL, route=CHAT, method="POST", status="200") == 1
    assert more("hearth_request_duration_seconds_count", model=MODEL, route=CHAT) == 1
    assert more("vllm:generation_tokens_total", model_name=MODEL) == usage["completion_tokens"]
    assert more("vllm:prompt_tokens_total", model_name=MODEL) == usage["prompt_tokens"]
    assert more("vllm:time_to_first_token_seconds_count", model_name=MODEL) == 1
    assert more("vllm:generation_tokens_total", model_name="service-pro") == 0


@pytest.mark.engine
async def test_answers_are_counted_by_tier_while_they_run(http: httpx2.AsyncClient, server: Server):
    key = server.make_key("of a tier", tier="standard", scopes=["chat"])
    asked = {"model": MODEL, "messages": HELLO, "stream": True, "max_tokens": 16_000, "ignore_eos": True}
    async with http.stream("POST", CHAT, json=asked, headers=_with(key.text)) as answer:
        assert answer.status_code == 200
        assert (await read(http)).value("hearth_tier_running", tier="standard") == 1
    ended = await read(http)
    while ended.value("hearth_tier_running", tier="standard"):
        ended = await read(http)
    assert ended.value("hearth_tier_waiting", tier="standard") == 0


async def test_whoever_reads_in_a_loop_has_the_page_made_no_more_than_once_a_second():
    kept, made, go = Kept[bytes](PAGE_SECONDS), [], asyncio.Event()

    async def make() -> bytes:
        made.append(asyncio.get_running_loop().time())
        await go.wait()
        return b"%d" % len(made)

    together = [asyncio.create_task(kept.read(make)) for _ in range(5)]
    await async_poll_until(lambda: bool(made), 60)
    together.pop().cancel()
    go.set()
    assert await asyncio.gather(*together) == [b"1"] * 4
    while await kept.read(make) == b"1":  # noqa: ASYNC110 - until the clock says so
        await asyncio.sleep(0)
    assert made[1] - made[0] >= PAGE_SECONDS


async def test_a_page_that_could_not_be_made_is_made_anew():
    kept = Kept[bytes](PAGE_SECONDS)

    async def fail() -> bytes:
        raise OSError

    async def make() -> bytes:
        return b"page"

    with pytest.raises(OSError):  # noqa: PT011  # ours has no text
        await kept.read(fail)
    assert await kept.read(make) == b"page"


async def test_what_is_about_something_else_is_made_anew():
    kept, numbers = Kept[int](PAGE_SECONDS), iter(range(9))

    async def make() -> int:
        return next(numbers)

    assert [await kept.read(make, about) for about in ({1}, {1}, {1, 2}, {1, 2}, set())] == [0, 0, 1, 1, 2]


@pytest.mark.engine
async def test_one_page_is_given_to_all_who_ask_within_a_second(http: httpx2.AsyncClient):
    await read(http)
    pages = await asyncio.gather(*(read_kept(http) for _ in range(20)))
    assert len({page.text for page in pages}) <= 2, "a second may end among them"


@pytest.mark.engine
async def test_all_models_stand_side_by_side_and_each_name_once(http: httpx2.AsyncClient):
    page = await read(http)
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:request_success_total"):
        assert page.labels(name, "model_name") == {
            *CHATS,
            *(f"service-{one}" for one in ("embedding", "rerank", "transcription")),
        }
    types = [line for line in page.text.splitlines() if line.startswith("# TYPE ")]
    assert len(types) == len({*types})
    everyone = page.labels("hearth_model_state", "model")
    assert everyone > {*CHATS}
    assert page.value("hearth_model_state", model=MODEL, state="ready") == 1
    assert page.value("hearth_model_state", model=MODEL) == 1
    assert page.labels("hearth_queue_waiting", "model") >= {*CHATS}
    assert page.value("hearth_disk_free_bytes", folder="data") > 0
    assert page.value("process_resident_memory_bytes") > 0


@pytest.mark.engine
async def test_the_names_stay_vllms_own_whatever_form_is_asked_for(http: httpx2.AsyncClient):
    """Prometheus asks for OpenMetrics first, in which its library would rename them."""
    answer = await http.get("/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0,*/*;q=0.1"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nvllm:generation_tokens_total{" in answer.text


@pytest.mark.engine
async def test_nothing_that_a_client_sends_becomes_a_label(http: httpx2.AsyncClient, server: Server):
    await http.post(CHAT, json=body(PROMPTS["say-hello"], model=f"{CANARY}-model"))
    await http.get(f"/{CANARY}/path")
    await http.request("PROPFIND", f"/v1/models/{CANARY}")
    await http.get("/v1/models", headers={"Authorization": f"Bearer {CANARY}-key", "User-Agent": CANARY})
    page = await read(http)
    assert CANARY not in page.text
    assert not any(key.public_id in page.text for key in [*server.made_keys, server.admin_key] if key)
    assert page.value("hearth_requests_total", status="404", model="", route=CHAT) >= 1


@pytest.mark.engine
async def test_the_page_asks_for_a_key_that_may_read_it(server: Server, http: httpx2.AsyncClient):
    async with httpx2.AsyncClient(base_url=server.root_url, timeout=60) as stranger:
        assert_error(await stranger.get("/metrics"), 401, "invalid_api_key")
    scraper = server.make_key("prometheus", tier="standard", scopes=["metrics"])
    chatter = server.make_key("chat only", tier="standard", scopes=["chat"])

    async def is_known() -> bool:
        return (await http.get("/v1/usage", headers=_with(chatter.text))).status_code == 200

    assert await is_known()
    assert_error(await http.get("/metrics", headers=_with(chatter.text)), 403, "insufficient_permissions")
    assert (await http.get("/metrics", headers=_with(scraper.text))).status_code == 200
    assert_error(
        await http.post(CHAT, json=body(PROMPTS["say-hello"]), headers=_with(scraper.text)),
        403,
        "insufficient_permissions",
    )


def _with(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def sample(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_a_model_that_does_not_exist_has_no_name():
    metrics = Metrics({"known"})
    for model in ("known", "made up by a client"):
        metrics.used(model, "chat", Usage(requests=1, aborted=1, completion_tokens=3), None)
        metrics.finished(RequestRecord("r", "BREW", None, model=model, status=404))
    assert sample(metrics, "hearth_answers_total", model="known", kind="chat", outcome="aborted") == 1
    assert sample(metrics, "hearth_answers_total", model="", kind="chat", outcome="aborted") == 1
    assert sample(metrics, "hearth_completion_tokens_total", model="", kind="chat") == 3
    assert sample(metrics, "hearth_requests_total", method="", route="", status="404", model="") == 1
    assert sample(metrics, "hearth_queue_wait_seconds_count", model="known", kind="chat") is None


def asked_by(file: str) -> list[str]:
    """The PromQL expressions of a shipped file: JSON is YAML, too."""
    found, left = [], [yaml.safe_load((ROOT / "docker" / file).read_text())]
    while left:
        part = left.pop()
        left += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        found += [part["expr"]] if isinstance(part, dict) and "expr" in part else ()
    return found


def metrics_of(expression: str) -> set[str]:
    """What is no function, label, range or operator."""
    bare = re.sub(r"{[^}]*}|\[[^]]*]|\b(?:by|on) \([^)]*\)", "", expression)
    return {*re.findall(r"\b[a-z_][\w:]*\b(?!\s*\()", bare)} - {"and"}


@pytest.mark.engine
@pytest.mark.parametrize("file", ["grafana/hearth.json", "prometheus/alerts.yaml"])
async def test_dashboard_and_alerts_ask_for_metrics_that_there_are(file: str, http: httpx2.AsyncClient):
    written = {re.split("[{ ]", line)[2] for line in (await read(http)).text.splitlines() if line.startswith("# TYPE ")}
    there = written | {f"{name}_{part}" for name in written for part in ("bucket", "sum", "count")}
    for expression in asked_by(file):
        assert metrics_of(expression), expression
        assert metrics_of(expression) <= there | {"up"}, expression  # which Prometheus writes itself


async def test_the_documentation_lists_what_is_counted():
    told = (ROOT / "docs" / "operations.md").read_text()
    for family in Metrics(()).registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if not name.startswith("process_"):
            assert name.replace("hearth_build", "hearth_build_info") in told or f"`{name}`" in told, name
