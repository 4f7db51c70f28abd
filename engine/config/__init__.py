"""models.yaml as frozen specs: what is served, to whom, and where; every problem reported at once with line and key.

The server's settings say how this machine runs it (folders, ports, the database); whether a model fits is checked by
the caller. models.py has what an entry may say, yaml.py reads the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from engine.config.messages import (
    Spec,
    Word,
    check_spec,
    did_you_mean,
    each_once,
    listed,
    matching,
    plain_error,
    unknown_key,
)
from engine.config.models import (
    SPEC_BY_TASK,
    AdapterSpec,
    AuxiliaryModelSpec,
    ChatModelSpec,
    CommonModelSpec,
    EmbeddingModelSpec,
    Entry,
    ImageModelSpec,
    ModelSpec,
    PoolingModelSpec,
    RerankModelSpec,
    SpeechModelSpec,
    TierSpec,
    TranscriptionModelSpec,
)
from engine.config.yaml import Document, Location, Problem, read_document, shown
from engine.errors import LoadError

_SECTIONS = ("models", "tiers", "cluster")
_OF_MODELS = {"task", "weights", "base"}
_NO_TIER = "looks like a model: move it up, below `models:`; here, below `tiers:`, are only tiers"
# A file of another kind has a problem on every line.
LISTED_PROBLEMS = 200
# Of `cluster`, which means something only to `hearth cluster`: one server serves every model.
_RoleModels = Annotated[
    tuple[str, ...], Field(strict=False, json_schema_extra={"uniqueItems": True}), AfterValidator(each_once)
]
_Count = Annotated[int, Field(ge=1, le=1024)]
_Resource = Annotated[str, matching(r"^[a-z0-9_-]+$", 64, "a name of small letters, digits, `_` and `-`")]


class ConfigError(LoadError):
    """models.yaml is wrong. The message lists every problem; `problems` holds them one by one."""

    def __init__(self, path: Path, problems: list[Problem]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: problem.line or 0))
        listed = self.problems[:LISTED_PROBLEMS]
        width = max((len(str(problem.line)) for problem in listed if problem.line), default=0)
        lines = [f"{path}: {len(problems)} problem{'s' if len(problems) != 1 else ''}"]
        for problem in listed:
            where = f"line {problem.line:<{width}}  " if problem.line else ""
            what = f"{problem.key}: {problem.message}" if problem.key else problem.message
            lines.append(f"  {where}{what}")
        if len(problems) > len(listed):
            lines.append(f"  and {len(problems) - len(listed)} more")
        super().__init__("\n".join(lines))


class ReplicasSpec(Spec):
    """How many replicas there are. A number alone is both `min` and `max`."""

    min: _Count = 1
    """So many, however few requests there are."""
    max: _Count | None = None
    """At most so many, with many requests. null: as `min`."""
    requests: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Between the two, a replica is added when each has more requests than this, running and waiting. null: as many as
    its models run at the same time."""

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
    models: _RoleModels
    """Models of this file. Adapters go with their base. The first role may have none: it then only speaks HTTP, and
    every token of an answer is a message between processes."""
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    """GPUs that Ray sets aside for each replica. 0: it runs on the CPU."""
    replicas: Annotated[ReplicasSpec, BeforeValidator(_number_alone), Field(json_schema_extra=_or_a_number)] = (
        ReplicasSpec()
    )
    """How many, or `min` and `max` between which their number follows the requests that run and wait."""
    replicas_per_node: Annotated[int, Field(ge=1, le=64)] | None = None
    """At most so many on one machine. null: 1 for a role without GPUs, else as many as there are GPUs for."""
    resource: _Resource | None = None
    """Only on machines that were started with it (`hearth cluster up --resources='{"name": 1}'`). null: on any."""
    surge: bool = False
    """At a deploy, start new replicas before old ones end: there must be room for one more."""

    @property
    def most_per_node(self) -> int | None:
        most = self.replicas_per_node or (None if self.gpus else 1)
        return most if most is None or not self.surge else most + 1


@dataclass(frozen=True, slots=True)
class Config:
    """A models.yaml without problems; its mappings are read-only, by id, in the file's order.

    `models` have an engine each, `adapters` answer on that of their base. `roles` are for a cluster, the one that
    speaks HTTP first.
    """

    path: Path
    models: Mapping[str, ModelSpec]
    tiers: Mapping[str, TierSpec]
    adapters: Mapping[str, AdapterSpec] = field(default_factory=dict)
    roles: Mapping[str, RoleSpec] = field(default_factory=dict)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """All that requests may name: models, then adapters."""
        return {**self.models, **self.adapters}

    def entry(self, name: str) -> Entry | None:
        """Return the model or adapter that has this id or alias."""
        entries = self.entries
        return entries.get(name) or next((spec for spec in entries.values() if name in spec.aliases), None)

    def adapters_of(self, model: str) -> tuple[AdapterSpec, ...]:
        return tuple(adapter for adapter in self.adapters.values() if adapter.base == model)

    def of_role(self, role: str) -> "Config":
        """Return what a replica of this role serves itself."""
        models = {name: self.models[name] for name in self.models if name in self.roles[role].models}
        adapters = {name: adapter for name, adapter in self.adapters.items() if adapter.base in models}
        return replace(self, models=MappingProxyType(models), adapters=MappingProxyType(adapters))


def load_config(path: Path) -> Config:
    """Read models.yaml. Raises `ConfigError`, which names every problem, not the first alone."""
    document = read_document(path)
    found: dict[str, Entry] = {}
    tiers: dict[str, TierSpec] = {}
    roles: dict[str, RoleSpec] = {}
    if document.root is not None:
        for key in document.root:
            if key not in _SECTIONS:
                document.add_problem((key,), unknown_key(key, _SECTIONS))
        entries = {section: _entries(document, section) for section in ("models", "tiers")}
        for name, entry in entries["models"].items():
            if model := _check_model(entry, ("models", name), document):
                found[name] = model
        for name, entry in entries["tiers"].items():
            if _OF_MODELS & entry.keys():
                document.add_problem(("tiers", name), _NO_TIER)
            elif tier := check_spec(TierSpec, entry, ("tiers", name), document):
                tiers[name] = tier
        _check_aliases(found, document)
        _check_bases(found, entries["models"], document)
        _check_tiers(entries["models"], document)
        roles = _read_roles(document, found, entries["models"])
    if document.problems:
        raise ConfigError(path, document.problems)
    adapters = {name: spec for name, spec in found.items() if isinstance(spec, AdapterSpec)}
    models = {name: spec for name, spec in found.items() if not isinstance(spec, AdapterSpec)}
    return Config(
        path,
        MappingProxyType(models),
        MappingProxyType(tiers),
        MappingProxyType(adapters),
        MappingProxyType(roles),
    )


def _entries(document: Document, section: str) -> dict[str, dict[str, object]]:
    entries = (document.root or {}).get(section)
    if not isinstance(entries, dict) or not entries:
        what = "must hold" if isinstance(entries, dict) or entries is None else "must be a mapping with"
        document.add_problem((section,), f"{what} at least one of the {section}, each under its own name")
        return {}
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            document.add_problem((section, name), "must be a mapping: put its `key: value` lines below, indented")
    return {name: entry for name, entry in entries.items() if isinstance(entry, dict)}


def _check_model(entry: dict[str, object], location: Location, document: Document) -> Entry | None:
    task = entry.get("task")
    if isinstance(task, str) and task not in SPEC_BY_TASK:
        near = did_you_mean(task, SPEC_BY_TASK)
        message = f"there is no task `{shown(task)}`; there is {listed(SPEC_BY_TASK)}{near}"
        document.add_problem((*location, "task"), message)
        # Which keys belong to it is unknown, so only what all tasks share is checked.
        common = {key: entry[key] for key in CommonModelSpec.model_fields if key in entry}
        check_spec(CommonModelSpec, common, location, document)
        return None
    spec = SPEC_BY_TASK[task if isinstance(task, str) else "chat"]
    return check_spec(spec, entry, location, document)


def _check_bases(found: Mapping[str, Entry], named: Mapping[str, object], document: Document) -> None:
    """Check that each adapter has a chat model as its base, unless that has problems of its own."""
    chats = [name for name, spec in found.items() if isinstance(spec, ChatModelSpec)]
    for spec in found.values():
        if isinstance(spec, AdapterSpec) and spec.base not in chats and (spec.base in found or spec.base not in named):
            what = f"must be a chat model of this file, not `{shown(spec.base)}`{did_you_mean(spec.base, chats)}"
            document.add_problem(("models", spec.id, "base"), what)


def _check_aliases(models: Mapping[str, Entry], document: Document) -> None:
    """Check that a name means one model."""
    owners = {name: name for name in models}
    for spec in models.values():
        for alias in spec.aliases:
            owner = owners.setdefault(alias, spec.id)
            if owner != spec.id or alias in models:
                what = "is the name of another model" if alias in models else f"is an alias of `{owner}` already"
                document.add_problem(("models", spec.id, "aliases"), f"`{shown(alias)}` {what}")


def _check_tiers(models: Mapping[str, dict[str, object]], document: Document) -> None:
    """Check names across entries, unless tiers are so wrong that this would mislead."""
    tiers = (document.root or {}).get("tiers")
    if not isinstance(tiers, dict) or not tiers:
        return
    lists = {name: tier.get("models") if isinstance(tier, dict) else None for name, tier in tiers.items()}
    named = {("models", name, "tier"): [entry.get("tier")] for name, entry in models.items()}
    named |= {("tiers", name, "models"): listed for name, listed in lists.items() if isinstance(listed, list)}
    known = [listed for listed in lists.values() if isinstance(listed, list)]
    for location, names in named.items():
        for name in names:
            if isinstance(name, str) and name not in tiers:
                message = f"there is no tier `{shown(name)}` under `tiers`{did_you_mean(name, tiers)}"
                document.add_problem(location, message)
            elif isinstance(name, str) and len(known) == len(tiers) and not any(name in listed for listed in known):
                message = f"no tier lists `{name}` under its `models`, so no key could use this model: add it to one"
                document.add_problem(location, message)


def _read_roles(document: Document, found: Mapping[str, Entry], named: Mapping[str, object]) -> dict[str, RoleSpec]:
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
        _check_roles(specs, found, named, document)
    return specs


def _check_roles(
    roles: Mapping[str, RoleSpec], found: Mapping[str, Entry], named: Mapping[str, object], document: Document
) -> None:
    """Check that each model of the file is in one role, unless it has problems of its own."""
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
