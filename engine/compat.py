"""Names in other packages that our code relies on: how they are listed, and found without an import.

The lists are beside the code that uses them: engine/backends/vllm/compat.py, server/http/compat.py.
Sources are read, never run, so that a release which is not installed is checked in the same way as one that is.
"""

import ast
import importlib.util
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["needed", "optional"]
_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_STEPS = 20  # through bases, and imports of imports
# On two threads at once (two models that start), Python 3.11 fails when the collector runs while a tree is made.
_parsing = threading.Lock()


@dataclass(frozen=True, slots=True)
class ForeignName:
    """One name that is not stable API: private, or overridden or assigned to by us."""

    name: str
    kind: Kind
    patch: str
    """Our code that relies on it. An optional patch is left out as a whole when one of its names is gone."""
    why: str
    since: str
    """The package's version that it was found in."""
    without: str
    """What happens where it is gone."""
    parameters: tuple[str, ...] | None = None
    """Those that we pass or override; None: it is not a function, or any signature will do."""
    overridden: bool = False
    """Our function replaces it and takes these only: a new parameter is a problem too."""


def missing(names: Iterable[ForeignName], sources: "Sources") -> list[tuple[ForeignName, str]]:
    """List which of `names` are gone or take other parameters in `sources`, and what is wrong with them."""
    return [(name, problem) for name in names if (problem := _problem(name, sources)) is not None]


class Sources:
    """The source code of packages by name: in `folders`, else as installed."""

    def __init__(self, folders: Mapping[str, Path] | None = None) -> None:
        self._folders = dict(folders or {})
        self._modules: dict[str, ast.Module | None] = {}

    def find(self, dotted: str) -> ast.AST | None:
        """Return the definition of a module, class, function, or attribute of these; None if there is none."""
        return self._find(dotted, _MOST_STEPS)[0]

    def parameters(self, dotted: str) -> list[tuple[str, bool]] | None:
        """Return (name, is required) of each parameter of a function or class; None if unknown.

        The name `**` stands for any.
        """
        node = self.find(dotted)
        if isinstance(node, ast.ClassDef):
            made = self.find(f"{dotted}.__init__")
            return _parameters(made) if isinstance(made, _Function) else self._fields(dotted, node)
        return _parameters(node) if isinstance(node, _Function) else None

    def _find(self, dotted: str, steps: int) -> tuple[ast.AST | None, str]:
        """Return the definition of a name, and the dotted name of the place where it is."""
        module = self._module(dotted)
        if module is not None:
            return module, dotted
        above, _, name = dotted.rpartition(".")
        owner, place = self._find(above, steps) if above and steps else (None, "")
        if isinstance(owner, ast.ClassDef):
            if (own := _member(owner, name)) is not None:
                return own, f"{place}.{name}"
            return self._first_of([f"{base}.{name}" for base in self._bases(owner, place)], steps - 1)
        if isinstance(owner, ast.Module):
            return self._in_module(owner, place, name, steps - 1)
        return None, ""

    def _in_module(self, node: ast.Module, place: str, name: str, steps: int) -> tuple[ast.AST | None, str]:
        everything = []  # what `import *` may give: searched last, since it leads far
        for statement in _statements(node):
            if name in _defined(statement):
                return statement, f"{place}.{name}"
            for own_name, origin in self._imports(statement, place):
                if own_name == "*":
                    everything.append(f"{origin}.{name}")
                elif own_name == name:
                    found, where = self._find(origin, steps)
                    if found is not None:
                        return found, where
                    if self._module(origin.partition(".")[0]) is None:  # compiled, or not installed: assumed there
                        return statement, origin
        return self._first_of(everything, steps)

    def _first_of(self, dotted: list[str], steps: int) -> tuple[ast.AST | None, str]:
        found = (self._find(each, steps) for each in dotted)
        return next(((node, place) for node, place in found if node is not None), (None, ""))

    def _bases(self, node: ast.ClassDef, place: str) -> list[str]:
        module = place
        while module and self._module(module) is None:
            module = module.rpartition(".")[0]
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        return [f"{module}.{ast.unparse(base)}" for base in bases]

    def _fields(self, dotted: str, node: ast.ClassDef) -> list[tuple[str, bool]]:
        """Return (name, is required) of each field of a dataclass, its bases' first."""
        fields: dict[str, bool] = {}
        for base in self._bases(node, self._find(dotted, _MOST_STEPS)[1]):
            above = self.find(base)
            if isinstance(above, ast.ClassDef):
                fields |= dict(self._fields(base, above))
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                fields[statement.target.id] = statement.value is None
        return list(fields.items())

    def _imports(self, statement: ast.stmt, module: str) -> Iterator[tuple[str, str]]:
        """Yield the names that an import gives, with the full names of what they refer to."""
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                top = alias.name.partition(".")[0]
                yield alias.asname or top, alias.name if alias.asname else top
        elif isinstance(statement, ast.ImportFrom):
            file = self._file(module)
            package = module if file is not None and file.stem == "__init__" else module.rpartition(".")[0]
            above = importlib.util.resolve_name("." * statement.level + (statement.module or ""), package)
            for alias in statement.names:
                yield alias.asname or alias.name, above if alias.name == "*" else f"{above}.{alias.name}"

    def _module(self, dotted: str) -> ast.Module | None:
        if dotted not in self._modules:
            file = self._file(dotted)
            with _parsing:
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
        return "is not a function any more"
    known = dict(taken)
    removed = [] if "**" in known else [each for each in name.parameters if each not in known]
    more = {each: required for each, required in taken if each not in {"**", *name.parameters}}
    new = [each for each, required in more.items() if required or name.overridden]
    words = [f"no longer takes {', '.join(removed)}"] if removed else []
    words += [f"takes {', '.join(new)} as well"] if new else []
    return "; ".join(words) or None


def _parameters(function: _Function) -> list[tuple[str, bool]]:
    arguments = function.args
    usual = [*arguments.posonlyargs, *arguments.args]
    required = len(usual) - len(arguments.defaults)
    found = [(each.arg, place < required) for place, each in enumerate(usual) if each.arg not in {"self", "cls"}]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [(each.arg, default is None) for each, default in named]
    return found if arguments.kwarg is None else [*found, ("**", False)]


def _statements(within: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a node and of each `if`, `try` and `with` in it: they may hold imports."""
    for node in ast.iter_child_nodes(within):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(node)


def _assigned(node: ast.AST) -> list[ast.AST]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target]) if each]


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    return {each.id for each in _assigned(statement) if isinstance(each, ast.Name)}


def _member(node: ast.ClassDef, name: str) -> ast.AST | None:
    """Look in the class's own body, then among what its methods set on `self`."""
    own = (statement for statement in _statements(node) if name in _defined(statement))
    of_self = (
        inner
        for inner in ast.walk(node)
        for each in _assigned(inner)
        if isinstance(each, ast.Attribute) and each.attr == name and ast.unparse(each.value) == "self"
    )
    return next(itertools.chain(own, of_self), None)
