"""One repository on a model hub: its list of files at one commit, and their bytes. Goes on after cuts by itself.

`huggingface_hub` knows the hub's addresses, the token, proxies and its errors. Its own download starts a file anew when
a process was killed, so the bytes are read here.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, TypeVar

from engine.config_document import shown
from engine.hub.errors import WeightsError
from engine.hub.explained import refused, unreachable
from engine.hub.listing import ListedFile, Listing
from engine.hub.paths import COMMIT, check_repository, is_plain
from engine.hub.patience import TRANSIENT, Patience, asked_pause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import httpx2

T = TypeVar("T")

_CHUNK_BYTES = 2**18
# Some stores answer a plain request for more than 50 GB with an error, and a slice of the same file gladly.
_SLICE_BYTES = 8 * 2**30
_ANSWER_SECONDS = 30
# Where there is no network nobody wants to wait as long as for one that broke in the middle.
_FIRST_ATTEMPTS = 3


class _AnswerError(Exception):
    """The hub's answer is not what was asked for."""

    def __init__(self, response: httpx2.Response) -> None:
        super().__init__(response.status_code)
        self.response = response


class HubRepository:
    """`endpoint` None is HF_ENDPOINT, or else the public hub. The token is that of HF_TOKEN or `hf auth login`."""

    def __init__(self, repository: str, *, endpoint: str | None = None, patience: Patience | None = None) -> None:
        # Read at import: nothing else is sent to the hub than what the fetch needs.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        from huggingface_hub import HfApi

        self.repository = check_repository(repository)
        self._api = HfApi(endpoint=endpoint, library_name="hearth")
        self._patience = patience or Patience()
        self._commit, self._subfolder = "main", ""

    @property
    def address(self) -> str:
        """Where people look at the repository."""
        return f"{self._api.endpoint}/{self.repository}"

    def listing(self, revision: str | None, subfolder: str = "") -> Listing:
        """Return the files of a commit, branch or tag; None is the branch main. Raises `WeightsError`."""
        info = self._patiently(lambda: self._info(revision))
        commit = str(info.sha)
        if re.fullmatch(COMMIT, commit) is None or (re.fullmatch(COMMIT, revision or "") and commit != revision):
            raise WeightsError(f"{self.address} answers with the revision {shown(commit)!r}, not {revision or 'main'}.")
        files = _files(self.address, info.siblings or [], subfolder)
        self._commit, self._subfolder = commit, subfolder
        return Listing(repository=self.repository, revision=commit, subfolder=subfolder, files=files)

    def read(self, file: ListedFile, start: int) -> Iterator[bytes]:
        """As `Source.read`; ask for the `listing` first."""
        from httpx2 import TransportError
        from huggingface_hub.errors import OfflineModeIsEnabled

        position, failures = start, 0
        while position < file.size_bytes:
            before = position
            try:
                for chunk in self._slice(file, position):
                    position += len(chunk)
                    yield chunk
                whole = position >= min(file.size_bytes, before + _SLICE_BYTES)
                failures = 0 if whole else 1 if position > before else failures + 1
                self._go_on(failures, None)
            except (TransportError, _AnswerError, OfflineModeIsEnabled) as error:
                failures = 1 if position > before else failures + 1
                self._go_on(failures, error)

    def _slice(self, file: ListedFile, position: int) -> Iterator[bytes]:
        from huggingface_hub import constants, get_session

        end = min(file.size_bytes, position + _SLICE_BYTES)
        headers = self._api._build_hf_headers() | {"Accept-Encoding": "identity"}  # noqa: SLF001
        if (position, end) != (0, file.size_bytes):
            headers["Range"] = f"bytes={position}-{end - 1}"
        timeout = max(constants.HF_HUB_DOWNLOAD_TIMEOUT, 1)
        with get_session().stream("GET", self._url(file), headers=headers, timeout=timeout) as response:
            if response.status_code not in {200, 206}:
                raise _AnswerError(response)
            skipped = 0 if _starts_at(response, position, file) else position  # it knows nothing of ranges
            for chunk in response.iter_bytes(_CHUNK_BYTES):
                wanted = chunk[skipped:]
                skipped -= len(chunk) - len(wanted)
                position += len(wanted)
                if position > file.size_bytes:
                    raise _wrong_size(file, f"more than {file.size_bytes}")
                if wanted:
                    yield wanted

    def _url(self, file: ListedFile) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(
            self.repository,
            file.path,
            subfolder=self._subfolder or None,
            revision=self._commit,
            endpoint=self._api.endpoint,
        )

    def _info(self, revision: str | None) -> Any:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return self._api.model_info(
                self.repository, revision=revision, files_metadata=True, timeout=_ANSWER_SECONDS
            )
        except HfHubHTTPError as error:
            raise _AnswerError(error.response) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(
                f"{self._api.endpoint} does not answer like a model hub. Is HF_ENDPOINT right, and does a proxy answer "
                "in its place?"
            ) from error

    def _patiently(self, ask: Callable[[], T]) -> T:
        from httpx2 import TransportError
        from huggingface_hub.errors import OfflineModeIsEnabled

        failures = 0
        while True:
            try:
                return ask()
            except (TransportError, _AnswerError, OfflineModeIsEnabled) as error:
                failures += 1
                if isinstance(error, TransportError) and failures >= _FIRST_ATTEMPTS:
                    raise unreachable(str(self._api.endpoint), error) from error
                self._go_on(failures, error)

    def _go_on(self, failures: int, error: Exception | None) -> None:
        """Wait as long as is right after so many failures in a row. Raises `WeightsError` when it is no use."""
        if failures == 0:
            return
        if isinstance(error, _AnswerError):
            asked = asked_pause(error.response.headers)
            if error.response.status_code not in TRANSIENT or not self._patience.pause(failures, asked):
                raise refused(self.address, error.response.status_code, error.response.headers) from error
        elif isinstance(error, ConnectionError) or not self._patience.pause(failures, None):
            raise unreachable(str(self._api.endpoint), error) from error


def _files(address: str, siblings: list[Any], subfolder: str) -> tuple[ListedFile, ...]:
    """Check every name before anything is fetched: a list with tricks in it comes from nobody to trust."""
    for sibling in siblings:
        if not isinstance(sibling.rfilename, str) or not is_plain(sibling.rfilename):
            raise WeightsError(
                f"{address} lists a file {shown(str(sibling.rfilename))!r}, which would lie outside of the model's "
                "folder. Nothing was fetched. Do not use this repository."
            )
    start = f"{subfolder}/" if subfolder else ""
    files = tuple(
        _file(address, sibling, sibling.rfilename.removeprefix(start))
        for sibling in siblings
        if sibling.rfilename.startswith(start)
    )
    if len({file.path for file in files}) != len(files):
        raise WeightsError(f"{address} lists a file twice. Nothing was fetched. Do not use this repository.")
    return files


def _file(address: str, sibling: Any, path: str) -> ListedFile:
    sha256 = getattr(sibling.lfs, "sha256", None)
    try:
        return ListedFile(
            path=path, size_bytes=sibling.size, sha256=sha256, git_sha1=None if sha256 else sibling.blob_id
        )
    except ValueError as error:
        raise WeightsError(
            f"{address} does not say size and hash of {shown(path)}, so nobody could tell whether it arrives whole. "
            "Use a hub that does."
        ) from error


def _starts_at(response: httpx2.Response, position: int, file: ListedFile) -> bool:
    """Whether the answer begins where was asked for; False if it begins at the beginning."""
    if response.status_code == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
        if found is None or int(found[1]) != position:
            raise _AnswerError(response)
        total = found[2]
    else:
        encoded = response.headers.get("content-encoding", "identity") != "identity"
        total = "*" if encoded else response.headers.get("content-length", "*")
    if total not in {"*", str(file.size_bytes)}:
        raise _wrong_size(file, total)
    return response.status_code == 206 or position == 0


def _wrong_size(file: ListedFile, found: str) -> WeightsError:
    return WeightsError(
        f"{file.path} has {found} bytes on the server, but {file.size_bytes} in its list of files. Try again later; if "
        "it stays so, HF_ENDPOINT names a mirror that is broken."
    )
