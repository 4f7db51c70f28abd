"""Many long prompts at once: each is prepared in its turn, and none is given up for the time that it waited."""

import asyncio
from collections import Counter
from pathlib import Path

import httpx2
import pytest
from chat_parts import MODEL
from serving import Server
from small_models import CHAT_ENTRY, models_yaml

pytestmark = pytest.mark.engine


async def test_a_burst_of_long_prompts_is_prepared_one_after_the_other(tmp_path: Path):
    (tmp_path / "models.yaml").write_text(models_yaml(CHAT_ENTRY.replace("2048", "32768")))
    environment = {"HEARTH_MODELS": str(tmp_path / "models.yaml")}
    # vLLM gives up on a template that takes longer than this, with what it waits for others
    environment["VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"] = "0.3"
    with Server(tmp_path, environment=environment) as server:
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        async with httpx2.AsyncClient(base_url=server.base_url, headers=headers, timeout=240) as http:
            messages = [{"role": "user", "content": "A long question. " * 6000}]
            body = {"model": MODEL, "messages": messages}
            asked = [asyncio.create_task(http.post("/tokenize", json=body)) for _ in range(60)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)  # the others are still read
            later = [http.post("/tokenize", json=body) for _ in range(20)]
            found = Counter(answer.status_code for answer in await asyncio.gather(*asked, *later))
    assert found == {200: 80}
