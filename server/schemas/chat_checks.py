"""Checks of single values in a chat body that types alone cannot express. Their sentences follow the field's name.

Each takes the value as it was sent and returns it as the schema keeps it, or raises `ValueError`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from server.bodies import parse_strict_json
from server.errors import ApiError
from server.schemas.json_schema import check_schema


def token_biases(value: Any) -> Any:
    """The keys are the client's, so they are checked as a whole: no path of an error may name one."""
    if value is None:
        return value
    sentence = "must map at most 1024 token ids (digits) to numbers from -100 to 100"
    if not isinstance(value, dict) or len(value) > 1024:
        raise ValueError(sentence)
    for token, bias in value.items():
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool) and -100 <= bias <= 100
        if not number or not re.fullmatch(r"[0-9]{1,9}", token):
            raise ValueError(sentence)
    return value


def template_switches(value: Any) -> Any:
    if value is None:
        return value
    known = isinstance(value, dict) and set(value) <= {"enable_thinking"}
    if not known or not all(isinstance(switch, bool) for switch in value.values()):
        raise ValueError("may hold `enable_thinking` (true or false) only")
    return value


def object_schema(value: Any) -> Any:
    """A JSON schema has to be an object of bearable size, or null."""
    if value is None:
        return value
    if not isinstance(value, dict):
        raise ValueError("must be an object")  # noqa: TRY004  # pydantic makes a finding of a ValueError only
    check_schema(value)
    return value


def call_arguments(arguments: str) -> str:
    """Text that is no JSON is a call the model never finished, and taken for no arguments further down.

    JSON that only a lenient parser reads (lone surrogates, NaN, thousands of levels or digits) would fail there.
    """
    sentence = "must be JSON text without NaN, lone surrogates, huge numbers or deep nesting"
    try:
        json.loads(arguments)
        parse_strict_json(arguments.encode())
    except json.JSONDecodeError:
        return arguments
    except (ValueError, RecursionError, ApiError) as error:
        raise ValueError(sentence) from error
    return arguments


def stop_sequences(value: Any) -> Any:
    if value is None:
        return ()
    sequences = [value] if isinstance(value, str) else value
    good = isinstance(sequences, list) and len(sequences) <= 4
    if not good or not all(isinstance(item, str) and 1 <= len(item) <= 256 for item in sequences):
        raise ValueError("must be a string or an array of at most 4 strings, each of 1 to 256 characters")
    return tuple(sequences)
