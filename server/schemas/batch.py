"""The envelope of a batch. Its items are chat bodies, each checked on its own: a bad one fails alone."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from server.schemas.chat import Strict

_ITEM = {"type": "object", "description": "A body of POST /v1/chat/completions, and `custom_id` if you like."}


class BatchBody(Strict):
    """The body of `POST /v1/chat/completions/batch`."""

    requests: Annotated[list[Annotated[Any, WithJsonSchema(_ITEM)]], Field(min_length=1)]
    """1 to 256 chat bodies. They may differ in everything, also in model; `stream` must not be true."""
