"""Objects in an S3 bucket: what several servers share without a common folder.

An object is there whole or not at all. The bucket's address comes from the settings, credentials and endpoint from
where all programs for S3 read them (`AWS_ENDPOINT_URL`, `AWS_ACCESS_KEY_ID`, ...).
"""

import errno
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

_T = TypeVar("_T")
_PART_BYTES = 8 * 2**20  # of a large object; two at a time are in memory
_PARTS_AT_A_TIME = 2
_PIECE_BYTES = 4 * 2**20
# s3fs itself tries five times.
_CALLS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}
# The default since 2025 needs trailing checksums, which many stores other than Amazon's refuse.
_CHECKSUMS = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")


@dataclass(frozen=True, slots=True)
class Stored:
    """An object, by its name in the bucket. `modified` in Unix seconds, by the store's clock."""

    name: str
    bytes: int
    modified: float


class Bucket:
    """The objects below one address like `s3://bucket/prefix`. Names have no leading slash.

    All methods block, for use on threads; they raise OSError, FileNotFoundError where there is no such object.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = url.removeprefix("s3://").rstrip("/")

    def put(self, name: str, data: bytes) -> None:
        """Store an object, in place of one of the same name."""
        self._do(lambda: self._files.pipe_file(self._key(name), data))

    def put_file(self, name: str, path: Path) -> None:
        self._do(
            lambda: self._files.put_file(
                str(path), self._key(name), chunksize=_PART_BYTES, max_concurrency=_PARTS_AT_A_TIME
            )
        )

    def get(self, name: str) -> bytes:
        found: bytes = self._do(lambda: self._files.cat_file(self._key(name)))
        return found

    def get_file(self, name: str, path: Path) -> None:
        """Write an object to a file. After an error the file may hold a part of it."""
        self._do(lambda: self._files.get_file(self._key(name), str(path)))

    def size(self, name: str) -> int:
        return int(self._do(lambda: self._files.info(self._key(name)))["size"])

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield an object in pieces of some MiB."""
        start, size = 0, self.size(name)
        while start < size:
            end = min(size, start + _PIECE_BYTES)
            yield self._do(lambda: self._files.cat_file(self._key(name), start=start, end=end))  # noqa: B023
            start = end

    def delete(self, *names: str) -> None:
        """Delete objects, if they are there."""
        for name in names:
            with suppress(FileNotFoundError):
                self._do(lambda: self._files.rm_file(self._key(name)))  # noqa: B023

    def list(self, folder: str) -> list[Stored]:
        """Return all objects whose names begin with `folder/`, in the order of their names."""
        try:
            found: dict[str, Any] = self._do(lambda: self._files.find(self._key(folder), detail=True))
        except FileNotFoundError:
            return []
        skipped = len(self._root) + 1
        return [
            Stored(path[skipped:], int(entry["size"]), entry["LastModified"].timestamp())
            for path, entry in sorted(found.items())
            if entry["type"] == "file"
        ]

    @cached_property
    def _files(self) -> Any:
        try:
            from s3fs import S3FileSystem  # a web client that few need
        except ImportError as error:
            raise OSError(errno.ENOSYS, "files in a bucket need the package s3fs") from error
        return S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs={**_CALLS, **_CHECKSUMS})

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _do(self, work: Callable[[], _T]) -> _T:
        """Translate errors of the client libraries. Their texts may name keys, so they are dropped."""
        try:
            return work()
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"the bucket did not answer ({type(error).__name__})") from error
