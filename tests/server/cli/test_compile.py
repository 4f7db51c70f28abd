"""`hearth compile`, and servers that start with what it made, or without where that cannot be used."""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import httpx2
import openai
import pytest
from chat_parts import HELLO, MODEL, PROMPTS, ask, ask_streamed, promised
from serving import BIN, ROOT, Server
from small_models import CHAT_ENTRY, models_yaml

pytestmark = pytest.mark.engine

COMPILE_SECONDS = 400.0
COMPILER = {"CC": "gcc", "CXX": "g++"}  # part of what vLLM finds its code by; other servers of tests have none
FAILED = "service-plus does not start with the code that was compiled for it."
HINT = "Faster on this CPU once compiled: service-plus."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compiled")
    (made / "models.yaml").write_text(models_yaml(CHAT_ENTRY))
    (made / "weights").mkdir()
    return made


@pytest.fixture(scope="module")
def compiled(folder: Path) -> Path:
    """The data directory after `hearth compile`, which takes a minute where nothing is in vLLM's cache yet."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed (apt-get install g++)")
    done = hearth_compile(folder, folder / "data")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (one,) = told["compiled"]
    assert (one["model"], one["weights"], told["failed"]) == ("service-plus", "demo", [])
    assert one["seconds"] > 0
    return folder / "data"


@pytest.fixture(scope="module")
def fast(folder: Path, compiled: Path) -> Iterator[Server]:
    assert compiled.exists()
    with server_in(folder, COMPILER) as running:
        yield running
        assert running.stop() == 0, running.log()


@pytest.fixture
async def client(fast: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    assert fast.admin_key is not None
    one = openai.AsyncOpenAI(base_url=fast.base_url, api_key=fast.admin_key.text, max_retries=0, timeout=120)
    async with one:
        yield one


def server_in(folder: Path, environment: Mapping[str, str] | None = None) -> Server:
    models = {"HEARTH_MODELS": str(folder / "models.yaml")}
    return Server(folder, environment=models | cache_in(folder) | dict(environment or {}))


def cache_in(folder: Path) -> dict[str, str]:
    return {"VLLM_CACHE_ROOT": str(folder / "cache")}


def hearth_compile(
    folder: Path, data_dir: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    where = ["--models", str(folder / "models.yaml"), "--weights-dir", str(folder / "weights")]
    return subprocess.run(
        [BIN / "hearth", "compile", *where, "--data-dir", str(data_dir), "--json", *arguments],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | COMPILER | cache_in(folder) | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
        check=False,
    )


@pytest.mark.rounds
async def test_a_compiled_model_answers_every_promised_prompt_word_for_word(client: openai.AsyncOpenAI) -> None:
    ways = [ask if position % 2 else ask_streamed for position in range(len(PROMPTS))]
    answers = await asyncio.gather(*(way(client, one) for way, one in zip(ways, PROMPTS.values(), strict=True)))
    wrong = {name: answer for name, answer in zip(PROMPTS, answers, strict=True) if answer != promised(PROMPTS[name])}
    assert wrong == {}


@pytest.mark.rounds
async def test_what_vllm_would_compile_at_first_use_is_not_compiled(client: openai.AsyncOpenAI, folder: Path) -> None:
    code = set((folder / "cache").rglob("*.so"))
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=3)
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) > 0
    assert len(code) > 0
    assert set((folder / "cache").rglob("*.so")) == code


@pytest.mark.rounds
def test_a_server_starts_with_the_code_that_is_there(fast: Server) -> None:
    fast.wait_for_line("service-plus: starting the engine process, compiled")
    assert fast.admin_key is not None
    address, headers = f"{fast.root_url}/v1/admin/status", {"Authorization": f"Bearer {fast.admin_key.text}"}
    (model,) = httpx2.get(address, headers=headers, timeout=60).json()["models"]
    assert model["served_with"]["compiled"] is True
    assert FAILED not in fast.log()  # it would have been, had vLLM not loaded it
    assert HINT not in fast.log()


@pytest.mark.rounds
def test_where_vllms_cache_cannot_be_used_the_model_starts_uncompiled(
    folder: Path, compiled: Path, tmp_path: Path
) -> None:
    (tmp_path / "models.yaml").write_bytes((folder / "models.yaml").read_bytes())
    (tmp_path / "data").mkdir()
    shutil.copy(compiled / "compiled.json", tmp_path / "data")
    (tmp_path / "cache").touch()
    with server_in(tmp_path, COMPILER) as running:
        log = running.log()
        assert "cannot be used (Not a directory): models run uncompiled" in log
        assert FAILED in log  # it looked for its code, and did not compile though it could
        assert HINT in log
        assert running.stop() == 0


def test_without_a_compiler_the_command_says_what_to_install(folder: Path, tmp_path: Path) -> None:
    done = hearth_compile(folder, tmp_path, environment={"PATH": str(tmp_path)})
    assert done.returncode == 1
    assert "sudo apt-get install g++ python3." in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_chat_is_not_compiled(folder: Path, tmp_path: Path) -> None:
    done = hearth_compile(folder, tmp_path, "service-image")
    assert done.returncode == 2  # as for any wrong argument
    assert "It has: service-plus." in done.stderr


def test_a_model_with_adapters_is_not_compiled(tmp_path: Path) -> None:
    adapter = "  legal: {task: adapter, tier: standard, base: service-plus, weights: legal}\n"
    (tmp_path / "models.yaml").write_text(models_yaml(CHAT_ENTRY, adapter))
    (tmp_path / "weights").mkdir()
    done = hearth_compile(tmp_path, tmp_path / "data", "service-plus")
    assert done.returncode == 2
    assert "service-plus has adapters in models.yaml" in done.stderr
