"""Instructions within a conversation, for a model whose template takes a system message at the start only."""

import shutil
from collections.abc import Iterator

import httpx2
import pytest
from serving import Server

from engine.demo import weights_dir

pytestmark = pytest.mark.engine

YAML = """\
models:
  strict: {task: chat, tier: t, capabilities: [chat, function_calling], weights: strict}
tiers:
  t: {models: [t]}
  standard: {models: [t]}
"""
CHECK = (
    "{%- for one in messages %}{%- if one.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}{%- endfor %}"
)
USER, ANSWER = {"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}


def told(text: str, role: str = "system") -> dict[str, str]:
    return {"role": role, "content": text}


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx2.Client]:
    folder = tmp_path_factory.mktemp("strict")
    (folder / "models.yaml").write_text(YAML)
    shutil.copytree(weights_dir("chat"), folder / "weights" / "strict")
    template = folder / "weights" / "strict" / "chat_template.jinja"
    template.write_text(CHECK + template.read_text().replace("('system', 'developer')", "('system',)"))
    with Server(folder, environment={"HEARTH_MODELS": str(folder / "models.yaml")}) as server:
        assert server.admin_key is not None
        headers = {"Authorization": f"Bearer {server.admin_key.text}"}
        with httpx2.Client(base_url=server.base_url, headers=headers, timeout=60) as client:
            yield client


def tokens(client: httpx2.Client, messages: list[dict[str, str]]) -> list[int]:
    answer = client.post("/tokenize", json={"model": "strict", "messages": messages})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


@pytest.mark.parametrize("late", ["system", "developer"])
@pytest.mark.parametrize("first", ["system", "developer"])
def test_later_instructions_join_the_first(strict: httpx2.Client, first: str, late: str):
    sent = [told("Be brief.", first), USER, ANSWER, told("In French.", late), USER]
    assert tokens(strict, sent) == tokens(strict, [told("Be brief.\n\nIn French."), USER, ANSWER, USER])
    assert tokens(strict, [USER, told("In French.", late), USER]) == tokens(strict, [told("In French."), USER, USER])


@pytest.mark.parametrize("late", ["system", "developer"])
def test_responses_take_them_as_chat_does(strict: httpx2.Client, late: str):
    items = [told("Be brief.", "developer"), USER, told("In French.", late), USER]
    body = {"model": "strict", "input": items, "instructions": "Be kind.", "max_output_tokens": 1}
    answer = strict.post("/responses", json=body)
    assert answer.status_code == 200, answer.text
    chat = [told("Be kind.\n\nBe brief.\n\nIn French."), USER, USER]
    assert answer.json()["usage"]["input_tokens"] == len(tokens(strict, chat))
