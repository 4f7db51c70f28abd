"""Fields that people fill in: what is wrong with one, as a sentence that follows its name, and dates and spans.

Pydantic's findings become one clear sentence and a field path. The offending value is never repeated. Dates and spans
are `90d`, `2027-01-31`, or a whole moment, on the command line and in addresses.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import Any

from pydantic import BaseModel, Field

# By pydantic's type of error, with values of its context; and by pattern.
_SENTENCES = {
    **dict.fromkeys(("missing", "union_tag_not_found"), "is missing"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be an object"),
    "string_type": "must be a string",
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
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
_PATTERNS: dict[str, str] = {}
_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_SPAN = re.compile(r"([0-9]{1,6})([mhdw])")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class FieldError(ValueError):
    """Raised by validators that look at several fields: `param` is the wrong one; the sentence follows its name."""

    def __init__(self, param: str, sentence: str) -> None:
        super().__init__(sentence)
        self.param = param


def most_specific(findings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the finding that is deepest in the body: in a union the others belong to branches that were not meant.

    Of equally deep ones, return one whose branch has the right type.
    """
    first = findings[0]
    same_field = [item for item in findings if item["loc"][:1] == first["loc"][:1]]
    return max(same_field, key=lambda item: (len(item["loc"]), not item["type"].endswith("_type")))


def spelled(pattern: str, sentence: str) -> Any:
    """Make the field of a text that has to match a pattern; `sentence` describes the pattern."""
    _PATTERNS[pattern] = sentence
    return Field(pattern=pattern)


def sentence(finding: Mapping[str, Any]) -> str:
    """Return what is wrong, as words that follow the name of the field."""
    context = finding.get("ctx", {})
    unknown = _PATTERNS.get(context.get("pattern", ""), "has a value that is not allowed here")
    template = _SENTENCES.get(finding["type"], unknown)
    return re.sub(r"\b1 (item|character)s\b", r"1 \1", template.format(**context))


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
    """Return a field's path for the log, cut before the first word that is not ours, since a client chose it."""
    known = []
    for part in (param or "").split("."):
        word = re.fullmatch(r"(\w+)((?:\[\d{1,6}\])*)", part, re.ASCII)
        if word is None or word[1] not in _own_words():
            break
        known.append(part)
    return ".".join(known[:10]) or None


def field_path(finding: Mapping[str, Any], body: Any) -> str | None:
    """Return pydantic's location as a path in the client's body; None for the body as a whole.

    A location also names union branches, which are not in the body: only what leads further into it is kept.
    """
    location = list(finding["loc"])
    if finding["type"].startswith("union_tag_"):
        location.append(finding["ctx"]["discriminator"].strip("'"))
    path, here = "", body
    for depth, part in enumerate(location):
        last = depth == len(location) - 1
        if re.fullmatch(r"messages\[\d+\]", path) and isinstance(here, dict) and part == here.get("role") and not last:
            continue  # names the branch, even if a message has a field of that name
        if isinstance(part, int) and isinstance(here, list) and part < len(here):
            path, here = f"{path}[{part}]", here[part]
        elif isinstance(part, str) and isinstance(here, dict) and (part in here or last):
            path, here = f"{path}.{part}" if path else part, here.get(part)
    return path or None


class MomentError(ValueError):
    """A text is not a time. The message follows the name of the field or option, and does not repeat the text."""


def span(text: str) -> timedelta:
    """Read a span like `90d`. Raises `MomentError`."""
    found = _SPAN.fullmatch(text)
    if found is None:
        raise MomentError("must be a time span like 30m, 12h, 90d or 4w")
    return int(found[1]) * _UNITS[found[2]]


def future(text: str, now: datetime) -> datetime:
    """Read an end: a span from now on, the last day (through 23:59:59 UTC), or a moment. Raises `MomentError`."""
    return _read(text, now, 1, time(23, 59, 59), "the last day")


def past(text: str, now: datetime) -> datetime:
    """Read a beginning: so long ago, the first moment of a day in UTC, or a moment. Raises `MomentError`."""
    return _read(text, now, -1, time(), "a day")


def moment(text: str) -> datetime:
    """Read one moment with its time zone. Raises `MomentError`."""
    try:
        found = datetime.fromisoformat(text)
        if found.tzinfo is not None and "T" in text.upper():
            return found.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise MomentError("must be a date and time with its zone, like 2027-01-31T12:00:00Z")


def iso(at: datetime | None) -> str | None:
    """Return a moment as in all our JSON: UTC, whole seconds."""
    return None if at is None else at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _read(text: str, now: datetime, direction: int, time_of_day: time, day: str) -> datetime:
    try:
        if _SPAN.fullmatch(text):
            return now + direction * span(text)
        if _DAY.fullmatch(text):
            return datetime.combine(date.fromisoformat(text), time_of_day, UTC)
        return moment(text)
    except (ValueError, OverflowError):
        raise MomentError(
            f"must be a time span like 12h, 90d or 4w, {day} like 2027-01-31, or a moment like 2027-01-31T12:00:00Z"
        ) from None
