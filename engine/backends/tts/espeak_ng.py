"""The library eSpeak NG in this process, which is a worker: one voice at a time, a piece of text in, samples out.

It keeps its state in globals, so there is one of it. Its data are the package's, with dictionaries of our own
(pronunciation/) that its compiler makes at their first use. Written for espeakng-loader 0.2.4, eSpeak NG 1.52.
"""

import ctypes
import functools
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import espeakng_loader
import numpy as np
from numpy.typing import NDArray

from engine.backends.tts import pronunciation
from engine.errors import GenerationError, LoadError

_log = logging.getLogger(__name__)

# Of espeak_ng.h and speak_lib.h
_OK = 0
_SYNCHRONOUS = 1
_UTF8 = 1
_IPA = 2
_TIED = 128
_POSITION_CHARACTER = 1
_VOLUME = 3
# Of its 100: a loud vowel would be cut off otherwise; samples are made louder again as floats.
_VOLUME_PERCENT = 50
# Their phases go on from one text to the next, and the same text would never sound the same.
_STEADY = ("flutter 0", "roughness 0")
_VOWEL = "a."
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@functools.cache
def library() -> "EspeakNG":
    """Return the library, ready. Raises `LoadError`."""
    return EspeakNG()


class EspeakNG:
    """Made by `library`."""

    def __init__(self) -> None:
        # Its data folder holds one more dictionary a language, and is written to by its compiler.
        self._temporary = tempfile.TemporaryDirectory(prefix="hearth-espeak-", ignore_cleanup_errors=True)
        # Some of its buffers for paths are as short as 40 letters, which TMPDIR alone may have.
        self._data = Path("/proc/self/fd", str(os.open(self._temporary.name, os.O_PATH)))
        for file in Path(espeakng_loader.get_data_path()).iterdir():
            (self._data / file.name).symlink_to(file)
        self._library: Any = ctypes.CDLL(espeakng_loader.get_library_path())
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_ng_InitializePath(os.fsencode(self._data))
        self._must("start", self._library.espeak_ng_Initialize(None))
        self._must("start", self._library.espeak_ng_InitializeOutput(_SYNCHRONOUS, 0, None))
        self.sample_rate: int = self._library.espeak_ng_GetSampleRate()
        self._parts: list[NDArray[np.int16]] = []
        self._callback = _CALLBACK(self._take)  # the library keeps no reference
        self._library.espeak_SetSynthCallback(self._callback)
        self._library.espeak_ng_SetParameter(_VOLUME, _VOLUME_PERCENT, 0)
        self._dictionary = functools.cache(self._compile)
        self._chosen: tuple[str, tuple[str, ...]] | None = None

    def speaks(self, language: str) -> bool:
        """Whether there is a dictionary of a language (ISO 639-1)."""
        return language in pronunciation.LANGUAGES or (self._data / f"{language}_dict").exists()

    def choose(self, language: str, sound: tuple[str, ...]) -> None:
        """Take a voice: a language (ISO 639-1) and the lines of a voice file. Raises `LoadError`."""
        if self._chosen == (language, sound):
            return
        self._set_voice([*self._lines(language, self._dictionary(language)), *sound, *_STEADY])
        self._chosen = (language, sound)

    def speak(self, text: str, seed: int) -> NDArray[np.float32]:
        """Say a text in the voice that was chosen: mono, without the silence at its end. Raises `GenerationError`."""
        # Its filters still ring with what was said last: a vowel first, and the same text is the same sound.
        for piece in (_VOWEL, text):
            self._parts.clear()
            self._library.espeak_ng_SetRandSeed(ctypes.c_long(seed))
            data = piece.encode() + b"\0"
            status = self._library.espeak_ng_Synthesize(
                data, ctypes.c_size_t(len(data)), 0, _POSITION_CHARACTER, 0, _UTF8, None, None
            )
            if status != _OK:
                raise GenerationError("The voice failed at a sentence of this text. Write it in other words.")
        samples = np.concatenate([np.zeros(0, np.int16), *self._parts])
        heard = np.flatnonzero(np.abs(samples) > 8)
        last = min(len(samples), heard[-1] + self.sample_rate // 50) if len(heard) else 0
        return samples[:last].astype(np.float32) / (2**15 * _VOLUME_PERCENT / 100)

    def choose_language(self, name: str) -> None:
        """Take a language by the library's own name, like en-us, for `phonemes`. Raises `LoadError`."""
        self._chosen = None
        self._must("take a language", self._library.espeak_ng_SetVoiceByName(name.encode()))

    def phonemes(self, text: str, *, tie: str = "") -> str:
        """Return what it would say, in IPA, words apart by spaces; the marks of changed languages are in brackets.

        `tie` stands between the letters of one phoneme.
        """
        mode = _IPA | (_TIED | ord(tie) << 8 if tie else 0)
        place = ctypes.c_char_p(text.encode())
        clauses = []
        while place.value is not None:
            said = self._library.espeak_TextToPhonemes(ctypes.byref(place), _UTF8, mode)
            clauses.append(said.decode("utf-8", "replace"))
        return " ".join(" ".join(clauses).split())

    def _take(self, samples: Any, count: int, _events: int) -> int:
        if samples and count:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def _compile(self, language: str) -> str | None:
        """Make the dictionary of a language of which we have one, and return its name."""
        sources = pronunciation.sources(language)
        if sources is None:
            return None
        name = f"hearth-{language}"
        for kind, content in sources.items():
            (self._data / f"{name}_{kind}").write_text(content, encoding="utf-8")
        # Phonemes are compiled to numbers of the table that the voice speaks with.
        self._set_voice(self._lines(pronunciation.PHONEME_TABLES.get(language, language), None))
        log = self._data / f"{name}.log"
        libc = ctypes.CDLL(None)
        libc.fopen.restype = ctypes.c_void_p
        file = ctypes.c_void_p(libc.fopen(os.fsencode(log), b"w"))
        try:
            status = self._library.espeak_ng_CompileDictionary(
                os.fsencode(f"{self._data}/"), name.encode(), file, 0, None
            )
        finally:
            libc.fclose(file)
        if status != _OK:
            _log.error("eSpeak NG could not compile its dictionary of %s: %s", language, log.read_text("utf-8")[-2000:])
        self._must("compile a dictionary", status)
        return name

    def _lines(self, language: str, dictionary: str | None) -> list[str]:
        lines = ["name hearth", f"language {language}"]
        if dictionary is not None:
            table = pronunciation.PHONEME_TABLES.get(language, language)
            lines += [f"phonemes {table}", f"dictionary {dictionary}", *pronunciation.OPTIONS.get(language, ())]
        return lines

    def _set_voice(self, lines: list[str]) -> None:
        self._chosen = None
        file = self._data / "voice"
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")
        self._must("take a voice", self._library.espeak_ng_SetVoiceByFile(os.fsencode(file)))

    def _must(self, what: str, status: int) -> None:
        if status != _OK:
            raise LoadError(f"eSpeak NG could not {what} (status {status & 0xFFFFFFFF:#x}). Run ./scripts/setup again.")
