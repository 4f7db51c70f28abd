"""Pulls a model from a hub into its folder below the weights directory, and says before whether there is room."""

from __future__ import annotations

import shutil
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.hub import selection
from engine.hub.errors import StoppedError, WeightsError, disk_error
from engine.hub.manifest import Manifest, is_complete, read_manifest
from engine.hub.partial import locked
from engine.hub.paths import is_there
from engine.hub.patience import Patience
from engine.hub.remote import HubRepository

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from engine.hub.listing import ListedFile, Listing, Report, Source
    from engine.hub.partial import Partial

_AT_ONCE = 4  # one connection rarely fills a line
_SPARE_BYTES = 64 * 2**20
_LARGEST_DESCRIPTION_BYTES = 64 * 2**20  # they are fetched before it is known whether there is room


@dataclass(frozen=True, slots=True)
class Wanted:
    """`revision` None is that of the folder's manifest, or of an unfinished pull, or else the newest of main."""

    repository: str
    folder: str
    revision: str | None = None
    subfolder: str = ""
    again: bool = False
    """Hash what is there and fetch what is damaged, even if the folder looks complete."""
    endpoint: str | None = None
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class Pull:
    """A pull that knows what it will fetch. Valid inside `prepared`."""

    wanted: Wanted
    listing: Listing
    files: tuple[ListedFile, ...]
    partial: Partial
    source: Source

    @property
    def missing_bytes(self) -> int:
        return self.partial.missing_bytes(self.files)

    def run(self, report: Report) -> Manifest:
        """Fetch, verify and put in place. Raises `WeightsError` or `LoadError`; what was fetched is kept."""
        try:
            _fetch_all(self, report)
            selection.check_loadable(self.partial.model)
            self.partial.finish(self.listing, self.files)
        except OSError as error:
            raise disk_error(error, self.partial.target.parent) from error
        manifest = read_manifest(self.partial.target)
        if manifest is None:
            raise WeightsError(f"{self.wanted.folder} vanished while it was put in place. Run the same command again.")
        return manifest


@contextmanager
def prepared(weights_dir: Path, wanted: Wanted, report: Report) -> Iterator[Pull | Manifest]:
    """Find out what is to be fetched; a `Manifest` if nothing is. Raises `WeightsError` or `LoadError`.

    Configurations are fetched here already, so that a model that brings code is refused before its weights are.
    """
    there = _there(weights_dir, wanted)
    if there is not None and wanted.revision in {None, there.revision} and _is_fine(weights_dir, wanted):
        yield there
        return
    try:
        weights_dir.mkdir(parents=True, exist_ok=True)
        with locked(weights_dir, wanted.folder) as partial:
            source = HubRepository(wanted.repository, endpoint=wanted.endpoint, patience=wanted.patience)
            listing = source.listing(_revision(partial, wanted, there), wanted.subfolder)
            if there is not None and there.revision == listing.revision and _is_fine(weights_dir, wanted):
                yield there
            else:
                yield _prepare(partial, wanted, source, listing, report)
    except OSError as error:
        raise disk_error(error, weights_dir) from error


def pull(weights_dir: Path, wanted: Wanted, report: Report = lambda _path, _done, _size: None) -> Manifest:
    """Have the model complete and verified in its folder. Raises `WeightsError` or `LoadError`."""
    with prepared(weights_dir, wanted, report) as found:
        if isinstance(found, Manifest):
            return found
        check_room(weights_dir, [found])
        return found.run(report)


def check_room(weights_dir: Path, pulls: Iterable[Pull]) -> None:
    """Raise `WeightsError`, with the numbers, if the disk has no room for all of these together."""
    needed = {pull.wanted.folder: pull.missing_bytes for pull in pulls}
    if not any(needed.values()):
        return
    free = shutil.disk_usage(weights_dir).free
    lacking = sum(needed.values()) + _SPARE_BYTES - free
    if lacking > 0:
        listed = ", ".join(f"{folder} {_gib(size)}" for folder, size in needed.items())
        raise WeightsError(
            f"Not enough room on the disk of {weights_dir}: still to be fetched are {listed}; free are {_gib(free)}, "
            f"so {_gib(lacking)} are lacking. Pick one: 1. free them (`hearth weights list` shows what lies there); 2. "
            "have HEARTH_WEIGHTS_DIR on another disk; 3. pull a smaller variant."
        )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**27 else f"{size_bytes / 2**20:.1f} MiB"


def _there(weights_dir: Path, wanted: Wanted) -> Manifest | None:
    """Return what is in the folder's place, if it may be touched. Raises `WeightsError` if it may not."""
    folder = weights_dir / wanted.folder
    if not is_there(folder):
        return None
    manifest = None if folder.is_symlink() else read_manifest(folder)
    if manifest is None:
        raise WeightsError(
            f"{wanted.folder} is there and was not pulled by Hearth (it has no manifest), so it stays as it is. Pick "
            "one: 1. pull under another name with --as; 2. move it away; 3. `hearth weights remove`."
        )
    if (manifest.repository, manifest.subfolder) != (wanted.repository, wanted.subfolder):
        has = "/".join(part for part in (manifest.repository, manifest.subfolder) if part)
        raise WeightsError(
            f"{wanted.folder} holds {has}. Pick one: 1. pull under another name with --as; 2. `hearth weights remove "
            f"{wanted.folder}` first."
        )
    return manifest


def _is_fine(weights_dir: Path, wanted: Wanted) -> bool:
    return not wanted.again and is_complete(weights_dir / wanted.folder)


def _revision(partial: Partial, wanted: Wanted, there: Manifest | None) -> str | None:
    unfinished = partial.recorded()
    if unfinished is not None and not unfinished.is_of(wanted.repository, wanted.subfolder):
        unfinished = None
    return wanted.revision or (there or unfinished or wanted).revision


def _prepare(partial: Partial, wanted: Wanted, source: HubRepository, listing: Listing, report: Report) -> Pull:
    by_path = {file.path: file for file in listing.files}
    looked_at = selection.descriptions(by_path)
    partial.begin(listing)
    for path in looked_at:
        if by_path[path].size_bytes > _LARGEST_DESCRIPTION_BYTES:
            raise WeightsError(f"{wanted.repository} lists {path} with {by_path[path].size_bytes} bytes: that is none.")
        partial.fetch(by_path[path], source, lambda _path, _done, _size: None)
    selection.check_descriptions(partial.model, looked_at)
    files = tuple(by_path[path] for path in selection.chosen(by_path, partial.model))
    partial.keep_only(files)
    if is_there(partial.target):
        for file in files:
            partial.borrow(partial.target, file, report)
    return Pull(wanted, listing, files, partial, source)


def _fetch_all(pull: Pull, report: Report) -> None:
    stop = pull.wanted.patience.stop

    def watched(path: str, done: int, size: int) -> None:
        if stop.is_set():
            raise StoppedError("Stopped. What was fetched so far is kept: run the same command again to go on.")
        report(path, done, size)

    # The largest last would have one connection work alone at the end.
    files = sorted(pull.files, key=lambda file: -file.size_bytes)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        fetches = [threads.submit(pull.partial.fetch, file, pull.source, watched) for file in files]
        try:
            ended, _ = wait(fetches, return_when=FIRST_EXCEPTION)
        finally:  # also of Ctrl-C, and no matter which failed
            if not all(fetch.done() for fetch in fetches):
                stop.set()
            threads.shutdown(wait=False, cancel_futures=True)
    errors = [error for fetch in ended if (error := fetch.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, StoppedError)):
        raise error
