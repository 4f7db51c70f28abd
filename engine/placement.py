"""Decides what each model is served with and where: a pure function from models.yaml and a machine to a plan.

The rule: everybody begins with the smallest variant. If these fit together, all stay loaded; else the last in
`_rank` take turns. Then one after the other moves up to the next better variant for as long as all still fit.
What is left goes to KV caches. The words that explain it are engine/placement_report.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.footprints import Footprints
from engine.placement_needs import demo_need, devices_of, needs_of
from engine.placement_packing import Layout, Wanted, pack
from engine.placement_refusal import lack_of
from engine.placement_report import turns_line, why_demo, why_placed, why_unplanned
from engine.placement_shares import placed_models, uses
from engine.placement_types import Lack, Placed, Plan, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.config import Config, ModelSpec
    from engine.config_variants import VariantSpec
    from engine.hardware import Hardware
    from engine.placement_types import Device, Need

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
) -> Plan | Refusal:
    """Place every model of models.yaml.

    `folders` holds, for models whose own weights folder is there, what that folder is (engine/own_weights.py): it is
    taken as it is, whatever variants models.yaml names. Nothing is read from disk, and nothing depends on the order
    of models or GPUs.
    """
    devices = devices_of(hardware)
    footprints = footprints or Footprints()
    choices: list[Choice] = []
    unplanned: list[Placed] = []
    for spec in sorted(config.models.values(), key=_rank):
        choice = _choice(spec, folders.get(spec.id), devices, footprints)
        if isinstance(choice, Lack):
            return Refusal(hardware, choice)
        if choice is None:
            unplanned.append(Placed(spec.id, "unplanned", why_unplanned(spec, own=spec.id in folders)))
        else:
            choices.append(choice)
    fitted = _fit(choices, devices)
    if isinstance(fitted, Lack):
        return Refusal(hardware, fitted)
    choices, layout = fitted
    placed = [*placed_models(layout), *unplanned]
    texts = {choice.spec.id: choice for choice in choices}
    explained = {one.id: _explained(one, texts.get(one.id), devices, folders, footprints) for one in placed}
    return Plan(hardware, tuple(explained[name] for name in config.models), uses(layout, placed))


def _rank(spec: ModelSpec) -> tuple[int, bool, str]:
    """Who stays loaded: voices, which are small, then who chats, then who sees too, and who makes images last."""
    task = {SpeechModelSpec: 0, ChatModelSpec: 1, ImageModelSpec: 2}[type(spec)]
    return task, "vision" in spec.capabilities, spec.id


def _choice(
    spec: ModelSpec, own: tuple[VariantSpec, ...] | None, devices: Sequence[Device], footprints: Footprints
) -> Choice | Lack | None:
    """Say what a model could be served with here; None when nothing is known that could be planned with."""
    variants = spec.variants if own is None else own
    stands_in = own is None and spec.demo is not None
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


def _explained(
    one: Placed,
    choice: Choice | None,
    devices: Sequence[Device],
    folders: Mapping[str, tuple[VariantSpec, ...]],
    footprints: Footprints,
) -> Placed:
    if choice is None:
        return one
    spec = choice.spec
    all_needs = [needs_of(spec, variant, devices, footprints) for variant in folders.get(spec.id, spec.variants)]
    if choice.demo is not None:
        smallest = [needs for needs in all_needs if needs]
        return replace(one, state="demo", variant=None, why=why_demo(spec, smallest, devices) + turns_line(one))
    alone = {needs[0].variant.id for needs in choice.variants}
    return replace(one, why=why_placed(one, all_needs, alone, devices, own=spec.id in folders))
