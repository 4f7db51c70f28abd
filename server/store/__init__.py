"""What must outlive the process: for now the API keys. The front door of the store.

Alembic is not imported here; `Database.open` does it when a schema is behind.
"""

from server.store.database import Database, sqlite_url
from server.store.errors import KeyFieldError, KeyNotFoundError, StoreError, StoreUnavailableError
from server.store.key_cache import KeyCache
from server.store.keys import DEFAULT_SCOPES, SCOPES, ApiKey, KeyStore

__all__ = [
    "DEFAULT_SCOPES",
    "SCOPES",
    "ApiKey",
    "Database",
    "KeyCache",
    "KeyFieldError",
    "KeyNotFoundError",
    "KeyStore",
    "StoreError",
    "StoreUnavailableError",
    "sqlite_url",
]
