"""Downloads a model from a hub into its folder below the weights directory, after checking that there is room.

A model is put together in `.partial/<name>` below the weights directory, by one process at a time: `parts/` has
unfinished files, `model/` only whole ones whose hash was right, `listing.json` what is being fetched. The model's
folder appears by one rename at the end, so an unfinished model is never loaded.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from pydantic import ValidationError

from engine.config.yaml import shown
from engine.errors import WeightsError
from engine.files import sync_folder, sync_folders, write_atomically
from engine.weights import manifest, safety

T = TypeVar("T")

FOLDER = ".partial"
# Some stores answer a plain request for more than 50 GB with an error, but serve slices of the same file.
_SLICE_BYTES = 8 * 2**30
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
# So many attempts in a row may bring nothing; each byte that arrives resets the count.
_ATTEMPTS = 6
_FIRST_ATTEMPTS = 3  # for the list of files, if there is no network
_PAUSE_GROWS_TO = 30  # times the first one
_LONGEST_ASKED_SECONDS = 300  # a hub that asks for a longer pause is an error
_PICKLED = (".pth", ".pt")
_CONVERSION_SECONDS = 1800
_NOT_CONVERTED = 3  # as unpickle.py ends
_UNPICKLE = "engine.backends.tts.unpickle"
_RESUMES = "What was fetched so far is kept: run the same command again to continue."
_GATED = """\
{address} is gated: its owner gives it to people who have accepted the conditions. Do this once:
  1. Open {address} in a browser, sign in and accept the conditions (some owners take days to answer).
  2. Make a token that may read gated repositories (Settings, Access Tokens), and set HF_TOKEN=hf_... for
     this command, or run `.venv/bin/hf auth login`.
  3. Run the same command again. Or take a model without a gate, or carry the folder from a machine that has
     it: `hearth weights export` and `import`."""
_REFUSED_LOGIN = (
    "{address}: the hub does not know the token. Pick one: 1. set HF_TOKEN to a valid one; 2. unset it and run "
    "`.venv/bin/hf auth logout`, for models that need none."
)
_UNKNOWN = (
    "There is no {address}, or this machine may not see it. Pick one: 1. correct the name (owner/name); 2. if it is "
    "private, set HF_TOKEN to a token that may read it."
)
_BY_CODE = {
    "GatedRepo": _GATED,
    "RevisionNotFound": "{address} has no such revision. Give --revision a commit, branch or tag that its page shows, "
    "or leave it out for the newest.",
    "EntryNotFound": "{address} lists a file that it does not have. Try another --revision.",
}
_BY_STATUS = {
    401: _UNKNOWN,
    404: _UNKNOWN,
    403: "{address}: access is refused. Give HF_TOKEN a token with the right to read this repository; if a proxy "
    "refuses, have it let the hub and its storage through.",
    429: "{address}: the hub has had too many requests from here and asks to come back {when}. {resumes}",
}
_OTHER_STATUS = "{address}: the hub answered with status {status}, which Hearth cannot use. {resumes}"


class UnreachableError(WeightsError):
    """The hub cannot be reached, so nothing else can be fetched from it either."""


class _StoppedError(WeightsError):
    """The operator stopped it. What was fetched so far is kept."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to fetch. `revision` None: the manifest's, or an unfinished pull's, else the newest of main."""

    repository: str
    folder: str
    revision: str | None = None
    subfolder: str = ""
    again: bool = False
    """Hash what is there and fetch what is damaged, even if the folder looks complete."""
    convert: bool = False
    """Take pickles if there are no safetensors, and make safetensors of them."""
    endpoint: str | None = None
    first_pause_seconds: float = 1
    """Before the second attempt; it doubles with each further one."""


class Part:
    """An unfinished file: what is written to it is hashed and reported. `done` counts the bytes so far."""

    def __init__(self, stream: BufferedRandom, file: manifest.ModelFile, report: manifest.Report) -> None:
        self.file, self.done = file, stream.seek(0, os.SEEK_END)
        self._stream, self._report = stream, report
        if self.done > file.size_bytes:
            self.restart()
        stream.seek(0)
        self._content = hashlib.file_digest(stream, lambda: manifest.new_hash(file))
        report(file.path, self.done, file.size_bytes)

    def write(self, chunk: bytes) -> None:
        if self.done + len(chunk) > self.file.size_bytes:
            raise _wrong_size(self.file, f"more than {self.file.size_bytes}")
        self._content.update(chunk)
        self._stream.write(chunk)
        self.done += len(chunk)
        self._report(self.file.path, self.done, self.file.size_bytes)

    def restart(self) -> None:
        self._stream.truncate(0)
        self._content, self.done = manifest.new_hash(self.file), 0

    def matches(self) -> bool:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return manifest.is_right(self.file, self._content)


class Pull:
    """One model that is being fetched. Made by `locked`; its files are known after `begin`.

    `OSError` passes through all but `run`: the caller knows which disk it is about.
    """

    listing: manifest.Listing
    files: tuple[manifest.ModelFile, ...]
    """Those of the listing that are fetched."""

    def __init__(self, weights_dir: Path, name: str) -> None:
        self.name = name
        self.target = weights_dir / safety.check_folder_name(name)
        self.root = weights_dir / FOLDER / name.replace("%", "%25").replace("/", "%2F")
        self.model = self.root / "model"
        self.parts = self.root / "parts"
        self._record = self.root / "listing.json"
        self.convert = False
        self.stop = Event()
        """Set when the work has to end: by Ctrl-C, or because another file cannot be fetched."""

    def recorded(self) -> manifest.Listing | None:
        """Return the listing of an earlier process."""
        try:
            return manifest.Listing.model_validate_json(self._record.read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def begin(self, listing: manifest.Listing, fetch: Callable[[Part], None]) -> None:
        """Set what is fetched; other files are dropped. `fetch` writes what a part lacks."""
        before = self.recorded()
        self.keep_only(set(listing.files) & set(before.files) if before else ())
        self.model.mkdir(parents=True, exist_ok=True)
        self.parts.mkdir(exist_ok=True)
        write_atomically(self._record, listing.model_dump_json(), durable=True)
        self.listing, self.files, self._fetch = listing, listing.files, fetch

    def choose(self, report: manifest.Report) -> None:
        """Fetch the descriptions, and choose by them which files the model needs. Raises `WeightsError`."""
        by_path = {file.path: file for file in self.listing.files}
        for path in safety.descriptions(by_path):
            if (size := by_path[path].size_bytes) > 64 * 2**20:  # it is not known yet whether there is room
                raise WeightsError(f"{self.listing.repository} lists {path} with {size} bytes: that is none.")
            self._complete(by_path[path], manifest.silent)
            safety.check_file(self.model, self.model / path)
        choose = safety.convertible if self.convert else safety.chosen
        self.files = tuple(by_path[path] for path in choose(by_path, self.model))
        self.keep_only(self.files)
        # Files of an older folder of the model are reused, without a second copy.
        for file in self.files if safety.is_there(self.target) else ():
            if manifest.size_problem(self.model, file) and not manifest.problem_of(self.target, file, report):
                self._place(file).unlink(missing_ok=True)
                with suppress(OSError):  # a file system without links: then it is fetched
                    self._place(file).hardlink_to(self.target / file.path)

    def keep_only(self, files: Iterable[manifest.ModelFile]) -> None:
        kept = {place / file.path for file in files for place in (self.model, self.parts)}
        for place in (self.model, self.parts):
            for path in place.rglob("*") if place.is_dir() else ():
                if (path.is_symlink() or not path.is_dir()) and path not in kept:
                    path.unlink()

    @property
    def missing_bytes(self) -> int:
        missing = [file for file in self.files if manifest.size_problem(self.model, file)]
        begun = [self.parts / file.path for file in missing]
        made = sum(file.size_bytes for file in self.files if self.convert and file.path.endswith(_PICKLED))
        there = sum(path.stat().st_size for path in begun if path.is_file())
        return sum(file.size_bytes for file in missing) - there + made

    def run(self, report: manifest.Report) -> manifest.Manifest:
        """Fetch, verify and put in place. Raises `WeightsError` or `LoadError`; what was fetched is kept."""
        try:
            self._complete_all(report)
            if self.convert:
                self.files = converted(self.model, self.files)
            safety.check_loadable(self.model)
            return self._finish()
        except OSError as error:
            raise manifest.disk_error(error, self.target.parent) from error

    def _complete_all(self, report: manifest.Report) -> None:
        def watched(path: str, done: int, size: int) -> None:
            if self.stop.is_set():
                raise _StoppedError(f"Stopped. {_RESUMES}")
            report(path, done, size)

        # Largest first: else one connection would work alone at the end.
        files = sorted(self.files, key=lambda file: -file.size_bytes)
        with ThreadPoolExecutor(4) as threads:  # one connection rarely uses all of the bandwidth
            fetches = [threads.submit(self._complete, file, watched) for file in files]
            try:
                ended, _ = wait(fetches, return_when=FIRST_EXCEPTION)
            finally:  # also of Ctrl-C, and no matter which failed
                if not all(fetch.done() for fetch in fetches):
                    self.stop.set()
                threads.shutdown(wait=False, cancel_futures=True)
        errors = [error for fetch in ended if (error := fetch.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, _StoppedError)):
            raise error

    def _complete(self, file: manifest.ModelFile, report: manifest.Report) -> None:
        """Have the file whole in `model/`, continuing what is there. Raises `WeightsError`."""
        if not manifest.size_problem(self.model, file):
            report(file.path, file.size_bytes, file.size_bytes)
            return
        path = self.parts / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A power cut may have damaged an earlier process's part: then the file is fetched again from zero.
        for _ in range(2):
            with path.open("ab+") as stream:
                part = Part(stream, file, report)
                self._fetch(part)
                right = part.matches()
            if right:
                path.replace(self._place(file))
                return
            path.unlink()
        raise WeightsError(
            f"{file.path} was fetched twice, and its SHA-256 was wrong both times; it was deleted. Something between "
            "here and the source changes files, or the source is damaged: use another network or HF_ENDPOINT."
        )

    def _finish(self) -> manifest.Manifest:
        """Write the manifest, last, and put the model in its place."""
        self.keep_only(self.files)
        files = []
        for file in self.files:
            with (self.model / file.path).open("rb") as stream:  # for small files the hub gives only Git's hash
                sha256 = file.sha256 or hashlib.file_digest(stream, "sha256").hexdigest()
            files.append(file.model_copy(update={"sha256": sha256, "git_sha1": None}))
        made = manifest.Manifest(**self.listing.origin(), files=tuple(files))
        manifest.write_manifest(self.model, made)
        sync_folders(self.model)
        old = self.root / "old"
        shutil.rmtree(old, ignore_errors=True)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if safety.is_there(self.target):
            self.target.rename(old)
        self.model.rename(self.target)
        sync_folder(self.target.parent)
        return made

    def _place(self, file: manifest.ModelFile) -> Path:
        path = self.model / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@contextmanager
def locked(weights_dir: Path, name: str) -> Iterator[Pull]:
    """Keep other processes from working on one model's folder. Raises `WeightsError`. Removed when nothing is left."""
    pull = Pull(weights_dir, name)
    while True:
        pull.root.mkdir(parents=True, exist_ok=True)
        with (pull.root / "lock").open("a", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise WeightsError(f"Another process works on {name} right now. Wait until it has ended.") from error
            except OSError as error:
                raise WeightsError(
                    f"{file.name} cannot be locked: {error.strerror}. Use another file system."
                ) from error
            if not _is_still(file.fileno(), pull.root / "lock"):
                continue  # the one before has just removed it
            try:
                yield pull
            finally:
                _tidy(pull)
            return


def _tidy(pull: Pull) -> None:
    """Remove what is left of a pull that is finished, or that never had a list of files."""
    if any(not path.is_dir() for place in (pull.model, pull.parts) for path in place.rglob("*")):
        return
    shutil.rmtree(pull.root, ignore_errors=True)
    with suppress(OSError):  # other pulls use it
        pull.root.parent.rmdir()


def _is_still(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def prepared(weights_dir: Path, wanted: Wanted, report: manifest.Report) -> Iterator[Pull | manifest.Manifest]:
    """Find out what is to be fetched; a `Manifest` if nothing is. Raises `WeightsError` or `LoadError`.

    Configurations are fetched here already, so that a model with code is refused before its weights are fetched.
    """
    there = _there(weights_dir, wanted)
    is_fine = there is not None and not wanted.again and manifest.is_complete(weights_dir / wanted.folder)
    if there is not None and is_fine and wanted.revision in {None, there.revision}:
        yield there
        return
    try:
        weights_dir.mkdir(parents=True, exist_ok=True)
        with locked(weights_dir, wanted.folder) as pull:
            unfinished = pull.recorded()
            if unfinished is not None and not unfinished.is_of(wanted.repository, wanted.subfolder):
                unfinished = None
            hub = _Hub(wanted, pull.stop)
            listing = hub.listing(wanted.revision or (there or unfinished or wanted).revision)
            if there is not None and is_fine and there.revision == listing.revision:
                yield there
            else:
                pull.convert = wanted.convert
                pull.begin(listing, lambda part: hub.fetch(listing, part))
                pull.choose(report)
                yield pull
    except OSError as error:
        raise manifest.disk_error(error, weights_dir) from error


def check_room(weights_dir: Path, pulls: Iterable[Pull]) -> None:
    """Raise `WeightsError`, with the numbers, if the disk has no room for all of these."""
    needed = {pull.name: pull.missing_bytes for pull in pulls}
    if not any(needed.values()):
        return
    free = shutil.disk_usage(weights_dir).free
    lacking = sum(needed.values()) + 64 * 2**20 - free  # some room stays free
    if lacking > 0:
        listed = ", ".join(f"{folder} {_gib(size)}" for folder, size in needed.items())
        raise WeightsError(
            f"Not enough room on the disk of {weights_dir}: still to be fetched are {listed}; free are {_gib(free)}, "
            f"so {_gib(lacking)} are lacking. Pick one: 1. free them (`hearth weights list` shows what is there); 2. "
            "have HEARTH_WEIGHTS_DIR on another disk; 3. pull a smaller variant."
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**27 else f"{size_bytes / 2**20:.1f} MiB"


def _there(weights_dir: Path, wanted: Wanted) -> manifest.Manifest | None:
    """Return the manifest of the folder there, if any. Raises `WeightsError` for a folder that must not be changed."""
    folder = weights_dir / safety.check_folder_name(wanted.folder)
    if not safety.is_there(folder):
        return None
    found = None if folder.is_symlink() else manifest.read_manifest(folder)
    if found is None:
        raise WeightsError(
            f"{wanted.folder} is there and was not pulled by Hearth (it has no manifest), so it stays as it is. Pick "
            "one: 1. pull under another name with --as; 2. move it away; 3. `hearth weights remove`."
        )
    if not found.is_of(wanted.repository, wanted.subfolder):
        has = "/".join(part for part in (found.repository, found.subfolder) if part)
        raise WeightsError(
            f"{wanted.folder} contains {has}. Pick one: 1. pull under another name with --as; 2. `hearth weights "
            f"remove {wanted.folder}` first."
        )
    return found


def converted(folder: Path, files: tuple[manifest.ModelFile, ...]) -> tuple[manifest.ModelFile, ...]:
    """Make safetensors of the pickles among `files`; return the files after that. Raises `WeightsError`, `OSError`.

    It runs in a process of its own, which may be killed.
    """
    pickles = [file.path for file in files if file.path.endswith(_PICKLED)]
    # -I: no modules from elsewhere; -B: no bytecode is written beside the packages.
    command = [sys.executable, "-I", "-B", "-m", _UNPICKLE, str(folder)]
    with tempfile.TemporaryDirectory() as home:
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": home, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=home,
                input=json.dumps({name: _as_safetensors(name) for name in pickles}).encode(),
                capture_output=True,
                timeout=_CONVERSION_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise WeightsError(f"{pickles[0]} could not be converted within {_CONVERSION_SECONDS} s.") from error
    said = done.stdout.decode(errors="replace").strip()
    if done.returncode == _NOT_CONVERTED and said.isdigit():
        raise OSError(int(said), os.strerror(int(said)))
    if done.returncode == _NOT_CONVERTED and said in pickles:
        raise WeightsError(f"{said} has more than tensors, so it could run code, and is refused.")
    if done.returncode != 0:
        why = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        raise WeightsError(f"The pickles could not be converted ({why}). Is there enough memory? Try again.")
    kept = [file for file in files if not file.path.endswith(_PICKLED)]
    made = [(path, folder / path) for path in map(_as_safetensors, pickles)]
    return (*kept, *(manifest.ModelFile(path=path, size_bytes=place.stat().st_size) for path, place in made))


def _as_safetensors(name: str) -> str:
    return f"{name.rpartition('.')[0]}.safetensors"


class _Hub:
    """One repository, through huggingface_hub, which knows addresses, token (HF_TOKEN or `hf auth login`) and proxies.

    The bytes are read here. Its own `http_get` also resumes at a byte, but writes in pieces of 10 MiB, so that a slow
    line loses minutes at each cut; sleeps as long as a hub asks for, even days, without regard to Ctrl-C; and cannot
    fetch slices of a file.
    """

    def __init__(self, wanted: Wanted, stop: Event) -> None:
        # Read at import: nothing is sent to the hub but what the fetch needs.
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        from huggingface_hub import HfApi

        self._repository, self._subfolder = safety.check_repository(wanted.repository), wanted.subfolder
        self._first_pause, self._stop = wanted.first_pause_seconds, stop
        self._api = HfApi(endpoint=wanted.endpoint, library_name="hearth")
        self._endpoint = str(self._api.endpoint)
        self._address = f"{self._endpoint}/{self._repository}"

    def listing(self, revision: str | None) -> manifest.Listing:
        """Return the files of a commit, branch or tag; None is the branch main. Raises `WeightsError`."""
        try:
            info = self._patiently(
                lambda: self._api.model_info(self._repository, revision=revision, files_metadata=True, timeout=30)
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise WeightsError(
                f"{self._endpoint} does not answer like a model hub. Is HF_ENDPOINT right, and does a proxy answer "
                "in its place?"
            ) from error
        commit = str(info.sha)
        pinned = re.fullmatch(safety.COMMIT, revision or "") is not None
        if re.fullmatch(safety.COMMIT, commit) is None or (pinned and commit != revision):
            raise WeightsError(
                f"{self._address} answers with the revision {shown(commit)!r}, not {revision or 'main'}."
            )
        files = _files(self._address, info.siblings or [], self._subfolder)
        return manifest.Listing(repository=self._repository, revision=commit, subfolder=self._subfolder, files=files)

    def fetch(self, listing: manifest.Listing, part: Part) -> None:
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(
            self._repository,
            part.file.path,
            subfolder=self._subfolder,
            revision=listing.revision,
            endpoint=self._endpoint,
        )
        while part.done < part.file.size_bytes:
            self._patiently(lambda: self._slice(url, part), part)

    def _slice(self, url: str, part: Part) -> None:
        from httpx2 import RemoteProtocolError
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        size, end = part.file.size_bytes, min(part.file.size_bytes, part.done + _SLICE_BYTES)
        asked = {"Accept-Encoding": "identity"}
        if (part.done, end) != (0, size):
            asked["Range"] = f"bytes={part.done}-{end - 1}"
        headers = build_hf_headers(library_name="hearth", headers=asked)
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
            start, total = _range(response)
            if total not in {"*", str(size)}:
                raise _wrong_size(part.file, total)
            if start not in {0, part.done}:
                raise HfHubHTTPError("another range", response=response)
            if start != part.done:  # the server ignores ranges
                part.restart()
            for chunk in response.iter_bytes():  # in the pieces that arrive: buffering would lose more at a cut
                part.write(chunk)
        if part.done < end:
            raise RemoteProtocolError("the answer ended early")

    def _patiently(self, ask: Callable[[], T], part: Part | None = None) -> T:
        """Ask until there is an answer, or no hope for one. Raises `WeightsError`."""
        from httpx2 import TransportError
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        failures = 0
        while True:
            before = part.done if part else 0
            try:
                return ask()
            except (TransportError, HfHubHTTPError, OfflineModeIsEnabled) as error:
                failures = 1 if part and part.done > before else failures + 1
                answer = error.response if isinstance(error, HfHubHTTPError) else None
                asked = "" if answer is None else answer.headers.get("retry-after", "").strip()
                seconds = self._first_pause * min(2 ** (failures - 1), _PAUSE_GROWS_TO)
                if asked.isdecimal():
                    seconds = float(asked)
                too_often = failures >= (_ATTEMPTS if part or answer is not None else _FIRST_ATTEMPTS)
                lasts = isinstance(error, OfflineModeIsEnabled)
                lasts = lasts or (answer is not None and answer.status_code not in _TRANSIENT)
                if lasts or too_often or seconds > _LONGEST_ASKED_SECONDS:
                    if answer is None:
                        raise _unreachable(self._endpoint, error) from error
                    raise _refused(self._address, answer.status_code, answer.headers) from error
                if self._stop.wait(seconds):
                    raise _StoppedError("Stopped.") from error


def _files(address: str, siblings: list[Any], subfolder: str) -> tuple[manifest.ModelFile, ...]:
    """Check every name before anything is fetched: one bad name refuses the whole list."""
    for sibling in siblings:
        if not isinstance(sibling.rfilename, str) or not safety.is_plain(sibling.rfilename):
            raise WeightsError(
                f"{address} lists a file {shown(str(sibling.rfilename))!r}, which would lie outside of the model's "
                "folder. Nothing was fetched. Do not use this repository."
            )
    start = f"{subfolder}/" if subfolder else ""
    files: dict[str, manifest.ModelFile] = {}
    for sibling in siblings:
        if not sibling.rfilename.startswith(start):
            continue
        path, sha256 = sibling.rfilename.removeprefix(start), getattr(sibling.lfs, "sha256", None)
        if path in files:
            raise WeightsError(f"{address} lists a file twice. Nothing was fetched. Do not use this repository.")
        git_sha1 = None if sha256 else sibling.blob_id
        try:
            files[path] = manifest.ModelFile(path=path, size_bytes=sibling.size, sha256=sha256, git_sha1=git_sha1)
        except ValueError as error:
            raise WeightsError(
                f"{address} does not say size and hash of {shown(path)}, so it cannot be checked. Use a hub that does."
            ) from error
    return tuple(files.values())


def _range(response: Any) -> tuple[int, str]:
    """Return where in the file an answer begins, and the file's size there; "*" if it is not given."""
    from huggingface_hub.errors import HfHubHTTPError

    if response.status_code == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
        if found is not None:
            return int(found[1]), found[2]
    if response.status_code != 200:
        raise HfHubHTTPError("another status", response=response)
    encoded = response.headers.get("content-encoding", "identity") != "identity"
    return 0, "*" if encoded else response.headers.get("content-length", "*")


def _wrong_size(file: manifest.ModelFile, found: str) -> WeightsError:
    return WeightsError(
        f"{file.path} has {found} bytes on the server, but {file.size_bytes} in its list of files. Try again later; if "
        "it stays so, HF_ENDPOINT names a mirror that is broken."
    )


def _refused(address: str, status: int, headers: Mapping[str, str]) -> WeightsError:
    """Return the error for an answer with this status; `address` is the repository's page."""
    meaning = _BY_CODE.get(headers.get("x-error-code", "")) or _BY_STATUS.get(status, _OTHER_STATUS)
    if status == 401 and headers.get("x-error-message", "").startswith("Invalid credentials"):
        meaning = _REFUSED_LOGIN
    asked = headers.get("retry-after", "")
    when = f"in {asked} seconds" if asked.isdecimal() else "later"
    return WeightsError(meaning.format(address=address, status=status, when=when, resumes=_RESUMES))


def _unreachable(endpoint: str, error: Exception) -> UnreachableError:
    """Return the error for an answer that is missing or incomplete."""
    if isinstance(error, ConnectionError):  # huggingface_hub's own: HF_HUB_OFFLINE
        return UnreachableError("HF_HUB_OFFLINE is set, so nothing is fetched. Unset it for this command.")
    untrusted = "CERTIFICATE_VERIFY" in str(error)
    why = "the server's certificate is not trusted" if untrusted else type(error).__name__
    return UnreachableError(
        f"{endpoint} cannot be reached, or the connection breaks again and again ({why}). {_RESUMES} If it stays so, "
        "pick one: 1. HTTPS_PROXY names your proxy, SSL_CERT_FILE its certificate; 2. HF_ENDPOINT names a mirror; "
        "3. pull on a machine that reaches it and carry the folder here: `hearth weights export` and `import`."
    )
