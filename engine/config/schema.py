"""models.yaml as a JSON Schema, for completion and help in editors.

`python -m engine.config.schema` writes models.schema.json: run it after a change of what an entry may say.
"""

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from engine.config.messages import Id, Spec
from engine.config.models import SPEC_BY_TASK, Entry, TierSpec

SCHEMA_PATH = Path(__file__).parents[1] / "models.schema.json"


_named = Field(min_length=1, json_schema_extra={"propertyNames": TypeAdapter(Id).json_schema()})


class _ModelsFile(Spec):
    models: Annotated[dict[str, Annotated[Entry, Field(discriminator="task")]], _named]
    """What is served, each model under the name that clients use."""
    tiers: Annotated[dict[str, TierSpec], _named]
    """Which keys may use which models."""


class _WithoutTitles(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False


def json_schema() -> dict[str, Any]:
    """Describe models.yaml as a JSON Schema (draft 7, which editors know best), with help for every key."""
    schema = _ModelsFile.model_json_schema(schema_generator=_WithoutTitles)
    for spec in (*SPEC_BY_TASK.values(), TierSpec):  # the id of each is its name in the file
        definition = schema["$defs"][spec.__name__]
        del definition["properties"]["id"]
        definition["required"].remove("id")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "Hearth's models.yaml"}


if __name__ == "__main__":
    SCHEMA_PATH.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
