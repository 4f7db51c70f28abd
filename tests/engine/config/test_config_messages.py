"""Every mistake that models.yaml can contain is named with its line, its key and what to write instead."""

import textwrap
from typing import NamedTuple

import jsonschema
import pytest

from engine.config import ConfigError, load_config
from engine.config.schema import json_schema
from engine.config.yaml import Problem, read_document

GOOD = """\
models:
  a:
    task: chat
    tier: low
    capabilities: [chat]
    weights: a
    engine:
      dtype: auto
tiers:
  low: {models: [low]}
  high: {models: [low, high]}
"""


def problems(tmp_path, text: str) -> tuple[Problem, ...]:
    return refused(tmp_path, text).problems


def refused(tmp_path, text: str) -> ConfigError:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    return caught.value


class Wrong(NamedTuple):
    """What to replace in GOOD and by what; then where the one problem is and a part of its message."""

    old: str
    new: str
    line: int
    key: str
    message: str


# fmt: off
WRONG_VALUES = [
    Wrong("models:", "moddels: {}\nmodels:", 1, "moddels", "unknown key; did you mean `models`?"),
    Wrong("    weights: a", "    wieghts: a", 6, "models.a.wieghts", "did you mean `weights`?"),
    Wrong("weights: a", "weights: a\n    zzz: 1", 7, "models.a.zzz", "known here: `tier`, `owned_by`"),
    Wrong("weights: a", "weights: a\n    id: b", 7, "models.a.id", "the id is the name above, `a`"),
    Wrong("dtype: auto", "dytpe: auto", 8, "models.a.engine.dytpe", "did you mean `dtype`?"),
    Wrong("    weights: a\n", "", 2, "models.a.weights", "is missing; it must be a folder"),
    Wrong("    task: chat\n", "", 2, "models.a.task", "is missing; it must be `chat`"),
    Wrong("task: chat", "task: chatt", 3, "models.a.task", "there is no task `chatt`; there is `chat`, `image`, `speech`, `embedding`, `rerank`, `transcription`, `adapter`; did you mean"),
    Wrong("task: chat", "task: [chat]", 3, "models.a.task", "must be `chat`, not a list"),
    Wrong("tier: low", "tier: lwo", 4, "models.a.tier", "no tier `lwo` under `tiers`; did you mean `low`?"),
    Wrong("[low, high]}", "[low, high]}\n  top: {models: [low, to]}", 12, "tiers.top.models", "no tier `to`"),
    Wrong("tier: low", "tier: 7", 4, "models.a.tier", "must be text, not 7"),
    Wrong("  low: {models: [low]}", "  low: {models: low}", 10, "tiers.low.models", "must be a list of at least one"),
    Wrong("{models: [low]}", "{models: []}", 10, "tiers.low.models", "not an empty list"),
    Wrong("[chat]", "[chat, visoin]", 5, "models.a.capabilities[1]", "did you mean `vision`?"),
    Wrong("[chat]", "\n    - chat\n    - 1", 7, "models.a.capabilities[1]", "must be one of `chat`, `streaming`"),
    Wrong("[chat]", "[visoin]", 5, "models.a.capabilities[0]", "did you mean `vision`?"),
    Wrong("[chat]", "[chat, chat]", 5, "models.a.capabilities", "names `chat` 2 times"),
    Wrong("[chat]", "[streaming]", 5, "models.a.capabilities", "must contain `chat`"),
    Wrong("weights: a", "weights: /a", 6, "models.a.weights", "a folder below the weights directory"),
    Wrong("weights: a", "weights: a/../b", 6, "models.a.weights", 'not "a/../b"'),
    Wrong("weights: a", "weights: ..", 6, "models.a.weights", 'not ".."'),
    Wrong("weights: a", "weights: .", 6, "models.a.weights", 'not "."'),
    Wrong("weights: a", "weights: ~/a", 6, "models.a.weights", "starting with a dot or `~`"),
    Wrong("weights: a", r'weights: "a\0b"', 6, "models.a.weights", r"a\x00b"),
    Wrong("weights: a", r'weights: "a\n"', 6, "models.a.weights", r"a\n"),
    Wrong("weights: a", "weights: ''", 6, "models.a.weights", "a folder below"),
    Wrong("weights: a", "weights: a\n    demo: A", 7, "models.a.demo", "small letters"),
    Wrong("weights: a", "weights: a\n    owned_by: ''", 7, "models.a.owned_by", "text of 1 to 64 characters, not an empty text"),
    Wrong("dtype: auto", "dtype: bf16", 8, "models.a.engine.dtype", "must be one of `auto`, `bfloat16`"),
    Wrong("dtype: auto", "max_num_seqs: 0", 8, "models.a.engine.max_num_seqs", "a whole number from 1 to 65536, not 0"),
    Wrong("dtype: auto", "max_num_seqs: many", 8, "models.a.engine.max_num_seqs", 'not "many"'),
    Wrong("dtype: auto", "max_num_seqs: true", 8, "models.a.engine.max_num_seqs", "not true"),
    Wrong("dtype: auto", "max_num_seqs: 1.0", 8, "models.a.engine.max_num_seqs", "not 1.0"),
    Wrong("dtype: auto", "max_num_seqs:", 8, "models.a.engine.max_num_seqs", "not empty"),
    Wrong("dtype: auto", f"max_num_seqs: {'9' * 9999}", 8, "models.a.engine.max_num_seqs", "not inf"),
    Wrong("dtype: auto", "cpu_threads: x", 8, "models.a.engine.cpu_threads", "from 1 to 4096, or null, not"),
    Wrong("dtype: auto", "kv_cache_gib: 0", 8, "models.a.engine.kv_cache_gib", "above 0 and at most 65536, or null"),
    Wrong("dtype: auto", "kv_cache_gib: .nan", 8, "models.a.engine.kv_cache_gib", "not nan"),
    Wrong("dtype: auto", "gpu_memory_utilization: 1.1", 8, "models.a.engine.gpu_memory_utilization", "at most 1,"),
    Wrong("dtype: auto", "enforce_eager: yes", 8, "models.a.engine.enforce_eager", 'true or false, or null, not "yes"'),
    Wrong("dtype: auto", "tool_parser: {a: b}", 8, "models.a.engine.tool_parser", "not a mapping"),
    Wrong("dtype: auto", "tool_parser: a-b", 8, "models.a.engine.tool_parser", "or null"),
    Wrong("dtype: auto", "{context_length: 4, max_output_tokens: 5}", 8, "models.a.engine.max_output_tokens", "context_length (4)"),
    Wrong("      dtype: auto\n", "", 7, "models.a.engine", "must be a mapping (indented"),
    Wrong("dtype: auto", "dtype: auto\n      dtype: auto", 9, "models.a.engine.dtype", "appears twice, first on line 8"),
    Wrong("dtype: auto", "dtype: !!python/name:os.system x", 8, "models.a.engine.dtype", "has the YAML tag"),
    Wrong("dtype: auto", "dtype: !!int x", 8, "models.a.engine.dtype", "has the YAML tag"),
    Wrong("dtype: auto", "? [a]\n      : b", 8, "models.a.engine", "a key is one word"),
    Wrong("  a:\n", "  ../a:\n", 2, "models.'../a'", "must be a name of at most 64 letters"),
    Wrong("  a:\n", "  a..b:\n", 2, "models.a..b", "without `..`"),
    Wrong("  a:\n", f"  {'a' * 65}:\n", 2, f"models.{'a' * 60}...", "at most 64"),
    Wrong("tiers:", "  b:\ntiers:", 9, "models.b", "must be a mapping: put its"),
    Wrong("tiers:", "  b: x\ntiers:", 9, "models.b", "must be a mapping: put its"),
]
# fmt: on


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=lambda wrong: f"{wrong.key}: {wrong.message}"[:60])
def test_a_wrong_value_is_named_with_its_line_and_key(tmp_path, wrong):
    assert wrong.old in GOOD, "the case would test nothing"
    found = problems(tmp_path, GOOD.replace(wrong.old, wrong.new, 1))
    assert {(problem.line, problem.key) for problem in found} == {(wrong.line, wrong.key)}
    assert any(wrong.message in problem.message for problem in found), found


def test_a_tier_that_no_key_may_use_is_refused(tmp_path):
    text = GOOD.replace("tier: low", "tier: high").replace("[low, high]", "[low]")
    (problem,) = problems(tmp_path, text)
    assert (problem.line, problem.key) == (4, "models.a.tier")
    assert "no tier lists `high` under its `models`" in problem.message


@pytest.mark.parametrize("entry", ["task: chat\n    tier: low\n    weights: b", "base: a\n    tier: low"])
def test_a_model_below_tiers_is_said_to_look_like_one(tmp_path, entry):
    (problem,) = problems(tmp_path, f"{GOOD}  b:\n    {entry}\n")
    assert (problem.line, problem.key) == (12, "tiers.b")
    assert "looks like a model: move it up, below `models:`" in problem.message


def test_wrong_names_of_voices_are_named(tmp_path):
    text = GOOD.replace("task: chat", "task: speech\n    voice_aliases: {nova: '', alloy: 7}")
    text = text.replace("[chat]", "[speech]")
    found = problems(tmp_path, text.replace("engine:\n      dtype: auto", "engine: {}"))
    assert [problem.key for problem in found] == ["models.a.voice_aliases.nova", "models.a.voice_aliases.alloy"]
    assert all("must be text of 1 to 64 characters" in problem.message for problem in found)


def test_a_name_that_means_two_models_is_refused(tmp_path):
    entries = GOOD.split("tiers:", maxsplit=1)[0].split("models:\n")[1]
    text = GOOD.replace(entries, entries.replace("task: chat", "task: chat\n    aliases: [x, gpt, b]"))
    second = entries.replace("  a:", "  b:").replace("weights: a", "weights: b\n    aliases: [gpt, b]")
    found = problems(tmp_path, text.replace("tiers:", f"{second}tiers:"))
    assert [(problem.line, problem.message) for problem in found] == [
        (4, "`b` is the name of another model"),
        (15, "`gpt` is an alias of `a` already"),
        (15, "`b` is the name of another model"),
    ]


def test_every_problem_is_listed_in_one_message(tmp_path):
    text = textwrap.dedent("""\
        models:
          a:
            task: chat
            tier: lwo
            capabilites: [chat]
            weights: /etc
            engine:
              max_num_seqs: 0
              max_num_seqs: 3
          b:
            task: imgae
            tier: low
            weights: ../b
        tiers:
          low: {models: [lo, low]}
    """)
    error = refused(tmp_path, text)
    assert str(error) == error.message
    first, *rest = str(error).splitlines()
    assert first == f"{tmp_path / 'models.yaml'}: 8 problems"
    assert [line.split(": ")[0] for line in rest] == [
        "  line 4   models.a.tier",
        "  line 5   models.a.capabilites",
        "  line 6   models.a.weights",
        "  line 8   models.a.engine.max_num_seqs",
        "  line 9   models.a.engine.max_num_seqs",
        "  line 11  models.b.task",
        "  line 13  models.b.weights",
        "  line 15  tiers.low.models",
    ]
    assert rest[1] == "  line 5   models.a.capabilites: unknown key; did you mean `capabilities`?"


def test_a_message_stays_readable_when_every_line_is_wrong(tmp_path):
    error = refused(tmp_path, "".join(f"key{number}: 1\n" for number in range(1000)))
    assert len(error.problems) == 1002
    assert str(error).splitlines()[-1] == "  and 802 more"


def test_an_editor_sees_most_mistakes_too(tmp_path):
    validator = jsonschema.Draft7Validator(json_schema())
    path = tmp_path / "models.yaml"
    unseen: set[str] = set()
    for old, new, _, key, _ in WRONG_VALUES:
        path.write_text(GOOD.replace(old, new, 1))
        document = read_document(path)
        if not document.problems and validator.is_valid(document.root):
            unseen.add(key)
    # A schema cannot look across entries or keys; to it 1.0 is whole, NaN is in range, `$` lets a line end pass.
    assert unseen <= {
        "models.a.tier",
        "tiers.top.models",
        "models.a.engine.max_output_tokens",
        "models.a.engine.kv_cache_gib",
        "models.a.engine.max_num_seqs",
        "models.a.weights",
    }
