"""Turns pydantic's findings into one clear sentence and a field path. The offending value is never repeated."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SENTENCES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_parsing": "must be an integer",
    "float_parsing": "must be a number",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "list_type": "must be an array",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "finite_number": "must be a finite number",
    "union_tag_not_found": "is missing",
    "extra_forbidden": "is not known here",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "must be at least {}"),
    "greater_than": ("gt", "must be more than {}"),
    "less_than_equal": ("le", "must be at most {}"),
    "less_than": ("lt", "must be less than {}"),
    "too_short": ("min_length", "must have at least {} items"),
    "too_long": ("max_length", "must have at most {} items"),
    "string_too_short": ("min_length", "must have at least {} characters"),
    "string_too_long": ("max_length", "must have at most {} characters"),
    "literal_error": ("expected", "must be one of {}"),
    "union_tag_invalid": ("expected_tags", "must be one of {}"),
}


class FieldError(ValueError):
    """Raised by validators that look at several fields: which one to blame, and a sentence that follows its name."""

    def __init__(self, param: str, sentence: str) -> None:
        super().__init__(sentence)
        self.param = param


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a body. `param` is a path like `messages[2].content`."""

    param: str | None
    code: str
    message: str


def most_specific_problem(findings: Sequence[Mapping[str, Any]], body: Any) -> Problem:
    """Return the most specific of pydantic's `findings` about `body`; their `loc`s start at the body."""
    finding = _most_specific(findings)
    cause = finding.get("ctx", {}).get("error")
    param = cause.param if isinstance(cause, FieldError) else field_path(finding, body)
    missing = finding["type"] in {"missing", "union_tag_not_found"}
    code = "missing_field" if missing else getattr(cause, "code", "invalid_value")
    if param is None:
        if missing:
            return Problem(None, "invalid_json", "The body is empty. Send a JSON object.")
        return Problem(None, "invalid_value", "The body must be a JSON object.")
    return Problem(param, code, f"`{param}` {sentence(finding)}.")


def _most_specific(findings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of several findings take the one deepest in the body: in a union the others are branches not meant.

    Equally deep, the one whose branch has the right type is meant.
    """
    first = findings[0]
    same_field = [item for item in findings if item["loc"][:1] == first["loc"][:1]]
    return max(same_field, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))


def sentence(finding: Mapping[str, Any]) -> str:
    """Say what is wrong, to follow the name of the field."""
    kind = finding["type"]
    if kind in _SENTENCES:
        return _SENTENCES[kind]
    if kind in _BOUNDS:
        key, template = _BOUNDS[kind]
        return template.format(finding.get("ctx", {}).get(key))
    if kind == "value_error":  # raised by our own validators: the text is ours
        return str(finding["ctx"]["error"])
    return "has a value that is not allowed here"


def field_path(finding: Mapping[str, Any], body: Any) -> str | None:
    """Write pydantic's location as the client knows it; None for the body as a whole.

    A location also names union branches, which are not in the body: only what leads further into it is kept.
    """
    location = list(finding["loc"])
    if finding["type"] == "union_tag_not_found" or finding["type"] == "union_tag_invalid":
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
