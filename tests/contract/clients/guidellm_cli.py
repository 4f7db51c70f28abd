"""guidellm: a small load test, after its own health check."""

import json
import os
import subprocess
from pathlib import Path

import checks
from checks import API_KEY, BASE_URL, MODEL, WRONG_KEY

PROGRAM = Path(os.environ["PROGRAMS"]) / "guidellm"
Path("prompts.jsonl").write_text('{"prompt": "What is the capital of France?"}\n' * 4, encoding="utf-8")


def guidellm(key: str) -> subprocess.CompletedProcess[str]:
    backend = {"kind": "openai_http", "target": BASE_URL.removesuffix("/v1"), "model": MODEL, "api_key": key}
    options = {
        "--backend": json.dumps(backend),
        "--profile": "kind=concurrent,streams=2",
        "--constraint": "kind=max_requests,count=4",
        "--data": "kind=json_file,path=prompts.jsonl",
        "--output": "kind=json,path=report.json",
    }
    flags = [text for option in options.items() for text in option]
    return subprocess.run(
        [PROGRAM, "run", *flags, "--disable-console-interactive"],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def requests() -> tuple[int, int]:
    """How many succeeded and how many did not, as its report says."""
    (benchmark,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    return totals["successful"], totals["errored"]


def load() -> None:
    done = guidellm(API_KEY)
    checks.same((done.returncode, done.stderr[-2000:] if done.returncode else ""), (0, ""))
    checks.same(requests(), (4, 0))


def wrong_key() -> None:
    """It passes its health check, which needs no key, and counts what was refused."""
    guidellm(WRONG_KEY)
    checks.same(requests(), (0, 4))


checks.run(load, wrong_key)
