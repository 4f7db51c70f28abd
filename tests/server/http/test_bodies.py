"""Bodies are read as the strictest parser would: what JSON libraries disagree about is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import ApiError
from server.http.bodies import parse_strict_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    SCALARS | TEXT,
    lambda below: st.lists(below, max_size=5) | st.dictionaries(TEXT, below, max_size=5),
    max_leaves=30,
)


def nested(levels: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * levels + "1" + closing * levels).encode()


@settings(max_examples=300)
@given(value=VALUES, ascii_only=st.booleans(), indent=st.sampled_from([None, 0, 2]))
def test_valid_json_within_the_limits_is_read_like_the_standard_library_does(value, ascii_only, indent):
    body = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert parse_strict_json(body) == json.loads(body)


@settings(max_examples=300)
@given(body=st.binary(max_size=40))
def test_any_bytes_give_a_value_or_a_400(body: bytes):
    try:
        value, refused = parse_strict_json(body), None
    except ApiError as error:
        value, refused = None, (error.status, error.code)
    assert refused == (400, "invalid_json") or value == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"NaN",
        b'{"a": NaN}',
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-1E+999",
        b"1e0000999",
        b"9" * 400 + b".0",
        str(2**63).encode(),
        str(-(2**63) - 1).encode(),
        b"9" * 400,
        b"9" * 5000,
        b'"\\ud800"',
        b'"\\udc00\\ud800"',
        b'{"\\ud800": 1}',
        b'"\xff"',
        b'"\xed\xa0\x80"',
        '"x"'.encode("utf-16"),
        '"x"'.encode("utf-16-le"),
        '"x"'.encode("utf-32"),
        b"\xef\xbb\xbf1",
        b"1 2",
        b"1\0",
        b'"\x01"',
        b"[1,]",
        b"{'a': 1}",
        b"/**/1",
        b"01",
        nested(65),
        b"[" * 65 + b"]" * 65,
        nested(65, '{"a":', "}"),
        nested(5000),
        nested(5000, '{"a":', "}"),
        b"[" * 5000,
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_parsers_disagree_about_is_refused(body: bytes):
    with pytest.raises(ApiError) as caught:
        parse_strict_json(body)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "invalid_json", None)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"model": "x",\n "n" 1}', "UTF-8 at line 2 column 6."),
        (b"{'model': 1}", "UTF-8 at line 1 column 2."),
        (b" \n", "The body is empty."),
    ],
)
def test_a_mistake_is_told_with_its_place(body: bytes, told: str):
    with pytest.raises(ApiError, match=told.replace(".", r"\.")):
        parse_strict_json(body)


@pytest.mark.parametrize(
    "body", [nested(64), nested(64, '{"a":', "}"), b"[" * 64 + b"]" * 64, b"[" + b"[]," * 200 + b"[]]"]
)
def test_64_levels_are_fine_and_breadth_is_no_depth(body: bytes):
    assert parse_strict_json(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"a": [' + b"{}," * 100_000 + b"{}]}", 413),
        (b'{"a": {' + b",".join(b'"%d": 1' % key for key in range(400_001)) + b"}}", 413),
        (b'{"a": {' + b",".join(b'"%d" :1' % key for key in range(400_001)), 413),
        (b'"' + b"12:30 " * 400_001 + b'"', 413),
        (b":" * 400_001, 400),
        (b":" * 400_001 + b"{", 400),
    ],
    ids=["objects", "keys", "keys-cut-off", "text", "colons", "colons-and-a-brace"],
)
def test_more_parts_than_are_checked_in_half_a_second_are_refused(body: bytes, status: int):
    with pytest.raises(ApiError) as caught:
        parse_strict_json(body)
    assert caught.value.status == status


def test_as_many_keys_as_are_allowed_are_read():
    body = b"{" + b",".join(b'"%d":1' % key for key in range(400_000)) + b"}"
    assert len(parse_strict_json(body)) == 400_000


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 1e308, -0.0, 5e-324])
def test_the_extremes_of_64_bits_are_read_exactly(number):
    assert parse_strict_json(json.dumps(number).encode()) == number
