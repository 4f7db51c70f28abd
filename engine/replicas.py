"""One model of several engines: what their states and loads are together.

Which engine a request goes to is the pool's to decide.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import TypeVar

from engine.config.models import model_of
from engine.types import ModelHealth, ModelLoad, ModelStatus

_T = TypeVar("_T", ModelHealth, ModelLoad)
# A model is what its best engine is.
_BEST: tuple[ModelStatus, ...] = ("ready", "loading", "sleeping", "unloaded", "failed")


def healths_of_models(engines: Iterable[ModelHealth]) -> Iterator[ModelHealth]:
    """Yield the state of each model; of one with replicas that of its best engine, with all of them in `engines`."""
    for several in _by_model(engines):
        best = min(several, key=lambda one: _BEST.index(one.status))
        if len(several) == 1:
            yield best
            continue
        ready = sum(one.status == "ready" for one in several)
        lost = [f"{one.id}: {one.error}" for one in several if one.error]
        yield replace(
            best,
            id=model_of(best.id),
            phase=f"{ready} of {len(several)} engines are ready" if 0 < ready < len(several) else best.phase,
            restarts=sum(one.restarts for one in several),
            error=" ".join(lost) or None,
            waiting=sum(one.waiting for one in several),
            engines=several,
        )


def loads_of_models(engines: Iterable[ModelLoad]) -> Iterator[ModelLoad]:
    """Yield how busy each model is; one with replicas as all of its engines together, which are in `engines`."""
    for several in _by_model(engines):
        first, model = several[0], model_of(several[0].id)
        if len(several) == 1 and first.id == model:
            yield first
            continue
        usages = [one.kv_cache_usage for one in several if one.kv_cache_usage is not None]
        yield replace(
            first,
            id=model,
            running=sum(one.running for one in several),
            waiting=sum(one.waiting for one in several),
            pids=tuple(pid for one in several for pid in one.pids),
            kv_cache_usage=sum(usages) / len(usages) if usages else None,
            engines=several,
        )


def _by_model(engines: Iterable[_T]) -> Iterator[tuple[_T, ...]]:
    for _, several in groupby(engines, key=lambda one: model_of(one.id)):
        yield tuple(several)
