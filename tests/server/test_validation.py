"""What is said of a wrong field, and dates and spans: what they mean to the second, and what is refused."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from pydantic import BaseModel, ValidationError

from server.api.admin.commands import PullBody
from server.api.admin.schema import UsageQuery
from server.api.audio.transcriptions import TranslationBody
from server.api.chat_request import FunctionDefinition
from server.validation import MomentError, future, iso, moment, past, sentence, span


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


@pytest.mark.parametrize(
    ("body", "given", "said"),
    [
        (FunctionDefinition, {"name": "get weather"}, "must have 1 to 128 letters, digits, `_`, `-`, and nothing else"),
        (UsageQuery, {"key": "hk_"}, "must be a public id: 12 letters and digits"),
        (UsageQuery, {"model": "é"}, "must be the id of a model"),
        (PullBody, {"models": ["--help"]}, "must be the name of a model or variant"),
        (TranslationBody, {"model": "m", "stream": "maybe"}, "must be true or false"),
    ],
)
def test_what_is_spelled_wrong_is_told_how_it_is_spelled(body: type[BaseModel], given: dict[str, object], said: str):
    with pytest.raises(ValidationError) as found:
        body.model_validate_strings(given) if body is TranslationBody else body.model_validate(given)
    assert [sentence(one) for one in found.value.errors()] == [said]


NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1m", timedelta(seconds=60)),
        ("30m", timedelta(minutes=30)),
        ("12h", timedelta(hours=12)),
        ("90d", timedelta(days=90)),
        ("4w", timedelta(days=28)),
        ("0m", timedelta()),
        ("999999m", timedelta(minutes=999999)),
    ],
)
def test_a_span_is_a_number_and_a_unit(text: str, meant: timedelta):
    assert span(text) == meant


@pytest.mark.parametrize("text", ["", "m", "1", "1s", "1M", "-1d", "1.5d", " 1d", "1d ", "1000000d", "1d2h", "٣d"])
def test_what_is_no_span_is_refused_without_being_repeated(text: str):
    with pytest.raises(MomentError, match=r"must be a time span like 30m, 12h, 90d or 4w$"):
        span(text)


def test_an_end_is_a_span_from_now_the_end_of_a_day_or_a_moment():
    assert future("1h", NOW) == datetime(2026, 11, 21, 13, 0, tzinfo=UTC)
    assert future("2027-01-31", NOW) == datetime(2027, 1, 31, 23, 59, 59, tzinfo=UTC)
    assert future("2027-01-31T12:00:00+02:00", NOW) == datetime(2027, 1, 31, 10, 0, tzinfo=UTC)


def test_a_beginning_is_a_span_ago_the_start_of_a_day_or_a_moment():
    assert past("1h", NOW) == datetime(2026, 11, 21, 11, 0, tzinfo=UTC)
    assert past("2026-01-31", NOW) == datetime(2026, 1, 31, 0, 0, 0, tzinfo=UTC)
    assert past("2026-01-31T12:00:00Z", NOW) == datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize("read", [future, past])
@pytest.mark.parametrize("text", ["", "soon", "2027-02-30", "2027-1-31", "20270131", "2027-06-30T12:00:00", "999999w"])
def test_what_is_none_of_these_is_refused(read, text: str):
    with pytest.raises(MomentError, match="must be a time span like 12h, 90d or 4w, ") as told:
        read(text, datetime.max.replace(tzinfo=UTC) if read is future else datetime.min.replace(tzinfo=UTC))
    assert not text or text not in str(told.value)


@pytest.mark.parametrize(
    "text", ["2027-01-31", "2027-01-31T12:00:00", "2027-01-31 12:00:00Z", "0001-01-01T00:00:00+02:00"]
)
def test_a_moment_has_a_day_a_time_and_a_zone(text: str):
    with pytest.raises(MomentError, match="must be a date and time with its zone"):
        moment(text)


def test_moments_are_shown_in_utc_and_whole_seconds():
    assert moment("2027-01-31t12:00:00Z").utcoffset() == timedelta()
    east = timezone(timedelta(hours=2))
    assert iso(datetime(2027, 1, 31, 12, 0, 0, 999999, tzinfo=east)) == "2027-01-31T10:00:00Z"
    assert iso(None) is None
