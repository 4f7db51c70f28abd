"""Dates and spans as people write them: `90d`, `2027-01-31`, or a whole moment. For the command line and addresses."""

import re
from datetime import UTC, date, datetime, time, timedelta

_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_SPAN = re.compile(r"([0-9]{1,6})([mhdw])")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class MomentError(ValueError):
    """A text is no moment. The message follows the name of the field or option, and does not repeat the text."""


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
    """Write a moment the way all our JSON has it: UTC, whole seconds."""
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
