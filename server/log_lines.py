"""What goes to standard error while the server runs."""

from __future__ import annotations

import logging

# What uvicorn says when a file is cut off, which happens on purpose: sse.py says why.
_CUT_OFF = "ASGI callable returned without completing response."


def set_up_log(level: str) -> None:
    """Write ours at the level asked for; of libraries only what goes wrong."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are a line per stranger's mistake
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != _CUT_OFF)
    logging.getLogger("hearth").setLevel(level.upper())
