"""What can go wrong in the store.

StoreError                     the operator's: the database cannot be used; the message may name files
├── StoreUnavailableError      it cannot answer right now (locked, full, damaged while running): 503
├── KeyNotFoundError           no key has this public id
└── KeyFieldError              a key was asked for with a name, scope or date that cannot be

No message holds a key or a hash. The driver's error is kept as `__cause__`, without SQL parameters.
"""

from __future__ import annotations


class StoreError(Exception):
    """The database is missing, damaged, foreign or too new; the message says which, and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class StoreUnavailableError(StoreError):
    """It cannot answer now. The message is safe to show; `retry_after_seconds` is an honest guess."""

    def __init__(self, message: str, *, retry_after_seconds: int = 5) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class KeyNotFoundError(StoreError):
    """No key has this public id."""

    def __init__(self, public_id: str) -> None:
        super().__init__(f"There is no key {public_id}. `hearth keys list` shows all of them.")
        self.public_id = public_id


class KeyFieldError(StoreError):
    """`field` of a new key cannot be what was asked for."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
