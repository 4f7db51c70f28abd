"""What the tests of plans share: models and machines to plan for. No tests."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

from engine.config import Config, ModelSpec, load_config
from engine.config.models import SPEC_BY_TASK

ROOT = Path(__file__).parents[2]


def shipped() -> Config:
    return load_config(ROOT / "models.yaml")


def variant(name: str, weights_gib: float, **more: Any) -> dict[str, Any]:
    return {"folder": name, "licence": "Apache-2.0", "weights_gib": weights_gib, **more}


def model(name: str, *variants: dict[str, Any], task: str = "chat", **more: Any) -> ModelSpec:
    capability = "image_generation" if task == "image" else task
    fields: dict[str, Any] = {
        "id": name,
        "task": task,
        "tier": "standard",
        "capabilities": [capability],
        "weights": name,
        "variants": list(variants),
    }
    if task == "image":
        fields["profile"] = "sdxl"
    return SPEC_BY_TASK[task].model_validate({**fields, **more})


def config_of(*models: ModelSpec) -> Config:
    return Config(Path("models.yaml"), MappingProxyType({spec.id: spec for spec in models}), MappingProxyType({}))
