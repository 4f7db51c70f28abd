"""scripts/prove-gpu: a rehearsal with the demo models, and a report that says which step failed."""

import json
from datetime import UTC, datetime
from pathlib import Path

import prove_gpu
import pytest


def test_a_step_that_fails_is_told_and_the_others_go_on(tmp_path: Path):
    import asyncio

    async def works() -> dict[str, int]:
        return {"seen": 3}

    async def fails() -> dict[str, int]:
        raise ValueError("no | such\nthing")

    async def both() -> prove_gpu.Proof:
        proof = prove_gpu.Proof("1 GPU", "590", datetime.now(UTC).isoformat(), rehearsal=False)
        await proof.try_step("first", fails)
        await proof.try_step("second", works)
        return proof

    text = prove_gpu.as_markdown(asyncio.run(both()))
    assert "Driver 590. 1 of 2 steps failed." in text
    assert "| first | FAILED |" in text
    assert "ValueError: no / such thing |" in text
    assert "seen: 3 |" in text


@pytest.mark.engine
@pytest.mark.rounds
def test_a_rehearsal_on_this_machine_passes_all_steps(tmp_path: Path):
    out = tmp_path / "proof"
    options = ["--out", str(out), "--weights-dir", str(tmp_path / "none"), "--streams", "16"]
    code = prove_gpu.main(options)
    proof = json.loads((out / "proof.json").read_text())
    assert [(step["name"], step["problem"]) for step in proof["steps"] if not step["passed"]] == []
    assert code == 0
    speeds = [step["figures"]["tokens_per_second"] for step in proof["steps"] if "streams" in step["name"]]
    assert len(speeds) == 4
    assert min(speeds) > 0
    names = {step["name"] for step in proof["steps"]}
    assert {"service-pro: a picture", "service-image: 4 x 1024", "service-voice: a sentence"} <= names
    assert {"service-embedding: 256 texts", "service-rerank: the right text first"} <= names
    assert (out / "proof.md").read_text().startswith("# Proof of ")
