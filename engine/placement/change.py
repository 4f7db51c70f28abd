"""Finds the smallest change after which all models fit: each is tried with a whole plan before it is offered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from engine.config import ChatModelSpec
from engine.placement.hardware import GIB
from engine.placement.needs import DEFAULT_CONTEXT, told
from engine.placement.refusal import CONTEXT_STEP, GPU_SIZES_GIB, SHORTEST_CONTEXT, gib

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from engine.config import Config, ModelSpec
    from engine.config.models import VariantSpec
    from engine.placement.hardware import Gpu, Hardware
    from engine.placement.types import Lack

# The word of the variant and the demo that answer for a task.
_DEMO_OF_TASK = {"chat": "chat", "image": "image", "speech": "voices"}


@dataclass(frozen=True, slots=True)
class Change:
    """Looks for changes of `config` or `hardware` with which `fits`; `folders` are those of the operator's own."""

    config: Config
    hardware: Hardware
    folders: Mapping[str, tuple[VariantSpec, ...]]
    fits: Callable[[Config, Hardware], bool]

    def smallest(self, lack: Lack) -> str:
        """Say what would do; in general words only where nothing was found that would."""
        specs = [self.config.models[name] for name in lack.models]
        free = self._without_keep_loaded()
        if free:
            lines = f"the line{'s' if len(free) > 1 else ''} `keep_loaded: true`"
            return f"take {lines} of {', '.join(free)} out of models.yaml, so that models take turns"
        changes = [*self._shorter(specs), *self._other_share(specs), *self._others_ended(on_gpus=lack.on_gpus)]
        changes = changes or list(self._more_memory(lack)) or list(self._without_one(specs))
        return ", or ".join(changes) or "smaller variants, or fewer models, in models.yaml"

    def _with(self, *specs: ModelSpec) -> Config:
        models = {**self.config.models, **{spec.id: spec for spec in specs}}
        return replace(self.config, models=MappingProxyType(models))

    def _fits_with(self, *specs: ModelSpec) -> bool:
        return self.fits(self._with(*specs), self.hardware)

    def _without_keep_loaded(self) -> list[str]:
        """Return as few models as possible that need not stay loaded."""
        freed = {
            spec.id: spec.model_copy(update={"keep_loaded": False})
            for spec in self.config.models.values()
            if getattr(spec, "keep_loaded", False)
        }
        if not freed or not self._fits_with(*freed.values()):
            return []
        for name in sorted(freed):
            fewer = {other: spec for other, spec in freed.items() if other != name}
            if self._fits_with(*fewer.values()):
                freed = fewer
        return list(freed)

    def _shorter(self, specs: Iterable[ModelSpec]) -> Iterator[str]:
        """Yield the longest context of one model with which all fit."""
        chats = [spec for spec in specs if isinstance(spec, ChatModelSpec) and spec.id not in self.folders]
        for spec in sorted(chats, key=lambda spec: (-_context(spec), spec.id)):
            longest = (_context(spec) - 1) // CONTEXT_STEP
            steps = _most(
                SHORTEST_CONTEXT // CONTEXT_STEP,
                longest,
                lambda steps, spec=spec: self._fits_with(_told(spec, context_length=steps * CONTEXT_STEP)),  # type: ignore[misc]
            )
            if steps is not None:
                whose = "" if len(chats) == 1 else f" for {spec.id}"
                yield f"context_length: {steps * CONTEXT_STEP} in place of {_context(spec)}{whose}"
                return

    def _other_share(self, specs: Iterable[ModelSpec]) -> Iterator[str]:
        for spec in specs:
            share = told(spec, "gpu_memory_utilization") if isinstance(spec, ChatModelSpec) else None
            if not isinstance(spec, ChatModelSpec) or not isinstance(share, float):
                continue
            for percent in range(int(share * 100) + 1, 96):
                if self._fits_with(_told(spec, gpu_memory_utilization=percent / 100)):
                    yield f"gpu_memory_utilization: {percent / 100:.2f} for {spec.id}"
                    return

    def _others_ended(self, *, on_gpus: bool) -> Iterator[str]:
        machine = self.hardware
        if on_gpus:
            held = sum(gpu.foreign_bytes for gpu in machine.gpus)
            alone = replace(machine, gpus=tuple(replace(gpu, free_bytes=gpu.total_bytes) for gpu in machine.gpus))
        else:
            held = machine.ram_bytes - machine.ram_available_bytes - machine.ram_ours_bytes
            alone = replace(machine, ram_available_bytes=machine.ram_bytes - machine.ram_ours_bytes)
            held = 0 if machine.ram_for_models_bytes is not None else held
        if held > 0 and self.fits(self.config, alone):
            yield f"end the other processes there, which hold {gib(held)}"

    def _more_memory(self, lack: Lack) -> Iterator[str]:
        if lack.on_gpus:
            yield from self._larger_gpus(lack.split)
            return
        tenths = range(1, 10 * 1024)
        first = next((size for size in (2**power for power in range(14)) if self._fits_with_ram(size / 10)), None)
        if first is not None:
            more = next(size for size in tenths if size > first // 2 and self._fits_with_ram(size / 10))
            yield f"{more / 10:.1f} GiB more RAM"

    def _fits_with_ram(self, more_gib: float) -> bool:
        machine, more = self.hardware, int(more_gib * GIB)
        if machine.ram_for_models_bytes is not None:
            larger = replace(machine, ram_for_models_bytes=machine.ram_for_models_bytes + more)
        else:
            larger = replace(
                machine,
                ram_bytes=machine.ram_bytes + more,
                ram_available_bytes=machine.ram_available_bytes + more,
            )
        return self.fits(self.config, larger)

    def _larger_gpus(self, count: int) -> Iterator[str]:
        """Yield the size that as many GPUs must have, in place of the largest that there are."""
        gpus = sorted(self.hardware.gpus, key=lambda gpu: (-gpu.total_bytes, gpu.index))
        for size in GPU_SIZES_GIB if gpus else ():
            if size * GIB <= gpus[0].total_bytes:
                continue
            larger = [_of_size(gpu, size * GIB) for gpu in gpus[:count]]
            if self.fits(self.config, replace(self.hardware, gpus=(*larger, *gpus[count:]))):
                yield f"{f'{count} GPUs' if count > 1 else 'a GPU'} of {size} GiB"
                return

    def _without_one(self, specs: Iterable[ModelSpec]) -> Iterator[str]:
        """Yield what helps where memory does not: a demo for one of the models, or one model less."""
        for spec in reversed(list(specs)):
            if spec.demo is None and spec.id not in self.folders and self._fits_with(_with_demo(spec)):
                yield f"give {spec.id} a `demo` in models.yaml"
                break
        for spec in reversed(list(specs)):
            rest = {name: other for name, other in self.config.models.items() if name != spec.id}
            if rest and self.fits(replace(self.config, models=MappingProxyType(rest)), self.hardware):
                yield f"take {spec.id} out of models.yaml"
                return


def _most(least: int, most: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest number that fits, of which all smaller ones fit too; None where not even the least does."""
    if most < least or not fits(least):
        return None
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(middle) else (least, middle - 1)
    return least


def _context(spec: ChatModelSpec) -> int:
    lengths = [variant.context_length or DEFAULT_CONTEXT for variant in spec.variants]
    return spec.engine.context_length or max(lengths, default=DEFAULT_CONTEXT)


def _told(spec: ChatModelSpec, **said: Any) -> ChatModelSpec:
    return spec.model_copy(update={"engine": spec.engine.model_copy(update=said)})


def _with_demo(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"demo": _DEMO_OF_TASK[spec.task]})


def _of_size(gpu: Gpu, total_bytes: int) -> Gpu:
    return replace(gpu, total_bytes=total_bytes, free_bytes=gpu.free_bytes + total_bytes - gpu.total_bytes)
