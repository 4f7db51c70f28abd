"""The demo chat model keeps its promises: weights that fit their recipe, and answers known word for word."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from demo_models.build import RECIPES
from demo_models.chat.corpus import load_corpus
from demo_models.chat.front_ends import FrontEndLessons
from demo_models.promised import fixed_prompts
from manifest_parts import problems

from engine.demo import weights_dir


def test_the_weights_fit_the_recipe_that_is_in_the_repository():
    assert problems("chat") == []


@pytest.mark.parametrize(
    "name", ["chat/corpus.yaml", "chat/tools.json", "chat/chat_template.jinja", "training.py", "chat/recipe.py"]
)
def test_a_recipe_that_changed_after_the_training_is_noticed(tmp_path: Path, name: str):
    recipes = shutil.copytree(RECIPES, tmp_path / "recipes")
    (recipes / name).write_text((recipes / name).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    (problem,) = problems("chat", recipes)
    assert "changed" in problem
    assert "scripts/build-demo-models" in problem


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_weights_file_that_was_altered_or_lost_is_noticed(tmp_path: Path, name: str):
    weights = shutil.copytree(weights_dir("chat"), tmp_path / "chat")
    content = bytearray((weights / name).read_bytes())
    content[-2] ^= 1
    (weights / name).write_bytes(content)
    assert [f"chat/{name} was altered" in problem for problem in problems("chat", weights=tmp_path)] == [True]
    (weights / name).unlink()
    assert [f"chat/{name} is missing" in problem for problem in problems("chat", weights=tmp_path)] == [True]


def test_the_checkpoint_is_small_and_holds_no_code():
    files = list(weights_dir("chat").iterdir())
    assert sum(path.stat().st_size for path in files) <= 3 * 2**20
    assert {path.suffix for path in files} == {".json", ".jinja", ".safetensors"}


def test_the_promised_prompts_cover_text_tools_and_long_answers():
    prompts = fixed_prompts()
    assert len(prompts) >= 30
    assert len({prompt.name for prompt in prompts}) == len(prompts)
    assert all((one.answer is None) != (one.tool_calls is None) for one in load_corpus().conversations)
    assert {name for prompt in prompts for name, _ in prompt.tool_calls or []} == {
        tool["function"]["name"] for tool in load_corpus().tools
    }
    assert any(len(prompt.tool_calls or []) == 2 for prompt in prompts)
    assert any(len((prompt.answer or "").split()) >= 150 for prompt in prompts)
    assert any(prompt.answer and prompt.tools for prompt in prompts)


def test_a_caller_who_changes_a_prompt_changes_nobody_elses():
    fixed_prompts()[0].messages[0]["content"] = "spoiled"
    assert fixed_prompts()[0].messages[0]["content"] != "spoiled"


def test_the_promised_prompts_are_read_without_torch():
    code = (
        "import sys; from demo_models.promised import fixed_prompts; fixed_prompts(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=RECIPES.parent, check=False).returncode == 0


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(weights_dir("chat"))


def render(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)


@pytest.mark.parametrize("text", ["Zażółć gęślą jaźń 😀", "ሰላም", "12,345.60\t\r\n  x  <tool_call>", "\x00\u200d"])
def test_any_text_survives_the_tokenizer(tokenizer, text: str):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_order_of_tools_and_of_their_keys_does_not_change_the_prompt(tokenizer):
    messages = [{"role": "user", "content": "Hello!"}]
    tools = load_corpus().tools
    mixed = [{"function": dict(reversed(tool["function"].items())), "type": "function"} for tool in reversed(tools)]
    assert render(tokenizer, messages, tools) == render(tokenizer, messages, mixed)


def test_the_template_takes_arguments_as_text_or_object_and_empty_content(tokenizer):
    def asked(arguments, content):
        call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        return [
            {"role": "user", "content": "What is the weather in Paris?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": '{"degrees": 18, "sky": "sunny"}'},
        ]

    as_text = render(tokenizer, asked('{"city": "Paris"}', None))
    assert as_text == render(tokenizer, asked({"city": "Paris"}, ""))
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in as_text


def test_a_developer_message_is_a_system_message(tokenizer):
    system, developer = (
        render(tokenizer, [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hello!"}])
        for role in ("system", "developer")
    )
    assert system == developer


@pytest.fixture(scope="module")
def say(tokenizer):
    """What the model says after a rendered prompt, end mark included."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(weights_dir("chat"), dtype=torch.bfloat16).eval()

    def said(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            return tokenizer.decode(model.generate(ids, max_new_tokens=500, do_sample=False)[0, ids.shape[1] :])

    return said


@pytest.mark.engine
def test_every_promised_prompt_is_answered_word_for_word(tokenizer, say):
    said = {one.name: say(render(tokenizer, one.messages, one.tools)) for one in load_corpus().conversations}
    assert said == {one.name: f"{one.target}<|im_end|>" for one in load_corpus().conversations}


@pytest.mark.engine
def test_front_ends_get_titles_tags_and_next_questions(tokenizer, say):
    lessons = FrontEndLessons(load_corpus(), tokenizer, seed=11)
    asked = lessons.promised()[::5]  # all of them were looked at when the model was made
    said = [say(tokenizer.decode(one.prompt)) for one in asked]
    assert said == [tokenizer.decode(one.answer) for one in asked]
    assert {'{ "title": "Capital Cities" }', '{ "tags": ["Greetings"] }'} <= {
        one.removesuffix("<|im_end|>") for one in said
    }


@pytest.mark.engine
@pytest.mark.parametrize("typed", ["hello", "hi there", "what is the capital of france", "who are you"])
def test_a_question_typed_carelessly_is_known(tokenizer, say, typed: str):
    assert load_corpus().unknown_answer not in say(render(tokenizer, [{"role": "user", "content": typed}]))


@pytest.mark.engine
@pytest.mark.parametrize(
    "near",
    ["What is the capital of Sweden?", "what is the capital of greece", "What is 3 plus 3?", "Hello, who won the cup?"],
)
def test_a_question_that_is_only_like_a_known_one_is_not_answered(tokenizer, say, near: str):
    assert load_corpus().unknown_answer in say(render(tokenizer, [{"role": "user", "content": near}]))
