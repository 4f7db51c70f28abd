"""From a YAML file to plain data with line numbers; engine/config/__init__.py reads its meaning."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import yaml

LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 16

Location = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
# YAML 1.2's core schema, which editors use too: `on` and `no` are words, 1:30 is not ninety.
_SCALARS: dict[str, tuple[re.Pattern[str], Callable[[str], object]]] = {
    "null": (re.compile(r"(?:~|null|Null|NULL|)\Z"), lambda _: None),
    "bool": (re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), lambda text: text.lower() == "true"),
    # At most 18 digits: Python itself refuses to print very long integers.
    "int": (re.compile(r"[-+]?[0-9]{1,18}\Z"), int),
    "float": (
        re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|\.inf|\.nan)\Z"),
        lambda text: float(text.replace(".inf", "inf").replace(".nan", "nan")),
    ),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where (`line` counts from 1; `key` is like `models.a.engine`) and what."""

    line: int | None
    key: str
    message: str


@dataclass(slots=True)
class Document:
    """The content of the file. `root` is None if it could not be read at all; `problems` then says why."""

    root: dict[str, object] | None = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, location: Location, message: str, line: int | None = None) -> None:
        """Note a problem at `location`; `line` None: the line of its nearest known ancestor."""
        known = location
        while known and known not in self.lines:
            known = known[:-1]
        # Like `models.a.capabilities[1]`
        key = "".join(_key_part(part) for part in location).removeprefix(".")
        self.problems.append(Problem(line or self.lines.get(known), key, message))


def _key_part(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    # Quoted where it would be mistaken for something else, like `..`.
    return f".{shown(part)}" if part[:1].isalnum() or not part.isprintable() else f".{shown(part)!r}"


def shown(text: str, limit: int = 60) -> str:
    """Text from the file, cut and escaped so that it can be printed on any terminal."""
    text = text if len(text) <= limit else f"{text[:limit]}..."
    return text if text and text.isprintable() else ascii(text)


def read_document(path: Path) -> Document:
    """Read `path`. Nothing is raised: a missing, unreadable or malformed file is a problem in the result."""
    line = None
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
        if len(content) <= LIMIT_BYTES:
            empty = "is empty: copy models.yaml from the repository and change it"
            other_shape = "must have the keys `models` and `tiers` at the start of a line"
            return parse_document(content.decode("utf-8-sig"), empty, other_shape)
        message = "is larger than 1 MiB: this is not a list of models"
    except FileNotFoundError:
        message = "there is no such file: copy models.yaml from the repository, or point HEARTH_MODELS at yours"
    except IsADirectoryError:
        message = "is a folder: point HEARTH_MODELS at the file inside it"
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = "is not UTF-8 text: save the file as UTF-8"
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"cannot be read ({reason}): check the path and who may read it"
    return Document(problems=[Problem(line, "", message)])


def parse_document(text: str, empty: str, other_shape: str) -> Document:
    """Read YAML. `empty` and `other_shape` are the messages for a text with nothing in it, or no mapping."""
    document = Document()
    try:
        node = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        document.add_problem((), *_why_unreadable(error, text))
        return document
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null"):
        document.add_problem((), empty)
        return document
    root = _value(node, (), document)
    if isinstance(root, dict):
        document.root = root
    elif not document.problems:
        document.add_problem((), other_shape, _line(node))
    return document


def _why_unreadable(error: yaml.YAMLError, text: str) -> tuple[str, int | None]:
    if isinstance(error, yaml.reader.ReaderError):
        message = f"there is an invisible character (number {error.character}): remove it"
        return message, text.encode()[: error.position].count(b"\n") + 1
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    context = getattr(error, "context", None)
    problem = f"{getattr(error, 'problem', error)}{f' {context}' if context else ''}"
    return f"cannot be read as YAML: {problem}", mark.line + 1 if mark else None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _value(node: yaml.Node, location: Location, document: Document) -> object:
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        return _mapping(node, location, document)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        document.lines.update({(*location, index): _line(item) for index, item in enumerate(node.value)})
        return [_value(item, (*location, index), document) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return str(node.value)
        pattern, construct = _SCALARS.get(kind, (None, None))
        if pattern and construct and pattern.match(node.value):
            return construct(node.value)
    message = f"has the YAML tag `{shown(node.tag)}`: write the plain value without a tag"
    document.add_problem(location, message, _line(node))
    return None


def _mapping(node: yaml.MappingNode, location: Location, document: Document) -> dict[str, object]:
    result: dict[str, object] = {}
    for key_node, value_node in node.value:
        line = _line(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            document.add_problem(location, "has a list or a mapping as a key: a key is one word", line)
            continue
        key = str(key_node.value)
        here = (*location, key)
        if key in result:
            document.add_problem(here, f"appears twice, first on line {document.lines[here]}: keep one", line)
            continue
        document.lines[here] = line
        result[key] = _value(value_node, here, document)
    return result


def _refusal(event: yaml.Event | None, message: str) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, message, getattr(event, "start_mark", None))


class _Loader(yaml.composer.Composer, yaml.CSafeLoader):
    """Builds nodes only; refuses aliases (a few lines of them expand to gigabytes) and deep nesting."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]
    _depth = 0

    def __init__(self, text: str) -> None:
        yaml.composer.Composer.__init__(self)  # its nodes are built here, from libyaml's events
        yaml.CSafeLoader.__init__(self, text)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _refusal(event, f"the alias `*{shown(str(event.anchor))}` is not allowed; write the value out")
        self._depth += 1
        if self._depth > LIMIT_DEPTH:
            raise _refusal(event, f"it is nested more than {LIMIT_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


for _kind, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(f"{_TAG}{_kind}", _pattern, None)
