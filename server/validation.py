"""Turns pydantic's findings into one clear sentence and a field path. The offending value is never repeated."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel

# By pydantic's type of error, with values of its context.
_SENTENCES = {
    **dict.fromkeys(("missing", "union_tag_not_found"), "is missing"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "finite_number": "must be a finite number",
    "extra_forbidden": "is not known here",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "too_short": "must have at least {min_length} items",
    "too_long": "must have at most {max_length} items",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "literal_error": "must be one of {expected}",
    "union_tag_invalid": "must be one of {expected_tags}",
    "value_error": "{error}",  # raised by our own validators: the text is ours
}


class FieldError(ValueError):
    """Raised by validators that look at several fields: which one to blame, and a sentence that follows its name."""

    def __init__(self, param: str, sentence: str) -> None:
        super().__init__(sentence)
        self.param = param


def most_specific(findings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of several findings take the one deepest in the body: in a union the others are branches not meant.

    Equally deep, the one whose branch has the right type is meant.
    """
    first = findings[0]
    same_field = [item for item in findings if item["loc"][:1] == first["loc"][:1]]
    return max(same_field, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))


def sentence(finding: Mapping[str, Any]) -> str:
    """Say what is wrong, to follow the name of the field."""
    template = _SENTENCES.get(finding["type"], "has a value that is not allowed here")
    return re.sub(r"\b1 (item|character)s\b", r"1 \1", template.format(**finding.get("ctx", {})))


@cache
def _own_words() -> frozenset[str]:
    """The names of all fields of our bodies and queries. Called when all routes are there."""

    def below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    ours = [kind for kind in below(BaseModel) if kind.__module__.startswith("server.api.")]
    named = {field.alias or name for kind in ours for name, field in kind.model_fields.items()}
    return frozenset(named | {"custom_id"})


def own_path(param: str | None) -> str | None:
    """Return a field's path for a log: it ends where a word comes that is not ours, since that one is the client's."""
    known = []
    for part in (param or "").split("."):
        word = re.fullmatch(r"(\w+)((?:\[\d{1,6}\])*)", part, re.ASCII)
        if word is None or word[1] not in _own_words():
            break
        known.append(part)
    return ".".join(known[:10]) or None


def field_path(finding: Mapping[str, Any], body: Any) -> str | None:
    """Write pydantic's location as the client knows it; None for the body as a whole.

    A location also names union branches, which are not in the body: only what leads further into it is kept.
    """
    location = list(finding["loc"])
    if finding["type"].startswith("union_tag_"):
        location.append(finding["ctx"]["discriminator"].strip("'"))
    path, here = "", body
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if re.fullmatch(r"messages\[\d+\]", path) and isinstance(here, dict) and part == here.get("role") and not last:
            continue  # names the branch; a message may hold a field of that name all the same
        if isinstance(part, int) and isinstance(here, list) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif isinstance(part, str) and isinstance(here, dict) and (part in here or last):
            path, here = f"{path}.{part}" if path else part, here.get(part)
    return path or None
