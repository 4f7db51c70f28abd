"""Feeds one choice's text to vLLM's tool and reasoning parsers and repairs what its older tool parsers lose.

Most of those parsers expect one token per step, find a call only at the very first character, and may not stream its
end. A model's family decides its parsers, unless models.yaml names them.
"""

import json
import re
from pathlib import Path
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.tool_parsers.utils import partial_tag_overlap

from engine.backends.vllm import compat
from engine.config import ChatModelSpec
from engine.types import ToolCallDelta
from engine.weights.safety import read_config

# The beginning of a call that may follow some words: these parsers check the beginning of an answer only.
_ANCHORS: dict[str, tuple[str, ...]] = {
    "Llama3JsonToolParser": ("<|python_tag|>", '{"name": '),
    "Llama4PythonicToolParser": ("<|python_start|>",),
    "Olmo3PythonicToolParser": ("<function_calls>",),
    "HunyuanA13BToolParser": ("<tool_calls>[",),
    # These would lose words that come in the same step as the beginning of a call
    "ApertusToolParser": ("<|tools_prefix|>",),
    "DeepSeekV3ToolParser": ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
    "DeepSeekV31ToolParser": ("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
    "JambaToolParser": ("<tool_calls>",),
}
_SPACE = " \n\r\t"
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"?', re.DOTALL)  # of JSON; the last may be unfinished
_HIDDEN = "\ufdd0end\ufdd1"  # in no text: these two are noncharacters
_BOUNDS_OF_TEXT = ("const", "enum", "format", "maxLength", "minLength", "pattern", "allOf")
_OPENINGS = {"Llama3JsonToolParser": "{", "Llama4PythonicToolParser": "["}


def mend(parser_class: Any) -> None:
    """Add our layers to the tool parser that `parser_class` makes."""
    tool_parser = getattr(parser_class, "tool_parser_cls", None)
    if tool_parser is None:
        return
    if not takes_joined_steps(tool_parser):
        layers = (_MarksInTexts, _Mended) if compat.fits("marks in texts") and _is_hermes(tool_parser) else (_Mended,)
        parser_class.tool_parser_cls = type(tool_parser.__name__, (*layers, tool_parser), {})
    elif compat.fits("exact values"):
        parser_class.tool_parser_cls = _exact(tool_parser)


def takes_joined_steps(parser: Any) -> bool:
    """Whether a class of parsers reads any number of tokens at once. Older ones lose calls and marks of such steps."""
    return bool(getattr(parser, "engine_based_streaming", False))


def _exact(tool_parser: Any) -> Any:
    """Return a parser of Qwen's XML calls that removes white space around values whose schema does not allow any.

    The grammar allows white space around a value that is not free text, and vLLM removes only one newline.
    """
    from vllm.parser.qwen3 import Qwen3Parser

    engine: Any = getattr(tool_parser, "_parser_engine_cls", object)
    if not issubclass(engine, Qwen3Parser):
        return tool_parser

    class Exact(engine):  # type: ignore[misc]
        @staticmethod
        def _coerce_dict(args: dict[str, Any], properties: dict[str, Any]) -> tuple[dict[str, Any], bool]:
            exact = {key: _without_space(value, properties.get(key, True)) for key, value in args.items()}
            changed = exact != args
            args.update(exact)
            args, coerced = engine._coerce_dict(args, properties)  # noqa: SLF001
            return args, changed or coerced

        @staticmethod
        def _streamable_string_keys(properties: dict[str, Any]) -> set[str] | None:
            keys = engine._streamable_string_keys(properties)  # noqa: SLF001
            return keys and {key for key in keys if _is_any_text(properties[key])}

    return type(tool_parser.__name__, (tool_parser,), {"_parser_engine_cls": Exact, "forced_is_calls": True})


def _without_space(value: Any, schema: Any) -> Any:
    if not isinstance(value, str) or _is_any_text(schema) or value in schema.get("enum", ()):
        return value
    stripped = value.strip(_SPACE)
    return value if len(stripped) < schema.get("minLength", 0) else stripped


def _is_any_text(schema: Any) -> bool:
    """Whether a schema may allow any text: then white space belongs to it, like the indentation of code."""
    if not isinstance(schema, dict) or "$ref" in schema:
        return True
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return any(map(_is_any_text, branches))
    kinds = schema.get("type", "string")
    is_text = "string" in kinds if isinstance(kinds, list) else kinds == "string"
    return is_text and not any(key in schema for key in _BOUNDS_OF_TEXT)


class CallStream:
    """The parsed answer of one choice as it grows."""

    def __init__(self, parser: Any, request: Any, tokenizer: Any) -> None:
        self.parser = parser
        self._request, self._tokenizer = request, tokenizer
        self._content = ""
        # A grammar lets a model spell the marks of a call letter by letter, which vLLM takes for content
        tool_parser, choice = getattr(parser, "tool_parser_cls", None), request.tool_choice
        forced = choice not in (None, "auto", "none")  # a tuple: a choice by name has no hash
        self._only_calls = forced and getattr(tool_parser, "forced_is_calls", False)
        self.calls: dict[int, tuple[str, str]] = {}
        """Name and arguments so far, by their index."""
        self._newest = -1  # index of the call that was passed on last
        self._held: list[ToolCallDelta] = []

    def feed(
        self, text: str, token_ids: list[int], prompt_token_ids: list[int] | None, finish_reason: str | None
    ) -> tuple[str, str, list[ToolCallDelta]]:
        """Return (content, reasoning, pieces of calls) of one engine step; parsers may hold text back."""
        # At the end a parser completes what it holds: in an answer that was cut off, a partial call or mark.
        ended = finish_reason not in {None, "length"}
        content, reasoning, calls = "", "", []
        message = self.parser.parse_delta(
            delta_text=text,
            delta_token_ids=token_ids,
            request=self._request,
            prompt_token_ids=prompt_token_ids,
            finished=ended,
        )
        if message is not None:
            content, reasoning = "" if self._only_calls else message.content or "", message.reasoning or ""
            calls = [self._seen(_delta(call)) for call in message.tool_calls]
            self._content += content
        if ended:
            rest, missing = self._missing()
            content += rest
            calls += missing
        return content, reasoning, self._in_order([*self._held, *calls], ended=finish_reason is not None)

    def _in_order(self, calls: list[ToolCallDelta], *, ended: bool) -> list[ToolCallDelta]:
        """Hold a call back until the one before is complete.

        Parsers that get several tokens at once may begin a call before they give the end of the previous one.
        """
        passed = []
        while calls:
            passed += [call for call in calls if call.index <= self._newest]
            calls = [call for call in calls if call.index > self._newest]
            if not calls:
                break
            following = min(call.index for call in calls)
            is_next = following == self._newest + 1 and (self._newest < 0 or _is_json(self.calls[self._newest][1]))
            if not (ended or is_next):
                break
            self._newest = following
        self._held = calls
        return passed

    def _seen(self, call: ToolCallDelta) -> ToolCallDelta:
        name, arguments = self.calls.get(call.index, ("", ""))
        self.calls[call.index] = (name + (call.name or ""), arguments + call.arguments)
        return call

    def _missing(self) -> tuple[str, list[ToolCallDelta]]:
        """Compare with what vLLM finds in the whole text; return the part that was never streamed."""
        tool_parser: Any = getattr(self.parser, "tool_parser", None)
        if not isinstance(tool_parser, _Mended) or tool_parser.seen in {"", self._content}:
            return "", []
        fresh: Any = type(tool_parser)(self._tokenizer, self._request.tools)
        found = fresh.extract_tool_calls(tool_parser.seen, self._request)
        if not found.tools_called:
            whole = found.content or ""
            marked = any(anchor in whole for anchor in tool_parser.anchors)
            missing = bool(self.calls) or marked or not whole.startswith(self._content)
            return ("" if missing else whole[len(self._content) :]), []
        calls = []
        for index, call in enumerate(found.tool_calls):
            name, arguments = self.calls.get(index, (None, ""))
            wanted = call.function.arguments
            if name is None:
                calls.append(self._seen(ToolCallDelta(index, call.id, call.function.name, wanted)))
            elif name == call.function.name and wanted != arguments and wanted.startswith(arguments):
                calls.append(self._seen(ToolCallDelta(index, None, None, wanted[len(arguments) :])))
        return "", calls


class _Mended:
    """Mixed in before a tool parser of vLLM: keeps the text, and lets calls begin after some words."""

    anchors: tuple[str, ...]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen = ""
        self.anchors = _ANCHORS.get(type(self).__name__, ())
        self._opening = _OPENINGS.get(type(self).__name__)
        self._start = None if self.anchors else 0
        self._sent = 0

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *others: Any, **named: Any
    ) -> Any:
        """Pass on the text from the first call on; text before it is content."""
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
            previous_text, current_text[self._start :], delta_text, *others, **named
        )
        if content:
            message = message or DeltaMessage()
            message.content = content + (message.content or "")
        return message

    def _words(self, text: str) -> str:
        """Return the new text that is not a call; set `_start` once a call begins."""
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


def _is_hermes(tool_parser: Any) -> bool:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    return issubclass(tool_parser, Hermes2ProToolParser)


class _MarksInTexts:
    """Mixed in before the Hermes parser: a text in a call's arguments may contain the mark that ends calls."""

    tool_call_start_token: str
    tool_call_end_token: str

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        found = super().extract_tool_calls(self._hidden(model_output), request)  # type: ignore[misc]
        for call in found.tool_calls:
            call.function.arguments = self._shown(call.function.arguments)
        found.content = found.content and self._shown(found.content)
        return found

    def _extract_tool_call_jsons(self, text: str) -> list[tuple[str, bool]]:
        found = super()._extract_tool_call_jsons(self._hidden(text))  # type: ignore[misc]
        return [(self._shown(call), is_complete) for call, is_complete in found]

    def _hidden(self, text: str) -> str:
        if text.count(self.tool_call_end_token) == 0:
            return text
        words, start, calls = text.partition(self.tool_call_start_token)
        return words + start + _TEXT.sub(lambda found: found[0].replace(self.tool_call_end_token, _HIDDEN), calls)

    def _shown(self, text: str) -> str:
        return text.replace(_HIDDEN, self.tool_call_end_token)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _delta(call: Any) -> ToolCallDelta:
    name, arguments = (call.function.name, call.function.arguments) if call.function else (None, None)
    return ToolCallDelta(call.index, call.id, name, arguments or "")


# (tool parser, reasoning parser) -> `model_type`s of config.json
_MODELS: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("apertus", None): ("apertus",),
    ("deepseek_v3", "deepseek_r1"): ("deepseek_v3",),
    ("deepseek_v32", "deepseek_v3"): ("deepseek_v32",),
    ("ernie45", "ernie45"): ("ernie4_5_moe",),
    ("gemma4", "gemma4"): ("gemma4",),
    ("glm45", "glm45"): ("glm4_moe", "glm4v_moe"),
    ("glm47", "glm45"): ("glm4_moe_lite", "glm_moe_dsa"),
    ("openai", "openai_gptoss"): ("gpt_oss",),
    ("granite", None): ("granite",),
    ("granite4", None): ("granitemoehybrid",),
    ("hunyuan_a13b", "hunyuan_a13b"): ("hunyuan_v1_moe",),
    # idefics3 has no calls of its own: this is how our demo model writes them
    ("hermes", None): ("idefics3", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl"),
    ("kimi_k2", "kimi_k2"): ("kimi_k2",),
    ("lfm2", None): ("lfm2", "lfm2_moe"),
    ("llama3_json", None): ("llama",),
    ("llama4_pythonic", None): ("llama4",),
    ("longcat", None): ("longcat_flash",),
    ("minimax_m2", "minimax_m2"): ("minimax_m2",),
    ("mistral", None): ("mistral", "mistral3"),
    ("olmo3", "olmo3"): ("olmo3",),
    ("hermes", "qwen3"): ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
    ("qwen3_coder", "qwen3"): ("qwen3_5", "qwen3_5_moe"),
    ("seed_oss", "seed_oss"): ("seed_oss",),
    ("step3", "step3"): ("step3_vl",),
    ("step3p5", "step3p5"): ("step3p5",),
}
FAMILIES = {model_type: parsers for parsers, types in _MODELS.items() for model_type in types}


# By what a chat template writes, for families whose members call in several ways; the more specific come first.
_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ("<|tool_call|>", "phi4_mini_json"),
)
_MANY_WAYS = {None, "hermes", "llama3_json", "mistral"}


def parsers_to_try(model_type: str, chat_template: str, spec: ChatModelSpec) -> list[tuple[str | None, str | None]]:
    """Return pairs of tool parser and reasoning parser, the likeliest first; None means that none is used.

    A parser in models.yaml is the only choice; `none` switches it off. A tool parser is only chosen for a model that
    claims `function_calling`. A family's reasoning parser is only chosen if the chat template mentions thinking: the
    whole answer of a member that does not think would be taken for reasoning.
    """
    family_tool, family_reasoning = FAMILIES.get(model_type, (None, None))
    if model_type != "gpt_oss" and "think" not in chat_template:
        family_reasoning = None
    written = [parser for mark, parser in _MARKS if mark in chat_template]
    if family_tool != "hermes" and "<tool_call>" not in chat_template:
        written = [parser for parser in written if parser != "qwen3_coder"]
    first = [*written, family_tool] if family_tool in _MANY_WAYS else [family_tool, *written]
    tools = _choices(spec.engine.tool_parser, first) if "function_calling" in spec.capabilities else [None]
    return [(tool, one) for tool in tools for one in _choices(spec.engine.reasoning_parser, [family_reasoning])]


def reasoning_parser_in(folder: Path, spec: ChatModelSpec) -> str | None:
    """Return the likeliest reasoning parser of the model in a folder, which its engine needs at its start.

    Without it a grammar would hold from the first token on, and the model could not end its reasoning.
    """
    template = folder / "chat_template.jinja"
    named = read_config(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    text = template.read_text("utf-8") if template.is_file() else str(named.get("chat_template"))
    likeliest = parsers_to_try(str(read_config(folder / "config.json").get("model_type")), text, spec)[0][1]
    return likeliest if likeliest is not None and _reads(likeliest, folder) else None


def _reads(reasoning_parser: str, folder: Path) -> bool:
    """Whether there is such a parser, and the vocabulary in a folder has its marks: else the engine would not start.

    The serving then reports it, or does without.
    """
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers import get_tokenizer

    try:
        ReasoningParserManager.get_reasoning_parser(reasoning_parser)(get_tokenizer(str(folder)))
    except (KeyError, OSError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _choices(named: str | None, found: list[str | None]) -> list[str | None]:
    if named is not None:
        return [None if named == "none" else named]
    return list(dict.fromkeys([*(one for one in found if one is not None), None]))
