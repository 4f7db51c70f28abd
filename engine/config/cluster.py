"""The section `cluster` of models.yaml: which models share a replica, and how many replicas there are of each kind.

It means something only to `hearth cluster`; one server serves every model.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.config.messages import Spec, Word, check_spec, did_you_mean, each_once, plain_error, unknown_key
from engine.config.models import AdapterSpec, Entry, TranscriptionModelSpec
from engine.config.yaml import Document, shown

_Models = Annotated[
    tuple[str, ...], Field(strict=False, json_schema_extra={"uniqueItems": True}), AfterValidator(each_once)
]
_Count = Annotated[int, Field(ge=1, le=1024)]


class ReplicasSpec(Spec):
    """How many there are. A number alone is both."""

    min: _Count = 1
    """So many, whatever there is to do."""
    max: _Count | None = None
    """So many while there is much to do. null: as `min`."""
    requests: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Between the two, another replica comes where there are more requests for each, running and waiting. null: as many
    as its models run at the same time."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max is not None and self.max < self.min:
            raise plain_error(f"`max` is {self.max}, and `min` {self.min}: `max` cannot be less")
        return self

    @property
    def most(self) -> int:
        return self.max or self.min


def _number_alone(given: object) -> object:
    return {"min": given} if isinstance(given, int) and not isinstance(given, bool) else given


def _or_a_number(schema: dict[str, Any]) -> None:
    schema["anyOf"] = [{"$ref": schema.pop("$ref")}, {"type": "integer", "minimum": 1}]


class RoleSpec(Spec):
    """Models that are served together. Each replica of the role has all of them."""

    id: Word
    models: _Models
    """Models of this file. Adapters go with their base. The first role may have none: it then only speaks HTTP, and
    every token of an answer is a message between processes."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs that Ray sets aside for each replica. 0: it runs on the CPU."""
    replicas: Annotated[ReplicasSpec, BeforeValidator(_number_alone), Field(json_schema_extra=_or_a_number)] = (
        ReplicasSpec()
    )
    """How many, or `min` and `max` between which their number follows the requests that run and wait."""
    replicas_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """At most so many on one machine. null: 1 of a role without GPUs, else as many as there are GPUs for."""
    resource: Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")] | None = None
    """Only on machines that were started with it (`hearth cluster up --resources='{"NAME": 1}'`). null: on any."""
    surge: bool = False
    """At a deploy, start new replicas before old ones end: there must be room for one more."""

    @property
    def most_per_node(self) -> int | None:
        most = self.replicas_per_node or (None if self.gpus else 1)
        return most if most is None or not self.surge else most + 1


def read_roles(document: Document, found: Mapping[str, Entry], named: Mapping[str, object]) -> dict[str, RoleSpec]:
    """Return the roles, the one that speaks HTTP first; what is wrong with them is added to `document`."""
    section = (document.root or {}).get("cluster")
    if section is None:
        return {}
    roles = section.get("roles") if isinstance(section, dict) else None
    if not isinstance(section, dict) or not isinstance(roles, dict) or not roles:
        document.add_problem(("cluster",), "must hold `roles`, each under its own name")
        return {}
    for key in section:
        if key != "roles":
            document.add_problem(("cluster", key), unknown_key(str(key), ("roles",)))
    specs: dict[str, RoleSpec] = {}
    for name, entry in roles.items():
        location = ("cluster", "roles", name)
        if not isinstance(entry, dict):
            document.add_problem(location, "must be a mapping: put its `key: value` lines below, indented")
        elif spec := check_spec(RoleSpec, entry, location, document):
            specs[name] = spec
    if len(specs) == len(roles):
        _check_models(specs, found, named, document)
    return specs


def _check_models(
    roles: Mapping[str, RoleSpec], found: Mapping[str, Entry], named: Mapping[str, object], document: Document
) -> None:
    """Check that each model of the file is in one role; not where it has problems of its own."""
    owners: dict[str, str] = {}
    models = [name for name, spec in found.items() if not isinstance(spec, AdapterSpec)]
    first = next(iter(roles))
    for role, spec in roles.items():
        location = ("cluster", "roles", role, "models")
        if not spec.models and role != first:
            document.add_problem(location, "must name a model: only the first role may have none")
        for name in spec.models:
            owner = owners.setdefault(name, role)
            if name not in named:
                document.add_problem(location, f"there is no model `{shown(name)}`{did_you_mean(name, models)}")
            elif isinstance(found.get(name), AdapterSpec):
                document.add_problem(location, f"`{shown(name)}` is an adapter, which goes with its base: leave it out")
            elif isinstance(found.get(name), TranscriptionModelSpec) and role != first:
                document.add_problem(
                    location,
                    f"`{shown(name)}` reads recordings where they arrive: put it into the first role, `{first}`",
                )
            elif owner != role:
                document.add_problem(location, f"`{shown(name)}` is in the role `{owner}` already: keep one")
    for name in models:
        if name not in owners:
            document.add_problem(("cluster", "roles"), f"no role has the model `{shown(name)}`: add it to one")
