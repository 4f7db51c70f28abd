"""A control group with a limit of memory, like that of a container or of a systemd unit with MemoryMax."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Self

from serving import poll_until

_ROOT = Path("/sys/fs/cgroup")
_numbers = count()


def missing_reason() -> str | None:
    """Why there can be none here, or None."""
    root = _root()
    if root is None:
        return "no control groups for memory"
    return None if os.access(root, os.W_OK) and os.getuid() == 0 else f"{root} is not writable: needs root"


def _root() -> Path | None:
    if (_ROOT / "memory" / "memory.limit_in_bytes").exists():
        return _ROOT / "memory"
    controllers = _ROOT / "cgroup.subtree_control"
    return _ROOT if controllers.exists() and "memory" in controllers.read_text().split() else None


class MemoryGroup:
    """Use as `with`. What is in it at the end is killed."""

    def __init__(self, limit_bytes: int, *, parent: Path | None = None) -> None:
        root = parent or _root()
        assert root is not None
        self._folder = root / f"hearth-test-{os.getpid()}-{next(_numbers)}"
        self._first = root.relative_to(_ROOT).parts[:1] == ("memory",)  # version 1
        self._limit_bytes = limit_bytes
        self._before: Path | None = None  # where this process was

    def __enter__(self) -> Self:
        self._folder.mkdir()
        self.limit(self._limit_bytes)
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
        poll_until(self._is_removed, 30, describe=self._members.read_text)

    @property
    def used_bytes(self) -> int:
        return int((self._folder / ("memory.usage_in_bytes" if self._first else "memory.current")).read_text())

    def limit(self, limit_bytes: int) -> None:
        (self._folder / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit_bytes))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is started meanwhile is in it from its start."""
        kind, root = ("memory", _ROOT / "memory") if self._first else ("", _ROOT)
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        (path,) = (path for _, kinds, path in lines if kind in kinds.split(","))
        self._before = Path(f"{root}{path}")
        self._members.write_text(str(os.getpid()))
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Take this process back to where it was."""
        if self._before is not None:
            (self._before / "cgroup.procs").write_text(str(os.getpid()))
            self._before = None

    def inner(self, limit_bytes: int) -> "MemoryGroup":
        """A group within this one."""
        if not self._first:
            (self._folder / "cgroup.subtree_control").write_text("+memory")
        return MemoryGroup(limit_bytes, parent=self._folder)

    @property
    def _members(self) -> Path:
        return self._folder / "cgroup.procs"

    def _is_removed(self) -> bool:
        for pid in self._members.read_text().split():
            os.kill(int(pid), 9)
        try:
            self._folder.rmdir()
        except OSError:  # the last ones are ending
            return False
        return True
