"""API keys and the sessions of the page: their text, fields and rows; each change of a key has its audit entry.

A key's text is `hk_<12 public id>_<43 secret><6 checksum>` in base62; only its SHA-256 is on disk. Requests go
through `key_cache.py`.
"""

import hashlib
import hmac
import re
import secrets
import string
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import RowMapping, bindparam, delete, func, insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from server.store import KeyFieldError, KeyNotFoundError, StoreUnavailableError
from server.store.audit import Actor, write_entry
from server.store.database import Database
from server.store.schema import api_key, console_session, utc_now

if TYPE_CHECKING:
    from engine.config import TierSpec

DEFAULT_SCOPES = ("chat", "batch", "embeddings", "images", "audio", "models")
SCOPES = (*DEFAULT_SCOPES, "metrics", "admin")  # these two show or change what concerns all keys
NAME_LENGTH = 64
NOTES_LENGTH = 1000
LARGEST_LIMIT = 2**31 - 1
LONGEST_OVERLAP = timedelta(days=366)
LONGEST_SESSION = timedelta(days=7)
_LAST_MOMENT = datetime.max.replace(tzinfo=UTC)
SESSION_IDLE = timedelta(hours=12)
SESSIONS_PER_KEY = 20
_SEEN_EVERY = timedelta(minutes=1)

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
KEY_PREFIX = "hk_"
_KEY = re.compile(r"(hk_([0-9A-Za-z]{12})_[0-9A-Za-z]{43})([0-9A-Za-z]{6})")
_PUBLIC_ID = re.compile(r"[0-9A-Za-z]{12}")
_NAMED = re.compile(r"(?:hk_)?([0-9A-Za-z]{12})(?:_.*)?", re.DOTALL)

_COLUMNS = [column for column in api_key.c if column.name != "secret_sha256"]
_UNKNOWN_SHA256 = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """A key's own limits. None: as its tier; 0: nothing."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel_requests: int | None = None
    batch_items: int | None = None
    images_per_day: int | None = None


LIMITS = tuple(field.name for field in fields(KeyLimits))


@dataclass(frozen=True, slots=True)
class Limits(KeyLimits):
    """The limits that hold for a key, its tier's or its own; None is no limit."""

    queue_share: float = 1.0


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. Datetimes are UTC; `models` None means all of its tier."""

    public_id: str
    name: str
    tier: str
    scopes: frozenset[str]
    models: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None
    notes: str = ""
    replaced_by: str | None = None
    limits: KeyLimits = KeyLimits()

    def usable_at(self, now: datetime) -> bool:
        """Whether the key is neither revoked nor, at `now`, expired."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)

    def limits_in(self, tiers: "Mapping[str, TierSpec]") -> Limits:
        """Return the limits of the key's tier with those that the key has of its own."""
        tier = tiers.get(self.tier)
        if tier is None:  # not in models.yaml any more: then the key may use no model either
            return Limits()
        own = {name: limit for name in LIMITS if (limit := getattr(self.limits, name)) is not None}
        return Limits(**{name: getattr(tier, name) for name in LIMITS} | own, queue_share=tier.queue_share)


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key, without its secret. `sha256` is of the whole text, 32 bytes."""

    public_id: str
    sha256: bytes = field(repr=False)


def new_key() -> str:
    """Make the text of a key, with a 256 bit secret from the system's random source. To be shown once."""
    public_id = "".join(secrets.choice(ALPHABET) for _ in range(12))
    body = f"hk_{public_id}_{_base62(secrets.randbits(256), 43)}"  # 62**43 > 2**256
    return body + _checksum(body)


def parse(text: str) -> ParsedKey | None:
    """Parse a presented key; None for any text that is not a key or was mistyped. Never raises.

    The checksum keeps garbage from the database. It is no security: anyone can compute it.
    """
    match = _KEY.fullmatch(text)
    if match is None or match[3] != _checksum(match[1]):
        return None
    # A slow hash would add nothing to 256 random bits, and would let strangers burn our CPU
    return ParsedKey(match[2], hashlib.sha256(text.encode("ascii")).digest())


def public_id_in(text: str) -> str | None:
    """The public id in what a person typed: the id, `hk_<id>`, or a whole key, mistyped or not."""
    match = _NAMED.fullmatch(text.strip())
    return match.group(1) if match else None


def _checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode("ascii")), 6)


def _base62(number: int, length: int) -> str:
    digits = ""
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits = ALPHABET[digit] + digits
    return digits


def plan_key(  # noqa: PLR0913 - the fields of a key
    name: str,
    tier: str,
    scopes: Iterable[str] = DEFAULT_SCOPES,
    models: Iterable[str] | None = None,
    expires_at: datetime | None = None,
    *,
    now: datetime,
    notes: str = "",
    limits: KeyLimits = KeyLimits(),
) -> ApiKey:
    """Return a key for `KeyStore.create_all`: checked, and without an id. Raises KeyFieldError."""
    key = ApiKey(
        public_id="",
        name=name,
        tier=tier,
        scopes=frozenset(scopes),
        models=_unique(models),
        created_at=now,
        expires_at=expires_at,
        notes=notes,
        limits=limits,
    )
    _check(key)
    _check_end(expires_at, now)
    return key


class KeyStore:
    """The keys in a database. `clock` gives aware datetimes. Any method may raise StoreUnavailableError.

    Each change writes an audit entry in its own transaction; `by` None means the local user.
    """

    def __init__(self, database: Database, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self.clock = clock

    async def create(  # noqa: PLR0913 - the fields of a key
        self,
        name: str,
        tier: str,
        scopes: Iterable[str] = DEFAULT_SCOPES,
        models: Iterable[str] | None = None,
        expires_at: datetime | None = None,
        *,
        notes: str = "",
        limits: KeyLimits = KeyLimits(),
        by: Actor | None = None,
    ) -> tuple[str, ApiKey]:
        """Make a key. Its text exists only in what this returns; on disk is its hash.

        Whether tier and models are configured is the caller's to check. Raises KeyFieldError.
        """
        key = plan_key(name, tier, scopes, models, expires_at, now=self.clock(), notes=notes, limits=limits)
        return (await self.create_all([key], by=by))[0]

    async def create_all(self, planned: Iterable[ApiKey], *, by: Actor | None = None) -> Sequence[tuple[str, ApiKey]]:
        """Make keys, all or none, like `create`."""
        made = []
        async with self._database.writing() as connection:
            for one in planned:
                text, key = await _insert_key(connection, one)
                detail: dict[str, Any] = {"name": key.name, "tier": key.tier, "scopes": sorted(key.scopes)}
                detail |= {"expires_at": _iso(key.expires_at), "models": key.models}
                detail |= {field: own for field, own in asdict(key.limits).items() if own is not None}
                await write_entry(connection, key.created_at, by, "key.create", key.public_id, detail)
                made.append((text, key))
        return made

    async def rotate(
        self, public_id: str, overlap: timedelta, *, expires_at: datetime | None = None, by: Actor | None = None
    ) -> tuple[str, ApiKey]:
        """Make a successor with the same rights; the old key works for `overlap` more, never longer than it had.

        Without `expires_at` the successor lives as long as the old key was made for. Raises KeyNotFoundError,
        and KeyFieldError when the key is revoked, expired or was replaced before.
        """
        if not timedelta() <= overlap <= LONGEST_OVERLAP:
            raise KeyFieldError("overlap", f"The overlap is between 0 and {LONGEST_OVERLAP.days} days.")
        now = self.clock()
        _check_end(expires_at, now)
        async with self._changing(public_id) as (connection, old):
            _check_not_revoked(old)
            if old.replaced_by is not None:
                already = f"The key {public_id} was replaced by {old.replaced_by}. Rotate that one."
                raise KeyFieldError("public_id", already)
            if not old.usable_at(now):
                ended = f"The key {public_id} has expired. Create a new one, or move its end."
                raise KeyFieldError("public_id", ended)
            if expires_at is None and old.expires_at is not None:
                expires_at = now + min(old.expires_at - old.created_at, _LAST_MOMENT - now)
            successor = replace(old, created_at=now, expires_at=expires_at, last_used_at=None)
            text, key = await _insert_key(connection, successor)
            end = min(now + overlap, old.expires_at or _LAST_MOMENT)
            await _set_fields(connection, public_id, expires_at=end, replaced_by=key.public_id)
            detail = {"replaced_by": key.public_id, "expires_at": end.isoformat()}
            await write_entry(connection, now, by, "key.rotate", public_id, detail)
        return text, key

    async def expire(self, public_id: str, at: datetime | None, *, by: Actor | None = None) -> ApiKey:
        """Set when a key ends; None: never. An expired key works again with a later end. Raises as `update` does."""
        now = self.clock()
        _check_end(at, now)
        async with self._changing(public_id) as (connection, key):
            _check_not_revoked(key)
            await _set_fields(connection, public_id, expires_at=at)
            detail = {"expires_at": [_iso(key.expires_at), _iso(at)]}
            await write_entry(connection, now, by, "key.expire", public_id, detail)
        return replace(key, expires_at=None if at is None else at.astimezone(UTC))

    async def update(self, public_id: str, *, by: Actor | None = None, **changes: Any) -> ApiKey:
        """Change fields or limits (None: its tier's). Raises KeyNotFoundError, KeyFieldError (also: it is revoked)."""
        async with self._changing(public_id) as (connection, old):
            _check_not_revoked(old)
            limits = replace(old.limits, **{name: changes.pop(name) for name in LIMITS if name in changes})
            if "scopes" in changes:
                changes["scopes"] = frozenset(changes["scopes"])
            if "models" in changes:
                changes["models"] = _unique(changes["models"])
            new = replace(old, **changes, limits=limits)
            _check(new)
            before, after = _row_of(old), _row_of(new)
            different = {name: value for name, value in after.items() if before[name] != value}
            if different:
                await _set_fields(connection, public_id, **different)
                # Notes are for the administrators and may be personal: that they changed is enough
                detail = {name: [before[name], after[name]] for name in different if name != "notes"}
                detail |= {"notes": ["changed"]} if "notes" in different else {}
                await write_entry(connection, self.clock(), by, "key.update", public_id, detail)
        return new

    async def revoke(self, public_id: str, *, by: Actor | None = None) -> ApiKey:
        """End a key for good; a key revoked before keeps its date. Raises KeyNotFoundError."""
        now = self.clock()
        async with self._changing(public_id) as (connection, key):
            if key.revoked_at is not None:
                return key
            await _set_fields(connection, public_id, revoked_at=now)
            await write_entry(connection, now, by, "key.revoke", public_id, {"name": key.name})
        return replace(key, revoked_at=now)

    async def delete(self, public_id: str, *, by: Actor | None = None) -> None:
        """Delete a key with its row: for one that a program made for itself. Raises KeyNotFoundError.

        Keys of people are revoked instead and stay in the list. Audit entries and usage stay.
        """
        async with self._changing(public_id) as (connection, key):
            await connection.execute(delete(api_key).where(api_key.c.public_id == public_id))
            await write_entry(connection, self.clock(), by, "key.delete", public_id, {"name": key.name})

    async def list(self) -> list[ApiKey]:
        query = select(*_COLUMNS).order_by(api_key.c.created_at, api_key.c.public_id)
        return [_key_of(row) for row in await self._database.rows(query)]

    async def find(self, public_id: str) -> ApiKey:
        """The key with this public id, usable or not. Raises KeyNotFoundError."""
        async with self._database.reading() as connection:
            return await _found(connection, public_id)

    async def count_active(self) -> int:
        alive = or_(api_key.c.expires_at.is_(None), api_key.c.expires_at > self.clock())
        query = select(func.count()).select_from(api_key).where(api_key.c.revoked_at.is_(None), alive)
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one())

    async def check(self, presented: ParsedKey) -> ApiKey | None:
        """The usable key presented, or None; the same work whether its public id is known or not."""
        # This id or the next larger one: reading a row either way hides by its time which ids exist. Only beyond the
        # last id there is none, which tells nothing of the others.
        nearest = select(api_key).where(api_key.c.public_id >= presented.public_id).order_by(api_key.c.public_id)
        row = await self._database.first(nearest.limit(1))
        right = hmac.compare_digest(presented.sha256, _UNKNOWN_SHA256 if row is None else row["secret_sha256"])
        if row is None or not right or row["public_id"] != presented.public_id:
            return None
        key = _key_of(row)
        return key if key.usable_at(self.clock()) else None

    async def record_use(self, last_used_at: Mapping[str, datetime]) -> None:
        """Write when keys (by public id) were last used, in one transaction; a later date on disk stays."""
        if not last_used_at:
            return
        older = or_(api_key.c.last_used_at.is_(None), api_key.c.last_used_at < bindparam("used_at"))
        statement = (
            update(api_key)
            .where(api_key.c.public_id == bindparam("used_id"), older)
            .values(last_used_at=bindparam("used_at"))
        )
        # In one order everywhere: on PostgreSQL two processes would else wait for each other's rows
        rows: list[dict[str, Any]] = [{"used_id": name, "used_at": at} for name, at in sorted(last_used_at.items())]
        async with self._database.writing(durable=False) as connection:
            await connection.execute(statement, rows)

    @asynccontextmanager
    async def _changing(self, public_id: str) -> AsyncIterator[tuple[AsyncConnection, ApiKey]]:
        async with self._database.writing() as connection:
            yield connection, await _found(connection, public_id, lock=True)


async def _insert_key(connection: AsyncConnection, fields: ApiKey) -> tuple[str, ApiKey]:
    """Make a key with these fields. Returns its text, and the key with its public id."""
    text = new_key()
    parsed = parse(text)
    assert parsed is not None  # noqa: S101  # we made it
    key = replace(fields, public_id=parsed.public_id)
    await connection.execute(insert(api_key).values(**_row_of(key), secret_sha256=parsed.sha256))
    return text, key


async def _set_fields(connection: AsyncConnection, public_id: str, **values: Any) -> None:
    await connection.execute(update(api_key).where(api_key.c.public_id == public_id).values(**values))


async def _found(connection: AsyncConnection, public_id: str, *, lock: bool = False) -> ApiKey:
    if _PUBLIC_ID.fullmatch(public_id) is None:
        raise KeyNotFoundError(public_id)
    query = select(*_COLUMNS).where(api_key.c.public_id == public_id)
    # SQLite has no row locks and needs none: its write transaction is the only one
    found = await connection.execute(query.with_for_update() if lock else query)
    row = found.mappings().one_or_none()
    if row is None:
        raise KeyNotFoundError(public_id)
    return _key_of(row)


def _key_of(row: RowMapping) -> ApiKey:
    values = {column.name: row[column.name] for column in _COLUMNS}
    limits = KeyLimits(**{name: values.pop(name) for name in LIMITS})
    return ApiKey(**values | {"scopes": frozenset(row["scopes"]), "models": _unique(row["models"]), "limits": limits})


def _row_of(key: ApiKey) -> dict[str, Any]:
    values = {column.name: getattr(key, column.name) for column in _COLUMNS if column.name not in LIMITS}
    values["scopes"] = sorted(key.scopes, key=SCOPES.index)
    return values | asdict(key.limits)


def _unique(models: Iterable[str] | None) -> tuple[str, ...] | None:
    return None if models is None else tuple(dict.fromkeys(models))


def _check(key: ApiKey) -> None:
    """Raise KeyFieldError for an invalid field. Whether tier and models are configured is not checked here."""
    if not (1 <= len(key.name) <= NAME_LENGTH and key.name.isprintable() and key.name.strip()):
        raise KeyFieldError("name", f"A key's name is 1 to {NAME_LENGTH} printable characters, not all blank.")
    if not (1 <= len(key.tier) <= NAME_LENGTH and key.tier.isprintable()):
        raise KeyFieldError("tier", "A key needs a tier.")
    for scope in key.scopes:
        check_known("scope", "scopes", scope, SCOPES)
    if not key.scopes:
        raise KeyFieldError("scopes", f"A key needs at least one scope. Scopes are: {', '.join(SCOPES)}.")
    if key.models is not None and not all(model and model.isprintable() for model in key.models):
        raise KeyFieldError("models", "A model's name is empty or has unprintable characters.")
    if key.models == ():
        raise KeyFieldError("models", "An empty list of models would make a key for nothing; leave it out for all.")
    if len(key.notes) > NOTES_LENGTH or not all(letter.isprintable() or letter in "\n\t" for letter in key.notes):
        raise KeyFieldError("notes", f"Notes are at most {NOTES_LENGTH} printable characters, tabs and line ends.")
    for name in LIMITS:
        limit = getattr(key.limits, name)
        if limit is not None and (isinstance(limit, bool) or not 0 <= limit <= LARGEST_LIMIT):
            raise KeyFieldError(name, f"{name} is a number from 0 to {LARGEST_LIMIT}, or null for the tier's.")


def check_known(kind: str, field: str, given: str, known: Iterable[str]) -> None:
    """Raise KeyFieldError for a name that there is not."""
    names = list(known)
    if given in names:
        return
    from engine.config.messages import near_miss  # most commands do without models.yaml

    near = near_miss(given, names)
    meant = f" Did you mean {near!r}?" if near else ""
    shown = repr(given) if len(given) <= 64 and given.isprintable() else "of this name"
    raise KeyFieldError(field, f"There is no {kind} {shown}.{meant} Known: {', '.join(names)}.")


def _check_end(expires_at: datetime | None, now: datetime) -> None:
    if expires_at is None:
        return
    if expires_at.tzinfo is None:
        raise KeyFieldError("expires_at", "An expiry date must carry its time zone.")
    if expires_at <= now:
        raise KeyFieldError("expires_at", "The expiry date has passed already.")


def _check_not_revoked(key: ApiKey) -> None:
    if key.revoked_at is not None:
        raise KeyFieldError("public_id", f"The key {key.public_id} is revoked, which is for good. Create a new one.")


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat()


class SessionStore:
    """The page's sessions in a database. `clock` gives aware datetimes. Any method may raise StoreUnavailableError.

    A session is two random halves, of which only the SHA-256 is on disk, and the key that signed in. It has the rights
    of its key, as long as both live.
    """

    def __init__(self, database: Database, keys: KeyStore, clock: Callable[[], datetime] = utc_now) -> None:
        self._database = database
        self._keys = keys
        self._clock = clock

    async def create(self, key: ApiKey, origin: str) -> tuple[str, str]:
        """Begin a session of a usable key; return its halves. Ends stale ones, and the key's oldest beyond 20."""
        now, table = self._clock(), console_session.c
        halves = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        newest = select(table.id_sha256).where(table.key_id == key.public_id).order_by(table.last_seen.desc())
        kept = newest.limit(SESSIONS_PER_KEY - 1).subquery()
        mine_and_old = (table.key_id == key.public_id) & table.id_sha256.not_in(select(kept.c.id_sha256))
        stale = or_(table.expires_at <= now, table.last_seen <= now - SESSION_IDLE)
        async with self._database.writing() as connection:
            await connection.execute(delete(console_session).where(or_(stale, mine_and_old)))
            await connection.execute(
                insert(console_session).values(
                    id_sha256=digest(halves[0]),
                    token_sha256=digest(halves[1]),
                    key_id=key.public_id,
                    created_at=now,
                    last_seen=now,
                    expires_at=now + LONGEST_SESSION,
                )
            )
            await write_entry(connection, now, Actor(key.public_id, origin), "console.login", key.public_id)
        return halves

    async def check(self, half: str, token: str) -> ApiKey | None:
        """Return the usable key of a live session, None for halves that are not of one."""
        now, ours = self._clock(), console_session.c.id_sha256 == digest(half)
        row = await self._database.first(select(console_session).where(ours))
        if row is None or not hmac.compare_digest(digest(token), row["token_sha256"]):
            return None
        if now >= min(row["expires_at"], row["last_seen"] + SESSION_IDLE):
            return None
        if now - row["last_seen"] >= _SEEN_EVERY:
            with suppress(StoreUnavailableError):  # a full disk: the page may be needed to see that
                await self._database.change(update(console_session).where(ours).values(last_seen=now), durable=False)
        key = await self._keys.find(row["key_id"])
        return key if key.usable_at(now) else None

    async def end(self, half: str) -> None:
        await self._database.change(delete(console_session).where(console_session.c.id_sha256 == digest(half)))


def digest(half: str) -> bytes:
    """Return what is kept of a half. A slow hash would add nothing to 256 random bits."""
    return hashlib.sha256(half.encode()).digest()
