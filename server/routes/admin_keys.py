"""`/v1/admin/keys`: what `hearth keys` does, for keys with the scope `admin`."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from server.bodies import StrictRoute
from server.dependencies import TheActor, TheKeyAdmin, key_with
from server.schemas.admin import ChangesBody, ExpireBody, Key, KeyList, NewKey, NewKeyBody, RotateBody

router = APIRouter(
    prefix="/v1/admin/keys", tags=["admin"], route_class=StrictRoute, dependencies=[Depends(key_with("admin"))]
)


@router.post("")
async def create_key(body: NewKeyBody, keys: TheKeyAdmin, by: TheActor) -> NewKey:
    """Make a key. Its text is in this answer and never again."""
    return NewKey.made(*await keys.create(body, by))


@router.get("")
async def list_keys(keys: TheKeyAdmin) -> KeyList:
    """List all keys, oldest first, also those that are revoked or expired."""
    return KeyList(data=[Key.of(key) for key in await keys.store.list()])


@router.get("/{public_id}")
async def retrieve_key(public_id: str, keys: TheKeyAdmin) -> Key:
    """Show one key."""
    return Key.of(await keys.store.find(public_id))


@router.patch("/{public_id}")
async def update_key(public_id: str, body: ChangesBody, keys: TheKeyAdmin, by: TheActor) -> Key:
    """Change name, tier, scopes, models, notes or limits."""
    return Key.of(await keys.update(public_id, body, by))


@router.post("/{public_id}/rotate")
async def rotate_key(public_id: str, body: RotateBody, keys: TheKeyAdmin, by: TheActor) -> NewKey:
    """Make a successor with the same rights; the old key works on for a while."""
    return NewKey.made(*await keys.rotate(public_id, body, by))


@router.post("/{public_id}/expire")
async def expire_key(public_id: str, body: ExpireBody, keys: TheKeyAdmin, by: TheActor) -> Key:
    """Set when a key ends, or that it never does."""
    return Key.of(await keys.expire(public_id, body, by))


@router.post("/{public_id}/revoke")
async def revoke_key(public_id: str, keys: TheKeyAdmin, by: TheActor) -> Key:
    """End a key for good."""
    return Key.of(await keys.revoke(public_id, by))
