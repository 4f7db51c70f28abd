"""File systems with little room, for tests that fill them up. No tests."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount_small_disk(folder: Path, size: str) -> str:
    """Put a file system of `size` (tmpfs: 256k, 4m) at this folder. Return why that is not possible, or nothing."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return "a real full disk needs the command `mount`"
    return f"a real full disk needs the right to mount one: {done.stderr.strip()}" if done.returncode != 0 else ""


def unmount(folder: Path) -> None:
    subprocess.run(["umount", str(folder)], timeout=20, check=True)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Have a file system of `size` at this folder. Skips the test where that is not possible."""
    reason = mount_small_disk(folder, size)
    if reason:
        pytest.skip(reason)
    try:
        yield
    finally:
        unmount(folder)
