"""lm-eval: a multiple-choice task over a data set of our own, by /v1/completions with echo and logprobs."""

import json
import os
import subprocess
from pathlib import Path

import checks
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

PYTHON = Path(os.environ["PROGRAMS"]) / "python"
QUESTIONS = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Rome", "Berlin"], "answer": 0},
    {"question": "What is two and two?", "choices": ["seven", "four"], "answer": 1},
]
TASK = """\
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
Path("tasks").mkdir()
Path("data.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS), encoding="utf-8")
Path("tasks/capitals.yaml").write_text(TASK.replace("FILE", str(Path("data.jsonl").absolute())), encoding="utf-8")


def lm_eval(key: str = API_KEY, model: str = MODEL) -> subprocess.CompletedProcess[str]:
    arguments = {
        "model": model,
        "base_url": f"{BASE_URL}/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": os.environ["TOKENIZER"],
        "max_retries": 1,
    }
    text = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [PYTHON, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", text]
    return subprocess.run(
        [*command, "--include_path", "tasks", "--tasks", "capitals", "--output_path", "results"],
        env=os.environ | {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def multiple_choice() -> None:
    done = lm_eval()
    checks.same((done.returncode, done.stderr[-3000:] if done.returncode else ""), (0, ""))
    (results,) = Path("results").rglob("results*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]["capitals"]
    checks.true(0 <= scores["acc,none"] <= 1, scores)


def wrong_key() -> None:
    done = lm_eval(key=WRONG_KEY)
    checks.true(done.returncode and DEMO["wrong_key_message"] in done.stderr, done.stderr[-3000:])


def unknown_model() -> None:
    done = lm_eval(model=UNKNOWN_MODEL)
    checks.true(done.returncode and DEMO["unknown_model_message"] in done.stderr, done.stderr[-3000:])


checks.run(multiple_choice, wrong_key, unknown_model)
