"""What must outlive the process: API keys, their limits, usage and the audit log.

Alembic is not imported here; `Database.open` does it when a schema is behind. Nor is PostgreSQL's driver.
"""
