"""Starts a new migration from the template: `python -m server.store.migrations "what changes"`."""

from __future__ import annotations

import sys

from server.store.migrations import HEAD, config

if __name__ == "__main__":
    from alembic import command

    if len(sys.argv) != 2:
        raise SystemExit('usage: python -m server.store.migrations "what changes"')
    command.revision(config(), message=sys.argv[1], rev_id=f"{int(HEAD) + 1:04}")
