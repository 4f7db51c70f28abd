"""Takes a changed models.yaml into the running server. A wrong one changes nothing."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine import ConfigError, load_config
from server.store import AuditLog, StoreUnavailableError

if TYPE_CHECKING:
    from fastapi import FastAPI

    from engine import Config
    from server.store import Actor

_log = logging.getLogger("hearth.reload")


@dataclass(frozen=True, slots=True)
class Taken:
    """What is served now, and by their ids the models and tiers in which it differs from before."""

    config: Config
    added: tuple[str, ...]
    changed: tuple[str, ...]
    removed: tuple[str, ...]


async def reload_config(app: FastAPI) -> None:
    """Do what a SIGHUP asks for, and say in the log what came of it."""
    try:
        taken = await take_over(app, None)
    except ConfigError as error:
        _log.error("models.yaml was not taken over: %s\nEverything stays as it was.", error.message)
        return
    changes = [
        f"{what} {', '.join(names)}"
        for what, names in (("added", taken.added), ("changed", taken.changed), ("removed", taken.removed))
        if names
    ]
    _log.warning("models.yaml was read again: %s.", "; ".join(changes) or "nothing has changed")


async def take_over(app: FastAPI, by: Actor | None) -> Taken:
    """Read the file again; tiers and models are from then on what it says. Answers that are being given go on.

    `by` None means the user of this machine. Raises `ConfigError`, and then nothing has changed.
    """
    async with app.state.reloading:  # of two at once, the one that read the file last has to win
        config = await asyncio.to_thread(load_config, app.state.settings.models)
        taken = _compared(app.state.config, config)
        await app.state.engine.reload(config)
        app.state.access.use(config)
        app.state.meter.limiter.use(config)
        app.state.config = config
        detail = {"added": taken.added, "changed": taken.changed, "removed": taken.removed}
        try:
            await AuditLog(app.state.database).record("config.reload", config.path.name, detail, by=by)
        except StoreUnavailableError as error:  # it has happened already: better unwritten than called a failure
            _log.error("the audit log lacks this: models.yaml was read again. %s", error.message)
        return taken


def _compared(old: Config, new: Config) -> Taken:
    before = {**old.models, **{f"tier {name}": tier for name, tier in old.tiers.items()}}
    after = {**new.models, **{f"tier {name}": tier for name, tier in new.tiers.items()}}
    return Taken(
        config=new,
        added=tuple(name for name in after if name not in before),
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        removed=tuple(name for name in before if name not in after),
    )
