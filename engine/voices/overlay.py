"""What people write about a model's voices: voices.yaml in its folder, or `service_voices:` in its card, README.md."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from engine.config.messages import Spec, add_problems, matching, plain_error
from engine.config.yaml import Document, Location, Problem, parse_document, shown
from engine.voices.files import MetadataError, ModelFolder
from engine.voices.languages import language_code
from engine.voices.readers import MAX_SPEAKERS
from engine.voices.types import Gender

FILE, CARD = "voices.yaml", "README.md"
SECTION = "service_voices"
# More than a thousand voices need. The reader takes a second for so much of the worst YAML.
LIMIT_BYTES = 128 << 10
_CARD_BYTES = 64 << 10
_LISTED_PROBLEMS = 20
ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_ID_MEANS = "1 to 64 of a-z, 0-9, `-` and `_`, beginning with a letter or digit"
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


def _line(text: str) -> str:
    text = " ".join(text.split())
    if not text or not text.isprintable():
        raise plain_error("is empty or has an invisible character: remove it")
    return text


def _language(text: str) -> str:
    code = language_code(text)
    if code is None:
        raise plain_error(f"must be the code of a language, like `am` or `en`, not {shown(text)!r}")
    return code


def _speaker(value: object) -> object:
    if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
        return value
    raise plain_error("must be the number or the name of a voice in the model, or null in a model of one voice")


def _not_too_many(entries: object) -> object:
    if isinstance(entries, list) and len(entries) > MAX_SPEAKERS:
        raise plain_error(f"lists {len(entries)} voices, and one model may have {MAX_SPEAKERS}: leave some out")
    return entries


Line = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_line)]
Language = Annotated[str, Field(max_length=64), AfterValidator(_language)]


class VoiceEntry(Spec):
    speaker: Annotated[Any, BeforeValidator(_speaker)] = None
    """Number or name of the voice in the model. null in a model of one voice."""
    id: Annotated[str, matching(f"^{ID.pattern}$", 64, _ID_MEANS)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_line)] | None = None
    gender: Gender | None = None
    language: Language | None = None
    description: Line | None = None
    licence: Line | None = None
    consent: Line | None = None
    """Who allowed the use of the voice, and where that is documented."""


class OverlaySpec(Spec):
    """What is written about all voices of a model, and about single ones. `voices`, if given, lists all of them."""

    language: Language | None = None
    licence: Line | None = None
    consent: Line | None = None
    demo: bool = False
    """Voices for trying out, which are shown as such."""
    voices: Annotated[tuple[VoiceEntry, ...], Field(strict=False), BeforeValidator(_not_too_many)] | None = None


@dataclass(frozen=True, slots=True)
class Overlay:
    """What people wrote. `problems`: entries that are left out for a mistake. Other keys of a card are the model's."""

    spec: OverlaySpec
    file: str
    """The file that has it, or could have it."""
    problems: tuple[str, ...]
    card_language: str | None
    card_licence: str | None


def read_overlay(folder: ModelFolder) -> Overlay:
    """Read both files; voices.yaml wins. Raises `MetadataError` if it is unclear which voices are meant."""
    written = _read_voices(folder)
    card, problems = _read_card(folder, needed=written is None)
    said = card.root or {}
    spec, file = OverlaySpec(), FILE
    if written is not None:
        spec, mistakes = _checked(written, written.root, FILE)
        problems += mistakes
    elif SECTION in said:
        file = CARD
        spec, problems = _checked(card, said[SECTION], CARD, (SECTION,))
    language, licence = said.get("language"), said.get("license")
    if isinstance(language, list) and len(language) == 1:
        language = language[0]
    if licence == "other":
        licence = said.get("license_name")
    return Overlay(spec, file, problems, language_code(language), licence if isinstance(licence, str) else None)


def _read_voices(folder: ModelFolder) -> Document | None:
    content = folder.read(FILE, limit_bytes=LIMIT_BYTES)
    if content is None:
        return None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MetadataError(f"{FILE} is not UTF-8 text: save it as UTF-8") from error
    empty = "is empty: list the voices in it, or remove it"
    document = parse_document(text, empty, "must begin with a key like `voices:`")
    if document.problems:
        raise MetadataError(_sentence(FILE, document.problems))
    return document


def _read_card(folder: ModelFolder, *, needed: bool) -> tuple[Document, tuple[str, ...]]:
    text = (folder.read_start(CARD, _CARD_BYTES) or b"").decode("utf-8-sig", "replace")
    found = _FRONT_MATTER.match(text)
    if found is None:
        return Document(), ()
    # The line of the fence is kept, so that line numbers are those of the file.
    document = parse_document("\n" + found[1], "is empty", "is not a mapping")
    if not document.problems:
        return document, ()
    message = _sentence(f"{CARD}, front matter", document.problems)
    if needed and SECTION in found[1]:
        raise MetadataError(message)
    return document, (f"{message}; what it says is left out as far as it cannot be read",)


def _checked(
    document: Document, value: object, file: str, location: Location = ()
) -> tuple[OverlaySpec, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise MetadataError(f"{file}: `{SECTION}` must be a mapping: put its `key: value` lines below, indented")
    try:
        return OverlaySpec.model_validate(value), ()
    except ValidationError as error:
        errors = error.errors(include_url=False)
    single = {at[1] for error in errors if len(at := error["loc"]) > 1 and at[0] == "voices"}
    whole = [error for error in errors if len(error["loc"]) == 1]
    add_problems((whole or errors)[:_LISTED_PROBLEMS], OverlaySpec, location, document)
    if whole:
        raise MetadataError(_sentence(file, document.problems))
    entries = [entry for number, entry in enumerate(value["voices"]) if number not in single]
    left_out = tuple(_sentence(file, [problem]) for problem in document.problems)
    if len(errors) > _LISTED_PROBLEMS:
        left_out += (f"{file}: and {len(errors) - _LISTED_PROBLEMS} more mistakes",)
    return OverlaySpec.model_validate({**value, "voices": entries}), left_out


def _sentence(file: str, problems: list[Problem]) -> str:
    listed = [
        (f"line {problem.line}: " if problem.line else "")
        + (f"{problem.key}: " if problem.key else "")
        + problem.message
        for problem in problems[:3]
    ]
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"{file}: {'; '.join(listed)}{more}"
