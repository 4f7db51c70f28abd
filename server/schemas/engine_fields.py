"""Fields that would reach into the engine: refused by name in every body that makes a model write."""

from __future__ import annotations

from server.schemas.chat import EngineField, Strict


class NoEngineFields(Strict):
    """A body in which none of them may be set."""

    chat_template: EngineField = None
    mm_processor_kwargs: EngineField = None
    media_io_kwargs: EngineField = None
    prompt_embeds: EngineField = None
    extra_args: EngineField = None
    guided_json: EngineField = None
    guided_regex: EngineField = None
    guided_choice: EngineField = None
    guided_grammar: EngineField = None
