"""LoRA adapters on a vLLM engine: checked before it starts, loaded once it has, kept in memory all of them.

One that cannot be used is refused alone: its base and the others answer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from engine.backends.vllm import processes
from engine.errors import LoadError
from engine.weights.layouts import LoraAdapter, room_for_rank

_log = logging.getLogger("hearth.vllm")


@dataclass(frozen=True, slots=True)
class Adapters:
    """Those of one engine, by the names of their models; `refused` says why others are not usable."""

    usable: Mapping[str, LoraAdapter]
    refused: dict[str, str]

    @classmethod
    def read(cls, folders: Mapping[str, Path], base: Path) -> Self:
        """Check each folder, and that it was made for the model in `base`. Blocks."""
        usable, refused = {}, {}
        for name, folder in folders.items():
            try:
                adapter = LoraAdapter.read(folder)
                adapter.check_base(base)
                usable[name] = adapter
            except LoadError as error:
                refused[name] = error.message
                _log.error("%s cannot be served: %s", name, error.message)
        return cls(usable, refused)

    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments that keep room for them."""
        if not self.usable:
            return {}
        # vLLM's CPU kernels add the last place to what is asked of the base beside an adapter: there it stays empty
        empty = int(processes.runs_on_cpu())
        return {
            "enable_lora": True,
            "max_loras": len(self.usable) + empty,
            "max_lora_rank": room_for_rank(max(one.rank for one in self.usable.values())),
            "lora_target_modules": sorted({name for one in self.usable.values() for name in one.targets}),
        }

    async def loaded(self, engine: Any) -> dict[str, Any]:
        """Load them into a started engine; return vLLM's request for each, None for one that it refuses."""
        from vllm.lora.request import LoRARequest

        found: dict[str, Any] = dict.fromkeys(self.refused)
        for number, (name, adapter) in enumerate(self.usable.items(), 1):
            request = LoRARequest(name, number, str(adapter.folder.resolve()))
            try:
                await engine.add_lora(request)
                found[name] = request
            except Exception as error:  # noqa: BLE001  # whatever vLLM does not like about its tensors
                self.refused[name] = f"vLLM does not load it: {next(iter(str(error).splitlines()), '')[:300]}"
                _log.error("%s cannot be served: %s", name, self.refused[name])
                found[name] = None
        return found
