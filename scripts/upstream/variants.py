"""Compares the variants of models.yaml with what the model hub says of their repositories; scripts/refresh-variants.

Of each repository the list of files and the small descriptions are fetched, never the weights. What the file can be
given is printed as a difference, or written: the commit (`revision`), the size of the weights, that of the download.
What a person has to look at is a line on standard error and exit code 1: another licence, a gate, another KV cache.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.config import load_config
from engine.config.models import VariantSpec
from engine.errors import EngineError
from engine.placement.hardware import GIB
from engine.placement.needs import ContextNeeds
from engine.weights.download import Pull, Wanted, prepared
from engine.weights.manifest import silent

MODELS = Path(__file__).parents[2] / "models.yaml"
# Of what is stated: below it nothing is changed.
_TOLERANCE = 0.02


@dataclass(frozen=True)
class Found:
    """What the hub says of one variant. Sizes are in GiB; `needs` only for chat models."""

    revision: str
    weights_gib: float
    download_gib: float
    licence: str | None
    is_gated: bool
    needs: ContextNeeds | None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/refresh-variants", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("variants", nargs="*", metavar="VARIANT", help="folders of variants; default: all")
    parser.add_argument("--write", action="store_true", help="change the file")
    parser.add_argument("--models", type=Path, default=MODELS, help="another models.yaml")
    parser.add_argument("--endpoint", help="another hub, like a mirror; default: HF_ENDPOINT")
    given = parser.parse_args(arguments)
    before = text = given.models.read_text(encoding="utf-8")
    variants = [variant for spec in load_config(given.models).models.values() for variant in spec.variants]
    wanted = [each for each in variants if each.repository and (not given.variants or each.id in given.variants)]
    problems = [f"{name}: no such variant with a repository" for name in set(given.variants) - {v.id for v in wanted}]
    for variant in wanted:
        try:
            found = look_up(variant, given.endpoint)
        except EngineError as error:
            problems.append(f"{variant.id}: {error.message}")
            continue
        problems += [f"{variant.id}: {problem}" for problem in problems_of(variant, found)]
        text = changed(text, variant, found)
    name = given.models.name
    old, new = before.splitlines(keepends=True), text.splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(old, new, name, f"{name} (hub)"))
    if given.write:
        given.models.write_text(text, encoding="utf-8")
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


def look_up(variant: VariantSpec, endpoint: str | None = None) -> Found:
    """Ask the hub. Raises `EngineError`."""
    from huggingface_hub import HfApi

    assert variant.repository is not None  # noqa: S101  # only such are looked up
    with tempfile.TemporaryDirectory() as folder:
        wanted = Wanted(variant.repository, "looked-up", endpoint=endpoint)
        with prepared(Path(folder), wanted, silent) as pull:
            assert isinstance(pull, Pull)  # noqa: S101  # nothing is in a new folder
            weights = sum(file.size_bytes for file in pull.files if file.path.endswith(".safetensors"))
            download = sum(file.size_bytes for file in pull.files)
            hub = HfApi(endpoint=endpoint, library_name="hearth")
            info = hub.model_info(variant.repository, revision=pull.listing.revision)
            return Found(
                revision=pull.listing.revision,
                weights_gib=weights / GIB,
                download_gib=download / GIB,
                licence=getattr(info.card_data, "license", None) if info.card_data else None,
                is_gated=bool(info.gated),
                needs=ContextNeeds.read(pull.model),
            )


def problems_of(variant: VariantSpec, found: Found) -> Iterator[str]:
    """Yield what a person has to decide."""
    said = re.sub(r"[^a-z0-9]", "", variant.licence.lower())
    if found.is_gated:
        yield "its repository is gated: who pulls it has to accept terms first"
    if found.licence is None:
        yield "its model card names no licence"
    elif re.sub(r"[^a-z0-9]", "", found.licence.lower()) != said:
        yield f"its model card says licence {found.licence!r}, models.yaml {variant.licence!r}"
    needs = found.needs
    if needs is None:
        return
    pairs = (
        ("kv_kib_per_token", variant.kv_kib_per_token, needs.token_bytes / 1024),
        ("kv_heads", variant.kv_heads or needs.kv_heads, needs.kv_heads),
        ("state_mib_per_chat", variant.state_mib_per_chat, needs.state_bytes / 2**20),
        ("max_context_length", variant.max_context_length or needs.positions, needs.positions),
        ("sliding_window", variant.sliding_window or 0, needs.window or 0),
    )
    for key, here, there in pairs:
        if abs(here - there) > _TOLERANCE * max(here, there):
            yield f"config.json comes to {key}: {there:g}, models.yaml says {here:g}"


def changed(text: str, variant: VariantSpec, found: Found) -> str:
    """Return models.yaml with what is known now of one variant; comments and order stay."""
    start = re.search(rf"^ +- folder: {re.escape(variant.id)}\n", text, re.MULTILINE)
    if start is None:  # written in another style: left to a person
        return text
    rest = text[start.end() :]
    end = re.search(r"^ {0,6}\S|^ +- ", rest, re.MULTILINE)
    block, after = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    block = _with(block, "revision", found.revision, "repository")
    if found.needs is not None and abs(found.weights_gib - variant.weights_gib) > _TOLERANCE * variant.weights_gib:
        block = _with(block, "weights_gib", f"{found.weights_gib:.1f}", "licence")
    stated = variant.download_gib or variant.weights_gib
    if abs(found.download_gib - stated) > _TOLERANCE * stated and found.needs is None:
        block = _with(block, "download_gib", f"{found.download_gib:.1f}", "weights_gib")
    return text[: start.end()] + block + after


def _with(block: str, key: str, value: str, behind: str) -> str:
    """Set a key of a variant's block, in the line after another key where it is new."""
    if re.search(rf"^ +{key}:", block, re.MULTILINE):
        return re.sub(rf"^( +{key}: *)[^\s#]+", rf"\g<1>{value}", block, count=1, flags=re.MULTILINE)
    return re.sub(rf"^( +){behind}:.*\n", rf"\g<0>\g<1>{key}: {value}\n", block, count=1, flags=re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
