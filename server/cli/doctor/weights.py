"""`hearth doctor` on weights: what each model is served with, whether it is whole, what is half fetched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.config import ChatModelSpec, ImageModelSpec, SpeechModelSpec
from engine.errors import EngineError
from engine.placement.types import Plan
from engine.voices.catalogue import Voices
from engine.weights import is_complete, read_manifest
from engine.weights.manifest import verify
from engine.weights.safety import check_folder, check_pipeline_folder
from engine.weights.transfer import local_folders
from server.cli.doctor.findings import Case, Finding, ok, problem, skipped, warning
from server.cli.plan import missing_of
from server.terminal import HEARTH, size_text


def weights(case: Case) -> Iterator[Finding]:
    """Look at what every model is served with, then at the folders."""
    if case.config is None:
        yield skipped("what models are served with is not known: models.yaml cannot be read")
    else:
        for spec in case.config.models.values():
            if not isinstance(spec, SpeechModelSpec):
                yield _model(case, spec)
        yield from _missing_room(case)
    yield from _folders(case.settings.weights_dir, full=case.full)


def voices(case: Case) -> Iterator[Finding]:
    """Whether each speech model has voices that can speak."""
    if case.config is not None:
        offered = Voices(case.config, case.settings.weights_dir)
        for spec in case.config.models.values():
            if isinstance(spec, SpeechModelSpec):
                yield from _voices(offered, spec.id)


def _model(case: Case, spec: ChatModelSpec | ImageModelSpec) -> Finding:
    own = case.settings.weights_dir / spec.weights
    if own.is_dir():
        return _own(spec, own)
    placed = case.plan.of(spec.id) if isinstance(case.plan, Plan) else None
    variant = None if placed is None else placed.variant
    if variant is not None and is_complete(case.settings.weights_dir / variant.id):
        return ok(f"{spec.id}: {variant.id} is complete")
    if spec.demo is None:
        fetched = variant is not None and variant.repository is not None
        remedy = f"{HEARTH} weights pull {spec.id}" if fetched else f"put a model into {own}"
        remedy += f"; or give it its demo back, `demo: {_demo(spec)}` in models.yaml"
        return problem(f"{spec.id}: no weights are here, and no demo is named", remedy)
    if variant is None or variant.repository is None:
        return ok(f"{spec.id}: the demo answers; nothing better is planned ({HEARTH} plan says why)")
    return warning(
        f"{spec.id}: the demo answers, since {variant.id} is not here",
        f"{HEARTH} weights pull {spec.id}",
    )


def _demo(spec: ChatModelSpec | ImageModelSpec) -> str:
    if isinstance(spec, ImageModelSpec):
        return "image"
    return "vision" if "vision" in spec.capabilities else "chat"


def _own(spec: ChatModelSpec | ImageModelSpec, folder: Path) -> Finding:
    try:
        if isinstance(spec, ImageModelSpec):
            check_pipeline_folder(folder)
        else:
            check_folder(folder)
    except EngineError as error:
        return problem(f"{spec.id}: {error.message}")
    return ok(f"{spec.id}: your folder {spec.weights} is there, and headers fit sizes")


def _voices(offered: Voices, model: str) -> Iterator[Finding]:
    wrong = offered.problem(model)
    if wrong is not None:
        yield problem(f"{model}: {wrong.message}")
        return
    warnings = offered.warnings(model)
    if warnings:
        more = "" if len(warnings) == 1 else f" (and {len(warnings) - 1} more remarks on voices)"
        yield warning(f"{model}: {warnings[0].message}{more}", f"{HEARTH} voices shows all")
    able = [voice for voice in offered.of(model) if voice.available]
    if not able:
        yield problem(f"{model}: no voice can speak", f"{HEARTH} voices says why; docs/voices.md")
        return
    demos = sum(voice.demo for voice in able)
    yield ok(f"{model}: {len(able)} voices can speak, {demos} of them demos")


def _missing_room(case: Case) -> Iterator[Finding]:
    """Whether what the plan wants and is not here would fit on the disk."""
    if case.config is None or not isinstance(case.plan, Plan) or case.hardware.disk_free_bytes is None:
        return
    missing = missing_of(case.config, case.settings.weights_dir, case.plan)
    absent = [one.variant for one in missing if one.variant.repository is not None]
    needed = int(sum(variant.weights_gib for variant in absent) * 2**30)
    if needed > case.hardware.disk_free_bytes:
        yield warning(
            f"what the plan wants ({', '.join(variant.id for variant in absent)}) takes {size_text(needed)}, and "
            f"{size_text(case.hardware.disk_free_bytes)} are free in {case.settings.weights_dir}",
            "make room, or set HEARTH_WEIGHTS_DIR to another disk",
        )


def _folders(weights_dir: Path, *, full: bool) -> Iterator[Finding]:
    try:
        found = local_folders(weights_dir) if weights_dir.is_dir() else []
    except EngineError as error:
        yield problem(error.message)
        return
    for one in found:
        if one.state == "damaged":
            yield problem(
                f"{one.folder} is not whole: files are missing or have another size",
                f"{HEARTH} weights pull {one.folder} --again",
            )
        elif one.state == "partial":
            yield warning(
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
        return problem(f"{name}: {'; '.join(wrong)}", f"{HEARTH} weights pull {name} --again")
    manifest = read_manifest(folder)
    count = len(manifest.files) if manifest is not None else 0
    return ok(f"{name}: all {count} files have the content that was fetched (SHA-256)")
