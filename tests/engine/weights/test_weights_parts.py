"""A file on its way, to the byte: how far it is, what is asked for, what is taken, and how often it is tried."""

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
from hub_server import COMMIT, HubServer
from huggingface_hub.errors import HfHubHTTPError

from engine.errors import WeightsError
from engine.weights.download import Part, Wanted, _Hub, _range, locked
from engine.weights.manifest import Listing, ModelFile

CONTENT = bytes(range(200))
FILE = ModelFile(path="w.bin", size_bytes=200, sha256=hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def hub(hub: HubServer) -> HubServer:
    hub.add("org/parts", {"w.bin": CONTENT})
    return hub


Begin = Callable[..., Part]


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Begin]:
    """Begin with what is there of the file already; `reports` gets how many bytes are there each time."""
    with ExitStack() as stack:

        def begin(there: bytes, reports: list[int] | None = None) -> Part:
            path = tmp_path / "w.bin"
            path.write_bytes(there)
            told = [] if reports is None else reports
            return Part(stack.enter_context(path.open("ab+")), FILE, lambda _path, done, _size: told.append(done))

        yield begin


@pytest.mark.parametrize(("there", "done"), [(0, 0), (1, 1), (199, 199), (200, 200), (201, 0), (400, 0)])
def test_a_part_goes_on_where_it_ended_and_begins_again_if_it_is_too_long(
    tmp_path: Path, begun: Begin, there: int, done: int
):
    reports: list[int] = []
    part = begun((CONTENT * 2)[:there], reports)
    assert (part.done, reports) == (done, [done])
    part.write(CONTENT[done:])
    assert part.matches()
    assert reports[-1] == part.done == 200
    assert (tmp_path / "w.bin").read_bytes() == CONTENT


def test_a_part_takes_no_byte_more_than_its_file_has(begun: Begin):
    part = begun(CONTENT[:150])
    with pytest.raises(WeightsError, match="more than 200 bytes on the server"):
        part.write(CONTENT[149:])
    part.write(CONTENT[150:])
    assert part.matches()
    with pytest.raises(WeightsError, match="more than 200"):
        part.write(b"x")


def test_another_content_does_not_match(begun: Begin):
    part = begun(b"x" * 150)
    part.write(CONTENT[150:])
    assert not part.matches()
    part.restart()
    part.write(CONTENT)
    assert part.matches()


def listing() -> Listing:
    return Listing(repository="org/parts", revision=COMMIT, files=(FILE,))


def hub_of(server: HubServer) -> _Hub:
    return _Hub(Wanted("org/parts", "parts", endpoint=server.endpoint, first_pause_seconds=0.001), threading.Event())


@pytest.mark.parametrize(
    ("there", "asked"),
    [(0, None), (1, "bytes=1-199"), (199, "bytes=199-199")],
    ids=["all", "the rest", "the last byte"],
)
def test_what_is_missing_is_asked_for(hub: HubServer, begun: Begin, there: int, asked: str | None):
    part = begun(CONTENT[:there])
    hub_of(hub).fetch(listing(), part)
    assert hub.ranges["w.bin"] == [asked]
    assert part.matches()


def test_nothing_is_asked_for_a_file_that_is_there(hub: HubServer, begun: Begin):
    hub_of(hub).fetch(listing(), begun(CONTENT))
    assert hub.ranges["w.bin"] == []


def test_of_a_subfolder_its_own_file_is_fetched(hub: HubServer, begun: Begin):
    hub.add("org/parts", {"w.bin": b"x" * 200, "below/w.bin": CONTENT})
    wanted = Wanted("org/parts", "parts", subfolder="below", endpoint=hub.endpoint, first_pause_seconds=0.001)
    part = begun(b"")
    _Hub(wanted, threading.Event()).fetch(listing(), part)
    assert part.matches()


def test_a_hub_without_ranges_is_read_from_the_start(hub: HubServer, begun: Begin):
    hub.knows_ranges = False
    part = begun(b"x" * 10)
    hub_of(hub).fetch(listing(), part)
    assert part.matches()


@pytest.mark.parametrize(
    ("status", "headers", "found"),
    [
        (200, {"content-length": "9"}, (0, "9")),
        (200, {}, (0, "*")),
        (200, {"content-length": "9", "content-encoding": "identity"}, (0, "9")),
        (200, {"content-length": "9", "content-encoding": "gzip"}, (0, "*")),
        (206, {"content-range": "bytes 5-8/9"}, (5, "9")),
        (206, {"content-range": "bytes 5-8/*"}, (5, "*")),
    ],
)
def test_where_an_answer_begins_and_how_large_the_file_is(status: int, headers: dict[str, str], found: tuple[int, str]):
    assert _range(httpx2.Response(status, headers=headers)) == found


@pytest.mark.parametrize(
    ("status", "said"), [(206, ""), (206, "bytes 5-8"), (206, "lines 5-8/9"), (204, ""), (302, "")]
)
def test_an_answer_that_is_no_part_of_a_file_is_refused(status: int, said: str):
    answer = httpx2.Response(status, headers={"content-range": said}, request=httpx2.Request("GET", "http://hub"))
    with pytest.raises(HfHubHTTPError, match="another status"):
        _range(answer)


def tries(hub: _Hub, fails: Callable[[int], Exception | None], part: Part | None = None) -> int:
    """How often something is asked for that fails as told."""
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        error = fails(asked)
        if error is not None:
            raise error

    try:
        hub._patiently(ask, part)
    except WeightsError:
        return -asked
    return asked


def failed(status: int, **headers: str) -> HfHubHTTPError:
    answer = httpx2.Response(
        status,
        headers={name.replace("_", "-"): value for name, value in headers.items()},
        request=httpx2.Request("GET", "http://hub"),
    )
    return HfHubHTTPError("no", response=answer)


def test_what_may_pass_is_tried_again_so_often(hub: HubServer, begun: Begin):
    here, part = hub_of(hub), begun(b"")
    lost = httpx2.ConnectError("lost")
    assert tries(here, lambda _: None) == 1
    assert tries(here, lambda number: lost if number < 3 else None) == 3
    assert tries(here, lambda _: lost) == -3, "where nothing answers, it is said soon"
    assert tries(here, lambda _: lost, part) == -6
    assert tries(here, lambda _: failed(503)) == -6
    assert tries(here, lambda _: failed(404)) == -1
    assert tries(here, lambda number: failed(503, retry_after="0") if number < 6 else None) == 6
    assert tries(here, lambda _: failed(503, retry_after="301")) == -1


def test_every_byte_that_came_makes_it_patient_again(hub: HubServer, begun: Begin):
    here, part = hub_of(hub), begun(b"")
    lost = httpx2.ReadError("lost")

    def fails(number: int) -> Exception | None:
        if number % 5 == 0 and part.done < 4:
            part.write(CONTENT[part.done : part.done + 1])
        return lost

    assert tries(here, fails, part) == -(4 * 5 + 5)


def test_pauses_double_up_to_thirty_times_the_first_unless_the_hub_asks_for_another(hub: HubServer, begun: Begin):
    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            pauses.append(timeout)
            return False

    pauses: list[float | None] = []
    here = _Hub(Wanted("org/parts", "parts", endpoint=hub.endpoint, first_pause_seconds=2), Stop())
    tries(here, lambda _: failed(503))
    assert pauses == [2, 4, 8, 16, 32]
    pauses.clear()
    tries(here, lambda number: failed(503, retry_after="300" if number == 2 else "") if number < 4 else None)
    assert pauses == [2, 300, 8]


def test_what_is_missing_is_all_but_whole_files_and_begun_parts_and_what_is_made_of_pickles(tmp_path: Path):
    other = FILE.model_copy(update={"path": "below/v.pt"})
    with locked(tmp_path, "m") as pull:
        pull.begin(Listing(repository="org/parts", revision=COMMIT, files=(FILE, other)), lambda _: None)
        assert pull.missing_bytes == 400
        (pull.parts / "w.bin").write_bytes(CONTENT[:50])
        assert pull.missing_bytes == 350
        (pull.model / "w.bin").write_bytes(CONTENT)
        assert pull.missing_bytes == 200
        pull.convert = True
        assert pull.missing_bytes == 400


def test_a_file_lies_as_deep_as_in_its_repository(tmp_path: Path):
    deep = FILE.model_copy(update={"path": "en/amy/w.bin"})
    with locked(tmp_path, "m") as pull:
        pull.begin(Listing(repository="org/parts", revision=COMMIT, files=(deep,)), lambda part: part.write(CONTENT))
        pull._complete(deep, lambda *_: None)
        assert (pull.model / deep.path).read_bytes() == CONTENT


def test_a_part_that_was_damaged_is_fetched_once_more_from_zero_and_no_oftener(tmp_path: Path):
    fetched: list[int] = []
    reports: list[int] = []

    def fetch(part: Part) -> None:
        fetched.append(part.done)
        part.write(CONTENT[part.done :] if len(fetched) < 3 else b"x" * 200)

    with locked(tmp_path, "m") as pull:
        pull.begin(listing(), fetch)
        (pull.parts / "w.bin").write_bytes(b"x" * 50)
        pull._complete(FILE, lambda _path, done, _size: reports.append(done))
        assert (pull.model / "w.bin").read_bytes() == CONTENT
        assert (fetched, reports) == ([50, 0], [50, 200, 0, 200])
        pull._complete(FILE, lambda _path, done, _size: reports.append(done))
        assert (len(fetched), reports[4:]) == (2, [200])
        (pull.model / "w.bin").unlink()
        with pytest.raises(WeightsError, match="was fetched twice"):
            pull._complete(FILE, lambda *_: None)
        assert len(fetched) == 4
        assert not (pull.parts / "w.bin").exists()
