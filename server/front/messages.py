"""Everything that a front and its lead say to each other. How it travels is wire.py's.

A `call` is a number that the front gives to one request, a call of the engine or an HTTP request that the lead answers.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

# msgspec reads the annotations.
from engine import ChatResult, ChatStep
from server.access_log import RequestRecord
from server.store import KeyLimits

Method: TypeAlias = Literal["chat", "chat_stream", "text", "text_stream", "count_tokens"]


class Said(msgspec.Struct, array_like=True, tag=True, tag_field="said", gc=False):
    """One message, as a list that begins with its name: a field's name would be sent with every token."""


# From the front.
class Listening(Said):
    """It takes connections."""


class Asker(Said):
    """The key behind a call, as far as limits and books go. The front has checked it."""

    public_id: str
    tier: str
    limits: KeyLimits


class Call(Said):
    """Call the engine, within the limits of the key. `request` holds a ChatRequest's or a TextRequest's fields."""

    call: int
    method: Method
    kind: str
    asker: Asker
    request: dict[str, Any]


class Request(Said):
    """An HTTP request for the lead to answer: what its ASGI scope says."""

    call: int
    http_version: str
    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    scheme: str
    method: str
    root_path: str
    path: str
    raw_path: bytes
    query_string: bytes
    headers: list[tuple[bytes, bytes]]


class Body(Said):
    """What the lead has asked for with `More`: a piece of the request's body."""

    call: int
    data: bytes
    more: bool


class Gone(Said):
    """What the lead has asked for with `More`: there is nothing, the client has left."""

    call: int


class Taken(Said):
    """So many bytes of an answer are on their way to the client."""

    call: int
    size_bytes: int


class PassedOn(Said):
    """So many steps of a stream have gone to the client, or wait in its connection."""

    call: int
    steps: int


class Cancel(Said):
    """Nobody waits for the call any more."""

    call: int


class Ended(Said):
    """An HTTP request that the front has answered: to be counted and logged."""

    record: RequestRecord


class Drained(Said):
    """Nothing runs there any more, and nothing new will."""


class Pong(Said):
    """Its event loop moves."""


# From the lead.
class Model(Said):
    """What a front has to know of a model. `max_output_tokens` as models.yaml says, where it does."""

    tier: str
    max_output_tokens: int | None


class Rights(Said):
    """The models, and the models of which tiers each tier may use."""

    models: dict[str, Model]
    tiers: dict[str, tuple[str, ...]]


class Begin(Said):
    """The first message. `settings` is a pickle: the front believes its lead, and never the other way round."""

    settings: bytes
    rights: Rights


class Headers(Said):
    """For the answer: what the limits have left."""

    call: int
    headers: dict[str, str]


class Step(Said):
    call: int
    step: ChatStep


class Result(Said):
    """The whole of a plain answer, and its end."""

    call: int
    result: ChatResult


class Counted(Said):
    """The prompt's tokens, and the call's end."""

    call: int
    tokens: int


class Failed(Said):
    """An `ApiError`, and the call's end."""

    call: int
    status: int
    code: str | None
    message: str
    type: str
    param: str | None
    headers: dict[str, str]


class End(Said):
    call: int


def unsayable(call: int) -> Failed:
    """Make the end of a call of which something cannot travel: as if it had failed in one process."""
    sentence = "Something in this request or its answer cannot be passed on. Try again, or ask in other words."
    return Failed(call, 500, "internal_error", sentence, "server_error", None, {})


class Start(Said):
    """The head of an HTTP answer."""

    call: int
    status: int
    headers: list[tuple[bytes, bytes]]


class Piece(Said):
    """A part of an HTTP answer's body; the last has no `more`."""

    call: int
    data: bytes
    more: bool


class More(Said):
    """Send the next piece of the request's body, or say that the client has left."""

    call: int


class KeyRevoked(Said):
    public_id: str


class KeyChanged(Said):
    public_id: str


class RenewCertificate(Said):
    pass


class Ping(Said):
    """Asks for a `Pong`."""


class Drain(Said):
    """Take no new work, let what runs go on for so long, then cut it. Answered with `Drained`."""

    seconds: float


class Cut(Said):
    """Make what runs stop now."""


class Stop(Said):
    """End the process."""


ToLead: TypeAlias = Listening | Call | Request | Body | Gone | Taken | PassedOn | Cancel | Ended | Drained | Pong
ToFront: TypeAlias = (
    Begin
    | Rights
    | Headers
    | Step
    | Result
    | Counted
    | Failed
    | End
    | Start
    | Piece
    | More
    | KeyRevoked
    | KeyChanged
    | RenewCertificate
    | Ping
    | Drain
    | Cut
    | Stop
)
