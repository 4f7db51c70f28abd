"""English in a closed loop: what a voice says, PocketSphinx hears, one of thirty sentences. Needs its package.

.venv/bin/pip install pocketsphinx: its wheel brings a model of American English, of people's speech.
"""

from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest
from espeak_parts import spoken

pytestmark = pytest.mark.rounds  # minutes: it looks far and wide for a voice that is no person's
SENTENCES = """good morning|thank you very much|please open the door|close the window|the water is cold
where is the book|i need more time|she is a good teacher|the children play outside|he reads a letter
we go home tomorrow|the meeting is on monday|call me in the evening|this is my brother|the bus leaves at seven
how much does it cost|turn left at the corner|i do not understand|the road is very long|my sister lives in the city
bring me a cup of coffee|the doctor will see you now|it rained all night|put the paper on the table
he has two hundred sheep|what is your name|the moon is bright tonight|they speak three languages
send the report today|the school is near the river""".replace("\n", "|").split("|")
HEARD_HZ = 16_000


@pytest.fixture(scope="module")
def heard() -> Callable[[np.ndarray], str]:
    pocketsphinx = pytest.importorskip("pocketsphinx")
    wide = {"beam": 1e-120, "pbeam": 1e-120, "wbeam": 1e-100, "maxhmmpf": -1}
    decoder: Any = pocketsphinx.Decoder(lm=None, loglevel="FATAL", dither=True, **wide)
    decoder.add_jsgf_string("said", f"#JSGF V1.0; grammar said; public <said> = {' | '.join(SENTENCES)};")
    decoder.activate_search("said")

    def hear(samples: np.ndarray) -> str:
        decoder.start_utt()
        decoder.process_raw(samples.tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return str(found.hypstr) if found else ""

    return hear


def for_ears(rate: int, samples: np.ndarray) -> np.ndarray:
    """With a room's noise before and after it, at the rate that is heard."""
    quiet = np.random.default_rng(1).normal(0, 0.001, rate // 3)
    whole = np.concatenate([quiet, samples, quiet]).astype(np.float32)
    resampler = av.AudioResampler("s16", "mono", HEARD_HZ)
    frame: Any = av.AudioFrame.from_ndarray(whole[np.newaxis], format="flt", layout="mono")
    frame.sample_rate = rate
    return np.concatenate([one.to_ndarray()[0] for part in (frame, None) for one in resampler.resample(part)])


@pytest.mark.parametrize(("voice", "least"), [("emma", 27), ("james", 18)])
@pytest.mark.timeout(1800)
def test_sentences_are_told_apart(voice: str, least: int, heard: Callable[[np.ndarray], str]):
    wrong = {said: found for said in SENTENCES if (found := heard(for_ears(*spoken(voice, said)))) != said}
    assert len(SENTENCES) - len(wrong) >= least, wrong
