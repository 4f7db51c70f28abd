"""From a YAML file to plain data that remembers its lines; what it means is left to engine/config/load.py."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import yaml

LIMIT_BYTES = 1 << 20
LIMIT_DEPTH = 16

Location = tuple[str | int, ...]

_EMPTY = "is empty: copy models.yaml from the repository and change it"
_OTHER_SHAPE = "must have the keys `models` and `tiers` at the start of a line"
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
    """What the file says. `root` is None when it could not be read at all; `problems` then says why."""

    root: dict[str, object] | None = None
    lines: dict[Location, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, location: Location, message: str) -> None:
        """Note a problem at `location`, with the line of its nearest known ancestor."""
        known = location
        while known and known not in self.lines:
            known = known[:-1]
        self.problems.append(Problem(self.lines.get(known), key_path(location), message))


def key_path(location: Location) -> str:
    """Show `("models", "a", "capabilities", 1)` as `models.a.capabilities[1]`."""
    return "".join(_key_part(part) for part in location).removeprefix(".")


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
    document = Document()
    text = _read_text(path, document)
    if text is not None:
        parse_document(text, document, _EMPTY, _OTHER_SHAPE)
    return document


def _read_text(path: Path, document: Document) -> str | None:
    try:
        with path.open("rb") as file:
            content = file.read(LIMIT_BYTES + 1)
        if len(content) <= LIMIT_BYTES:
            return content.decode("utf-8-sig")
        message = "is larger than 1 MiB: this is not a list of models"
    except FileNotFoundError:
        message = "there is no such file: copy models.yaml from the repository, or point HEARTH_MODELS at yours"
    except IsADirectoryError:
        message = "is a folder: point HEARTH_MODELS at the file inside it"
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        document.problems.append(Problem(line, "", "is not UTF-8 text: save the file as UTF-8"))
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot be read ({reason}): check the path and who may read it"
    document.problems.append(Problem(None, "", message))
    return None


def parse_document(text: str, document: Document, empty: str, other_shape: str) -> None:
    """Read YAML into `document`. `empty` and `other_shape` are said of a text with nothing in it, or no mapping."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"there is an invisible character (number {error.character}): remove it"
        document.problems.append(Problem(line, "", message))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line_or_none = mark.line + 1 if mark else None
        context = f" {error.context}" if error.context else ""
        document.problems.append(Problem(line_or_none, "", f"cannot be read as YAML: {error.problem}{context}"))
    except (ValueError, OverflowError):
        # PyYAML lets these out for escapes beyond Unicode and for a %YAML line with an endless number.
        message = "cannot be read as YAML: an escape like \\U00110000 or a %YAML line has too large a number"
        document.problems.append(Problem(None, "", message))
    else:
        _read_root(node, document, empty, other_shape)


def _read_root(node: yaml.Node | None, document: Document, empty: str, other_shape: str) -> None:
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == f"{_TAG}null"):
        document.problems.append(Problem(None, "", empty))
        return
    root = _value(node, (), document)
    if isinstance(root, dict):
        document.root = root
    elif not document.problems:
        document.problems.append(Problem(node.start_mark.line + 1, "", other_shape))


def _value(node: yaml.Node, location: Location, document: Document) -> object:
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        return _mapping(node, location, document)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        for index, item in enumerate(node.value):
            document.lines[*location, index] = item.start_mark.line + 1
        return [_value(item, (*location, index), document) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            return _text(node, location, document)
        pattern, construct = _SCALARS.get(kind, (None, None))
        if pattern and construct and pattern.match(node.value):
            return construct(node.value)
    message = f"has the YAML tag `{shown(node.tag)}`: write the plain value without a tag"
    document.problems.append(Problem(node.start_mark.line + 1, key_path(location), message))
    return None


def _mapping(node: yaml.MappingNode, location: Location, document: Document) -> dict[str, object]:
    result: dict[str, object] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            message = "has a list or a mapping as a key: a key is one word"
            document.problems.append(Problem(line, key_path(location), message))
            continue
        key = _text(key_node, location, document)
        here = (*location, key)
        if key in result:
            message = f"appears twice, first on line {document.lines[here]}: keep one"
            document.problems.append(Problem(line, key_path(here), message))
            continue
        document.lines[here] = line
        result[key] = _value(value_node, here, document)
    return result


def _text(node: yaml.ScalarNode, location: Location, document: Document) -> str:
    text: str = node.value
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "has an escape like \\ud800, which is half a character: remove it"
        document.problems.append(Problem(node.start_mark.line + 1, key_path(location), message))
        return text.encode("ascii", "backslashreplace").decode()
    return text


def _refusal(event: yaml.Event, message: str) -> yaml.MarkedYAMLError:
    return yaml.composer.ComposerError(None, None, message, event.start_mark)  # type: ignore[arg-type]


class _Loader(yaml.SafeLoader):
    """Builds nodes only; refuses aliases (a few lines of them expand to gigabytes) and deep nesting."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}  # type: ignore[misc]
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
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
