"""Decides what each model is served with and where: a pure function from models.yaml and a machine to a plan.

The rule: every model begins with its smallest variant. If these fit together, all stay loaded; else the last in
`_rank` take turns. Then one after the other moves up to the next better variant as long as all still fit, chat models
first. Models for embeddings, reranking and transcription never make variants of chat models smaller: they take
turns with the image model instead. With HEARTH_PREFER=quality models get the variants that fit if all take turns, and
as few as possible take turns.
What is left goes to KV caches. If no plan is possible, the refusal names the smallest change that makes one possible.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, TypeAlias

from engine.config import AuxiliaryModelSpec, ChatModelSpec, Config, ImageModelSpec, ModelSpec, SpeechModelSpec
from engine.config.models import VariantSpec, model_of, replica_id
from engine.placement import report
from engine.placement.hardware import GIB, Hardware, Prefer
from engine.placement.needs import DEFAULT_CONTEXT, Footprints, demo_need, devices_of, explicit, needs_of
from engine.placement.packing import Layout, add_replica, pack, shared_out, uses
from engine.placement.types import CONTEXT_STEP, Device, Need, Placed, Plan, Refusal

_NO_FOLDERS: Mapping[str, tuple[VariantSpec, ...]] = {}
# The demo that answers for a task.
DEMO_OF_TASK = {
    **{task: task for task in ("chat", "image", "embedding", "rerank", "transcription")},
    "speech": "voices",
}
_MOST_RAM_TENTHS = 10_000  # of a GiB: more is not a small change
_MOST_BEGINNINGS = 256  # combinations of first variants that are tried: many models, each in several sizes
_IN_GENERAL = "smaller variants, or fewer models, in models.yaml"


def plan(
    config: Config,
    hardware: Hardware,
    footprints: Footprints | None = None,
    folders: Mapping[str, tuple[VariantSpec, ...]] = _NO_FOLDERS,
    here: Collection[str] | None = None,
) -> Plan | Refusal:
    """Place every model of models.yaml.

    `folders` has the existing weights folders of models and adapters (`needs.own_folders`): they are used whatever
    variants models.yaml names. `here` has the folders of variants that are on the disk: only those are planned, and
    demos for models without one, so the plan is what can be served now. None: all variants, so the plan is what is
    worth fetching. Nothing is read from disk, and nothing depends on the order of models or GPUs.
    """
    planner = _Planner(footprints or Footprints(), folders, here)
    fitted = planner.fit(config, hardware)
    if isinstance(fitted, Refusal):
        return replace(fitted, change=_Change(config, hardware, planner).smallest(fitted))
    choices, layout = fitted
    _add_replicas(choices, layout)
    engines = sorted(shared_out(layout), key=lambda one: (len(one.id), one.id))  # 10 comes after 2
    placed = {}
    for name, choice in choices.items():
        first, *replicas = [one for one in engines if model_of(one.id) == name]
        first = planner.explained(first, choice, config, hardware)
        same = (replace(one, state=first.state, variant=first.variant) for one in replicas)
        placed[name] = replace(first, replicas=tuple(same))
    models = tuple(placed.get(name) or planner.unplanned(spec) for name, spec in config.models.items())
    found = Plan(hardware, models, ())
    return replace(found, devices=uses(layout.devices, found.engines))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A model and what serves it: `needs` are those of a variant, or of its demo."""

    spec: ModelSpec
    needs: tuple[Need, ...]
    better: tuple[tuple[Need, ...], ...] = ()
    """Needs of better variants that fit this machine, the best first."""
    offered: tuple[tuple[Need, ...], ...] = ()
    """Needs of all variants, the best first; empty for those that cannot run on such a machine."""
    is_demo: bool = False
    others: tuple["_Choice", ...] = ()
    """The smallest variants over other numbers of GPUs: they may fit beside other models where this one does not."""


_Fitted: TypeAlias = tuple[Mapping[str, _Choice], Layout]


@dataclass(frozen=True, slots=True)
class _Planner:
    footprints: Footprints
    folders: Mapping[str, tuple[VariantSpec, ...]]
    here: Collection[str] | None

    def fit(self, config: Config, hardware: Hardware) -> _Fitted | Refusal:
        """Choose a variant for each model, and lay them out."""
        devices = devices_of(hardware)
        choices: dict[str, _Choice] = {}
        for spec in sorted(config.models.values(), key=_rank):
            choice = self._choice(spec, devices, self._adapters_bytes(config, spec))
            if isinstance(choice, Refusal):
                return choice
            if choice is not None:
                choices[spec.id] = choice
        return _fit(choices, devices, hardware.prefer)

    def explained(self, one: Placed, choice: _Choice, config: Config, hardware: Hardware) -> Placed:
        """Add why a model is where it is and, if its demo answers, which change would replace that."""
        devices = devices_of(hardware)
        if not choice.is_demo:
            own = one.id in self.folders
            return replace(one, why=report.why_placed(one, choice.offered, devices, own=own))
        alone = replace(config, models={one.id: choice.spec.model_copy(update={"demo": None})})
        why = report.why_demo(one, choice.spec, choice.offered, devices, _Change(alone, hardware, self).of_memory)
        return replace(one, state="demo", variant=None, why=why)

    def unplanned(self, spec: ModelSpec) -> Placed:
        why = report.why_unplanned(spec, own=spec.id in self.folders, absent=self.here is not None)
        return Placed(spec.id, "unplanned", why)

    def _adapters_bytes(self, config: Config, spec: ModelSpec) -> int:
        adapters = (self.folders.get(adapter.id, ()) for adapter in config.adapters_of(spec.id))
        return sum(int(one.weights_gib * GIB) for folder in adapters for one in folder)

    def _choice(self, spec: ModelSpec, devices: Sequence[Device], adapters: int) -> _Choice | Refusal | None:
        """Begin with the smallest variant that fits alone; None if there is nothing to plan with."""
        offered = tuple(
            tuple(replace(need, adapters_bytes=adapters) for need in needs_of(spec, variant, devices, self.footprints))
            for variant in self._variants(spec)
        )
        alone = [(needs, pack({spec.id: needs}, devices)) for needs in offered if needs]
        placed = [(needs, layout.placed[spec.id]) for needs, layout in alone if layout is not None]
        if placed:
            fitting = tuple(needs for needs, _ in placed)
            sizes = [one.device_bytes * max(1, len(one.gpus)) for _, one in placed]
            spread = [len(one.gpus) for _, one in placed]
            by_size = sorted(range(len(fitting)), key=lambda at: (sizes[at], -at))
            begun = {spread[at]: _Choice(spec, fitting[at], fitting[:at], offered) for at in reversed(by_size)}
            smallest = begun.pop(spread[by_size[0]])
            return replace(smallest, others=tuple(other for gpus, other in begun.items() if gpus))
        if spec.demo is not None and spec.id not in self.folders:
            return _Choice(spec, (demo_need(spec, devices),), offered=offered, is_demo=True)
        return report.lack_alone(spec.id, offered, devices) if offered else None

    def _variants(self, spec: ModelSpec) -> tuple[VariantSpec, ...]:
        """Return what a model may be served with, best first. Variants of voices tell the size of their folder."""
        if spec.id in self.folders:
            return self.folders[spec.id]
        if self.here is None or isinstance(spec, SpeechModelSpec):
            return spec.variants
        return tuple(variant for variant in spec.variants if variant.id in self.here)


def _rank(spec: ModelSpec) -> tuple[bool, bool, bool, bool, str]:
    """Return the order in which models stay loaded: voices, chat, chat with vision, images, auxiliary ones."""
    return (
        isinstance(spec, AuxiliaryModelSpec),
        isinstance(spec, ImageModelSpec),
        isinstance(spec, ChatModelSpec),
        "vision" in spec.capabilities,
        spec.id,
    )


def _fit(choices: Mapping[str, _Choice], devices: Sequence[Device], prefer: Prefer) -> _Fitted | Refusal:
    found = _preferred(choices, devices, prefer)
    if found is not None:
        return found
    specs = [choice.spec for choice in choices.values()]
    # Not even in turns: the last model that has a demo is served with that
    for spec in reversed(specs):
        if not choices[spec.id].is_demo and spec.demo is not None:
            demo = replace(choices[spec.id], needs=(demo_need(spec, devices),), better=(), is_demo=True)
            return _fit({**choices, spec.id: demo}, devices, prefer)
    if len(specs) == 1:
        return report.lack_alone(specs[0].id, [choices[specs[0].id].needs], devices)
    return report.lack_together([(choice.spec, choice.needs) for choice in choices.values()], devices)


def _preferred(choices: Mapping[str, _Choice], devices: Sequence[Device], prefer: Prefer) -> _Fitted | None:
    """Return the preferred fitting choice, with as few models that take turns as possible."""
    others = {name: choice for name, choice in choices.items() if not isinstance(choice.spec, AuxiliaryModelSpec)}
    fitting = _fitting(choices, devices)
    if prefer == "quality":
        found = list(fitting)
        best = _variants_of(found[-1]) if found else None
        return next((each for each in found if _variants_of(each) == best), None)
    first = next(fitting, None)
    alone = _preferred(others, devices, prefer) if first and others != choices else None
    if first is None or alone is None:
        return first
    return next((each for each in (first, *fitting) if _keeps(each, alone)), first)


def _fitting(choices: Mapping[str, _Choice], devices: Sequence[Device]) -> Iterator[_Fitted]:
    """Yield what fits, with the fewest models that take turns first.

    Models for embeddings, reranking and transcription never take turns only with each other: one question may need
    an embedding and a reranking model.
    """
    specs = [choice.spec for choice in choices.values()]
    movable = [spec for spec in specs if not (isinstance(spec, SpeechModelSpec) or spec.keep_loaded)]
    auxiliary = sum(isinstance(spec, AuxiliaryModelSpec) for spec in movable)
    for count in range(len(movable) + 1):
        if count and count <= auxiliary < len(movable):
            continue
        shared = [spec.id for spec in movable[len(movable) - count :]]
        beginnings = product(*((choice, *choice.others) for choice in choices.values()))
        for begun in islice(beginnings, _MOST_BEGINNINGS):
            chosen = dict(zip(choices, begun, strict=True))
            layout = _layout(chosen, devices, shared)
            if layout is not None:
                yield _moved_up(chosen, layout, shared)
                break


def _keeps(fitted: _Fitted, alone: _Fitted) -> bool:
    """Whether chat models have as good variants as in `alone`, and stay loaded if they do there."""
    (choices, layout), (before, other) = fitted, alone
    chats = [name for name, choice in before.items() if isinstance(choice.spec, ChatModelSpec)]
    return all(
        len(choices[name].better) <= len(before[name].better) and layout.placed[name].state == other.placed[name].state
        for name in chats
    )


def _add_replicas(choices: Mapping[str, _Choice], layout: Layout) -> None:
    """Add engines to chat models that stay loaded, one for each model in turn, as long as there is room."""
    firsts = shared_out(layout)
    number = 0
    while firsts:
        number += 1
        firsts = [
            first
            for first in firsts
            if number <= _most_replicas(choices[first.id], first)
            and add_replica(layout, first, replica_id(first.id, number + 1))
        ]


def _most_replicas(choice: _Choice, first: Placed) -> int:
    """Return how many replicas a model may have; by default as many as GPUs have room for."""
    spec = choice.spec
    if not isinstance(spec, ChatModelSpec) or spec.unload_after_seconds is not None or first.state == "swapped":
        return 0
    if spec.replicas is None and (choice.is_demo or not first.gpus):
        return 0
    return (spec.replicas or 64) - 1


def _variants_of(fitted: _Fitted) -> dict[str, str]:
    return {name: choice.needs[0].variant.id for name, choice in fitted[0].items()}


def _moved_up(choices: Mapping[str, _Choice], layout: Layout, shared: Collection[str]) -> _Fitted:
    """Give each model in turn the next better variant that fits beside the others, until none does; chat first."""
    chats = [name for name, choice in choices.items() if isinstance(choice.spec, ChatModelSpec)]
    for names in (chats, [name for name in choices if name not in chats]):
        before = None
        while before is not choices:
            before = choices
            for name in names:
                choices, layout = _one_better(choices, layout, shared, name)
    return choices, layout


def _one_better(choices: Mapping[str, _Choice], layout: Layout, shared: Collection[str], name: str) -> _Fitted:
    choice = choices[name]
    for at in reversed(range(len(choice.better))):
        tried = {**choices, name: replace(choice, needs=choice.better[at], better=choice.better[:at])}
        found = _layout(tried, layout.devices, shared)
        if found is not None:
            return tried, found
    return choices, layout


def _layout(choices: Mapping[str, _Choice], devices: Sequence[Device], shared: Collection[str]) -> Layout | None:
    return pack({name: choice.needs for name, choice in choices.items()}, devices, shared)


@dataclass(frozen=True, slots=True)
class _Change:
    """Looks for the smallest change of `config` or `hardware` with which all models fit, by planning each change."""

    config: Config
    hardware: Hardware
    planner: _Planner

    def smallest(self, lack: Refusal) -> str:
        """Return the smallest change as a sentence; general advice if none was found."""
        free = self._without_keep_loaded()
        if free:
            lines = f"the line{'s' if len(free) > 1 else ''} `keep_loaded: true`"
            return f"take {lines} of {', '.join(free)} out of models.yaml, so that models take turns"
        return self.of_memory(lack) or ", or ".join(self._without_one(lack)) or _IN_GENERAL

    def of_memory(self, lack: Refusal) -> str:
        """Return a change that takes less memory or adds some, else that of `lack`, which may be empty."""
        specs = [self.config.models[name] for name in lack.models]
        changes = [*self._shorter(specs), *self._other_share(specs), *self._others_ended(on_gpus=lack.on_gpus)]
        return ", or ".join(changes or self._more_memory(lack)) or lack.change

    def _fits(self, config: Config, hardware: Hardware) -> bool:
        return not isinstance(self.planner.fit(config, hardware), Refusal)

    def _fits_with(self, *specs: ModelSpec) -> bool:
        models = {**self.config.models, **{spec.id: spec for spec in specs}}
        return self._fits(replace(self.config, models=models), self.hardware)

    def _fits_on(self, **changed: Any) -> bool:
        return self._fits(self.config, replace(self.hardware, **changed))

    def _without_keep_loaded(self) -> list[str]:
        """Return the fewest models to take `keep_loaded` from so that all fit; empty if that does not help."""
        movable = [spec for spec in self.config.models.values() if not isinstance(spec, SpeechModelSpec)]
        freed = {spec.id: spec.model_copy(update={"keep_loaded": False}) for spec in movable}
        if not self._fits_with(*freed.values()):
            return []
        for name in sorted(freed):
            fewer = {other: spec for other, spec in freed.items() if other != name}
            if self._fits_with(*fewer.values()):
                freed = fewer
        return list(freed)

    def _shorter(self, specs: Iterable[ModelSpec]) -> Iterator[str]:
        """Yield the longest context of one model with which all fit."""
        chats = [spec for spec in specs if isinstance(spec, ChatModelSpec) and spec.id not in self.planner.folders]
        for spec in chats:
            lengths = range(report.SHORTEST_CONTEXT, _context(spec), CONTEXT_STEP)

            def too_long(length: int, spec: ChatModelSpec = spec) -> bool:
                return not self._fits_with(_with_engine(spec, context_length=length))

            fitting = bisect_left(lengths, x=True, key=too_long)
            if fitting:
                whose = "" if len(chats) == 1 else f" for {spec.id}"
                yield f"context_length: {lengths[fitting - 1]} in place of {_context(spec)}{whose}"
                return

    def _other_share(self, specs: Iterable[ModelSpec]) -> Iterator[str]:
        """Yield the share with which all fit, nearest to that in models.yaml."""
        for spec in specs:
            said = explicit(spec, "gpu_memory_utilization")
            shares = (percent / 100 for percent in range(96))
            for share in sorted(shares, key=lambda one: abs(one - said)) if isinstance(said, float) else ():
                assert isinstance(spec, ChatModelSpec)  # noqa: S101  # no other has a share
                if self._fits_with(_with_engine(spec, gpu_memory_utilization=share)):
                    yield f"gpu_memory_utilization: {share:.2f} for {spec.id}"
                    return

    def _others_ended(self, *, on_gpus: bool) -> Iterator[str]:
        machine = self.hardware
        if on_gpus:
            taken = sum(gpu.foreign_bytes for gpu in machine.gpus)
            fits = self._fits_on(gpus=tuple(replace(gpu, free_bytes=gpu.total_bytes) for gpu in machine.gpus))
        else:
            taken = machine.ram_bytes - machine.ram_available_bytes - machine.ram_ours_bytes
            fits = machine.ram_for_models_bytes is None and self._fits_on(ram_available_bytes=machine.ram_bytes)
        if fits:
            yield f"end the other processes there, which hold {report.gib(taken)}"

    def _more_memory(self, lack: Refusal) -> Iterator[str]:
        if lack.on_gpus:
            yield from self._larger_gpus(lack.split)
            return
        tenths = range(_MOST_RAM_TENTHS)
        least = bisect_left(tenths, x=True, key=self._fits_with_ram)
        if least < len(tenths):
            yield f"{tenths[least] / 10:.1f} GiB more RAM"

    def _fits_with_ram(self, tenths: int) -> bool:
        machine, more = self.hardware, int(tenths / 10 * GIB)
        if machine.ram_for_models_bytes is not None:
            return self._fits_on(ram_for_models_bytes=machine.ram_for_models_bytes + more)
        return self._fits_on(ram_bytes=machine.ram_bytes + more, ram_available_bytes=machine.ram_available_bytes + more)

    def _larger_gpus(self, count: int) -> Iterator[str]:
        """Yield the size that `count` GPUs must have, in place of the largest ones."""
        gpus = sorted(self.hardware.gpus, key=lambda gpu: (-gpu.total_bytes, gpu.index))
        for size in report.GPU_SIZES_GIB:
            larger = (
                replace(gpu, total_bytes=size * GIB, free_bytes=gpu.free_bytes + size * GIB - gpu.total_bytes)
                for gpu in gpus[:count]
            )
            if gpus and size * GIB >= gpus[0].total_bytes and self._fits_on(gpus=(*larger, *gpus[count:])):
                yield f"{f'{count} GPUs' if count > 1 else 'a GPU'} of {size} GiB"
                return

    def _without_one(self, lack: Refusal) -> Iterator[str]:
        """Yield what helps if memory does not: a demo for one of the models, or one model less."""
        specs = [self.config.models[name] for name in lack.models]
        for spec in reversed(specs):
            demo = spec.model_copy(update={"demo": DEMO_OF_TASK[spec.task]})
            if spec.demo is None and spec.id not in self.planner.folders and self._fits_with(demo):
                yield f"give {spec.id} a `demo` in models.yaml"
                break
        for spec in reversed(specs):
            rest = {name: other for name, other in self.config.models.items() if name != spec.id}
            if rest and self._fits(replace(self.config, models=rest), self.hardware):
                yield f"take {spec.id} out of models.yaml"
                return


def _context(spec: ChatModelSpec) -> int:
    lengths = [variant.context_length or DEFAULT_CONTEXT for variant in spec.variants]
    return spec.engine.context_length or max(lengths, default=DEFAULT_CONTEXT)


def _with_engine(spec: ChatModelSpec, **values: Any) -> ChatModelSpec:
    return spec.model_copy(update={"engine": spec.engine.model_copy(update=values)})
