"""What becomes of a text before a voice speaks it: numbers in words, sentences, pieces."""

import pytest

from engine.voices.numbers import LANGUAGES, LARGEST, spell_numbers
from engine.voices.text import speakable

CARDINALS = {
    "am": {
        0: "ዜሮ",
        7: "ሰባት",
        10: "አሥር",
        15: "አሥራ አምስት",
        25: "ሃያ አምስት",
        100: "አንድ መቶ",
        157: "አንድ መቶ ሃምሳ ሰባት",
        1985: "አንድ ሺህ ዘጠኝ መቶ ሰማንያ አምስት",
        2_000_000: "ሁለት ሚሊዮን",
        45_000_000_010: "አርባ አምስት ቢሊዮን አሥር",
    },
    "en": {0: "zero", 21: "twenty-one", 1234: "one thousand two hundred and thirty-four"},
    "om": {
        0: "zeeroo",
        9: "sagal",
        10: "kudhan",
        11: "kudha tokko",
        20: "digdama",
        21: "digdamii tokko",
        43: "afurtamii sadii",
        100: "dhibba tokko",
        101: "dhibba tokko fi tokko",
        200: "dhibba lama",
        2000: "kuma lama",
        2043: "kuma lama fi afurtamii sadii",
        5327: "kuma shan dhibba sadii fi digdamii torba",
        3_000_000: "miliyoona sadii",
    },
    "so": {
        0: "eber",
        8: "siddeed",
        11: "kow iyo toban",
        34: "afar iyo soddon",
        90: "sagaashan",
        100: "boqol",
        101: "boqol iyo kow",
        111: "boqol iyo kow iyo toban",
        528: "shan boqol iyo siddeed iyo labaatan",
        1000: "kun",
        4000: "afar kun",
        100_000: "boqol kun",
        1_000_000: "hal milyan",
    },
    # From the paper's own examples and its reference implementation
    "ti": {
        0: "ዜሮ",
        7: "ሸውዓተ",
        15: "ዓሰርተ ሓሙሽተ",
        25: "ዕስራን ሓሙሽተን",
        100: "ሓደ ሚእቲ",
        127: "ሓደ ሚእትን ዕስራን ሸውዓተን",
        15_000: "ዓሰርተ ሓሙሽተ ሽሕ",
        25_000: "ዕስራን ሓሙሽተን ሽሕ",
        2026: "ክልተ ሽሕን ዕስራን ሽድሽተን",
        1_002_000: "ሓደ ሚልዮንን ክልተ ሽሕን",
    },
}

ORDINALS = {
    "am": {1: "አንደኛ", 10: "አሥረኛ", 21: "ሃያ አንደኛ", 100: "አንድ መቶኛ"},
    "en": {1: "first", 22: "twenty-second"},
    "om": {1: "tokkoffaa", 2: "lammaffaa", 5: "shanaffaa", 10: "kurnaffaa", 11: "kudha tokkoffaa"},
    "so": {1: "kowaad", 4: "afraad", 7: "toddobaad", 10: "tobnaad", 11: "kow iyo tobnaad", 20: "labaatanaad"},
    "ti": {1: "ቀዳማይ", 10: "ዓስራይ", 25: "መበል ዕስራን ሓሙሽተን"},
}


@pytest.mark.parametrize("language", CARDINALS)
def test_a_number_is_said_as_its_language_says_it(language: str):
    numbers = LANGUAGES[language]
    assert {number: numbers.cardinal(number) for number in CARDINALS[language]} == CARDINALS[language]
    assert {number: numbers.ordinal(number) for number in ORDINALS[language]} == ORDINALS[language]


@pytest.mark.parametrize("language", CARDINALS)
def test_every_number_has_words_of_its_own(language: str):
    numbers = LANGUAGES[language]
    asked = [*range(1200), *(10**power + less for power in range(4, 12) for less in (-1, 0, 1, 10)), LARGEST]
    said = {numbers.cardinal(number) for number in asked}
    assert len(said) == len(set(asked))
    assert not any(character.isdigit() for words in said for character in words)


@pytest.mark.parametrize(
    ("language", "text", "spelled"),
    [
        ("en", "It costs 1,234.50.", "It costs one thousand two hundred and thirty-four point five zero ."),
        ("en", "-5 or 40% at 10:05", "minus five or forty percent at ten zero five"),
        ("en", "the 21st of 2026-05-12", "the twenty-first of two thousand and twenty-six - zero five - twelve"),
        ("en", "call 0911", "call zero nine one one"),
        ("en", "1234567890123", "one two three four five six seven eight nine zero one two three"),
        ("en", "9" * 5000, "nine " * 5000),
        ("en", "COVID19x", "COVID nineteen x"),
        ("am", "በ፲፱፻፺፱", "በ አንድ ሺህ ዘጠኝ መቶ ዘጠና ዘጠኝ"),
        ("am", "5ኛው 40%", "አምስተኛ አርባ በመቶ"),
        ("so", "3aad, 40%", "saddexaad , boqolkiiba afartan"),
        ("om", "5ffaa 2.5", "shanaffaa lama tuqaa shan"),
        ("ti", "-3.05", "ኣሉታ ሰለስተ ነጥቢ ዜሮ ሓሙሽተ"),
        ("en", "٣", "three"),
        ("fr", "12 ፲፪", "12 12"),
    ],
)
def test_numbers_in_a_text_become_words(language: str, text: str, spelled: str):
    assert spell_numbers(text, language).split() == spelled.split()


@pytest.mark.parametrize(
    ("numeral", "number"),
    # The examples of CSS Counter Styles
    [("፩", 1), ("፲", 10), ("፻", 100), ("፸፰፻፩፼፺፪", 78010092), ("፸፰፻፩፼፼፺፪", 780100000092), ("፳፻፲፱", 2019), ("፼", 10000)],
)
def test_ethiopic_numerals_are_numbers(numeral: str, number: int):
    assert spell_numbers(numeral, "fr") == str(number)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        (
            "Dr. Abebe met Mr. J. Smith, e.g. at 3.5 km.",
            ["Doctor Abebe met Mister J. Smith, for example at three point five kilometres."],
        ),
        ("I have 3. 5 are red.", ["I have three.", "five are red."]),
        ("5 µg, not 5 mg.", ["five micrograms, not five milligrams."]),
        ("So do I. He too.", ["So do I.", "He too."]),
        ('He said "Go!" Then he went.', ['He said "Go!"', "Then he went."]),
        ("Well... maybe.", ["Well... maybe."]),
        ("ሰላም።እንዴት ነህ፧ ደህና፨ በ1999 ዓ.ም. ነበር።", ["ሰላም።", "እንዴት ነህ፧", "ደህና፨", "በ አንድ ሺህ ዘጠኝ መቶ ዘጠና ዘጠኝ ዓመተ ምህረት ነበር።"]),
        ("यह पहला है। यह दूसरा है।", ["यह पहला है।", "यह दूसरा है।"]),
        ("ሰላም፡ለዓለም፡፡ደህና", ["ሰላም ለዓለም።", "ደህና"]),
        ("one\n\n two ", ["one", "two"]),
        (" \n ", []),
        ("ＡＢＣ 𝐁𝐨𝐥𝐝 ﬁne. ② Ⅳ 5 m², ½", ["ABC Bold fine.", "two IV five square metres, ½"]),  # noqa: RUF001
    ],
)
def test_a_text_is_cut_into_sentences(text: str, sentences: list[str]):
    language = "am" if "ሰላም" in text else "en"
    assert [piece.text for piece in speakable(text, language)] == sentences


def test_long_sentences_are_cut_at_breaks_and_the_first_piece_is_short():
    clause = "many words follow one another here without any end in sight so to speak"
    pieces = [*speakable(f"A beginning, {', '.join([clause] * 8)}.", "en")]
    assert len(pieces[0].text) <= 100
    assert all(len(piece.text) <= 200 for piece in pieces)
    assert all(piece.text.endswith((",", ".")) for piece in pieces[1:])
    for text, mark in (("ሰላም ለዓለም፣ ", "፣"), ("今天天气很好\uff0c", "\uff0c")):
        assert all(piece.text.endswith(mark) for piece in speakable(text * 60, "am"))


@pytest.mark.parametrize("text", ["word " * 400, "ሰላም" * 200, "x" * 999, "a, " * 500])
def test_nothing_is_lost_where_a_text_is_cut(text: str):
    pieces = [*speakable(text, "en")]
    assert all(0 < len(piece.text) <= 200 for piece in pieces)
    assert "".join(piece.text.replace(" ", "") for piece in pieces) == text.replace(" ", "")


def test_pauses_are_longest_between_paragraphs_and_none_is_at_the_end():
    pauses = [piece.pause_seconds for piece in speakable("One. Two.\nThree.", "en")]
    assert pauses[0] < pauses[1]
    assert pauses[0] > pauses[2] == 0


def test_a_row_of_numerals_that_is_no_number_is_read_sign_by_sign():
    assert spell_numbers("፼" * 4096, "en").split()[:4] == ["ten", "thousand"] * 2
