"""Names in other people's packages that our code relies on: how they are listed, and found without an import.

The lists themselves stand beside the code that uses them: engine/backends/vllm/compat.py, server/http/compat.py.
Sources are read, never run, so that a release which is not installed is checked in the same way as one that is.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["needed", "optional"]
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_STEPS = 20  # through imports of imports


@dataclass(frozen=True, slots=True)
class ForeignName:
    """One name of a package that promises nothing about it: private, or overridden or assigned to by us."""

    name: str
    kind: Kind
    patch: str
    """What of ours relies on it. An optional patch is left out whole when one of its names is gone."""
    why: str
    since: str
    """The package's version that it was found in."""
    without: str
    """What happens where it is gone."""
    parameters: tuple[str, ...] | None = None
    """Those that we pass, or that our version takes; None: it is no function, or any signature will do."""
    overridden: bool = False
    """Ours takes its place and takes no others: one more parameter is a change as well."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A name that is not as we count on it."""

    name: ForeignName
    problem: str


def missing(names: Iterable[ForeignName], sources: Sources) -> list[Finding]:
    """List which of `names` are gone or take other parameters in `sources`."""
    findings = []
    for name in names:
        problem = _problem(name, sources)
        if problem is not None:
            findings.append(Finding(name, problem))
    return findings


def imported(package: str, files: Iterable[Path]) -> dict[str, str]:
    """Return what these files of ours import of `package`, public or not: dotted names, with the file of each."""
    found: dict[str, str] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == package:
                found |= {f"{node.module}.{alias.name}": file.name for alias in node.names}
            elif isinstance(node, ast.Import):
                found |= {alias.name: file.name for alias in node.names if alias.name.partition(".")[0] == package}
    return found


class Sources:
    """The source code of packages, by their names: those that are installed, but for the `folders` given."""

    def __init__(self, folders: Mapping[str, Path] | None = None) -> None:
        self._folders = dict(folders or {})
        self._modules: dict[str, ast.Module | None] = {}

    def find(self, dotted: str) -> ast.AST | None:
        """Return what defines a module, class, function, or attribute of these; None where nothing does."""
        return self._found(dotted, _MOST_STEPS)

    def parameters(self, dotted: str) -> list[tuple[str, bool]] | None:
        """Return (name, whether it has to be given) of a function or a class; None where that cannot be told.

        A `**` among them stands for any.
        """
        node = self.find(dotted)
        if isinstance(node, ast.ClassDef):
            made = self.find(f"{dotted}.__init__")
            return _parameters(made)[1:] if isinstance(made, _Function) else self._fields(dotted, node)
        if not isinstance(node, _Function):
            return None
        static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list)
        method = isinstance(self.find(dotted.rpartition(".")[0]), ast.ClassDef) and not static
        return _parameters(node)[1 if method else 0 :]

    def _found(self, dotted: str, steps: int) -> ast.AST | None:
        parts = dotted.split(".")
        for length in range(len(parts), 0, -1):
            module = self._module(".".join(parts[:length]))
            if module is not None:
                node: ast.AST | None = module
                place = ".".join(parts[:length])
                for attribute in parts[length:]:
                    node, place = self._attribute(node, place, attribute, steps)
                return node
        return None

    def _attribute(self, node: ast.AST | None, place: str, name: str, steps: int) -> tuple[ast.AST | None, str]:
        """Return what defines `name` within a module or class, and the place where that stands."""
        if steps and isinstance(node, ast.ClassDef):
            return self._of_class(node, place, name, steps - 1)
        if steps and isinstance(node, ast.Module):
            return self._of_module(node, place, name, steps - 1)
        return None, ""

    def _of_class(self, node: ast.ClassDef, place: str, name: str, steps: int) -> tuple[ast.AST | None, str]:
        own = _member(node, name)
        if own is not None:
            return own, f"{place}.{name}"
        for base in self._bases(node, place):
            found = self._found(f"{base}.{name}", steps)
            if found is not None:
                return found, f"{base}.{name}"
        return None, ""

    def _of_module(self, node: ast.Module, place: str, name: str, steps: int) -> tuple[ast.AST | None, str]:
        everything = []  # what `import *` may give: looked through last, since it leads far
        for statement in _statements(node.body):
            if name in _defined(statement):
                return statement, f"{place}.{name}"
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                continue
            for own_name, origin in self._targets(statement, place):
                if own_name == "*":
                    everything.append(f"{origin}.{name}")
                if own_name != name:
                    continue
                found = self._found(origin, steps)
                if found is not None or not self._knows(origin):
                    return found or statement, origin
        for origin in everything:
            found = self._found(origin, steps)
            if found is not None:
                return found, origin
        return None, ""

    def _bases(self, node: ast.ClassDef, place: str) -> Iterator[str]:
        module = place
        while module and self._module(module) is None:
            module = module.rpartition(".")[0]
        for base in node.bases:
            expression = base.value if isinstance(base, ast.Subscript) else base
            parts = []
            while isinstance(expression, ast.Attribute):
                parts.append(expression.attr)
                expression = expression.value
            if isinstance(expression, ast.Name):
                yield ".".join([module, expression.id, *reversed(parts)])

    def _fields(self, dotted: str, node: ast.ClassDef) -> list[tuple[str, bool]]:
        """Of a dataclass, its bases' first."""
        fields: dict[str, bool] = {}
        for base in self._bases(node, dotted):
            above = self.find(base)
            if isinstance(above, ast.ClassDef):
                fields |= dict(self._fields(base, above))
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = statement.value is None
        return list(fields.items())

    def _targets(self, statement: ast.Import | ast.ImportFrom, module: str) -> Iterator[tuple[str, str]]:
        """Yield the names that an import gives, with what they stand for."""
        for alias in statement.names:
            if isinstance(statement, ast.Import):
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top
                continue
            above = statement.module or ""
            if statement.level:
                keep = module.split(".") if self._is_package(module) else module.split(".")[:-1]
                keep = keep[: len(keep) - statement.level + 1]
                above = ".".join([*keep, above] if above else keep)
            yield alias.asname or alias.name, above if alias.name == "*" else f"{above}.{alias.name}"

    def _knows(self, dotted: str) -> bool:
        """Whether the sources of that package are here at all: what is compiled, or not installed, is believed."""
        return self._module(dotted.partition(".")[0]) is not None

    def _is_package(self, module: str) -> bool:
        file = self._file(module)
        return file is not None and file.stem == "__init__"

    def _module(self, dotted: str) -> ast.Module | None:
        if dotted not in self._modules:
            file = self._file(dotted)
            self._modules[dotted] = None if file is None else ast.parse(file.read_text(encoding="utf-8"))
        return self._modules[dotted]

    def _file(self, dotted: str) -> Path | None:
        package, _, rest = dotted.partition(".")
        if package not in self._folders:
            try:
                spec = importlib.util.find_spec(package)
            except ValueError:  # of a module that has none, like `__main__`
                spec = None
            if spec is None or spec.origin is None or not spec.submodule_search_locations:
                return None
            self._folders[package] = Path(spec.origin).parent
        path = self._folders[package].joinpath(*rest.split(".")) if rest else self._folders[package]
        candidates = [path / "__init__.py", path.with_suffix(".py"), path / "__init__.pyi", path.with_suffix(".pyi")]
        return next((each for each in candidates if each.is_file()), None)


def _problem(name: ForeignName, sources: Sources) -> str | None:
    if sources.find(name.name) is None:
        return "is gone"
    if name.parameters is None:
        return None
    taken = sources.parameters(name.name)
    if taken is None:
        return "is no function any more"
    known = [each for each, _ in taken]
    removed = [] if "**" in known else [each for each in name.parameters if each not in known]
    new = [
        each
        for each, required in taken
        if each not in name.parameters and each not in {"*", "**"} and (required or name.overridden)
    ]
    words = [f"no longer takes {', '.join(removed)}"] if removed else []
    words += [f"takes {', '.join(new)} as well"] if new else []
    return "; ".join(words) or None


def _parameters(function: ast.AST) -> list[tuple[str, bool]]:
    assert isinstance(function, _Function)  # noqa: S101  # the callers have looked
    arguments = function.args
    usual = [*arguments.posonlyargs, *arguments.args]
    required = len(usual) - len(arguments.defaults)
    found = [(each.arg, place < required) for place, each in enumerate(usual)]
    if arguments.vararg is not None:
        found.append(("*", False))
    found += [
        (each.arg, default is None) for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return [*found, ("**", False)] if arguments.kwarg is not None else found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield them, and those within conditions: what is imported in an `if` or a `try` counts as well."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _statements(handler.body)


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    names = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {each.id for each in names if isinstance(each, ast.Name)}


def _member(node: ast.ClassDef, name: str) -> ast.AST | None:
    """Look for it in the class's own body, then for what its methods set of `self`."""
    for statement in _statements(node.body):
        if name in _defined(statement):
            return statement
    for inner in ast.walk(node):
        targets = inner.targets if isinstance(inner, ast.Assign) else [getattr(inner, "target", None)]
        for target in [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]:
            if (
                isinstance(target, ast.Attribute)
                and target.attr == name
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                return inner
    return None
