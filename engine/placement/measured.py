"""What models really took when they were loaded, kept in one small JSON file and used by the next plan.

A footprint is bytes on one device without the KV cache, whose size is given and not found out.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from engine.config.models import VariantSpec
from engine.files import write_atomically

FILE_NAME = "footprints.json"

_log = logging.getLogger("hearth.footprints")

# Beyond that something else took or freed memory meanwhile; such a measurement would spoil later plans.
_PLAUSIBLE = (0.4, 2.5)


@dataclass(frozen=True, slots=True)
class Footprints:
    """Measured bytes by variant, split and device. Immutable: `with_` makes the next one."""

    measured: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, data_dir: Path) -> Footprints:
        """Read what is kept there; nothing, when there is no file or none that can be read."""
        try:
            kept = json.loads((data_dir / FILE_NAME).read_text(encoding="utf-8"))["footprints"]
            measured = {str(key): int(entry["bytes"]) for key, entry in kept.items() if int(entry["bytes"]) > 0}
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("%s cannot be read (%s): plans go by the sizes stated.", data_dir / FILE_NAME, error)
            return cls()
        return cls(MappingProxyType(measured))

    def of(self, variant: VariantSpec, split: int, device: str) -> int | None:
        """Return bytes on one device of that name when the variant is split over `split` of them; None: not known."""
        return self.measured.get(_key(variant, split, device))

    def with_(self, variant: VariantSpec, split: int, device: str, used_bytes: int) -> Footprints:
        """Add a measurement. One that cannot be true, going by the size stated, is not taken."""
        stated = (variant.resident_gib or variant.weights_gib) * 2**30 / max(1, split)
        low, high = (factor * stated for factor in _PLAUSIBLE)
        if not low <= used_bytes <= high + 2 * 2**30:
            _log.warning("%s took %d bytes, which cannot be right; not kept.", variant.id, used_bytes)
            return self
        return Footprints(MappingProxyType({**self.measured, _key(variant, split, device): used_bytes}))

    def write(self, data_dir: Path) -> None:
        """Keep them, whole or not at all. A disk that is full costs a log line."""
        now = int(time.time())
        entries = {key: {"bytes": used, "written_at": now} for key, used in sorted(self.measured.items())}
        try:
            write_atomically(data_dir / FILE_NAME, json.dumps({"footprints": entries}, indent=1) + "\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s).", data_dir / FILE_NAME, error.strerror)


def _key(variant: VariantSpec, split: int, device: str) -> str:
    # Another revision or number format is another size
    parts = (variant.id, variant.revision or "-", variant.dtype, variant.offload or "-", f"{split}x", device)
    return " | ".join(parts)
