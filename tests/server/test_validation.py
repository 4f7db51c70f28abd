"""What is said of a wrong field."""

import pytest

from server.validation import sentence


@pytest.mark.parametrize(
    ("kind", "context", "said"),
    [
        ("too_short", {"min_length": 1}, "must have at least 1 item"),
        ("too_long", {"max_length": 11}, "must have at most 11 items"),
        ("string_too_short", {"min_length": 1}, "must have at least 1 character"),
    ],
)
def test_one_is_said_in_the_singular(kind: str, context: dict[str, int], said: str):
    assert sentence({"type": kind, "ctx": context}) == said
