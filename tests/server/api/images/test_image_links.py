"""Signed links to images: who has one gets in until it ends, and nobody else."""

import stat
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from server.api.images.files import ImageLinks, public_base_url
from server.settings import SettingsError, load_settings

NAME = f"{'0123456789abcdef' * 2}.png"
NOW = 1_800_000_000.0
DAY = 24 * 3600


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def parts(path: str) -> tuple[str, str, str]:
    """The name, the end and the signature in a link."""
    split = urlsplit(path)
    query = parse_qs(split.query, strict_parsing=True)
    assert {name: len(values) for name, values in query.items()} == {"expires": 1, "signature": 1}
    return split.path.removeprefix("/images/files/"), query["expires"][0], query["signature"][0]


@pytest.fixture(scope="module")
def links() -> ImageLinks:
    return ImageLinks(b"k" * 32, Clock())


def test_the_repr_of_what_signs_hides_its_key(links: ImageLinks):
    assert "kkk" not in repr(links)


def test_a_link_opens_its_file_until_its_end_and_not_a_second_longer():
    clock = Clock()
    links = ImageLinks(b"k" * 32, clock)
    link = parts(links.path(NAME, int(NOW) + DAY))
    assert links.seconds_left(*link) == DAY
    clock.now += DAY - 1
    assert links.seconds_left(*link) == 1
    clock.now += 1
    assert links.seconds_left(*link) is None


def test_a_link_is_for_one_file_one_end_and_one_server(links: ImageLinks):
    name, expires, signature = parts(links.path(NAME, int(NOW) + DAY))
    other = NAME.replace("0", "f", 1)
    assert links.seconds_left(other, expires, signature) is None
    assert links.seconds_left(name, str(int(expires) + 1), signature) is None
    assert links.seconds_left(name, f"0{expires}", signature) is None
    assert links.seconds_left(name, f"{expires}.0", signature) is None
    assert links.seconds_left(name, expires, "") is None
    assert links.seconds_left(name, expires, signature[:-1]) is None
    assert ImageLinks(b"K" * 32, Clock()).seconds_left(name, expires, signature) is None


def test_a_signature_with_one_letter_changed_opens_nothing(links: ImageLinks):
    name, expires, signature = parts(links.path(NAME, int(NOW) + DAY))
    for position, letter in enumerate(signature):
        changed = "A" if letter != "A" else "B"
        assert links.seconds_left(name, expires, signature[:position] + changed + signature[position + 1 :]) is None


@given(st.text(max_size=40), st.text(max_size=20), st.text(max_size=60))
def test_what_nobody_has_signed_opens_nothing(name: str, expires: str, signature: str):
    assert ImageLinks(b"k" * 32, Clock()).seconds_left(name, expires, signature) is None


def test_the_end_of_a_name_is_not_the_beginning_of_another_end(links: ImageLinks):
    """What is signed says where one part ends, so that a link cannot be cut elsewhere."""
    name, expires, signature = parts(links.path(f"{NAME}1", int(NOW)))
    assert links.seconds_left(NAME, f"1{expires}", signature) is None
    assert links.seconds_left(f"{NAME}\n1", expires, signature) is None
    assert name == f"{NAME}1"


def test_the_key_is_made_once_for_its_owner_alone(tmp_path: Path):
    link = parts(ImageLinks.open(tmp_path).path(NAME, 2**33))
    assert ImageLinks.open(tmp_path).seconds_left(*link)
    [file] = tmp_path.iterdir()
    assert (file.name, stat.S_IMODE(file.stat().st_mode), file.stat().st_size) == ("image-links.key", 0o600, 32)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_key_signs_nothing_and_is_replaced(tmp_path: Path, content: bytes):
    (tmp_path / "image-links.key").write_bytes(content)
    link = parts(ImageLinks.open(tmp_path).path(NAME, 2**33))
    assert ImageLinks(content).seconds_left(*link) is None
    assert ImageLinks.open(tmp_path).seconds_left(*link)
    assert (tmp_path / "image-links.key").stat().st_size == 32


def asked(host: str | None, *, scheme: str = "http", root_path: str = "") -> Request:
    headers = [] if host is None else [(b"host", host.encode("latin-1"))]
    server = ("10.0.0.7", 8000)
    return Request({"type": "http", "scheme": scheme, "headers": headers, "server": server, "root_path": root_path})


@pytest.mark.parametrize(
    ("request_", "address"),
    [
        (asked("hearth:8000"), "http://hearth:8000/v1"),
        (asked("hearth.example.org", scheme="https"), "https://hearth.example.org/v1"),
        (asked("[::1]:8000"), "http://[::1]:8000/v1"),
        (asked("hearth", root_path="/ai"), "http://hearth/ai/v1"),
        (asked(None), "http://10.0.0.7:8000/v1"),
        (asked(""), "http://10.0.0.7:8000/v1"),
        (asked("evil/path?x="), "http://10.0.0.7:8000/v1"),
        (asked("user@evil"), "http://10.0.0.7:8000/v1"),
        (asked('a"><b'), "http://10.0.0.7:8000/v1"),
    ],
)
def test_links_lead_to_where_the_client_has_called_us(request_: Request, address: str):
    assert public_base_url(request_, load_settings()) == address


@pytest.mark.parametrize("value", ["https://ai.example.org", "https://ai.example.org/", "https://ai.example.org/v1"])
def test_the_setting_wins_with_and_without_its_last_part(value: str):
    assert public_base_url(asked("other"), load_settings(public_base_url=value)) == "https://ai.example.org/v1"


@pytest.mark.parametrize(
    "value",
    ["", "ai.example.org", "ftp://ai.example.org", "https://", "https://me:secret@x", "https://x/?a=b", "https://x/#a"],
)
def test_a_wrong_setting_is_told_at_the_start_and_not_repeated(value: str):
    with pytest.raises(SettingsError, match="HEARTH_PUBLIC_BASE_URL: must be an address like https://") as caught:
        load_settings(public_base_url=value)
    assert "secret" not in str(caught.value)
