"""What several endpoints share: models as the API shows them, and what may stand in a query."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from engine import ModelInfo


class Asked(BaseModel):
    """What stands behind the `?` of an address. What is not known there is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Model(BaseModel):
    """A model that the key may use. `context_length` and `max_output_tokens` are in tokens; `sizes` of images."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    tier: str
    capabilities: list[str]
    status: Literal["unloaded", "loading", "ready", "sleeping", "failed"]
    context_length: int | None
    max_output_tokens: int | None
    sizes: list[str] | None
    description: str
    demo: bool

    @classmethod
    def of(cls, info: ModelInfo) -> Model:
        """Show what the engine knows."""
        return cls(
            id=info.id,
            created=info.created,
            owned_by=info.owned_by,
            tier=info.tier,
            capabilities=list(info.capabilities),
            status=info.status,
            context_length=info.context_length,
            max_output_tokens=info.max_output_tokens,
            sizes=None if info.sizes is None else list(info.sizes),
            description=info.description,
            demo=info.demo,
        )


class ModelList(BaseModel):
    """All models that the key may use, in the order of models.yaml."""

    object: Literal["list"] = "list"
    data: list[Model]
