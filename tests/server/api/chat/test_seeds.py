"""Requests with a `seed` when the engine has to compute their prompts in several steps."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import httpx2

pytestmark = pytest.mark.engine

PATH = "/v1/chat/completions"


def seeded(number: int) -> dict[str, Any]:
    # Together far more tokens than one step of the engine takes (2048), so some prompts are cut.
    text = f"{number} " + "one two three four five six seven eight nine ten " * 20
    message = {"role": "user", "content": text}
    return {"model": "service-plus", "messages": [message], "seed": number, "max_tokens": 12, "temperature": 2}


async def test_seeded_prompts_that_do_not_fit_one_step_are_answered_and_harm_nobody(http: httpx2.AsyncClient) -> None:
    answers = await asyncio.gather(*(http.post(PATH, json=seeded(number)) for number in range(24)))
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert answers[0].json()["usage"]["prompt_tokens"] > 2048 / len(answers) * 2
    ready = await http.get("/health/ready")
    assert ready.json()["status"] == "ready"
