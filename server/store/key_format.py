"""The text form of a key: `hk_<12 public id>_<43 secret><6 checksum>`, all base62.

Owns making and taking apart. Whether a key is known, expired or revoked is `keys.py`'s.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
PUBLIC_ID_LENGTH = 12
SECRET_LENGTH = 43  # 62**43 > 2**256

_PAIRS = tuple(first + second for first in ALPHABET for second in ALPHABET)
_KEY = re.compile(r"(hk_([0-9A-Za-z]{12})_[0-9A-Za-z]{43})([0-9A-Za-z]{6})")
_PUBLIC_ID = re.compile(r"[0-9A-Za-z]{12}")
_NAMED = re.compile(r"(?:hk_)?([0-9A-Za-z]{12})(?:_.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made. `text` is shown to its owner once; only `sha256` (32 bytes) is kept."""

    public_id: str
    text: str = field(repr=False)
    sha256: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key as presented, without its secret. `sha256` is of the whole text, 32 bytes."""

    public_id: str
    sha256: bytes = field(repr=False)


def new_key() -> NewKey:
    """Make a key with a 256 bit secret from the system's random source."""
    public_id = "".join(secrets.choice(ALPHABET) for _ in range(PUBLIC_ID_LENGTH))
    body = f"hk_{public_id}_{_base62(secrets.randbits(256), SECRET_LENGTH)}"
    text = body + _checksum(body)
    return NewKey(public_id, text, _sha256(text))


def parse(text: str) -> ParsedKey | None:
    """Take a presented key apart; None for any text that is not a key or was mistyped. Never raises.

    The checksum spares the database from garbage. It is no security: anyone can compute it.
    """
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    body, public_id, checksum = match.groups()
    if checksum != _checksum(body):
        return None
    return ParsedKey(public_id, _sha256(text))


def public_id_in(text: str) -> str | None:
    """The public id in what a person typed: the id, `hk_<id>`, or a whole key, mistyped or not."""
    match = _NAMED.fullmatch(text.strip())
    return match.group(1) if match else None


def is_public_id(text: str) -> bool:
    """Whether the text can be a public id at all."""
    return _PUBLIC_ID.fullmatch(text) is not None


def _base62(number: int, length: int) -> str:
    digits: list[str] = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))


def _checksum(body: str) -> str:
    """Like `_base62` of six digits, but two at a time: it is made for the key of every request."""
    left, last = divmod(zlib.crc32(body.encode("ascii")), len(_PAIRS))
    first, middle = divmod(left, len(_PAIRS))
    return _PAIRS[first] + _PAIRS[middle] + _PAIRS[last]


def _sha256(text: str) -> bytes:
    # A slow hash would add nothing to 256 random bits, and would let strangers burn our CPU
    return hashlib.sha256(text.encode("ascii")).digest()
