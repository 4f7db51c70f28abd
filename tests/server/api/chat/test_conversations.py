"""What becomes of later instructions and of thoughts in a conversation, in all three conventions.

The template takes a system message at the start only, as Qwen3.5's, and shows thoughts.
"""

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
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "{%- if one.reasoning_content %}thought: {{ one.reasoning_content }}. {% endif %}{%- endfor %}"
    "{%- if preserve_thinking is defined and preserve_thinking %}All is kept. {% endif %}"
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


def tokens(client: httpx2.Client, messages: list[dict[str, str]], **fields: object) -> list[int]:
    answer = client.post("/tokenize", json={"model": "strict", "messages": messages, **fields})
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


CALL = {"id": "call-1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "Rain."}


def thought(field: str, text: object) -> list[dict[str, object]]:
    """A call that the model thought about."""
    return [USER, {"role": "assistant", "content": None, "tool_calls": [CALL], field: text}, RESULT]


def test_a_thought_that_is_sent_back_is_read_again_under_either_name(strict: httpx2.Client):
    without = tokens(strict, thought("reasoning_content", None))
    known = tokens(strict, thought("reasoning_content", "The sky is grey"))
    assert known == tokens(strict, thought("reasoning", "The sky is grey"))
    assert len(known) > len(without)
    for other in ({"effort": "high"}, [], 5, ""):
        assert tokens(strict, thought("reasoning", other)) == without


def test_the_template_is_told_to_keep_thoughts(strict: httpx2.Client):
    usual = tokens(strict, [USER])
    assert tokens(strict, [USER], chat_template_kwargs={"preserve_thinking": False}) == usual
    assert len(tokens(strict, [USER], chat_template_kwargs={"preserve_thinking": True})) > len(usual)


def test_messages_and_responses_give_thoughts_back_too(strict: httpx2.Client):
    known = len(tokens(strict, thought("reasoning_content", "The sky is grey")))
    use = {"type": "tool_use", "id": "call-1", "name": "look", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call-1", "content": "Rain."}]}
    for said in (
        [{"type": "thinking", "thinking": "The sky is grey", "signature": ""}, use],
        [{"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": "The sky is grey"}, use],
    ):
        body = {"model": "strict", "messages": [USER, {"role": "assistant", "content": said}, result]}
        answer = strict.post("/messages/count_tokens", json=body)
        assert answer.json() == {"input_tokens": known}, answer.text

    called = {"type": "function_call", "call_id": "call-1", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "call-1", "output": "Rain."}
    parts = [{"type": "reasoning_text", "text": "The sky is grey"}]
    mine = {"type": "reasoning", "id": "rs_1", "summary": [], "content": parts}
    foreign = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    for items in ([USER, mine, called, output], [USER, foreign, mine, called, output, foreign]):
        answer = strict.post("/responses", json={"model": "strict", "input": items, "max_output_tokens": 1})
        assert answer.json()["usage"]["input_tokens"] == known, answer.text
    items = [mine, USER, called, output]
    answer = strict.post("/responses", json={"model": "strict", "input": items, "max_output_tokens": 1})
    assert answer.json()["usage"]["input_tokens"] < known
