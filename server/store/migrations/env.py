"""Run by Alembic: applies the versions in the transaction that `migrations.upgrade` was given."""

from alembic import context

from server.store.migrations import VERSION_TABLE
from server.store.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,  # SQLite cannot alter a column; batches copy the table
)
with context.begin_transaction():
    context.run_migrations()
