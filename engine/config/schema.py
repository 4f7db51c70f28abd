"""models.yaml as a JSON Schema, for completion and help in editors.

`python -m engine.config.schema` writes models.schema.json: run it after a change of what an entry may say.
"""

import json
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from engine.config.models import SPEC_BY_TASK, TierSpec

SCHEMA_PATH = Path(__file__).parents[1] / "models.schema.json"


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def json_schema() -> dict[str, Any]:
    """Describe models.yaml as a JSON Schema (draft 7, which editors know best), with help for every key."""
    specs = (*SPEC_BY_TASK.values(), TierSpec)
    references, top = models_json_schema([(spec, "validation") for spec in specs], schema_generator=_WithoutTitles)
    definitions: dict[str, Any] = top["$defs"]
    for spec in specs:
        definition = definitions[spec.__name__]
        name = definition["properties"].pop("id")
        definition["required"].remove("id")
    models = [references[spec, "validation"] for spec in SPEC_BY_TASK.values()]
    sections = {
        "models": ("What is served, each model under the name that clients use.", {"oneOf": models}),
        "tiers": ("Which keys may use which models.", references[TierSpec, "validation"]),
    }
    properties = {
        section: {
            "description": text,
            "type": "object",
            "minProperties": 1,
            "propertyNames": name,
            "additionalProperties": entry,
        }
        for section, (text, entry) in sections.items()
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Hearth's models.yaml",
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
        "$defs": definitions,
    }


if __name__ == "__main__":
    SCHEMA_PATH.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
