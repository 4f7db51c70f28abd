"""What a reload does, whether a signal or an administrator asks for it: models.yaml, voices and certificate."""

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fastapi import FastAPI

from engine import Config, ConfigError, Engine, load_config
from server.http.tls import TlsError
from server.instance import Difference, Outcome, Renewal, write_outcome
from server.store import StoreUnavailableError
from server.store.audit import Actor, write_entry
from server.store.schema import utc_now

_log = logging.getLogger("hearth.reload")


async def reload_config(app: FastAPI) -> None:
    """Do what a SIGHUP asks for, and report the outcome in the log and to `hearth reload`."""
    began_at_ns, path = time.monotonic_ns(), str(app.state.settings.models)
    try:
        outcome = await take_over(app, None)
    except ConfigError as error:
        _log.error("models.yaml was not applied: %s\nEverything stays as it was.", error.message)
        outcome = Outcome(os.getpid(), began_at_ns, path, error.message, certificate=renew_certificate(app))
    try:
        async with app.state.reloading:  # one at a time, in order
            await asyncio.to_thread(write_outcome, app.state.settings.data_dir, outcome)
    except OSError as error:
        _log.error("the outcome of the reload cannot be written for `hearth reload`: %s", error.strerror)


def renew_certificate(app: FastAPI) -> Renewal | None:
    """Read the certificate's files again for new connections; if they cannot be used, the old one stays."""
    if app.state.certificate is None:
        return None
    try:
        return Renewal(renewed=app.state.certificate.renew())
    except TlsError as error:
        _log.error("The TLS certificate stays as it was. %s", error)  # ours, no trace needed
        return Renewal(refused=str(error))


async def take_over(app: FastAPI, by: Actor | None) -> Outcome:
    """Read models.yaml, voices and the certificate again, and serve what they say. Running answers finish.

    `by` None means the user of this machine. Raises `ConfigError`, and then nothing has changed. The outcome's
    `warnings` are about voices, and repeat what was wrong before and still is.
    """
    began_at_ns, path = time.monotonic_ns(), app.state.settings.models
    async with app.state.reloading:  # of two at once, the one that read the file last has to win
        config = await asyncio.to_thread(load_config, path)
        engine: Engine = app.state.engine
        before = _voices(engine)
        models = _difference(_named(engine.config), _named(config))
        outdated = await engine.reload(config)
        again, later = engine.again(), engine.later()  # before the pool loads them
        models = replace(models, changed=tuple(dict.fromkeys((*models.changed, *sorted(outdated)))))
        app.state.metrics.models = config.entries
        voices = _difference(before, _voices(engine))
        warnings = tuple(f"{model}: {remark}" for model in config.models for remark in engine.voice_warnings(model))
        try:
            async with app.state.database.writing() as connection:
                await write_entry(connection, utc_now(), by, "config.reload", config.path.name, asdict(models))
        except StoreUnavailableError as error:  # the reload has happened, and is not a failure
            _log.error("models.yaml was read again, but that is not in the audit log: %s", error.message)
        certificate = renew_certificate(app)
        outcome = Outcome(
            os.getpid(), began_at_ns, str(path), None, models, voices, warnings, again, later, certificate
        )
        _log.info("models.yaml was read again: %s.", "; ".join(outcome.sentences()) or "nothing has changed")
        return outcome


def _named(config: Config) -> dict[str, Any]:
    return {**config.entries, **{f"tier {name}": tier for name, tier in config.tiers.items()}}


def _voices(engine: Engine) -> dict[str, Any]:
    return {voice.id: voice for model in engine.config.models for voice in engine.voices(model)}


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    return Difference(
        added=tuple(name for name in after if name not in before),
        changed=tuple(name for name in after if name in before and before[name] != after[name]),
        removed=tuple(name for name in before if name not in after),
    )
