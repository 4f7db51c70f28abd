"""What must outlive the process: API keys, their limits, usage and the audit log; and what can go wrong with it.

Alembic is not imported here; `Database.open` does it when a schema is behind. Nor is PostgreSQL's driver. No message of
an error has a key or a hash. The driver's error is kept as `__cause__`, without SQL parameters.
"""


class StoreError(Exception):
    """The database is missing, damaged, foreign or too new; the message, which may name files, says which."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreUnavailableError(StoreError):
    """The database cannot answer now: 503. The message is safe to show. `is_logged`: logged when the failure began."""

    def __init__(self, message: str, *, is_logged: bool = False) -> None:
        super().__init__(message)
        self.is_logged = is_logged


class KeyNotFoundError(StoreError):
    def __init__(self, public_id: str) -> None:
        super().__init__(f"There is no key {public_id}. `hearth keys list` shows all of them.")


class KeyFieldError(StoreError):
    """A field of a key is not valid."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
