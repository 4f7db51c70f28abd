"""What tests of processes share: what one is called, whether it lives, and that all of some are gone."""

from collections.abc import Iterable

import psutil
from serving import poll_until


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_all_gone(processes: Iterable[psutil.Process], seconds: float = 30) -> None:
    poll_until(lambda: not any(alive(process) for process in processes), seconds, describe=lambda: str(processes))
