"""What stands for words in writing is said in words: dates, times, money, units, abbreviations, in five languages."""

import re
import time

import pytest

from engine.voices.numbers import LANGUAGES
from engine.voices.text import speakable, spell_signs

SAID = {
    "en": {
        "on 2026-05-12": "on the 12th of May twenty twenty six",
        "by 3.4.1999": "by the 3rd of April nineteen ninety nine",
        "the 1990s, 2010s, 1800s": "the nineteen nineties, twenty tens, eighteen hundreds",
        "32/13/2026 stays": "32/13/2026 stays",
        "at 9:05 or 14:00": "at 9 oh 5 or 14 o'clock",
        "at 10:30 a.m. Then": "at 10 30 ay em. Then",
        "10:20:30": "10:20:30",
        "$5, €1 and £3.50": "5 dollars, 1 euro and 3 pounds 50 pence",
        "$2 million": "2 million dollars",
        "£1.5m, -$3bn and €20k": "1.5 million pounds, -3 billion dollars and 20 thousand euros",
        "$1.5x, $5-10": "$1.5x, 5 dollars to 10",
        "1 km, 5 km, 80 km/h, 5.5 kg": "1 kilometre, 5 kilometres, 80 kilometres an hour, 5.5 kilograms",
        "20°C and 30 m²": "20 degrees Celsius and 30 square metres",
        "5-10 kg": "5 to 10 kilograms",
        "-5°C, (\u22121 kg), A-5 km": "-5 degrees Celsius, (\u22121 kilogram), A-5 km",
        "-$5, -5 € and -$1.01": "-5 dollars, -5 euros and -1 dollar 1 cent",
        "a well-known 2-year plan": "a well-known 2-year plan",
        "+251 911 234567": "2 5 1 9 1 1 2 3 4 5 6 7",
        "Dr. Jones vs. Mr Smith etc. They": "Doctor Jones versus Mister Smith et cetera. They",
        "No. I said no. See No. 5": "No. I said no. See number 5",
        "Tom & Ann, 1 + 1 = 2": "Tom and Ann, 1 plus 1 equals 2",
    },
    "am": {
        "በ12/05/2017 ዓ.ም. ነው": "በጥር 12 ቀን 2017 ዓመተ ምህረት ነው",
        "በ12/05/2026 ነው": "በሜይ 12 ቀን 2026 ነው",
        "ሰዓት 3:30": "3 ሰዓት ከ 30 ደቂቃ",
        "$5 እና ETB 100.50": "5 ዶላር እና 100 ብር 50 ሳንቲም",
        "5 ኪ.ሜ. 20 km/h": "5 ኪሎሜትር 20 ኪሎሜትር በሰዓት",
        "ወ/ሮ አልማዝ እና ዶ/ር ከበደ": "ወይዘሮ አልማዝ እና ዶክተር ከበደ",
        "5-10": "5 እስከ 10",
        "የት/ቤት በዶ/ር ከወ/ሮ": "የትምህርት ቤት በዶክተር ከወይዘሮ",
    },
    "so": {
        "12/05/2026": "12 Maayo 2026",
        "saacadda 10:30": "saacadda 10 iyo 30 daqiiqo",
        "Saacadda 10:30": "saacadda 10 iyo 30 daqiiqo",
        "$3 iyo 5 km iwm. Waa": "3 doolar iyo 5 kiilomitir iyo wixii la mid ah. Waa",
        "Dr. Cali": "Doktoor Cali",
    },
    "ti": {
        "12/05/2026 ሰዓት 3:00": "12 ጉንበት 2026 ሰዓት 3",
        "$5 5 kg": "5 ዶላር 5 ኪሎግራም",
        "ቤ/ት ዶ/ር": "ቤት ትምህርቲ ዶክተር",
        "ንዶ/ር ብወ/ሮ": "ንዶክተር ብወይዘሮ",
    },
    "om": {
        "12/05/2026": "Caamsaa 12 bara 2026",
        "sa'aatii 3:30": "sa'aatii 3 fi daqiiqaa 30",
        "Sa'aatii 3:30": "sa'aatii 3 fi daqiiqaa 30",
        "$5, 5 km, 80 km/h": "doolaara 5, kiiloomeetira 5, sa'aatiitti kiiloomeetira 80",
        "-$5, -5 km, \u22125 °C": "doolaara -5, kiiloomeetira -5, digirii seelshiyeesii \u22125",
        "Dr. Tolasaa fkn. kana": "Doktora Tolasaa fakkeenyaaf kana",
    },
    "fr": {"12/05/2026 5 km": "12/05/2026 5 km"},
}


@pytest.mark.parametrize(("language", "written"), [(language, text) for language in SAID for text in SAID[language]])
def test_signs_become_words(language: str, written: str):
    assert " ".join(spell_signs(written, language).split()) == SAID[language][written]


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_figure_and_no_sign_reaches_a_voice(language: str):
    written = "12/05/2026 2026-05-12 9:30 14:00 $5 €3.50 £1 ETB 250.75 5 km 80 km/h 20°C 5-10 1,234.5 40% +251 911 234567 ፲፱፻፺፱ 1 & 2"
    said = " ".join(piece.text for piece in speakable(written, language))
    assert not re.search(r"[\d$€£°%&/+=@]", said)


@pytest.mark.parametrize(
    "text", ["1" * 4096, "1," * 2048, "1-" * 2048, "5 " * 2048, "1:2" * 1365, "ወ/" * 2048, "a.m." * 1024]
)
def test_no_text_takes_long(text: str):
    began = time.process_time()
    for language in LANGUAGES:
        next(speakable(text, language))
    assert time.process_time() - began < 2
