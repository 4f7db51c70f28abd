"""Every family's tool parser, fed with complete calls in its own format: token by token, whole and cut off.

Drives the same classes that serve answers, without an engine. What the engine makes of a request's tools is tested in
tests/server/api/chat/test_tool_choice.py.
"""

# ruff: noqa: RUF001  # DeepSeek writes its marks with wide bars
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.config.models import ChatEngineSpec, ChatModelSpec
from engine.demo import weights_dir

pytestmark = pytest.mark.engine  # imports vLLM

CITY = "Pa{r}is ☂"
ARGUMENTS = json.dumps({"city": CITY}, ensure_ascii=False)
CALLS = [("get_weather", {"city": CITY}), ("now", {})]
WORDS = "Let me see. "
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]


@dataclass(frozen=True)
class Format:
    """How one family writes CALLS, and which of its marks are single tokens."""

    text: str
    tokens: tuple[str, ...] = ()
    content: str = ""  # white space between calls that some parsers pass on


def tagged(start: str, end: str, key: str = "arguments", **fields: Any) -> Format:
    """One JSON object per call, each between two marks."""
    calls = (f'{{"name": "get_weather", "{key}": {ARGUMENTS}}}', f'{{"name": "now", "{key}": {{}}}}')
    return Format("\n".join(f"{start}\n{call}\n{end}" for call in calls), (start, end), **fields)


def listed(start: str, end: str, tokens: tuple[str, ...] = ()) -> Format:
    """One JSON array of all calls."""
    calls = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]'
    return Format(f"{start}{calls}{end}", tokens)


def functions(start: str, end: str) -> Format:
    """Qwen3-Coder's XML."""
    first = f"<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n</function>"
    return Format(f"{start}\n{first}\n{end}\n{start}\n<function=now>\n</function>\n{end}", (start, end))


DEEPSEEK = tuple(f"<｜tool▁{mark}｜>" for mark in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
STEP3 = tuple(f"<｜tool_{mark}｜>" for mark in ("calls_begin", "calls_end", "call_begin", "call_end", "sep"))
KIMI = tuple(
    f"<|tool_{mark}|>"
    for mark in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
GLM = Format(
    f"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{CITY}</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

FORMATS: dict[str, Format] = {
    "apertus": Format(
        f'<|tools_prefix|>[{{"get_weather": {ARGUMENTS}}}, {{"now": {{}}}}]<|tools_suffix|>',
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    "deepseek_v3": Format(
        "{0}{2}function{4}get_weather\n```json\n%s\n```{3}\n{2}function{4}now\n```json\n%s\n```{3}{1}".format(*DEEPSEEK)
        % (ARGUMENTS, "{}"),
        DEEPSEEK,
        content="\n",
    ),
    "deepseek_v31": Format(
        "{0}{2}get_weather{4}%s{3}{2}now{4}%s{3}{1}".format(*DEEPSEEK) % (ARGUMENTS, "{}"), DEEPSEEK
    ),
    "deepseek_v32": Format(
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">'
        f'{CITY}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        ("｜DSML｜",),
    ),
    "ernie45": tagged("<tool_call>", "</tool_call>"),
    "gemma4": Format(
        f'<|tool_call>call:get_weather{{city:<|"|>{CITY}<|"|>}}<tool_call|><|tool_call>call:now{{}}<tool_call|>',
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "glm45": GLM,
    "glm47": GLM,
    "granite": listed("<|tool_call|>", "", ("<|tool_call|>",)),
    "granite4": tagged("<tool_call>", "</tool_call>", content="\n"),
    "hermes": tagged("<tool_call>", "</tool_call>"),
    "hunyuan_a13b": listed("<tool_calls>", "</tool_calls>"),
    "jamba": listed("<tool_calls>", "</tool_calls>", ("<tool_calls>", "</tool_calls>")),
    "kimi_k2": Format(
        "{0}{2}functions.get_weather:0{4}%s{3}{2}functions.now:1{4}%s{3}{1}".format(*KIMI) % (ARGUMENTS, "{}"), KIMI
    ),
    "lfm2": Format(
        f'<|tool_call_start|>[get_weather(city="{CITY}"), now()]<|tool_call_end|>',
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "llama3_json": Format(
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
        ("<|python_tag|>",),
    ),
    "llama4_pythonic": Format(
        f'<|python_start|>[get_weather(city="{CITY}"), now()]<|python_end|>', ("<|python_start|>", "<|python_end|>")
    ),
    "longcat": tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "minimax_m2": Format(
        f'<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "mistral": listed("[TOOL_CALLS]", "", ("[TOOL_CALLS]",)),
    "openai": Format(
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    ),
    "olmo3": Format(f'<function_calls>get_weather(city="{CITY}")\nnow()</function_calls>'),
    "qwen3_coder": functions("<tool_call>", "</tool_call>"),
    "seed_oss": functions("<seed:tool_call>", "</seed:tool_call>"),
    "step3": Format(
        '{0}{2}function{4}<steptml:invoke name="get_weather"><steptml:parameter name="city">%s</steptml:parameter>'
        '</steptml:invoke>{3}{2}function{4}<steptml:invoke name="now"></steptml:invoke>{3}{1}'.format(*STEP3)
        % CITY,
        STEP3,
    ),
    "step3p5": functions("<tool_call>", "</tool_call>"),
}
MARKS = ("tool", "TOOL", "python_", "DSML", "function_calls", "[get_", '{"name', "<|", "<｜")

Steps = list[tuple[str, list[int]]]
Answer = tuple[str, list[tuple[str, str]]]


class Family:
    """One parser over the demo's tokenizer, which is given the family's marks."""

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser.parser_manager import ParserManager

        from engine.backends.vllm.tool_calls import mend

        self.format = FORMATS[name]
        self.tokenizer = AutoTokenizer.from_pretrained(weights_dir("chat"))
        self.tokenizer.add_tokens([token for token in self.format.tokens if token not in self.tokenizer.get_vocab()])
        self.parser_class = ParserManager.get_parser(
            tool_parser_name=name, enable_auto_tools=True, tool_strict_level="parameter", tokenizer=self.tokenizer
        )
        mend(self.parser_class)
        self.request = ChatCompletionRequest.model_validate({"messages": [], "tools": TOOLS, "tool_choice": "auto"})

    def steps(self, text: str) -> Steps:
        """Return `text` as the engine would bring it, one token a step; half a character waits for the other half."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        done, steps = "", []
        for count, token_id in enumerate(token_ids, 1):
            so_far = self.tokenizer.decode(token_ids[:count])
            new = "" if so_far.endswith("\ufffd") else so_far[len(done) :]
            steps.append((new, [token_id]))
            done += new
        assert done == text
        return steps

    def answer(self, steps: Iterable[tuple[str, list[int]]], finish_reason: str) -> Answer:
        """Feed a parser with `steps` and put together what a client would."""
        from engine.backends.vllm.tool_calls import CallStream

        stream = CallStream(self.parser_class(self.tokenizer, self.request.tools), self.request, self.tokenizer)
        steps = list(steps)
        content, calls = "", {}
        for place, (text, token_ids) in enumerate(steps, 1):
            reason = finish_reason if place == len(steps) else None
            new, _, pieces = stream.feed(text, token_ids, [1, 2, 3], reason)
            content += new
            for piece in pieces:
                assert (piece.id is None) == (piece.index in calls), "id and name come once, with the first piece"
                assert piece.index >= max(calls, default=0), "a call is complete before the next begins"
                name, arguments = calls.get(piece.index, ("", ""))
                calls[piece.index] = (name + (piece.name or ""), arguments + piece.arguments)
        return content, [calls[index] for index in sorted(calls)]


class Harmony(Family):
    """gpt-oss: its parser reads tokens of its own vocabulary, and never text. Everything stands in messages."""

    def __init__(self, name: str) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
        from vllm.parser.parser_manager import ParserManager

        from engine.backends.vllm.tool_calls import mend

        self.format = FORMATS[name]
        self.encoding = get_encoding()
        self.tokenizer = SimpleNamespace(eos_token_id=self.encode("<|call|>")[0], get_vocab=dict)
        self.parser_class = ParserManager.get_parser(
            tool_parser_name=name,
            reasoning_parser_name="openai_gptoss",
            enable_auto_tools=True,
            tool_strict_level="parameter",
            is_harmony=True,
        )
        mend(self.parser_class)
        self.request = ChatCompletionRequest.model_validate({"messages": [], "tools": TOOLS, "tool_choice": "auto"})

    def encode(self, text: str) -> list[int]:
        return list(self.encoding.encode(text, allowed_special="all"))

    def steps(self, text: str) -> Steps:
        words, calls, _ = text.partition(self.format.text)
        thought = "<|channel|>analysis<|message|>The user asks me.<|end|><|start|>assistant"
        channel = "commentary" if calls else "final"
        said = f"<|channel|>{channel}<|message|>{words}" + ("<|end|><|start|>assistant" if calls else "")
        return [("", [token_id]) for token_id in self.encode(thought + (said if words else "") + calls)]


@pytest.fixture(scope="module", autouse=True)
def _vllm() -> None:
    """Import it once; that torch warns about itself while it does is no finding of ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.parser.parser_manager
        import vllm.tool_parsers.structural_tag_registry  # noqa: F401


@pytest.fixture(scope="module", params=FORMATS)
def family(request: pytest.FixtureRequest) -> Family:
    return (Harmony if request.param == "openai" else Family)(request.param)


def end(family: Family, steps: Steps) -> Steps:
    """The model stops by itself: a token without text."""
    return [*steps, ("", [family.tokenizer.eos_token_id])]


@pytest.mark.parametrize("words", ["", WORDS], ids=["calls-alone", "after-words"])
def test_a_complete_answer_is_read_whole(family: Family, words: str) -> None:
    content, calls = family.answer(end(family, family.steps(words + family.format.text)), "stop")
    assert content.removesuffix(family.format.content).removesuffix("\n") == words
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 17])
def test_steps_of_several_tokens_bring_the_same(family: Family, size: int) -> None:
    """As where tokens are guessed."""
    steps = end(family, family.steps(WORDS + family.format.text))
    parts = [steps[at : at + size] for at in range(0, len(steps), size)]
    joined = [("".join(text for text, _ in part), [token for _, ids in part for token in ids]) for part in parts]
    content, calls = family.answer(joined, "stop")
    assert content.strip() == WORDS.strip()
    assert [(name, json.loads(arguments)) for name, arguments in calls] == CALLS


@pytest.mark.parametrize("words", ["", WORDS], ids=["calls-alone", "after-words"])
def test_an_answer_cut_off_anywhere_shows_no_marks_and_nothing_that_was_not_said(family: Family, words: str) -> None:
    steps = family.steps(words + family.format.text)
    for cut in range(1, len(steps)):
        content, calls = family.answer(steps[:cut], "length")
        assert not any(mark in content for mark in MARKS), (cut, content)
        assert content.strip() in words
        for (name, arguments), (whole_name, whole) in zip(calls, CALLS, strict=False):
            assert name == whole_name
            assert json.dumps(whole, ensure_ascii=False).startswith(arguments), (cut, arguments)


@pytest.mark.parametrize("text", ["Just words, 1 < 2 and [1] {2}.", '{"answer": [1, 2]}', "[1] is a reference"])
def test_an_answer_without_calls_is_content(family: Family, text: str) -> None:
    assert family.answer(end(family, family.steps(text)), "stop") == (text, [])


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"enum": ["a", "b"]}, " a\t", "a"),
        ({"type": "string", "maxLength": 3}, "\r\nabc\n\n", "abc"),
        ({"type": "string", "pattern": "^x+$"}, "\n\n xx ", "xx"),
        ({"type": "string"}, "\n    indented\n\n", "    indented\n"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "  any text ", "  any text "),
        ({"anyOf": [{"const": "a"}, {"type": "null"}]}, " null ", None),
        ({"enum": [" a", "b"]}, "\n a\n", " a"),
        ({"type": "string", "minLength": 3}, "\n  a\n", "  a"),
        ({"type": "boolean"}, "\ttrue ", True),
        ({"type": "integer"}, " 5\t", 5),
    ],
)
def test_forced_values_have_no_white_space_that_their_schema_does_not_have(schema: Any, written: str, value: Any):
    family = Family("qwen3_coder")
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"v": schema}, "required": ["v"]}}
    fields = {"messages": [], "tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    family.request = type(family.request).model_validate(fields)
    text = f"<tool_call>\n<function=f>\n<parameter=v>{written}</parameter>\n</function>\n</tool_call>"
    _, calls = family.answer(end(family, family.steps(text)), "stop")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"v": value})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_of_forced_calls_marks_that_are_spelled_letter_by_letter_are_no_content(choice: Any, reason: str):
    family = Family("qwen3_coder")
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"v": {"enum": ["a", "b"]}}}}
    fields = {"messages": [], "tools": [{"type": "function", "function": tool}], "tool_choice": choice}
    family.request = type(family.request).model_validate(fields)
    call = "\n<function=f>\n<parameter=v>\na\n</parameter>\n</function>\n"
    marks = ("<tool", "_call>", call, "</tool_call>", "\n", "<tool", "_call>", "\n<func")
    steps = [step for part in marks for step in family.steps(part)]
    content, calls = family.answer(steps, reason)
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("f", {"v": "a"})]
    family.request.tool_choice = "auto"
    assert family.answer(family.steps("Words."), "length")[0] == "Words."


@pytest.mark.parametrize("city", ["</tool_call>", 'a "</tool_call>\\" {} </tool_call', "<tool_call></tool_call>", '"'])
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_mark_that_ends_a_hermes_call_may_stand_in_a_text_of_it(city: str, reason: str) -> None:
    family = Family("hermes")
    first = json.dumps({"name": "get_weather", "arguments": {"city": city}}, ensure_ascii=False)
    text = (
        f'A "word. <tool_call>\n{first}\n</tool_call>\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
    )
    for steps in (family.steps(text), [(text, family.tokenizer.encode(text))]):
        content, calls = family.answer(end(family, steps), reason)
        assert content == 'A "word. '
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            ("get_weather", {"city": city}),
            CALLS[1],
        ]


def test_every_family_has_parsers_that_exist_and_a_format_here() -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    from engine.backends.vllm.tool_calls import FAMILIES

    tools = {tool for tool, _ in FAMILIES.values() if tool}
    assert tools <= set(ToolParserManager.list_registered())
    assert {reasoning for _, reasoning in FAMILIES.values() if reasoning} <= set(
        ReasoningParserManager.list_registered()
    )
    assert tools <= set(FORMATS)


@pytest.mark.parametrize(
    ("model_type", "template", "parsers"),
    [
        ("qwen3_moe", "<tool_call> <think>", ("hermes", "qwen3")),
        ("qwen3_moe", "<tool_call>\n<function=", ("qwen3_coder", None)),
        ("llama", "<function=", ("llama3_json", None)),
        ("idefics3", "<tool_call>", ("hermes", None)),
        ("gpt_oss", "", ("openai", "openai_gptoss")),
        ("llama", "<tool_call>", ("hermes", None)),  # Hermes 3, SmolLM 3
        ("llama", "[TOOL_CALLS]", ("mistral", None)),
        ("unheard_of", "<tool_call>", ("hermes", None)),
        ("glm4_moe", "<tool_call> <think>", ("glm45", "glm45")),
        ("unheard_of", "", (None, None)),
    ],
)
def test_parsers_are_those_of_the_family_and_its_template(model_type: str, template: str, parsers: Any) -> None:
    from engine.backends.vllm.tool_calls import parsers_to_try

    spec = ChatModelSpec(id="x", task="chat", tier="standard", weights="x", capabilities=("chat", "function_calling"))
    tried = parsers_to_try(model_type, template, spec)
    assert tried[0] == parsers
    assert tried[-1] == (None, None)


@pytest.mark.parametrize(("named", "tried"), [("hermes", ("hermes", None)), ("none", (None, None))])
def test_a_parser_that_is_named_is_the_only_choice(named: str, tried: tuple[str | None, None]) -> None:
    from engine.backends.vllm.tool_calls import parsers_to_try

    spec = ChatModelSpec.model_validate(
        {
            "id": "x",
            "task": "chat",
            "tier": "standard",
            "weights": "x",
            "capabilities": ["chat", "function_calling"],
            "engine": {"tool_parser": named},
        }
    )
    assert parsers_to_try("llama", "[TOOL_CALLS]", spec) == [tried]


def test_an_engine_is_told_how_the_model_in_its_folder_thinks(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from engine.backends.vllm.tool_calls import reasoning_parser_in

    spec = ChatModelSpec(id="x", task="chat", tier="standard", weights="x", capabilities=("chat", "function_calling"))
    tokenizer = AutoTokenizer.from_pretrained(weights_dir("chat"))
    tokenizer.chat_template = "<think>{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5"}')
    assert reasoning_parser_in(tmp_path, spec) == "qwen3"
    unknown = spec.model_copy(update={"engine": ChatEngineSpec(reasoning_parser="unheard_of")})
    assert reasoning_parser_in(tmp_path, unknown) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert reasoning_parser_in(tmp_path, spec) is None
    assert reasoning_parser_in(weights_dir("chat"), spec) is None
