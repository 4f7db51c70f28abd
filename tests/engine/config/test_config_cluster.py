"""The section `cluster` of models.yaml: roles that divide the models, and what is said of wrong ones."""

from pathlib import Path

import jsonschema
import pytest
import yaml

from engine.config import ConfigError, load_config
from engine.config.schema import json_schema

MODELS = """\
models:
  chat: {task: chat, tier: low, capabilities: [chat], weights: a}
  terse: {task: adapter, tier: low, base: chat, weights: t}
  other: {task: chat, tier: low, capabilities: [chat], weights: b}
tiers:
  low: {models: [low]}
"""
GOOD = "cluster: {roles: {talk: {models: [chat], gpus: 1, replicas: {min: 1, max: 4}}, more: {models: [other]}}}"


def write(folder: Path, section: str) -> Path:
    path = folder / "models.yaml"
    path.write_text(MODELS + section)
    return path


def test_roles_divide_the_models_and_an_adapter_goes_with_its_base(tmp_path: Path):
    config = load_config(write(tmp_path, GOOD))
    assert list(config.roles) == ["talk", "more"]
    talk, more = config.of_role("talk"), config.of_role("more")
    assert (list(talk.models), list(talk.adapters)) == (["chat"], ["terse"])
    assert (list(more.models), list(more.adapters)) == (["other"], [])
    assert (config.roles["talk"].replicas.min, config.roles["talk"].replicas.most) == (1, 4)
    assert config.roles["more"].replicas.most == 1
    assert list(config.models) == ["chat", "other"]


def test_one_replica_of_a_role_without_gpus_is_on_a_machine_and_one_more_during_a_surge(tmp_path: Path):
    section = "cluster: {roles: {talk: {models: [chat], gpus: 1}, more: {models: [other], replicas: 2, surge: true}}}"
    roles = load_config(write(tmp_path, section)).roles
    assert (roles["talk"].most_per_node, roles["more"].most_per_node) == (None, 2)


@pytest.mark.parametrize(
    "section", [GOOD, "cluster: {roles: {api: {models: []}, talk: {models: [chat, other], replicas: 3}}}"]
)
def test_what_is_taken_follows_the_schema(tmp_path: Path, section: str):
    path = write(tmp_path, section)
    load_config(path)
    jsonschema.validate(yaml.safe_load(path.read_text()), json_schema())


@pytest.mark.parametrize(
    ("section", "key", "message"),
    [
        ("cluster: 3", "cluster", "must hold `roles`"),
        ("cluster: {roles: {}}", "cluster", "must hold `roles`"),
        ("cluster: {role: {}, roles: {a: {models: [chat, other]}}}", "cluster.role", "did you mean `roles`?"),
        ("cluster: {roles: {a: 1}}", "cluster.roles.a", "must be a mapping"),
        ("cluster: {roles: {a: {models: [chat]}}}", "cluster.roles", "no role has the model `other`"),
        ("cluster: {roles: {a: {models: [chat, othr]}}}", "cluster.roles.a.models", "did you mean `other`?"),
        ("cluster: {roles: {a: {models: [chat, other, terse]}}}", "cluster.roles.a.models", "is an adapter"),
        (
            "cluster: {roles: {a: {models: [chat, other]}, b: {models: [chat]}}}",
            "cluster.roles.b.models",
            "is in the role `a` already",
        ),
        (
            "cluster: {roles: {a: {models: [chat, other]}, b: {models: []}}}",
            "cluster.roles.b.models",
            "only the first role may have none",
        ),
        ("cluster: {roles: {a: {models: [chat, chat, other]}}}", "cluster.roles.a.models", "names `chat` 2 times"),
        ("cluster: {roles: {a: {models: [chat, other], replicas: 0}}}", "cluster.roles.a.replicas.min", "1"),
        (
            "cluster: {roles: {a: {models: [chat, other], replicas: {min: 3, max: 2}}}}",
            "cluster.roles.a.replicas",
            "`max` cannot be less",
        ),
        ("cluster: {roles: {a: {models: [chat, other], gpu: 1}}}", "cluster.roles.a.gpu", "did you mean `gpus`?"),
        ("cluster: {roles: {a: {models: [chat, other], resource: A}}}", "cluster.roles.a.resource", "small letters"),
    ],
)
def test_a_wrong_section_is_named_with_its_place(tmp_path: Path, section: str, key: str, message: str):
    path = write(tmp_path, section)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    found = [(problem.key, problem.message) for problem in caught.value.problems]
    assert any(where == key and message in what for where, what in found), found


def test_a_model_for_recordings_is_where_they_arrive(tmp_path: Path):
    path = tmp_path / "models.yaml"
    ears = "  ears: {task: transcription, tier: low, capabilities: [transcription], weights: e}\n"
    models = MODELS.replace("tiers:", ears + "tiers:")
    path.write_text(models + "cluster: {roles: {talk: {models: [chat, other]}, more: {models: [ears]}}}")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert (problem.key, "put it into the first role, `talk`" in problem.message) == ("cluster.roles.more.models", True)
    path.write_text(models + "cluster: {roles: {talk: {models: [chat, ears]}, more: {models: [other]}}}")
    assert list(load_config(path).of_role("talk").models) == ["chat", "ears"]
