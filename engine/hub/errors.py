"""What stops a fetch, a check or a copy of weights. Messages are for the operator and may name files and folders."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from engine.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path


class WeightsError(EngineError):
    """Weights cannot be fetched, verified, copied or removed; the message says why and what to do."""


class UnreachableError(WeightsError):
    """The hub cannot be reached, so nothing else can be had from it either."""


class StoppedError(WeightsError):
    """Somebody asked for an end. What was fetched so far is kept."""


def disk_error(error: OSError, place: Path) -> WeightsError:
    """Say what the operating system has against reading or writing below `place`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return WeightsError(
            f"The disk of {place} is full. What was fetched so far is kept: free some space (`hearth weights list` "
            "shows what lies there), then run the same command again."
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
