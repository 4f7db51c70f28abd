"""What went wrong lately: requests that were refused or failed, and warnings and errors of our own log. In memory."""

import logging
from collections import deque
from datetime import UTC, datetime

from server.observability.access_log import RequestRecord
from server.observability.metrics import METHODS, Metrics
from server.observability.moments import iso
from server.observability.status import LogLine, Refusal

_REFUSALS = 1000
_LINES = 50


class Lately(logging.Handler):
    """Keeps the last 1,000 refusals and the last 50 lines. A handler of logs, which the app adds."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(logging.WARNING)
        self._metrics = metrics
        self._refused: deque[tuple[datetime, RequestRecord]] = deque(maxlen=_REFUSALS)
        self._lines: deque[LogLine] = deque(maxlen=_LINES)

    def refuse(self, record: RequestRecord) -> None:
        """Keep a request that has ended with an error."""
        self._refused.append((datetime.now(UTC), record))

    def emit(self, record: logging.LogRecord) -> None:
        """Keep its line, and not what it refers to: a trace holds on to the bodies of requests."""
        at = iso(datetime.fromtimestamp(record.created, UTC)) or ""
        level = record.levelname.lower()
        self._lines.append(LogLine(at=at, level=level, source=record.name, message=record.getMessage()))

    def refused(self, since: datetime | None = None) -> list[Refusal]:
        """Return what was refused or failed, the newest first."""
        return [self._refusal(at, record) for at, record in reversed(self._refused) if since is None or at >= since]

    def log(self) -> list[LogLine]:
        """Return warnings and errors, the newest first."""
        return [*self._lines][::-1]  # a copy at once: threads log, too

    def _refusal(self, at: datetime, record: RequestRecord) -> Refusal:
        return Refusal(
            at=iso(at) or "",
            request_id=record.request_id,
            key=record.key,
            method=record.method if record.method in METHODS else "",
            route=record.route,
            path=record.path,
            model=record.model if record.model in self._metrics.models else None,
            status=record.status,
            error_code=record.error_code or "",
            param=record.param,
        )
