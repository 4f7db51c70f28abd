"""scripts/refresh-variants: what a hub says of variants, where models.yaml differs."""

import json
from pathlib import Path
from typing import Any

import pytest
from hub_server import COMMIT, HubServer
from upstream import refresh_variants
from weight_parts import hub_here

from engine.placement.hardware import GIB

YAML = """\
models:
  a:
    task: chat
    tier: t
    capabilities: [chat]
    weights: a
    variants:
      - folder: first
        repository: owner/first
        licence: Apache-2.0
        weights_gib: 7
        max_context_length: 40960
        kv_kib_per_token: 112
        kv_heads: 8
      - folder: second
        repository: owner/second
        revision: old
        licence: MIT
        weights_gib: 3
      - folder: by-hand
        licence: MIT
        weights_gib: 1
tiers:
  t: {models: [t]}
"""
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture
def hub():
    with hub_here() as server:
        yield server


def add(hub: HubServer, name: str, gib: float, shape: dict[str, Any] = SHAPE, **fields: Any) -> None:
    """A repository whose weights are only listed: nothing may fetch them."""
    size = int(gib * GIB)
    lfs = {"sha256": "0" * 64, "size": size, "pointerSize": 134}
    listed = [{"rfilename": "model.safetensors", "size": size, "blobId": "0" * 40, "lfs": lfs}]
    files = {"config.json": json.dumps(shape).encode(), "tokenizer.json": b"{}"}
    hub.add(f"owner/{name}", files, listed=listed, **fields)


def refresh(hub: HubServer, models: Path, *arguments: str) -> int:
    return refresh_variants(["--models", str(models), "--endpoint", hub.endpoint, *arguments])


def test_a_variant_as_it_is_published_has_no_line(hub: HubServer, models: Path, capsys: pytest.CaptureFixture[str]):
    add(hub, "first", 7.05)
    assert refresh(hub, models, "first") == 0
    assert capsys.readouterr().out == ""


def test_another_commit_and_size_are_told(hub: HubServer, models: Path, capsys: pytest.CaptureFixture[str]):
    add(hub, "second", 3.6, licence="mit")
    assert refresh(hub, models, "second") == 1
    told = capsys.readouterr().out
    assert f"second: its newest commit is {COMMIT}, models.yaml says old\n" in told
    assert "second: weights_gib comes to 3.6, models.yaml says 3\n" in told


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"licence": "cc-by-nc-4.0"}, "first: its model card says licence 'cc-by-nc-4.0', models.yaml 'Apache-2.0'"),
        ({"licence": None}, "first: its model card names no licence"),
        ({"gated": True}, "is gated"),
        (
            {"shape": SHAPE | {"num_hidden_layers": 32}},
            "kv_kib_per_token comes to 128, models.yaml says 112",
        ),
        ({"shape": SHAPE | {"auto_map": {"AutoModel": "code.Model"}}}, "first: "),
    ],
)
def test_what_else_is_different_is_a_line_and_exit_code_1(
    hub: HubServer, models: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
):
    add(hub, "first", 7, **changes)
    assert refresh(hub, models, "first") == 1
    assert said in capsys.readouterr().out


def test_a_name_that_is_no_variant_and_a_repository_that_is_gone_are_told(
    hub: HubServer, models: Path, capsys: pytest.CaptureFixture[str]
):
    assert refresh(hub, models, "first", "frist") == 1
    told = capsys.readouterr().out
    assert "frist: no such variant" in told
    assert "first: " in told.replace("frist: ", "")
