"""models.yaml as a JSON Schema, for completion and help in editors.

`python -m engine.config.schema` writes models.schema.json: run it after a change of what an entry may say.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core.core_schema import ModelSchema

from engine import config
from engine.config import RoleSpec, models
from engine.config.messages import Id, Spec
from engine.config.models import SPEC_BY_TASK, Entry, TierSpec

SCHEMA_PATH = Path(__file__).parents[1] / "models.schema.json"


_named = Field(min_length=1, json_schema_extra={"propertyNames": TypeAdapter(Id).json_schema()})


class _ClusterSection(Spec):
    roles: Annotated[dict[str, RoleSpec], _named]
    """Models that share a replica, by the role's name. The first role speaks HTTP."""


class _ModelsFile(Spec):
    models: Annotated[dict[str, Annotated[Entry, Field(discriminator="task")]], _named]
    """What is served, each model under the name that clients use."""
    tiers: Annotated[dict[str, TierSpec], _named]
    """Which keys may use which models."""
    cluster: _ClusterSection | None = None
    """How models are spread over several machines. null: they are served by one."""


@cache
def _helps() -> dict[str, dict[str, str]]:
    """The strings under the fields, of each class. pydantic could read them too, but at each start of each program."""
    classes = [
        part
        for module in (models, config, sys.modules[__name__])
        for part in ast.parse(inspect.getsource(module)).body
        if isinstance(part, ast.ClassDef)
    ]
    return {one.name: dict(_helps_in(one)) for one in classes}


def _helps_in(stated: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in pairwise(stated.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, inspect.cleandoc(text)


class _WithHelp(GenerateJsonSchema):
    """Without titles, which would only repeat the names."""

    def field_title_should_be_set(self, schema: Any) -> bool:  # noqa: ARG002
        return False

    def model_schema(self, schema: ModelSchema) -> dict[str, Any]:
        described = super().model_schema(schema)
        for kind in reversed(schema["cls"].__mro__):
            for name, text in _helps().get(kind.__name__, {}).items():
                alias = schema["cls"].model_fields[name].validation_alias or name
                described["properties"][alias]["description"] = text
        return described


def json_schema() -> dict[str, Any]:
    """Describe models.yaml as a JSON Schema (draft 7, which editors know best), with help for every key."""
    schema = _ModelsFile.model_json_schema(schema_generator=_WithHelp)
    for spec in (*SPEC_BY_TASK.values(), TierSpec, RoleSpec):  # each has its id as its name in the file
        definition = schema["$defs"][spec.__name__]
        del definition["properties"]["id"]
        definition["required"].remove("id")
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema, "title": "Hearth's models.yaml"}


if __name__ == "__main__":
    SCHEMA_PATH.write_text(json.dumps(json_schema(), indent=2) + "\n", encoding="utf-8")
