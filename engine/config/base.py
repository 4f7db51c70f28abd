"""What every entry of models.yaml is built of: the frozen class of entries, and the kinds of names in them."""

from collections import Counter
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from engine.config.messages import plain_error
from engine.config.yaml import shown


def _each_once(names: tuple[str, ...]) -> tuple[str, ...]:
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise plain_error(f"names `{shown(name)}` {times} times: keep one")
    return names


def words(message: str) -> dict[str, Any]:
    """Say what a pattern means."""
    # Editors show `patternErrorMessage` instead of the regular expression; our own messages use it too.
    return {"patternErrorMessage": message}


Id = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9]([./]?[A-Za-z0-9_-])*$",
        max_length=64,
        json_schema_extra=words(
            "a name of at most 64 letters, digits and `-` `_` `.` `/`"
            " (starting with a letter or digit, without `..` or `//`)"
        ),
    ),
]
Folder = Annotated[
    str,
    Field(
        pattern=r"^[^/\\\x00-\x1f.~][^/\\\x00-\x1f]*(/[^/\\\x00-\x1f.~][^/\\\x00-\x1f]*)*$",
        max_length=255,
        json_schema_extra=words(
            "a folder below the weights directory, like `my-model` or `team/my-model`"
            " (relative, without `..`, no part starting with a dot or `~`)"
        ),
    ),
]
Word = Annotated[
    str,
    Field(
        pattern=r"^[a-z0-9_]+$",
        max_length=64,
        json_schema_extra=words("a name of small letters, digits and `_`"),
    ),
]
Name = TypeVar("Name", bound=str)
# Strict mode would refuse YAML's lists for tuples.
Names = Annotated[
    tuple[Name, ...],
    Field(strict=False, min_length=1, json_schema_extra={"uniqueItems": True}),
    AfterValidator(_each_once),
]
Limit = Annotated[int, Field(ge=1, le=1_000_000_000)]
StallSeconds = Annotated[float, Field(ge=1, le=86400)]


class Spec(BaseModel):
    """An entry, or a part of one: every key known, every value of its type."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )
