"""`hearth doctor` on weights: what each model is served with, whether it is whole, what is half fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.errors import EngineError
from engine.hub import is_complete, read_manifest
from engine.hub.shelf import shelved
from engine.hub.verify import verify
from engine.images.folder import check_pipeline_folder
from engine.placement_types import Plan
from engine.voices.catalogue import Voices
from engine.weights import check_folder
from server.cli_doctor_findings import Finding
from server.command_name import HEARTH
from server.weights_progress import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine.config import ModelSpec
    from server.cli_doctor_findings import Case

_SHOWN_WARNINGS = 5


def weights(case: Case, *, full: bool) -> Iterator[Finding]:
    """Look at what every model is served with, then at the folders. `full` reads and hashes every byte of those."""
    if case.config is None:
        yield Finding("weights", "skipped", "what models are served with is not known: models.yaml cannot be read")
    else:
        voices = Voices(case.config, case.settings.weights_dir)
        for spec in case.config.models.values():
            if isinstance(spec, SpeechModelSpec):
                yield from _voices(voices, spec.id)
            else:
                yield _model(case, spec)
        yield from _missing_room(case)
    yield from _folders(case.settings.weights_dir, full=full)


def _model(case: Case, spec: ChatModelSpec | ImageModelSpec) -> Finding:
    own = case.settings.weights_dir / spec.weights
    if own.is_dir():
        return _own(spec, own)
    placed = case.plan.of(spec.id) if isinstance(case.plan, Plan) else None
    variant = None if placed is None else placed.variant
    if variant is not None and is_complete(case.settings.weights_dir / variant.id):
        return Finding("weights", "ok", f"{spec.id}: {variant.id} is complete")
    if spec.demo is None:
        fetched = variant is not None and variant.repository is not None
        remedy = f"{HEARTH} weights pull {spec.id}" if fetched else f"put a model into {own}"
        remedy += f"; or give it its demo back, `demo: {_demo(spec)}` in models.yaml"
        return Finding("weights", "problem", f"{spec.id}: no weights are here, and no demo is named", remedy)
    if variant is None or variant.repository is None:
        return Finding(
            "weights", "ok", f"{spec.id}: the demo answers; nothing better is planned ({HEARTH} plan says why)"
        )
    return Finding(
        "weights",
        "warning",
        f"{spec.id}: the demo answers, since {variant.id} is not here",
        f"{HEARTH} weights pull {spec.id}",
    )


def _demo(spec: ChatModelSpec | ImageModelSpec) -> str:
    if isinstance(spec, ImageModelSpec):
        return "image"
    return "vision" if "vision" in spec.capabilities else "chat"


def _own(spec: ModelSpec, folder: Path) -> Finding:
    try:
        if isinstance(spec, ImageModelSpec):
            check_pipeline_folder(folder)
        else:
            check_folder(folder)
    except EngineError as error:
        return Finding("weights", "problem", f"{spec.id}: {error.message}")
    return Finding("weights", "ok", f"{spec.id}: your folder {spec.weights} is there, and headers fit sizes")


def _voices(voices: Voices, model: str) -> Iterator[Finding]:
    problem = voices.problem(model)
    if problem is not None:
        yield Finding("voices", "problem", f"{model}: {problem.message}")
        return
    warnings = voices.warnings(model)
    for warning in warnings[:_SHOWN_WARNINGS]:
        yield Finding("voices", "warning", f"{model}: {warning.message}")
    if len(warnings) > _SHOWN_WARNINGS:
        more = len(warnings) - _SHOWN_WARNINGS
        yield Finding("voices", "warning", f"{model}: {more} more remarks on voices", f"{HEARTH} voices shows all")
    able = [voice for voice in voices.of(model) if voice.available]
    if not able:
        yield Finding("voices", "problem", f"{model}: no voice can speak", f"{HEARTH} voices says why; docs/voices.md")
        return
    demos = sum(voice.demo for voice in able)
    yield Finding("voices", "ok", f"{model}: {len(able)} voices can speak, {demos} of them demos")


def _missing_room(case: Case) -> Iterator[Finding]:
    """Whether what the plan wants and is not here would fit on the disk."""
    if not isinstance(case.plan, Plan) or case.hardware.disk_free_bytes is None:
        return
    absent = [
        one.variant
        for one in case.plan.models
        if one.variant is not None
        and one.variant.repository is not None
        and not is_complete(case.settings.weights_dir / one.variant.id)
    ]
    needed = int(sum(variant.weights_gib for variant in absent) * 2**30)
    if needed > case.hardware.disk_free_bytes:
        yield Finding(
            "weights",
            "warning",
            f"what the plan wants ({', '.join(variant.id for variant in absent)}) takes {size_text(needed)}, and "
            f"{size_text(case.hardware.disk_free_bytes)} are free in {case.settings.weights_dir}",
            "make room, or set HEARTH_WEIGHTS_DIR to another disk",
        )


def _folders(weights_dir: Path, *, full: bool) -> Iterator[Finding]:
    try:
        found = shelved(weights_dir) if weights_dir.is_dir() else []
    except EngineError as error:
        yield Finding("weights", "problem", error.message)
        return
    for one in found:
        if one.state == "damaged":
            yield Finding(
                "weights",
                "problem",
                f"{one.folder} is not whole: files are missing or have another size",
                f"{HEARTH} weights pull {one.folder} --again",
            )
        elif one.state == "partial":
            yield Finding(
                "weights",
                "warning",
                f"{one.folder} is half fetched ({size_text(one.size_bytes)})",
                f"{HEARTH} weights pull {one.folder} goes on; {HEARTH} weights remove {one.folder} frees the room",
            )
        elif one.state == "complete" and full:
            yield _hashed(weights_dir / one.folder, one.folder)


def _hashed(folder: Path, name: str) -> Finding:
    try:
        wrong = verify(folder)
    except EngineError as error:
        wrong = [error.message]
    if wrong:
        return Finding("weights", "problem", f"{name}: {'; '.join(wrong)}", f"{HEARTH} weights pull {name} --again")
    manifest = read_manifest(folder)
    count = len(manifest.files) if manifest is not None else 0
    return Finding("weights", "ok", f"{name}: all {count} files have the content that was fetched (SHA-256)")
