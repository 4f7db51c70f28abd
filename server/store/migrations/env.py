"""Run by Alembic: applies the versions in the transaction that `migrations.upgrade` was given."""

from alembic import context

from server.store.migrations import VERSION_TABLE
from server.store.schema import metadata

# `alembic revision` without autogenerate loads this file too, and has no connection to give
connection = context.config.attributes.get("connection")
if connection is not None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        render_as_batch=True,  # SQLite cannot alter a column; batches copy the table
    )
    with context.begin_transaction():
        context.run_migrations()
