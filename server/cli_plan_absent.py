"""What of a plan is not on the disk yet: how much there is to fetch, with which command, and who answers until then."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.config import SpeechModelSpec
from engine.hardware import GIB
from engine.placement_types import Plan, Refusal
from engine.weights import is_complete
from engine.weights.safety import is_there
from server.command_name import HEARTH

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from engine.config import Config, ModelSpec
    from engine.config.models import VariantSpec


@dataclass(frozen=True, slots=True)
class Absent:
    """A model and the variant that the plan has for it, which is not here."""

    spec: ModelSpec
    variant: VariantSpec


def absent(config: Config, weights_dir: Path, found: Plan) -> list[Absent]:
    """Return what the plan wants and the weights directory lacks; whatever voices are there will do."""
    wanted = [Absent(config.models[one.id], one.variant) for one in found.models if one.variant is not None]
    return [one for one in wanted if one.variant in one.spec.variants and not _is_here(weights_dir, one)]


def _is_here(weights_dir: Path, one: Absent) -> bool:
    if isinstance(one.spec, SpeechModelSpec):
        return is_there(weights_dir / one.spec.weights)
    return is_complete(weights_dir / one.variant.id)


def lines(missing: Sequence[Absent], options: Mapping[str, str | None], now: Plan | Refusal | None) -> Iterator[str]:
    """Yield what to fetch, what to put there by hand, and what answers `now`; None: the machine is imagined.

    `options` are those of the command line, to be said again to `hearth weights pull`.
    """
    fetched = [one for one in missing if one.variant.repository is not None]
    if fetched:
        total = sum(one.variant.weights_gib for one in fetched)
        yield f"\nNot here yet, to be fetched: about {total:.1f} GiB in all"
        for one in fetched:
            size = f"{one.variant.weights_gib:.1f} GiB"
            yield f"  {one.spec.id}: {one.variant.id}, about {size}, from {one.variant.repository}{_until(one, now)}"
        yield f"Fetch {'them' if len(fetched) > 1 else 'it'} with: {_command(fetched, options)}"
    by_hand = [one for one in missing if one.variant.repository is None]
    if by_hand:
        yield "\nNot here yet, to be put there by hand:"
    for one in by_hand:
        if isinstance(one.spec, SpeechModelSpec):
            yield f"  {one.spec.id}: {one.variant.id}, as docs/voices.md says{_until(one, now)}"
        else:
            yield f"  {one.spec.id}: {one.variant.id}, in the folder {one.spec.weights}{_until(one, now)}"


def as_rows(missing: Sequence[Absent]) -> list[dict[str, Any]]:
    """Return the same as plain data."""
    return [
        {
            "model": one.spec.id,
            "folder": one.variant.id,
            "repository": one.variant.repository,
            "about_bytes": int(one.variant.weights_gib * GIB),
        }
        for one in missing
    ]


def _until(one: Absent, now: Plan | Refusal | None) -> str:
    if now is None:
        return ""
    served = now.chosen.get(one.spec.id) if isinstance(now, Plan) else None
    if served is not None and not isinstance(one.spec, SpeechModelSpec):
        return f"; until then {served.id} answers"
    return "; until then the demo answers" if one.spec.demo is not None else "; until then nothing answers"


def _command(fetched: Sequence[Absent], options: Mapping[str, str | None]) -> str:
    # `pull` knows no --ram: then the folders are named
    names = [one.variant.id for one in fetched] if options.get("--ram") else []
    said = [part for name, value in options.items() if value and name != "--ram" for part in (name, value)]
    if names and "--gpus" in said:
        del said[said.index("--gpus") : said.index("--gpus") + 2]
    return f"{HEARTH} {shlex.join(['weights', 'pull', *names, *said])}"
