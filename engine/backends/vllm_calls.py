"""Feeds one choice's text to vLLM's tool and reasoning parsers and mends what its older tool parsers lose.

Most of those parsers count on a step being one token, start only at the very first character, and leave the end of a
call to vLLM's plain answers. vllm_serving.py owns the answer that comes of it.
"""

from __future__ import annotations

import json
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.tool_parsers.utils import partial_tag_overlap

from engine.types import ToolCallDelta

# Where a call begins that may follow some words: these parsers look at the beginning of an answer only.
_ANCHORS: dict[str, tuple[str, ...]] = {
    "Llama3JsonToolParser": ("<|python_tag|>", '{"name": '),
    "Llama4PythonicToolParser": ("<|python_start|>",),
    "Olmo3PythonicToolParser": ("<function_calls>",),
    "HunyuanA13BToolParser": ("<tool_calls>[",),
}
_OPENINGS = {"Llama3JsonToolParser": "{", "Llama4PythonicToolParser": "["}


def mend(parser_class: Any) -> None:
    """Put our layer on the tool parser that `parser_class` makes. vLLM's newer ones (engine based) need none."""
    tool_parser = getattr(parser_class, "tool_parser_cls", None)
    if tool_parser is not None and not tool_parser.engine_based_streaming:
        parser_class.tool_parser_cls = type(tool_parser.__name__, (_Mended, tool_parser), {})


class CallStream:
    """The parsed answer of one choice as it grows."""

    def __init__(self, parser: Any, request: Any, tokenizer: Any) -> None:
        self.parser = parser
        self._request = request
        self._tokenizer = tokenizer
        self._steps = _TokenSteps(tokenizer)
        self._content = ""
        self._calls: dict[int, tuple[str, str]] = {}

    @property
    def called_tools(self) -> bool:
        return bool(self._calls)

    def feed(
        self, text: str, token_ids: list[int], prompt_token_ids: list[int] | None, finish_reason: str | None
    ) -> tuple[str, str, list[ToolCallDelta]]:
        """Return (content, reasoning, pieces of calls) that the new text brought; parsers may hold text back."""
        # A parser told of the end completes what it holds. Of an answer cut off, that is half a call or half a mark.
        ended = finish_reason not in {None, "length"}
        pieces = self._steps.split(text, token_ids)
        content, reasoning, calls = "", "", []
        for place, (part, ids) in enumerate(pieces, 1):
            message = self.parser.parse_delta(
                delta_text=part,
                delta_token_ids=ids,
                request=self._request,
                prompt_token_ids=prompt_token_ids,
                finished=ended and place == len(pieces),
            )
            if message is None:
                continue
            content += message.content or ""
            reasoning += message.reasoning or ""
            calls += [self._seen(_delta(call)) for call in message.tool_calls]
        self._content += content
        if ended:
            rest, missing = self._missing()
            content += rest
            calls += missing
        return content, reasoning, calls

    def _seen(self, call: ToolCallDelta) -> ToolCallDelta:
        name, arguments = self._calls.get(call.index, ("", ""))
        self._calls[call.index] = (name + (call.name or ""), arguments + call.arguments)
        return call

    def _missing(self) -> tuple[str, list[ToolCallDelta]]:
        """Compare with what vLLM finds in the whole text; return what was never streamed of it."""
        tool_parser: Any = getattr(self.parser, "tool_parser", None)
        if not isinstance(tool_parser, _Mended) or tool_parser.seen in {"", self._content}:
            return "", []
        fresh: Any = type(tool_parser)(self._tokenizer, self._request.tools)
        found = fresh.extract_tool_calls(tool_parser.seen, self._request)
        if not found.tools_called:
            whole = found.content or ""
            marked = any(anchor in whole for anchor in tool_parser.anchors)
            missing = bool(self._calls) or marked or not whole.startswith(self._content)
            return ("" if missing else whole[len(self._content) :]), []
        calls = []
        for index, call in enumerate(found.tool_calls):
            name, arguments = self._calls.get(index, (None, ""))
            wanted = call.function.arguments
            if name is None:
                calls.append(self._seen(ToolCallDelta(index, call.id, call.function.name, wanted)))
            elif name == call.function.name and not _is_json(arguments) and wanted.startswith(arguments):
                calls.append(self._seen(ToolCallDelta(index, None, None, wanted[len(arguments) :])))
        return "", calls


class _TokenSteps:
    """Splits what several steps brought (a slow client's are put together) into steps of one token again."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._held: list[int] = []  # tokens whose text has not come yet, like the first bytes of a character

    def split(self, text: str, token_ids: list[int]) -> list[tuple[str, list[int]]]:
        """Return pieces, together `text` and `token_ids`; where shares are unclear, tokens stay together."""
        pieces: list[tuple[str, list[int]]] = []
        if len(token_ids) <= 1:
            pieces.append((text, token_ids))
            self._held = [] if text else [*self._held, *token_ids]
            return pieces
        waiting: list[int] = []
        for token_id in token_ids:
            self._held.append(token_id)
            waiting.append(token_id)
            share = self._share(text)
            if share:
                pieces += [("", [silent]) for silent in waiting[:-1]]
                pieces.append((share, [token_id]))
                text = text[len(share) :]
                self._held, waiting = [], []
        if text:
            self._held = []
            return [*pieces, (text, waiting)]
        return pieces + [("", [silent]) for silent in waiting]

    def _share(self, text: str) -> str:
        """Return how the rest of the text starts if it starts with what the tokens held stand for."""
        for token_ids in (self._held, self._held[-1:]):
            part = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            # Some tokenizers drop a space in front of what they take for the first word.
            for share in (part, f" {part}"):
                if part and text.startswith(share):
                    return share
        return ""


class _Mended:
    """Mixed in before a tool parser of vLLM: remembers the text, and lets calls begin after some words."""

    anchors: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = ""
        self.anchors = _ANCHORS.get(type(self).__name__, ())
        self._opening = _OPENINGS.get(type(self).__name__)
        self._start = None if self.anchors else 0
        self._sent = 0

    def extract_tool_calls_streaming(  # noqa: PLR0913, PLR0917  # vLLM's signature
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Any,
        current_token_ids: Any,
        delta_token_ids: Any,
        request: Any,
    ) -> Any:
        """Pass on the text from the first call on; what stands before is content."""
        self.seen = current_text
        content = ""
        if self._start is None:
            content = self._words(current_text)
            if self._start is None:
                return DeltaMessage(content=content) if content else None
            previous_text, delta_text = "", current_text[self._start :]
        else:
            previous_text = previous_text[self._start :]
        message = super().extract_tool_calls_streaming(  # type: ignore[misc]
            previous_text,
            current_text[self._start :],
            delta_text,
            previous_token_ids,
            current_token_ids,
            delta_token_ids,
            request,
        )
        if content:
            message = message or DeltaMessage()
            message.content = content + (message.content or "")
        return message

    def _words(self, text: str) -> str:
        """Return the new text that is no call; set `_start` once one begins."""
        places = [place for anchor in self.anchors if (place := text.find(anchor)) >= 0]
        if self._opening and text.startswith(self._opening):
            places.append(0)
        if places:
            self._start = end = min(places)
        else:
            end = len(text) - max(partial_tag_overlap(text, anchor) for anchor in self.anchors)
        content = text[self._sent : end]
        self._sent = max(end, self._sent)
        return content


def _delta(call: Any) -> ToolCallDelta:
    function = call.function
    return ToolCallDelta(
        call.index, call.id, function.name if function else None, (function.arguments if function else None) or ""
    )


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
