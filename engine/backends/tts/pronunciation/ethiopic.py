"""Rules of Ethiopic letters for Amharic and Tigrinya, made from a table: each letter is a consonant with a vowel.

The sixth form of a letter stands for the consonant with ɨ or alone, and the spelling does not say which. It is decided
here from left to right: ɨ where the consonant would begin a syllable with another one (a cluster), none at a word's
end. Source of that: Baye Yimam's and Hayward's accounts of Amharic epenthesis, as Wikipedia, "Amharic", sums them up.
Doubled consonants are not written either; the lists of words have the commonest.
"""

# In eSpeak NG's names of phonemes. x? and ts? are ejectives that its tables lack: the sound, then a glottal stop.
_VOWELS = ("@", "u", "i", "a", "e", "y", "o")
_FIRST, _SIXTH, _EIGHTH = 0, 5, 7
_LONGEST_RUN = 5

# The first letter of each row of eight, as Unicode has them.
_ROWS = """
ሀ h, ለ l, ሐ h, መ m, ሠ s, ረ r, ሰ s, ሸ S, ቀ k`, ቐ k`, በ b, ቨ v, ተ t, ቸ tS, ኀ h, ነ n, ኘ n^, አ ?, ከ k, ኸ h, ወ w, ዐ ?,
ዘ z, ዠ Z, የ j, ደ d, ዸ d, ጀ dZ, ገ g, ጘ N, ጠ t`, ጨ tS`, ጰ p`, ጸ ts?, ፀ ts?, ፈ f, ፐ p
"""  # noqa: RUF001  # letters are meant
_TIGRINYA_ROWS = "ሐ X, ኀ X, ቐ x?, ኸ x, ዐ A"  # noqa: RUF001
# Rows of the same consonants with w, which lack the second and the seventh form.
_ROUNDED = {"ቈ": "ቀ", "ቘ": "ቐ", "ኈ": "ኀ", "ኰ": "ከ", "ዀ": "ኸ", "ጐ": "ገ"}
_WITH_YA = {"ፘ": "r", "ፙ": "m", "ፚ": "f"}
# After these the first form sounds like the fourth.
_LIKE_FOURTH = {"am": "ሀሐኀአዐ", "ti": "ሐዐ"}
# At a word's end ɨ stands between a consonant and one that is more of a vowel: kɨfɨl, but k'ulf.
_LIQUIDS, _NASALS, _GLIDES = "ለረ", "መነኘ", "ወየ"


def rules(language: str) -> str:
    """Return the rules of `am` or `ti`, grouped by the first two bytes of the letters as the compiler wants them."""
    consonants = _read(_ROWS) | (_read(_TIGRINYA_ROWS) if language == "ti" else {})
    consonants |= {first: f"{consonants[plain]}w" for first, plain in _ROUNDED.items()}
    groups: dict[str, list[str]] = {}
    for first, consonant in consonants.items():
        for form, vowel in enumerate(_VOWELS):
            letter = chr(ord(first) + form)
            if form == _SIXTH:
                said = _of_sixth(letter, first, consonant)
            else:
                said = [f"{letter} {consonant}{'a' if not form and first in _LIKE_FOURTH[language] else vowel}"]
            groups.setdefault(_group(letter), []).extend(said)
        if first not in _ROUNDED:
            letter = chr(ord(first) + _EIGHTH)
            groups.setdefault(_group(letter), []).append(f"{letter} {consonant}{'@' if first == 'አ' else 'wa'}")
    for letter, consonant in _WITH_YA.items():
        groups.setdefault(_group(letter), []).append(f"{letter} {consonant}ja")
    parts = [f".L01 {_sixths(''.join(consonants))}", f".L02 {_sixths(_LIQUIDS + _NASALS + _GLIDES)}"]
    parts += [f".L03 {_sixths(_LIQUIDS + _NASALS)}", f".L04 {_sixths(_NASALS)}"]
    parts += [f".group {group}\n" + "\n".join(lines) for group, lines in groups.items()]
    return "\n\n".join([*parts, ""])


def _read(rows: str) -> dict[str, str]:
    return dict(pair.split() for pair in rows.split(","))


def _of_sixth(letter: str, first: str, consonant: str) -> list[str]:
    """With ɨ or without, by how many letters of the sixth form stand before it, at the word's beginning or not."""
    alone, with_vowel = f"{letter} {consonant}", f"{letter} {consonant}y"
    lines = [alone, f"_) {with_vowel}"]
    for before in range(1, _LONGEST_RUN):
        run = "L01" * before
        lines.append(f"{run}) {with_vowel if before % 2 else alone}")
        lines.append(f"_{run}) {alone if before % 2 else with_vowel}")
        lines += [f"{start}{run}) {letter} (_ {consonant}" for start in ("", "_")]
    # L02 are all that may follow, L03 those without glides, L04 the nasals.
    group = "L04" if first in _LIQUIDS else "L03" if first in _NASALS else "" if first in _GLIDES else "L02"
    if group:
        lines.append(f"{letter} ({group}_++++ {consonant}y")
    return lines


def _sixths(firsts: str) -> str:
    return " ".join(chr(ord(first) + _SIXTH) for first in firsts)


def _group(letter: str) -> str:
    return f"0x{letter.encode()[:2].hex()}"
