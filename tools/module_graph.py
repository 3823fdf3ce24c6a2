"""The imports between the modules of a package, read from its sources without running them.

Counted are imports at the top of a module, inside functions and by a string: a call of
`importlib.import_module`, or of a function that hands its one parameter on to it, such as
`hopper("kernels.norm_hopper")`. Imports under `if TYPE_CHECKING:` are for readers alone and are not
counted.

`from package import name` leads to the submodule `name` if one exists, else to the module that
`package` resolves the name to on first use (the home that its TYPE_CHECKING block gives), else to
`package` itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class StringImport:
    """A place in the sources that imports a module by a string.

    Attributes:
        module: Module in which the place is.
        line: Line of the call, from 1.
        targets: Modules that the call may import, as far as the sources tell.
        kind: "named" where the string is written out, "computed" where part of it comes from a
            table or an argument, "public" where a package resolves its own names on first use.
    """

    module: str
    line: int
    targets: tuple[str, ...]
    kind: str


@dataclass
class ModuleGraph:
    """The modules of a package and the imports between them.

    Attributes:
        files: File of each module by dotted name.
        edges: Modules that each module imports, by dotted name.
        strings: Every import by a string, in the order of files and lines.
    """

    files: dict[str, Path]
    edges: dict[str, set[str]] = field(default_factory=dict)
    strings: list[StringImport] = field(default_factory=list)

    def circles(self) -> list[tuple[str, ...]]:
        """Return the groups of modules that import one another, each sorted, the largest first."""
        reach = {module: self._reached_from(module) for module in self.edges}
        groups = {
            tuple(sorted(m for m in seen if module in reach[m]))
            for module, seen in reach.items()
            if module in seen
        }
        return sorted(groups, key=lambda group: (-len(group), group))

    def _reached_from(self, module: str) -> set[str]:
        seen: set[str] = set()
        waiting = [module]
        while waiting:
            new = self.edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen


def read_graph(package: Path) -> ModuleGraph:
    """Return the import graph of the package in a folder, such as src/jetrl."""
    files = {_module_name(package, path): path for path in sorted(package.rglob("*.py"))}
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    graph = ModuleGraph(files)
    homes = {name: dict(_lazy_names(tree, files)) for name, tree in trees.items()}
    prefixes: dict[str, str] = {}
    for tree in trees.values():
        prefixes |= _import_functions(tree)
    for name, tree in trees.items():
        reader = _Reader(name, files, homes, prefixes)
        reader.read(tree)
        graph.edges[name] = reader.imported - {name}
        graph.strings += sorted(reader.strings, key=lambda item: item.line)
    return graph


def _module_name(package: Path, path: Path) -> str:
    parts = [package.name, *path.relative_to(package).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def _lazy_names(tree: ast.Module, files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield each name that a module with `__getattr__` resolves on first use, and its home."""
    if not any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in tree.body):
        return
    for block in filter(_is_type_checking, tree.body):
        for node in ast.walk(block):
            if isinstance(node, ast.ImportFrom) and node.module in files:
                yield from ((alias.asname or alias.name, node.module) for alias in node.names)


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _pattern(node: ast.AST) -> str | None:
    """Return a string's text with `*` for what is known only at run time; None for no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        values = (_pattern(value) for value in node.values)
        return "".join("*" if value is None else value for value in values)
    return None


def _import_functions(tree: ast.Module) -> dict[str, str]:
    """Return the prefix of each function whose one parameter completes a module's name."""
    functions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.args.args) == 1:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and _called(call) == "import_module":
                    text = _pattern(call.args[0])
                    name = ast.unparse(call.args[0])
                    completes = text is not None and text[0] != "*" and text.endswith(".*")
                    if completes and f"{{{node.args.args[0].arg}}}" in name:
                        functions[node.name] = text[:-1]
    return functions


class _Reader:
    """A walk over one module that collects what the module imports.

    Args:
        name: Dotted name of the module.
        files: Every module of the package.
        homes: For each module, the home of the names that it resolves on first use.
        prefixes: Prefix that each import function puts before its argument, by function name.
    """

    def __init__(
        self,
        name: str,
        files: dict[str, Path],
        homes: dict[str, dict[str, str]],
        prefixes: dict[str, str],
    ) -> None:
        self.name = name
        self.files = files
        self.homes = homes
        self.prefixes = prefixes
        self.imported: set[str] = set()
        self.strings: list[StringImport] = []
        self.constants: set[str] = set()
        self.is_package = files[name].name == "__init__.py"

    def read(self, tree: ast.Module) -> None:
        """Collect the imports of the module's tree."""
        self.constants = {
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in self.files
        } - {self.name}
        self._visit(tree, None)

    def _visit(self, node: ast.AST, function: str | None) -> None:
        if isinstance(node, ast.Import):
            self.imported |= {self._existing(alias.name) for alias in node.names} - {""}
        elif isinstance(node, ast.ImportFrom):
            self._import_from(node.module or "", [alias.name for alias in node.names])
        elif isinstance(node, ast.Call) and node.args:
            self._call(node, function)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        children = node.orelse if _is_type_checking(node) else ast.iter_child_nodes(node)
        for child in children:
            self._visit(child, function)

    def _existing(self, name: str) -> str:
        """Return the longest beginning of a dotted name that is a module of the package."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def _import_from(self, module: str, names: list[str]) -> None:
        for name in names:
            whole = f"{module}.{name}"
            target = whole if whole in self.files else self.homes.get(module, {}).get(name, module)
            self.imported |= {self._existing(target)} - {""}

    def _call(self, node: ast.Call, function: str | None) -> None:
        called = _called(node)
        root = self.name.partition(".")[0]
        if called == "import_module":
            if function in self.prefixes:
                return  # its calls are counted
            text = _pattern(node.args[0])
            if text is None:  # a name from a table of this module
                targets, kind = tuple(sorted(self.constants)), "computed"
            elif text.partition(".")[0] in (root, "*"):
                targets, kind = self._matching(text), "computed" if "*" in text else "named"
            else:
                return
            if self.is_package and kind == "computed":
                kind = "public"
        elif called in self.prefixes:
            text = _pattern(node.args[0])
            targets = () if text is None else self._matching(self.prefixes[called] + text)
            kind = "computed" if text is None or "*" in text else "named"
        else:
            return
        if kind == "public":
            self.strings.append(StringImport(self.name, node.lineno, (), kind))
        elif targets or kind == "named":
            self.imported |= set(targets)
            self.strings.append(StringImport(self.name, node.lineno, targets, kind))

    def _matching(self, text: str) -> tuple[str, ...]:
        """Return the modules that a text, of which `*` stands for one component, may name."""
        if "*" not in text:
            return (text,) if text in self.files else ()
        folder, _, last = text.rpartition(".")
        return tuple(
            name
            for name in self.files
            if last == "*" and name.rpartition(".")[0] == folder and name != self.name
        )
