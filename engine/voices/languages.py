"""Codes of languages: ISO 639-1 where a language has two letters, else ISO 639-3; and the type of its voices."""

import re

import pycountry

# Languages with another name in the standard than in common use.
_NAMES = {"el": "Greek", "ht": "Haitian Creole"}
# Individual languages that go by the two letters of their macrolanguage. Source: SIL's table of macrolanguage mappings.
_MEMBERS = """
ar arb ary arz apc ajp acm afb aeb apd arq ars; az azj azb; et ekk; fa pes prs; ff fuf fuv fuc fue fuh fub fuq ffm;
gn gug; ku kmr; kr knc; lv lvs; mg plt; mn khk; ms zsm zlm; ne npi; om gaz hae orc gax; or ory; ps pbt pbu pst;
qu quy quz; sq als aln; sw swh swc; uz uzn uzs; yi ydd; zh cmn
"""

_MACROLANGUAGES = {member: row.split()[0] for row in _MEMBERS.split(";") for member in row.split()[1:]}
_CODE = re.compile(r"([a-z]{2,3})(?:[-_].*)?", re.DOTALL)
# ISO 639-3 codes that name no language: several, none, unknown, uncoded.
_NO_LANGUAGE = ("mis", "mul", "und", "zxx")
ETHIOPIAN = ("am", "so", "ti", "om")


def language_code(text: object) -> str | None:
    """Return the code for `amh`, `am`, `am_ET` or `AM-Ethi`; None for what is not the code of a language.

    That a code of three letters exists is not checked: there are 8000, and speech models for a thousand of them.
    """
    found = _CODE.fullmatch(text[:64].lower()) if isinstance(text, str) else None
    if found is None or found[1] in _NO_LANGUAGE:
        return None
    code = _MACROLANGUAGES.get(found[1], found[1])
    if len(code) == 2:
        return code if pycountry.languages.get(alpha_2=code) else None
    return getattr(pycountry.languages.get(alpha_3=code), "alpha_2", code)


def language_name(code: str) -> str:
    """Return the English name of a language; for those without a code of two letters, the code."""
    found = pycountry.languages.get(alpha_2=code)
    return code if found is None else _NAMES.get(code) or str(found.name.partition(" (")[0])


def voice_type(code: str) -> str:
    """Return the `type` of voices in this language."""
    if code in ETHIOPIAN:
        return "ethiopian"
    return "english_standard" if code == "en" else "standard"
