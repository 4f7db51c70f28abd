"""LiteLLM's proxy before the server, with the file of docs/clients.md: other names for our models, and its own health check."""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import checks
from checks import API_KEY, BASE_URL, DEMO, MODEL, UNKNOWN_MODEL, WRONG_KEY

PORT = int(os.environ["FREE_PORT"])
MASTER_KEY = "sk-of-the-proxy-and-long-enough-0123456789"  # it does not start without one
ENTRIES = [
    ("gpt-4o-mini", f"hosted_vllm/{MODEL}", API_KEY, None),
    ("seeing", f"hosted_vllm/{checks.SEEING}", API_KEY, None),
    ("dall-e-3", "openai/service-image", API_KEY, "image_generation"),
    ("tts-1", "openai/service-voice", API_KEY, "audio_speech"),
]
WRONG = [
    ("stranger", f"hosted_vllm/{MODEL}", WRONG_KEY, None),
    ("nobody", f"hosted_vllm/{UNKNOWN_MODEL}", API_KEY, None),
]


def configure(path: Path, entries: list[tuple[str, str, str, str | None]]) -> None:
    models = [
        {"model_name": name, "litellm_params": {"model": model, "api_base": BASE_URL, "api_key": key}}
        | ({"model_info": {"mode": mode}} if mode else {})
        for name, model, key, mode in entries
    ]
    path.write_text(
        json.dumps({"model_list": models, "general_settings": {"master_key": MASTER_KEY}}), encoding="utf-8"
    )  # JSON is YAML


def ask(path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {MASTER_KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310  its address stands above
        raw = answer.read()
        return json.loads(raw) if "json" in answer.headers["content-type"] else raw


def question(text: str = DEMO["question"], model: str = "gpt-4o-mini", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def said(message: Any) -> str:
    return str(message["choices"][0]["message"]["content"])


def chat() -> None:
    checks.same(said(ask("/v1/chat/completions", question())), DEMO["answer"])
    message = ask("/v1/messages", question(max_tokens=checks.MAX_TOKENS))
    checks.same(message["content"][0]["text"], DEMO["answer"])
    response = ask("/v1/responses", {"model": "gpt-4o-mini", "input": DEMO["question"], "temperature": 0})
    checks.same(response["output"][-1]["content"][0]["text"], DEMO["answer"])


def stream() -> None:
    lines = ask("/v1/chat/completions", question(stream=True)).decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    checks.same("".join(pieces), DEMO["answer"])
    checks.true(len(pieces) > 2, "it came in one piece")


def tools() -> None:
    asked = question(DEMO["tool_question"], tools=checks.TOOLS)
    message = ask("/v1/chat/completions", asked)["choices"][0]["message"]
    (call,) = message["tool_calls"]
    checks.same(json.loads(call["function"]["arguments"]), DEMO["tool_arguments"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": DEMO["tool_result"]}
    asked["messages"] += [{key: message[key] for key in ("role", "content", "tool_calls")}, result]
    checks.same(said(ask("/v1/chat/completions", asked)), DEMO["tool_answer"])


def pictures() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{DEMO['picture']}"}}
    asked = question(model="seeing")
    asked["messages"][0]["content"] = [part, {"type": "text", "text": DEMO["picture_question"]}]
    checks.same(said(ask("/v1/chat/completions", asked)), DEMO["picture_answer"])


def structured() -> None:
    limit = {"name": "person", "schema": checks.PERSON_SCHEMA, "strict": True}
    limited = {"response_format": {"type": "json_schema", "json_schema": limit}, "max_tokens": checks.MAX_TOKENS}
    checks.is_person(json.loads(said(ask("/v1/chat/completions", question(DEMO["person_question"], **limited)))))


def images_and_speech() -> None:
    image = ask("/v1/images/generations", {"model": "dall-e-3", "prompt": "a red square", "size": "256x256"})
    checks.true(image["data"][0]["b64_json"])
    checks.true(len(ask("/v1/audio/speech", {"model": "tts-1", "voice": "alloy", "input": "Hello."})) > 1000)


def health() -> None:
    """It asks every model, each in its mode."""
    found = ask("/health")
    unhealthy = {(one["model"], one.get("error", "")[:60]) for one in found["unhealthy_endpoints"]}
    checks.same({model for model, _ in unhealthy}, {f"hosted_vllm/{UNKNOWN_MODEL}", f"hosted_vllm/{MODEL}"})
    checks.same(len(found["healthy_endpoints"]), len(ENTRIES))


def refused(model: str, status: int, message: str) -> None:
    try:
        ask("/v1/chat/completions", question(model=model))
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        checks.true(error.code == status and message in text, (error.code, text))
    else:
        raise AssertionError(f"{model} was not refused")


def wrong_key() -> None:
    refused("stranger", 401, DEMO["wrong_key_message"])


def unknown_model() -> None:
    refused("nobody", 404, DEMO["unknown_model_message"])


config = Path("config.yaml")
configure(config, ENTRIES + WRONG)
command = [Path(os.environ["PROGRAMS"]) / "python", "-m", "litellm.proxy.proxy_cli", "--config", config]
with Path("proxy.log").open("wb") as log:
    proxy = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(PORT)],
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=log,
        stderr=log,
    )
try:
    deadline = time.monotonic() + 150
    while True:
        try:
            ask("/health/liveliness")
            break
        except OSError:
            if proxy.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(Path("proxy.log").read_text(encoding="utf-8")[-3000:]) from None
            time.sleep(0.5)
    checks.run(chat, stream, tools, pictures, structured, images_and_speech, health, wrong_key, unknown_model)
finally:
    proxy.terminate()
    proxy.wait(30)
