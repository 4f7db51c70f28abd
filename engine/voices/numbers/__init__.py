"""Numbers as words, so that a voice that knows letters only can say them. `spell_numbers` is the door."""

from engine.voices.numbers.spelling import numbers_in, spell_numbers

__all__ = ["numbers_in", "spell_numbers"]
