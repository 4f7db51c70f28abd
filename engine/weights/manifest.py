"""`hearth-manifest.json` in a model's folder: where it came from, and size and SHA-256 of every file. Written last.

Before that there is a `Listing`: the files that a hub or a folder says it has, kept beside an unfinished download.
"""

import stat
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from engine.files import write_atomically
from engine.weights.errors import WeightsError
from engine.weights.safety import COMMIT, REPOSITORY, is_plain

MANIFEST = "hearth-manifest.json"
_LIMIT_BYTES = 16 * 2**20


def _plain(path: str) -> str:
    if not is_plain(path) or path == MANIFEST:
        raise ValueError("must be a path below the folder")
    return path


PlainPath = Annotated[str, AfterValidator(_plain)]


class Record(BaseModel):
    """What is written to disk and read back, where it may have become anything."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Origin(Record):
    """Where a model is from."""

    repository: Annotated[str, Field(pattern=REPOSITORY)]
    revision: Annotated[str, Field(pattern=COMMIT)]
    """The commit, whatever name was asked for."""
    subfolder: PlainPath | Literal[""] = ""
    """Of the repository, where only that was fetched."""

    def is_of(self, repository: str, subfolder: str) -> bool:
        return (self.repository, self.subfolder) == (repository, subfolder)

    def origin(self) -> dict[str, Any]:
        return self.model_dump(include=set(Origin.model_fields))


class ManifestFile(Record):
    path: PlainPath
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


def _each_once(files: tuple[ManifestFile, ...]) -> tuple[ManifestFile, ...]:
    if len({file.path for file in files}) != len(files):
        raise ValueError("must name each file once")
    return files


class Manifest(Origin):
    format: Literal[1] = 1
    files: Annotated[tuple[ManifestFile, ...], Field(strict=False, min_length=1), AfterValidator(_each_once)]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


class ListedFile(Record):
    path: PlainPath
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Given for what is stored with LFS or Xet: every large file."""
    git_sha1: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Git's own hash of the file, given for the small ones."""


class Listing(Origin):
    files: Annotated[tuple[ListedFile, ...], Field(strict=False)]


def read_manifest(folder: Path) -> Manifest | None:
    """Return what a folder says of itself, None if it says nothing. Raises `WeightsError` if that cannot be read."""
    path = folder / MANIFEST
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LIMIT_BYTES:
            raise _unreadable(folder)
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        raise _unreadable(folder) from error


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it at once and for good: either the old one is there or the new one."""
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=2) + "\n", durable=True)


def is_complete(folder: Path) -> bool:
    """Whether the folder was fetched and every file is there with its size. Quick; `verify` reads the contents, too."""
    try:
        manifest = read_manifest(folder)
    except WeightsError:
        return False
    return manifest is not None and not any(size_problem(folder, file) for file in manifest.files)


def size_problem(folder: Path, file: ManifestFile) -> str | None:
    """Say what is wrong with a file as far as that can be seen from outside."""
    try:
        found = (folder / file.path).lstat()
    except OSError:
        return f"{file.path} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.path} is no plain file"
    if found.st_size != file.size_bytes:
        return f"{file.path} has {found.st_size} bytes instead of {file.size_bytes}"
    return None


def _unreadable(folder: Path) -> WeightsError:
    return WeightsError(
        f"{folder.name}/{MANIFEST} cannot be read, so nobody knows whether the model is whole. Pick one: 1. `hearth "
        "weights remove` and pull it again; 2. delete that file if the folder is your own."
    )
