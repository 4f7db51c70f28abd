"""What ends a benchmark early, in words for the person who started it."""

from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""
