"""Which repositories `hearth weights pull` means: the plan's variants, one by name, or a folder that is there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.config import Config, ModelSpec
from engine.config.messages import near_miss
from engine.config.models import VariantSpec
from engine.placement.hardware import imagined
from engine.placement.measured import Footprints
from engine.placement.needs import own_folders
from engine.placement.plan import plan
from engine.placement.types import Refusal
from engine.weights.download import Wanted
from engine.weights.errors import WeightsError
from engine.weights.manifest import read_manifest
from engine.weights.safety import is_there
from engine.weights.transfer import local_folders
from server.cli.options import hardware_for
from server.observability.status import ServedWith, StatusError, ask
from server.settings import Settings

_ANSWER_SECONDS = 5.0


def chosen(config: Config, settings: Settings, names: Sequence[str], gpus: str | None) -> list[Wanted]:
    """Return what to pull for these names; for none, the whole plan. Raises `EngineError`."""
    if names:
        return [_named(config, settings, name, gpus) for name in names]
    specs = [spec for spec in config.models.values() if not is_there(settings.weights_dir / spec.weights)]
    planned = _planned(config, settings, gpus, own=[spec.id for spec in config.models.values() if spec not in specs])
    return [wanted for spec in specs if (wanted := _of(planned.get(spec.id))) is not None]


def users(config: Config, folder: str) -> list[str]:
    """Return the models that a folder is for."""
    return [
        spec.id
        for spec in config.models.values()
        if folder == spec.weights
        or folder.startswith(f"{spec.weights}/")
        or folder in {variant.id for variant in spec.variants}
        or any(name.startswith(f"{folder}/") for name in (spec.weights, *(variant.id for variant in spec.variants)))
    ]


def serving(config: Config, settings: Settings, folder: str) -> list[str]:
    """Return the models that the running server serves from a folder, or may: those that it cannot tell of yet."""
    possible = users(config, folder)
    try:
        running = ask(settings.data_dir, _ANSWER_SECONDS) if possible else None
    except StatusError:
        running = None
    loaded = {} if running is None else {model.id: model.served_with for model in running.models}
    return [model for model in possible if is_served(loaded.get(model), folder)]


def is_served(served: ServedWith | None, folder: str) -> bool:
    """Whether a model that was loaded with `served` needs a folder."""
    if served is None:  # it does not answer, or waits for its turn
        return True
    if served.source == "demo":
        return False
    return f"{served.folder}/".startswith(f"{folder}/") or folder.startswith(f"{served.folder}/")


def _named(config: Config, settings: Settings, name: str, gpus: str | None) -> Wanted:
    spec = config.models.get(name)
    if spec is not None:
        return _of_model(config, settings, spec, gpus)
    variants = {variant.id: variant for spec in config.models.values() for variant in spec.variants}
    if name in variants:
        wanted = _of(variants[name])
        if wanted is None:
            raise WeightsError(f"{name} has no `repository` in models.yaml: its folder is made by hand.")
        return wanted
    known = _known(settings.weights_dir, name)
    if known is not None:
        return known
    near = near_miss(name, [*config.models, *variants])
    hint = f"did you mean {near}?" if near else f"there are {', '.join([*config.models, *variants])}."
    raise WeightsError(
        f"{name} is neither a model nor a variant of models.yaml, nor a folder that was pulled; {hint} Anything else "
        "is pulled with --repository owner/name."
    )


def _of_model(config: Config, settings: Settings, spec: ModelSpec, gpus: str | None) -> Wanted:
    others = [other for other in config.models if other != spec.id]
    wanted = _of(_planned(config, settings, gpus, own=others).get(spec.id))
    if wanted is not None:
        return wanted
    if not any(variant.repository for variant in spec.variants):
        raise WeightsError(
            f"{spec.id} has no variant with a `repository` in models.yaml. Pick one: 1. add one (docs/models-yaml.md); "
            f"2. hearth weights pull --repository owner/name --as {spec.weights}"
        )
    raise WeightsError(
        f"The plan has no variant of {spec.id} for this machine (`hearth plan` says why). Pick one: 1. plan for the "
        "machine that will serve it, like --gpus 1x24GiB; 2. name a variant: "
        f"{', '.join(variant.id for variant in spec.variants if variant.repository)}."
    )


def _planned(config: Config, settings: Settings, gpus: str | None, own: Sequence[str]) -> dict[str, VariantSpec | None]:
    """Return the plan's variants; models in `own` are planned with the folders of their own that they may have."""
    hardware = hardware_for(settings) if gpus is None else imagined(gpus)
    folders = {model: folder for model, folder in own_folders(config, settings.weights_dir).items() if model in own}
    found = plan(config, hardware, Footprints.read(settings.data_dir), folders)
    if isinstance(found, Refusal):
        raise WeightsError(f"There is no plan. {found.message}. Smallest change: {found.change}.")
    return found.chosen


def _known(weights_dir: Path, name: str) -> Wanted | None:
    """What a folder, or an unfinished pull, says it is."""
    for one in local_folders(weights_dir):
        if one.folder == name and one.repository is not None:
            manifest = read_manifest(weights_dir / name) if one.state != "partial" else None
            revision = manifest.revision if manifest else one.revision
            return Wanted(one.repository, name, revision, one.subfolder)
    return None


def _of(variant: VariantSpec | None) -> Wanted | None:
    if variant is None or variant.repository is None:
        return None
    return Wanted(variant.repository, variant.id, variant.revision)
