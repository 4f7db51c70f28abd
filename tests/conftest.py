"""One real server for the whole run, and clients that talk to it. Tests that use them are marked `engine`."""

import os
import re
import sys
from pathlib import Path

# pytest puts this folder on the path, where `engine` would be the folder of tests: the real package comes first.
sys.path.insert(0, str(Path(__file__).parents[1]))

from collections.abc import AsyncIterator, Iterator

import httpx2
import hypothesis
import openai
import pytest
from serving import CANARY, Key, RunningServer, Server, contents


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes minutes to say once more what a few rounds say is left out, and shown as skipped, unless asked for."""
    left_out = {
        "rounds": "many rounds, run before a release",
        "clients": "a program that takes long to install and run",
    }
    if "HEARTH_TEST_URL" in os.environ:
        items[:] = [item for item in items if "server" in getattr(item, "fixturenames", ())]
    for mark, why in left_out.items():
        if mark not in config.option.markexpr:
            for item in items:
                if item.get_closest_marker(mark):
                    item.add_marker(pytest.mark.skip(reason=f"{why}: ./scripts/test {mark}"))


# The machine may be busy: no property is broken by being slow to look at. What `scripts/test mutants` sets stays.
_SLOW = [hypothesis.HealthCheck.too_slow]
_PROFILE = hypothesis.settings(hypothesis.settings(), deadline=None, suppress_health_check=_SLOW)
hypothesis.settings.register_profile("busy", _PROFILE)
hypothesis.settings.load_profile("busy")

# Read by vLLM and OpenMP also where a test loads a model in this process.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server with the demo models, stopped at the end of the run, where its end and its silence are checked.

    With HEARTH_TEST_URL and HEARTH_TEST_KEY, of an admin: one that runs already, like a cluster.
    """
    if url := os.environ.get("HEARTH_TEST_URL"):
        yield RunningServer(url, Key(os.environ["HEARTH_TEST_KEY"]))
        return
    with Server(tmp_path_factory.mktemp("hearth")) as running:
        yield running
        assert running.stop() == 0, running.log()
        assert running.admin_key is not None
        _assert_nothing_leaked(running, running.admin_key)


@pytest.fixture(scope="session")
def admin_key(server: Server) -> Key:
    assert server.admin_key is not None
    return server.admin_key


@pytest.fixture(scope="session")
async def client(server: Server, admin_key: Key) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key=admin_key.text, max_retries=0, timeout=240
    ) as opened:
        yield opened


@pytest.fixture(scope="session")
def sync_client(server: Server, admin_key: Key) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key=admin_key.text, max_retries=0, timeout=240) as opened:
        yield opened


@pytest.fixture(scope="session")
async def http(server: Server, admin_key: Key) -> AsyncIterator[httpx2.AsyncClient]:
    """Plain HTTP with the key, at the address without /v1."""
    headers = {"Authorization": f"Bearer {admin_key.text}"}
    async with httpx2.AsyncClient(base_url=server.root_url, headers=headers, timeout=240) as opened:
        yield opened


_CANARY = CANARY.encode()


def _assert_nothing_leaked(server: Server, admin_key: Key) -> None:
    """The first key is shown twice at the start, on purpose. Nothing else may hold a key, and nothing a prompt."""
    shown = [line for line in server.log().splitlines() if admin_key.secret in line]
    assert [line.split(maxsplit=1)[0] for line in shown] == ["API", "curl"], shown
    secrets = [CANARY, *(key.secret for key in server.made_keys)]
    assert not any(secret in server.log() for secret in secrets)
    for file, content in contents(server.data_dir).items():
        # Of what a client wrote, the access log has the path that no route answers: escaped, and without keys
        kept = re.sub(rb'(?<="path":")/[^"]{0,99}(?=")', lambda path: path[0].replace(_CANARY, b""), content)
        leaked = [secret for secret in [*secrets, admin_key.secret] if secret.encode() in kept]
        assert leaked == [], f"{file.name} has a key's secret or a prompt"
