"""What the kernel lets a process have of the machine's memory, by its control groups, and whom it kills for want of it.

A container and a systemd unit (`MemoryMax=`) are control groups. Both versions are read: 2, and 1 of older systems.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOTS = {"0": Path("/sys/fs/cgroup"), "memory": Path("/sys/fs/cgroup/memory")}
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # beyond `high` processes are slowed to a halt
_USED = ("memory.current", "memory.usage_in_bytes")
_KILLS = ("memory.events", "memory.oom_control")
_KILL_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
# Of files, which the kernel lets go of where memory is short. Version 1 counts a group's children under other names.
_CACHED = tuple(re.compile(rf"^{name}(?:in)?active_file (\d+)$", re.MULTILINE) for name in ("total_", ""))
# The processes of models: what has a large model costs one, what serves costs all.
MODEL_VICTIM, FIRST_VICTIM = 500, 1000


def read_memory(pid: int | None) -> tuple[int, int]:
    """Return what a process and all others in its groups may have, and what is left of it, in bytes. None: this one."""
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for group in _groups(pid):
        limit = min((size for name in _LIMITS if (size := _number(group / name)) is not None), default=None)
        used = next((size for name in _USED if (size := _number(group / name)) is not None), None)
        if limit is not None and used is not None and limit < machine.total:
            total = min(total, limit)
            available = min(available, max(0, limit - used + _cached(group)))
    return total, min(total, available)


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory in this process's group, else on the machine."""
    for place in [group / name for group in _groups(None) for name in _KILLS] + [Path("/proc/vmstat")]:
        if found := _KILL_COUNT.search(text_of(place)):
            return int(found[1])
    return 0


def offer_to_oom_killer(score: int) -> None:
    """Have the kernel choose this process, and those that it starts, before others where memory is short."""
    with contextlib.suppress(OSError):  # not everywhere allowed
        Path("/proc/self/oom_score_adj").write_text(str(score), encoding="ascii")


def _groups(pid: int | None) -> Iterator[Path]:
    """The folders of the groups that a process is in, the innermost first. In a container the roots are its own."""
    for line in text_of(Path("/proc", "self" if pid is None else str(pid), "cgroup")).splitlines():
        number, kinds, path = line.split(":", 2)
        root = _ROOTS.get("memory" if "memory" in kinds.split(",") else number)
        if root is not None:
            own = Path(f"{root}{path}")
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _cached(group: Path) -> int:
    text = text_of(group / "memory.stat")
    return sum(map(int, next(filter(None, (pattern.findall(text) for pattern in _CACHED)), ())))


def _number(file: Path) -> int | None:
    """None: there is no such file, or it says `max`."""
    text = text_of(file).strip()
    return int(text) if text.isdecimal() else None


def text_of(file: Path) -> str:
    """Return what a file holds; nothing where it cannot be read."""
    with contextlib.suppress(OSError):
        return file.read_text(encoding="utf-8", errors="replace")
    return ""
