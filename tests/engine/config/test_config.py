"""models.yaml is read into frozen specs, and a wrong one names every problem with its line and key."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from engine.config import Config, ConfigError, load_config
from engine.config.models import ChatEngineSpec
from engine.config.schema import SCHEMA_PATH, json_schema
from engine.config.yaml import Problem
from engine.errors import LoadError

ROOT = Path(__file__).parents[3]

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


def load(tmp_path: Path, text: str | bytes) -> Config:
    path = tmp_path / "models.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config(path)


def problems(tmp_path: Path, text: str | bytes) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return caught.value.problems


def test_the_shipped_file_loads_and_follows_the_schema():
    path = ROOT / "models.yaml"
    config = load_config(path)
    assert {model.id: model.tier for model in config.models.values()} == {
        "service-plus": "standard",
        "service-pro": "enhanced",
        "service-image": "standard",
        "service-voice": "standard",
        "service-embedding": "standard",
        "service-rerank": "standard",
        "service-transcription": "standard",
    }
    assert config.tiers["enhanced"].models == ("standard", "enhanced")
    jsonschema.Draft7Validator(json_schema()).validate(yaml.safe_load(path.read_text()))
    assert path.read_text().startswith("# yaml-language-server: $schema=engine/models.schema.json\n")


def test_the_schema_on_disk_is_current():
    stored = json.loads(SCHEMA_PATH.read_text())
    assert stored == json.loads(json.dumps(json_schema())), "run `python -m engine.config.schema`"
    jsonschema.Draft7Validator.check_schema(stored)


def test_the_schema_explains_every_key():
    schema = json_schema()
    keys = {name: entry for spec in schema["$defs"].values() for name, entry in spec["properties"].items()}
    assert "id" not in keys
    assert [name for name, entry in keys.items() if not entry.get("description")] == []


def test_the_documentation_names_every_key_and_default():
    page = re.sub(r"\n +", " ", (ROOT / "docs" / "models-yaml.md").read_text())
    # Like: `a`, `b` (null: what that means)
    found = re.findall(r"((?:`\w+`, )*`\w+`) \((?:all |both )?`?([^`:;)]+)", page)
    documented = {(name, default) for names, default in found for name in re.findall(r"\w+", names)}
    for spec in json_schema()["$defs"].values():
        for name, entry in spec["properties"].items():
            default = "required" if name in spec.get("required", ()) else entry.get("default", {})
            if isinstance(default, dict):  # keys of their own
                assert name in {known for known, _ in documented}, f"docs/models-yaml.md lacks `{name}`"
            else:
                words = default if default and isinstance(default, str) else json.dumps(default).removesuffix(".0")
                assert (name, words) in documented, f"docs/models-yaml.md has another default for `{name}`"


def test_what_is_left_out_has_its_default(tmp_path):
    model = load(tmp_path, GOOD).models["a"]
    assert (model.id, model.owned_by, model.description, model.demo) == ("a", "hearth", "", None)
    assert model.engine == ChatEngineSpec()
    assert model.engine.max_queued_requests == 512
    assert model.engine.context_length is None


def test_what_is_written_arrives(tmp_path):
    engine = "{context_length: 8, max_output_tokens: 8, kv_cache_gib: 1, enforce_eager: true, tool_parser: none}"
    spec = load(tmp_path, GOOD.replace("\n      dtype: auto", f" {engine}")).models["a"].engine
    assert (spec.context_length, spec.max_output_tokens, spec.kv_cache_gib) == (8, 8, 1.0)
    assert (spec.enforce_eager, spec.tool_parser) == (True, "none")


def test_a_config_cannot_be_changed(tmp_path):
    config = load(tmp_path, GOOD)
    with pytest.raises(TypeError):
        config.models["b"] = config.models["a"]  # type: ignore[index]
    with pytest.raises(ValidationError):
        config.models["a"].tier = "high"  # type: ignore[misc]


def test_an_id_may_look_like_a_number_or_a_word_of_yaml(tmp_path):
    assert list(load(tmp_path, GOOD.replace("  a:", "  2024:")).models) == ["2024"]
    assert list(load(tmp_path, GOOD.replace("  a:", "  on:")).models) == ["on"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-8"])
def test_line_ends_and_byte_order_marks_of_other_systems_are_fine(tmp_path, encoding):
    assert "a" in load(tmp_path, GOOD.replace("\n", "\r\n").encode(encoding)).models


WRONG_FILES: list[tuple[str, str | bytes, int | None, str]] = [
    ("empty", "", None, "is empty: copy models.yaml"),
    ("only comments", "# nothing\n---\n", None, "is empty"),
    ("a list", "- models\n- tiers\n", 1, "must have the keys `models` and `tiers`"),
    ("a word", "\n\nmodels\n", 3, "must have the keys `models` and `tiers`"),
    ("an open bracket", "models: [\n", 2, "cannot be read as YAML"),
    ("a tab", "models:\n\ta: 1\n", 2, "cannot be read as YAML"),
    ("two documents", GOOD + "---\n" + GOOD, 12, "expected a single document"),
    ("an alias", "a: &x [1]\nb: *x\n", 2, "the alias `*x` is not allowed"),
    ("an expanding alias", "a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]\n", 2, "the alias `*a`"),
    ("an alias of itself", "&a [*a]", 1, "the alias `*a`"),
    ("brackets without end", "[" * 100_000, 1, "nested more than 16 levels"),
    ("a tag at the top", "!!set {a}", 1, "has the YAML tag"),
    ("an escape beyond Unicode", r'a: "\U00110000"', 1, "invalid Unicode character escape"),
    ("half a character", r'a: "\ud800"', 1, "invalid Unicode character escape"),
    ("a NUL", "models:\n  \0\n", 2, "an invisible character (number 0)"),
    ("Latin-1", "models:\n  a: caf\xe9\n".encode("latin-1"), 2, "is not UTF-8 text"),
    ("too large", b"#" * ((1 << 20) + 1), None, "is larger than 1 MiB"),
]


@pytest.mark.parametrize(
    ("text", "line", "message"), [case[1:] for case in WRONG_FILES], ids=[case[0] for case in WRONG_FILES]
)
def test_a_file_that_cannot_be_read_says_why(tmp_path, text, line, message):
    (problem,) = problems(tmp_path, text)
    assert (problem.line, message in problem.message) == (line, True), problem


def test_a_missing_file_says_what_to_do(tmp_path):
    with pytest.raises(LoadError, match=r"copy models\.yaml from the repository, or point HEARTH_MODELS at yours"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_folder_in_place_of_the_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)


def test_a_path_that_cannot_exist_says_so():
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(Path("models\0.yaml"))


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"engine_args": {"trust_remote_code": True}}, "there is no argument of vLLM that may be set here"),
        ({"engine_args": {"max_num_batched_token": 1}}, "did you mean `max_num_batched_tokens`?"),
        ({"engine_args": {"kv_transfer_config": "{}"}}, "there is no argument of vLLM that may be set here"),
        ({"speculative": {"method": "eagle"}}, "speculative.method"),
        ({"speculative": {"method": "ngram", "longest_match": 1}}, "must be at most `longest_match` (1)"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
    ],
)
def test_switches_that_break_a_promise_or_do_not_exist_are_refused(tmp_path, engine, message):
    text = yaml.safe_load(GOOD)
    text["models"]["a"]["engine"] = engine
    found = problems(tmp_path, yaml.safe_dump(text))
    assert any(message in f"{problem.key}: {problem.message}" for problem in found), found


@pytest.mark.parametrize("text", ["models: {}\ntiers: {}\n", "models:\ntiers: 3\n", "x: 1\n"])
def test_a_file_without_models_and_tiers_misses_both(tmp_path, text):
    found = {problem.key: problem.message for problem in problems(tmp_path, text)}
    assert "at least one of the models" in found["models"]
    assert "at least one of the tiers" in found["tiers"]


WORDS = st.sampled_from(
    [
        "models",
        "tiers",
        "a",
        "task",
        "chat",
        "tier",
        "capabilities",
        "weights",
        "engine",
        "dtype",
        "id",
        "<<",
        "..",
        "\ud800",
    ]
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
# fmt: off
PIECES = st.sampled_from([
    "!!int ", "!!set ", "! ", "&a ", "*a", "%YAML 9", "---", "...", "'", '"', "\\U00110000", "|", ">", "[", "]", "{", "}",
    "? ", ": ", "- ", ",", "\t", "\n", "\n  ", "\x00", "\x85", "\u2028", "#", "1e999", ".inf", "2020-99-99", "1:60", "0b",
    "models", "tiers", "a",
])
# fmt: on
DOCUMENTS = (
    st.binary(max_size=60)
    | VALUES.map(lambda value: json.dumps(value).encode())
    | VALUES.map(lambda value: yaml.safe_dump(value).encode("utf-8", "surrogatepass"))
    | st.fixed_dictionaries({"models": VALUES, "tiers": VALUES}).map(lambda value: json.dumps(value).encode())
    | st.lists(PIECES, max_size=20).map(lambda pieces: "".join(pieces).encode())
)


@given(document=DOCUMENTS)
def test_no_file_raises_anything_but_a_config_error(tmp_path_factory, document):
    try:
        load(tmp_path_factory.getbasetemp(), document)
    except ConfigError as error:
        assert error.problems  # noqa: PT017
        str(error).encode()
