"""What must outlive the process: API keys, their limits, usage and the audit log. The front door of the store.

Alembic is not imported here; `Database.open` does it when a schema is behind. Nor is PostgreSQL's driver.
"""

from server.store.api_key import DEFAULT_SCOPES, SCOPES, ApiKey, KeyChanges, KeyLimits
from server.store.audit import Actor, AuditEntry, AuditLog, local_actor
from server.store.buckets import Ask, Buckets, Level, Refused, Taken, TooLarge
from server.store.database import Database
from server.store.errors import KeyFieldError, KeyNotFoundError, StoreError, StoreUnavailableError
from server.store.key_cache import KeyCache
from server.store.keys import KeyStore
from server.store.quotas import QuotaExceeded, Quotas, QuotaTaken
from server.store.sqlite import sqlite_url
from server.store.usage import GroupBy, Usage, UsageBook, UsageRow

__all__ = [
    "DEFAULT_SCOPES",
    "SCOPES",
    "Actor",
    "ApiKey",
    "Ask",
    "AuditEntry",
    "AuditLog",
    "Buckets",
    "Database",
    "GroupBy",
    "KeyCache",
    "KeyChanges",
    "KeyFieldError",
    "KeyLimits",
    "KeyNotFoundError",
    "KeyStore",
    "Level",
    "QuotaExceeded",
    "QuotaTaken",
    "Quotas",
    "Refused",
    "StoreError",
    "StoreUnavailableError",
    "Taken",
    "TooLarge",
    "Usage",
    "UsageBook",
    "UsageRow",
    "local_actor",
    "sqlite_url",
]
