"""What a source says it has: files with their sizes and hashes. Kept beside an unfinished pull."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field

from engine.hub.manifest import Manifest, ManifestFile, PlainPath, Record
from engine.hub.paths import COMMIT, REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Report = Callable[[str, int, int], None]
    """Told of a file: its path, how many bytes of it are there, and how many there will be."""


class ListedFile(Record):
    path: PlainPath
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """Given for what is stored with LFS or Xet: every large file."""
    git_sha1: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Git's own hash of the file, given for the small ones."""


class Listing(Record):
    repository: Annotated[str, Field(pattern=REPOSITORY)]
    revision: Annotated[str, Field(pattern=COMMIT)]
    subfolder: PlainPath | Literal[""] = ""
    files: Annotated[tuple[ListedFile, ...], Field(strict=False)]

    def is_of(self, repository: str, subfolder: str) -> bool:
        return (self.repository, self.subfolder) == (repository, subfolder)

    @classmethod
    def of(cls, manifest: Manifest) -> Listing:
        files = tuple(ListedFile(**file.model_dump()) for file in manifest.files)
        return cls(
            repository=manifest.repository, revision=manifest.revision, subfolder=manifest.subfolder, files=files
        )

    def manifest(self, files: tuple[ManifestFile, ...]) -> Manifest:
        return Manifest(repository=self.repository, revision=self.revision, subfolder=self.subfolder, files=files)


class Source(Protocol):
    """Where files come from."""

    def read(self, file: ListedFile, start: int) -> Iterator[bytes]:
        """Yield the bytes of a file from `start` to its end. Raises `WeightsError`."""
        ...


class Digest:
    """The hashes of one file while it goes by."""

    def __init__(self, file: ListedFile) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        # Git hashes a header of its own first: "blob", the size in decimal, a zero byte.
        self._git = hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)

    def update(self, chunk: bytes) -> None:
        self._sha256.update(chunk)
        if self._file.sha256 is None:
            self._git.update(chunk)

    def matches(self) -> bool:
        if self._file.sha256 is not None:
            return self._sha256.hexdigest() == self._file.sha256
        return self._git.hexdigest() == self._file.git_sha1

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()
