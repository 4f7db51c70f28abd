"""How eSpeak NG is to read languages that it does not know, or not well: sources of dictionaries for its own compiler.

Rules of letters in `<language>_rules` (those of Ethiopic letters are made by `ethiopic`), single words in
`<language>_list`; the form of both is that of docs/dictionary.md of eSpeak NG.
"""

from pathlib import Path

from engine.backends.tts.pronunciation import ethiopic

_FOLDER = Path(__file__).parent
LANGUAGES = ("am", "so", "ti", "om")
# The library has no table of Somali's phonemes. Arabic's has both pharyngeals, ħ and ʕ, and a retroflex-like d.
PHONEME_TABLES = {"so": "ar"}
# What eSpeak NG knows of the other languages by itself. 2: stress on the last syllable but one.
OPTIONS = {"so": ("stressRule 2", "words 0 1")}


def sources(language: str) -> dict[str, str] | None:
    """Return the `rules` and the `list` of a language, None where the library's own are used."""
    if language not in LANGUAGES:
        return None
    rules = _FOLDER / f"{language}_rules"
    return {
        "rules": rules.read_text("utf-8") if rules.is_file() else ethiopic.rules(language),
        "list": (_FOLDER / f"{language}_list").read_text("utf-8"),
    }
