"""`hearth-manifest.json` in a model's folder: where it came from, and size and SHA-256 of every file. Written last.

Before that there is a `Listing`: the files that a hub or a folder says it has, kept beside an unfinished download.
This file also compares folders with their manifests, and has the messages for a failing disk.
"""

import errno
import hashlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from engine.config.messages import Spec
from engine.errors import WeightsError
from engine.files import write_atomically
from engine.weights.safety import COMMIT, REPOSITORY, is_plain

MANIFEST = "hearth-manifest.json"
# An added file of such a kind would be loaded, or tried. Notes of the owner, like voices.yaml, are allowed.
_LOADED = (".safetensors", ".json", ".jinja", ".py", ".onnx", ".bin", ".pt", ".pth", ".ckpt", ".pkl")

Report = Callable[[str, int, int], None]
"""Called with a file's path, its bytes so far, and its size."""


def silent(_path: str, _done: int, _size: int) -> None:
    """Report nothing."""


def _plain(path: str) -> str:
    if not is_plain(path) or path == MANIFEST:
        raise ValueError("must be a path below the folder")
    return path


PlainPath = Annotated[str, AfterValidator(_plain)]


class ModelFile(Spec):
    path: PlainPath
    size_bytes: Annotated[int, Field(ge=0)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """A hub gives it for files in LFS or Xet, so for every large one. A manifest has it for all."""
    git_sha1: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")] | None = None
    """Git's own hash of the file, which a hub gives for the small ones."""


class Listing(Spec):
    repository: Annotated[str, Field(pattern=REPOSITORY)]
    revision: Annotated[str, Field(pattern=COMMIT)]
    """The commit, whatever name was requested."""
    subfolder: PlainPath | Literal[""] = ""
    """Of the repository, if only that was fetched."""
    files: Annotated[tuple[ModelFile, ...], Field(strict=False)]

    def is_of(self, repository: str, subfolder: str) -> bool:
        return (self.repository, self.subfolder) == (repository, subfolder)

    def origin(self) -> dict[str, Any]:
        return self.model_dump(include={"repository", "revision", "subfolder"})


def _each_once_with_hash(files: tuple[ModelFile, ...]) -> tuple[ModelFile, ...]:
    if len({file.path for file in files}) != len(files) or not all(file.sha256 for file in files):
        raise ValueError("must name each file once, with its SHA-256")
    return files


class Manifest(Listing):
    format: Literal[1] = 1
    files: Annotated[tuple[ModelFile, ...], Field(strict=False, min_length=1), AfterValidator(_each_once_with_hash)]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def read_manifest(folder: Path) -> Manifest | None:
    """Return a folder's manifest, None if it has none. Raises `WeightsError` if it cannot be read."""
    path = folder / MANIFEST
    try:
        found = path.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size <= 16 * 2**20:
            return Manifest.model_validate_json(path.read_bytes())
        cause: Exception | None = None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError) as error:
        cause = error
    raise WeightsError(
        f"{folder.name}/{MANIFEST} cannot be read, so the model cannot be checked. Pick one: 1. `hearth "
        "weights remove`, then pull or import it again; 2. delete that file if the folder is your own."
    ) from cause


def required_manifest(folder: Path) -> Manifest:
    """Return the manifest. Raises `WeightsError` if there is none."""
    manifest = read_manifest(folder)
    if manifest is None:
        if folder.is_dir():
            raise WeightsError(f"{folder.name} was not pulled by Hearth: it has no manifest. Copy it with cp -r.")
        raise WeightsError(f"{folder.name} is not there. `hearth weights list` shows the folders.")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step, synced to the disk."""
    write_atomically(folder / MANIFEST, manifest.model_dump_json(indent=2, exclude_none=True) + "\n", durable=True)


def is_complete(folder: Path) -> bool:
    """Whether the folder was fetched and every file is there with its size. Quick; `verify` also reads contents."""
    try:
        manifest = read_manifest(folder)
    except WeightsError:
        return False
    return manifest is not None and not any(size_problem(folder, file) for file in manifest.files)


def size_problem(folder: Path, file: ModelFile) -> str | None:
    """Say what is wrong with a file, without reading its content."""
    try:
        found = (folder / file.path).lstat()
    except OSError:
        return f"{file.path} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.path} is not a regular file"
    if found.st_size != file.size_bytes:
        return f"{file.path} has {found.st_size} bytes instead of {file.size_bytes}"
    return None


def problem_of(folder: Path, file: ModelFile, report: Report) -> str | None:
    """Say what is wrong with a file, after reading its content."""
    problem = size_problem(folder, file)
    if problem is not None:
        return problem
    content, done = new_hash(file), 0
    with (folder / file.path).open("rb") as stream:
        while chunk := stream.read(2**20):
            content.update(chunk)
            done += len(chunk)
            report(file.path, done, file.size_bytes)
    return None if is_right(file, content) else f"{file.path} is damaged: its content has changed"


def verify(folder: Path, report: Report = silent) -> list[str]:
    """Return what is wrong, a sentence per file; nothing if all is well. Raises `WeightsError` without a manifest."""
    manifest = required_manifest(folder)
    known = {file.path for file in manifest.files} | {MANIFEST}
    try:
        problems = [problem_of(folder, file, report) for file in manifest.files]
        there = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
        names = [path.relative_to(folder).as_posix() for path in there]
    except OSError as error:
        raise disk_error(error, folder) from error
    strangers = [name for name in names if name not in known and name.endswith(_LOADED)]
    return [problem for problem in problems if problem] + [f"{name} does not belong to the model" for name in strangers]


def new_hash(file: ModelFile) -> Any:
    """Return a hash for the content of a file (`update`), of the kind that is known for it."""
    if file.sha256 is not None:
        return hashlib.sha256()
    # Git hashes a header of its own first: "blob", the size in decimal, a zero byte.
    return hashlib.sha1(b"blob %d\0" % file.size_bytes, usedforsecurity=False)


def is_right(file: ModelFile, fed: Any) -> bool:
    """Whether the content that a `new_hash` was fed is right."""
    return bool(fed.hexdigest() == (file.sha256 or file.git_sha1))


def disk_error(error: OSError, place: Path) -> WeightsError:
    """Return the error for a failed read or write below `place`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return WeightsError(
            f"The disk of {place} is full. What was fetched so far is kept: free some space (`hearth weights list` "
            "shows what is there), then run the same command again."
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return WeightsError(
            f"{error.filename or place} cannot be written or read by this user. Run the command as the owner of "
            f"{place}, or change the owner."
        )
    if error.errno == errno.EXDEV:
        return WeightsError(
            f"{place} is spread over two file systems, so a finished folder cannot appear in it at once. Have the "
            "whole weights directory on one file system."
        )
    where = f" ({error.filename})" if error.filename else ""
    return WeightsError(f"{place} cannot be used: {error.strerror or 'input/output error'}{where}.")
