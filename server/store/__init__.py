"""What must outlive the process: API keys, their limits, usage and the audit log. The front door of the store.

Alembic is not imported here; `Database.open` does it when a schema is behind. Nor is PostgreSQL's driver.
"""

from server.store.audit import Actor, AuditEntry, AuditLog, local_actor
from server.store.database import Database
from server.store.key_cache import KeyCache
from server.store.keys import DEFAULT_SCOPES, SCOPES, ApiKey, KeyLimits, KeyStore
from server.store.limits import Ask, Buckets, Level, QuotaExceeded, Quotas, QuotaTaken, Refused
from server.store.schema import KeyFieldError, KeyNotFoundError, StoreError, StoreUnavailableError, utc_now
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
    "Usage",
    "UsageBook",
    "UsageRow",
    "local_actor",
    "sqlite_url",
    "utc_now",
]
