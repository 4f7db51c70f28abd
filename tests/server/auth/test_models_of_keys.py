"""Which models a key may use, by what models.yaml says now."""

from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine import Engine, load_config
from server.api.admin.schema import check_rights
from server.auth.access import Access
from server.errors import ApiError
from server.store import KeyFieldError
from server.store.keys import ApiKey

MODELS = """
models:
  chat-2: {task: chat, tier: all, capabilities: [chat], weights: nothing-here, demo: chat, aliases: [chat-1]}
  other: {task: chat, tier: all, capabilities: [chat], weights: nothing-here, demo: chat}
tiers:
  all: {models: [all]}
  some: {models: [some]}
"""


@pytest.fixture
async def access(tmp_path: Path) -> Access:
    (tmp_path / "models.yaml").write_text(MODELS, encoding="utf-8")
    return Access(Engine(load_config(tmp_path / "models.yaml"), weights_dir=tmp_path))


def key_for(*models: str, tier: str = "all") -> ApiKey:
    return ApiKey("hk_1", "Ada", tier, frozenset({"chat"}), models, datetime.now(UTC))


@pytest.mark.parametrize("name", ["chat-1", "chat-2"])
async def test_a_key_made_for_a_model_uses_it_after_it_was_renamed(access: Access, name: str) -> None:
    for asked in ("chat-1", "chat-2"):
        assert access.model_id(key_for(name), asked) == "chat-2"
    assert [model.id for model in access.models(key_for(name))] == ["chat-2"]


def test_a_key_whose_model_was_renamed_or_is_gone_can_be_changed(access: Access) -> None:
    config = access.engine.config
    check_rights(config, "all", ["chat-1", "gone"], had=["gone"])
    with pytest.raises(KeyFieldError, match="There is no model 'gone'"):
        check_rights(config, "all", ["gone"])
    with pytest.raises(KeyFieldError, match="may not use the model 'chat-1'"):
        check_rights(config, "some", ["chat-1"])


@pytest.mark.parametrize(
    "key", [key_for("gone"), key_for("chat-1"), key_for("chat-1", tier="some")], ids=["gone", "another", "another tier"]
)
async def test_a_key_uses_no_other_model(access: Access, key: ApiKey) -> None:
    with pytest.raises(ApiError, match="no such model"):
        access.model_id(key, "other")
