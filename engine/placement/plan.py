"""Decides what each model is served with and where: a pure function from models.yaml and a machine to a plan.

The rule: everybody begins with the smallest variant. If these fit together, all stay loaded; else the last in
`_rank` take turns. Then one after the other moves up to the next better variant for as long as all still fit.
What is left goes to KV caches. The words that explain it are engine/placement/report.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.placement.change import Change
from engine.placement.measured import Footprints
from engine.placement.needs import demo_need, devices_of, needs_of
from engine.placement.packing import Layout, Wanted, pack
from engine.placement.refusal import lack_of
from engine.placement.report import turns_line, why_demo, why_placed, why_unplanned
from engine.placement.shares import placed_models, uses
from engine.placement.types import Lack, Placed, Plan, Refusal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from engine.config import Config, ModelSpec
    from engine.config.models import VariantSpec
    from engine.placement.hardware import Hardware
    from engine.placement.types import Device, Need

_NO_FOLDERS: Mapping[str, tuple[VariantSpec, ...]] = {}


@dataclass(frozen=True, slots=True)
class Choice:
    """A model and what it could be served with on this machine, best first. `demo` is set while that is all."""

    spec: ModelSpec
    variants: tuple[tuple[Need, ...], ...]
    at: int
    demo: Need | None = None
    shared: bool = False

    def wanted(self) -> Wanted:
        needs = (self.demo,) if self.demo is not None else self.variants[self.at]
        return Wanted(self.spec.id, needs, self.shared)


def plan(
    config: Config,
    hardware: Hardware,
    footprints: Footprints | None = None,
    folders: Mapping[str, tuple[VariantSpec, ...]] = _NO_FOLDERS,
    here: Collection[str] | None = None,
) -> Plan | Refusal:
    """Place every model of models.yaml.

    `folders` holds, for models whose own weights folder is there, what that folder is (engine/placement/own_weights.py): it is
    taken as it is, whatever variants models.yaml names. `here` holds the folders of variants that are on the disk:
    then only those are planned with, which is what can be served now, and demos for models that have none. None: all
    of them, which is what is worth fetching. Nothing is read from disk, and nothing depends on the order of models or
    GPUs.
    """
    footprints = footprints or Footprints()
    found = _planned(config, hardware, footprints, folders, here)
    if isinstance(found, Plan):
        return found

    def fits(config: Config, hardware: Hardware) -> bool:
        return isinstance(_planned(config, hardware, footprints, folders, here), Plan)

    if found.of_memory:
        found = replace(found, change=Change(config, hardware, folders, fits).smallest(found))
    return Refusal(hardware, found)


def _planned(
    config: Config,
    hardware: Hardware,
    footprints: Footprints,
    folders: Mapping[str, tuple[VariantSpec, ...]],
    here: Collection[str] | None,
) -> Plan | Lack:
    devices = devices_of(hardware)
    choices: list[Choice] = []
    unplanned: list[Placed] = []
    for spec in sorted(config.models.values(), key=_rank):
        choice = _choice(spec, _offered(spec, folders, here), devices, footprints, own=spec.id in folders)
        if isinstance(choice, Lack):
            return choice
        if choice is None:
            unplanned.append(
                Placed(spec.id, "unplanned", why_unplanned(spec, own=spec.id in folders, absent=here is not None))
            )
        else:
            choices.append(choice)
    fitted = _fit(choices, devices)
    if isinstance(fitted, Lack):
        return fitted
    choices, layout = fitted
    placed = [*placed_models(layout), *unplanned]
    texts = {choice.spec.id: choice for choice in choices}
    offered = {spec.id: _offered(spec, folders, here) for spec in config.models.values()}
    explained = {
        one.id: _explained(one, texts.get(one.id), devices, offered[one.id], footprints, own=one.id in folders)
        for one in placed
    }
    return Plan(hardware, tuple(explained[name] for name in config.models), uses(layout, placed))


def _rank(spec: ModelSpec) -> tuple[int, bool, str]:
    """Who stays loaded: voices, which are small, then who chats, then who sees too, and who makes images last."""
    task = {SpeechModelSpec: 0, ChatModelSpec: 1, ImageModelSpec: 2}[type(spec)]
    return task, "vision" in spec.capabilities, spec.id


def _offered(
    spec: ModelSpec, folders: Mapping[str, tuple[VariantSpec, ...]], here: Collection[str] | None
) -> tuple[VariantSpec, ...]:
    """Return what a model may be served with, best first. Voices stand for what is used of their folder."""
    if spec.id in folders:
        return folders[spec.id]
    if here is None or isinstance(spec, SpeechModelSpec):
        return spec.variants
    return tuple(variant for variant in spec.variants if variant.id in here)


def _choice(
    spec: ModelSpec, variants: Sequence[VariantSpec], devices: Sequence[Device], footprints: Footprints, *, own: bool
) -> Choice | Lack | None:
    """Say what a model could be served with here; None when nothing is known that could be planned with."""
    stands_in = not own and spec.demo is not None
    if not variants and not stands_in:
        return None
    needs = [needs_of(spec, variant, devices, footprints) for variant in variants]
    fitting = tuple(need for need in needs if need and pack([Wanted(spec.id, need)], devices) is not None)
    if fitting:
        return Choice(spec, fitting, at=_smallest(fitting))
    if stands_in:
        return Choice(spec, (), at=0, demo=demo_need(spec, devices))
    return lack_of([spec], [need for need in needs if need], devices)


def _smallest(variants: tuple[tuple[Need, ...], ...]) -> int:
    sizes = [Wanted("", needs).size * max(1, needs[0].split) for needs in variants]
    return max(range(len(variants)), key=lambda at: (-sizes[at], at))


def _fit(choices: list[Choice], devices: Sequence[Device]) -> tuple[list[Choice], Layout] | Lack:
    turns = [choice for choice in choices if not (isinstance(choice.spec, SpeechModelSpec) or choice.spec.keep_loaded)]
    for sharing in (0, *range(2, len(turns) + 1)):
        last = {choice.spec.id for choice in turns[len(turns) - sharing :]}
        tried = [replace(choice, shared=choice.spec.id in last) for choice in choices]
        if _layout(tried, devices) is not None:
            return _moved_up(tried, devices)
    # Not even in turns: the last that a demo can stand in for gives way
    for choice in reversed(choices):
        if choice.demo is None and choice.spec.demo is not None:
            stands_in = replace(choice, demo=demo_need(choice.spec, devices))
            return _fit([stands_in if one is choice else one for one in choices], devices)
    return lack_of([choice.spec for choice in choices], [choice.wanted().needs for choice in choices], devices)


def _moved_up(choices: list[Choice], devices: Sequence[Device]) -> tuple[list[Choice], Layout]:
    """Let each in turn take the next better variant that fits beside the others, until nobody can."""
    moved = True
    while moved:
        moved = False
        for position, choice in enumerate(choices):
            for better in range(choice.at - 1, -1, -1) if choice.demo is None else ():
                tried = [*choices[:position], replace(choice, at=better), *choices[position + 1 :]]
                if _layout(tried, devices) is not None:
                    choices, moved = tried, True
                    break
    layout = _layout(choices, devices)
    assert layout is not None  # noqa: S101  # every step was tried before it was taken
    return choices, layout


def _layout(choices: Sequence[Choice], devices: Sequence[Device]) -> Layout | None:
    return pack([choice.wanted() for choice in choices], devices)


def _explained(  # noqa: PLR0913 - what the words are made of
    one: Placed,
    choice: Choice | None,
    devices: Sequence[Device],
    offered: Sequence[VariantSpec],
    footprints: Footprints,
    *,
    own: bool,
) -> Placed:
    if choice is None:
        return one
    spec = choice.spec
    all_needs = [needs_of(spec, variant, devices, footprints) for variant in offered]
    if choice.demo is not None:
        smallest = [needs for needs in all_needs if needs]
        why = "The demo answers: none of its variants is here." if spec.variants and not offered else ""
        why = why or why_demo(spec, smallest, devices)
        return replace(one, state="demo", variant=None, why=why + turns_line(one))
    alone = {needs[0].variant.id for needs in choice.variants}
    return replace(one, why=why_placed(one, all_needs, alone, devices, own=own))
