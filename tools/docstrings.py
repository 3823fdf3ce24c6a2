#!/usr/bin/env python3
"""Check that every docstring can be read without the code that it belongs to.

    python tools/docstrings.py                      everything: src/jetrl, tests, tools
    python tools/docstrings.py src/jetrl/rollout    some files or folders
    python tools/docstrings.py --counts             how many violations each folder has
    python tools/docstrings.py --rule fragment      the violations of one rule
    python tools/docstrings.py --most 12            fail above 12 violations (default 0)

Rules for all docstrings:

    sentence   The first line is one sentence on a line of its own: it opens with an upper-case
               letter, a digit, a backtick or a quote, ends with a period, and an empty line or the
               end of the docstring follows. A shape formula (with `->` or ` = `) may open as it
               likes.
    fragment   The first line does not open with a word of `FRAGMENT`, such as What or Whether.
    pronoun    The first line holds no phrase of `PRONOUN`, such as "of it" or "likewise".

Rules for src/jetrl alone:

    glossary   A parameter or field is described in an Args or Attributes block, never by
               "name: description" inside a paragraph.
    args       A public function with three parameters or more has an Args block that names each one
               (self and cls aside); so does a public class for those of `__init__`, and a
               public dataclass with two fields or more has an Attributes block that names each one.
    unknown    An Args or Attributes block names nothing that does not exist.
    missing    Every public module, class, function and method has a docstring.

Nested functions, dunder methods, overloads, property setters, the static methods of a
`torch.autograd.Function`, `add_arguments` and `run` of a command, and methods that a base class or
a Protocol documents need none.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RULES = ("sentence", "fragment", "pronoun", "glossary", "args", "unknown", "missing")

FRAGMENT = re.compile(
    r"(What|Of|As|All of|Whether|Nothing|How|Where|Which|Likewise|That|Those|One|Its|It"
    r"|Who|Whom|Whose|Why|Not|None)\b"
)
PRONOUN = re.compile(
    r"\b(of it|of these|of them|of what|likewise|as it is|that there is|goes on|anew)\b"
    r"|^(\S+ ){0,4}of its\b(?! own)",  # so early that no noun can stand before "its"
    re.IGNORECASE,
)
OPENING = re.compile(r"[A-Z0-9`\"']")
FORMULA = re.compile(r"->| = ")
SECOND_SENTENCE = re.compile(r"(?<!e\.g)(?<!i\.e)(?<!vs)(?<!cf)[.?!] +[A-Z`]")
BLOCK = re.compile(
    r"(Args|Attributes|Returns|Raises|Yields|Examples?|Notes?|Shapes?|References?|Warnings?):$"
)
ENTRY = re.compile(r"\*{0,2}`?(?P<name>\w+)`?(?: \([^)]*\))?:(?: |$)")

# Every command of src/jetrl/cli has these two functions, which jetrl/cli/main.py calls.
COMMAND_FUNCTIONS = {"add_arguments", "run"}
AUTOGRAD_METHODS = {"forward", "backward", "setup_context"}
RECORD_BASES = {"NamedTuple", "TypedDict"}
# Classes whose attributes a docstring may name though no source of ours assigns them.
EMPTY_BASES = {"object", "Protocol", "Exception", "ValueError", "RuntimeError", "ABC", "Enum"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Violation:
    """A place where a docstring breaks a rule.

    Attributes:
        path: File of the docstring.
        line: Line in that file, from 1.
        rule: A name of `RULES`.
        message: A sentence about what is wrong.
        text: The offending words.
    """

    path: Path
    line: int
    rule: str
    message: str
    text: str

    def __str__(self) -> str:
        path = self.path.resolve()
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return f"{shown}:{self.line}: [{self.rule}] {self.message}: {self.text}"


@dataclass(frozen=True)
class ClassFacts:
    """The names that a class defines.

    Attributes:
        bases: Last component of each base class's name.
        is_record: True for a dataclass, a NamedTuple or a TypedDict.
        fields: Annotated names of the class body, but ClassVars.
        members: Every name that the class or one of its methods assigns or defines.
        parameters: Parameters of `__init__`, or of `__new__` in its absence; None without either.
        documented: Methods with a docstring.
    """

    bases: tuple[str, ...]
    is_record: bool
    fields: tuple[str, ...]
    members: frozenset[str]
    parameters: tuple[str, ...] | None
    documented: frozenset[str]


def last_name(node: ast.AST) -> str:
    """Return the last component of a dotted name, a call or a subscript; "" for anything else."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def parameters_of(function: Function) -> tuple[str, ...]:
    """Return the parameter names of a function in order, self and cls left out."""
    a = function.args
    names = [
        *(item.arg for item in (*a.posonlyargs, *a.args)),
        *([a.vararg.arg] if a.vararg else []),
        *(item.arg for item in a.kwonlyargs),
        *([a.kwarg.arg] if a.kwarg else []),
    ]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def class_facts(node: ast.ClassDef) -> ClassFacts:
    """Return the names that a class definition assigns or defines."""
    bases = tuple(last_name(base) for base in node.bases)
    decorated = any(last_name(item) == "dataclass" for item in node.decorator_list)
    fields = tuple(
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
        and item.target.id != "_"
    )
    members = set(fields)
    parameters = None
    for item in ast.walk(node):
        if isinstance(item, Function | ast.ClassDef):
            members.add(item.name)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            members.add(item.attr)
        elif isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            members.add(item.id)
    for name in ("__new__", "__init__"):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == name:
                parameters = parameters_of(item)
    is_record = decorated or bool(RECORD_BASES & set(bases))
    methods = [item for item in node.body if isinstance(item, Function)]
    documented = frozenset(item.name for item in methods if ast.get_docstring(item))
    return ClassFacts(bases, is_record, fields, frozenset(members), parameters, documented)


def classes_of(tree: ast.AST) -> dict[str, ClassFacts]:
    """Return the facts of every class of a file by name; of two namesakes, the last."""
    return {
        node.name: class_facts(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    }


@functools.cache
def source_classes() -> dict[str, ClassFacts]:
    """Return the facts of every class under src/jetrl by name; of two namesakes, the last."""
    classes = {}
    for path in sorted((ROOT / "src" / "jetrl").rglob("*.py")):
        classes |= classes_of(ast.parse(path.read_text(encoding="utf-8")))
    return classes


def names_of_class(facts: ClassFacts, classes: dict[str, ClassFacts]) -> set[str] | None:
    """Return the names that a class and its bases have; None if a base is not among `classes`."""
    names = set(facts.members) | set(facts.parameters or ())
    for base in facts.bases:
        if base in RECORD_BASES | EMPTY_BASES:
            continue
        above = names_of_class(classes[base], classes) if base in classes else None
        if above is None:
            return None
        names |= above
    return names


def inherits_docstring(name: str, facts: ClassFacts, classes: dict[str, ClassFacts]) -> bool:
    """Return True if a base class, or any Protocol, documents a method.

    Args:
        name: Name of the method.
        facts: The class that the method belongs to.
        classes: Facts of the classes among which bases and Protocols are looked up.
    """
    bases = [classes[base] for base in facts.bases if base in classes]
    protocols = [other for other in classes.values() if "Protocol" in other.bases]
    return any(name in other.documented for other in (*bases, *protocols) if other != facts) or any(
        inherits_docstring(name, base, classes) for base in bases
    )


@dataclass(frozen=True)
class Docstring:
    """A docstring, split into its blocks.

    Attributes:
        line: Line of its opening quotes.
        lines: Its lines, indentation removed.
        blocks: Entry names of each block by the block's title, such as "Args".
        prose: Index and text of each line that stands outside every block.
    """

    line: int
    lines: list[str]
    blocks: dict[str, list[str]]
    prose: list[tuple[int, str]]


def parse(line: int, text: str) -> Docstring:
    """Split a docstring's text into blocks and prose.

    A block begins with a title such as `Args:` and ends with the next line that is not indented.
    Its entries stand at the smallest indentation inside of the block.
    """
    lines = text.splitlines()
    bodies: dict[str, list[str]] = {}
    prose = []
    title = None
    for index, shown in enumerate(lines):
        if BLOCK.match(shown):
            title = shown[:-1]
            bodies.setdefault(title, [])
        elif title is not None and (not shown.strip() or shown.startswith(" ")):
            bodies[title].append(shown)
        else:
            title = None
            prose.append((index, shown))
    blocks = {}
    for title, body in bodies.items():
        indent = min((len(s) - len(s.lstrip()) for s in body if s.strip()), default=0)
        entries = [ENTRY.match(s[indent:]) for s in body if s[indent : indent + 1].strip()]
        blocks[title] = [entry["name"] for entry in entries if entry]
    return Docstring(line, lines, blocks, prose)


def docstring_of(node: Documented) -> Docstring | None:
    """Return the docstring of a module, class or function; None if it has none."""
    text = ast.get_docstring(node, clean=False)
    if text is None or not text.strip():
        return None
    return parse(node.body[0].lineno, inspect.cleandoc(text))


class Checker:
    """A walk over one file that collects the violations of its docstrings.

    Args:
        path: File that the violations are reported under.
        text: Python source of that file.
        all_rules: True to check every rule; False for the three of the first line alone.
    """

    def __init__(self, path: Path, text: str, all_rules: bool) -> None:
        self.path = path
        self.all_rules = all_rules
        self.violations: list[Violation] = []
        tree = ast.parse(text, filename=str(path))
        self.classes = {**source_classes(), **classes_of(tree)}
        public = not path.stem.startswith("_") or path.stem.startswith("__")
        self._check(tree, path.name, public, ())
        self._walk(tree, public=True, enclosing=None, nested=False)

    def _report(self, line: int, rule: str, message: str, text: str) -> None:
        self.violations.append(Violation(self.path, line, rule, message, text))

    def _walk(
        self, node: ast.AST, public: bool, enclosing: ast.ClassDef | None, nested: bool
    ) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, Function):
                needs = public and not nested and self._needs_docstring(child, enclosing)
                names = class_facts(enclosing).fields if enclosing else ()
                self._check(child, child.name, needs, names)
                self._walk(child, public, None, nested=True)
            elif isinstance(child, ast.ClassDef):
                shown = public and not child.name.startswith("_")
                self._check(child, child.name, shown and not nested, ())
                self._walk(child, shown, child, nested)
            else:
                self._walk(child, public, enclosing, nested)

    def _check(self, node: Documented, name: str, needs: bool, fields: Sequence[str]) -> None:
        """Check the docstring of one module, class or function against every rule.

        Args:
            node: Module, class or function.
            name: Name to report it under.
            needs: True if the rules `args` and `missing` hold for it.
            fields: Fields of the class around a method.
        """
        docstring = docstring_of(node)
        line = getattr(node, "lineno", 1)
        if docstring is None:
            if self.all_rules and needs:
                self._report(line, "missing", "public, without a docstring", name)
            return
        self._first_line(docstring)
        if not self.all_rules:
            return
        if isinstance(node, ast.ClassDef):
            self._class_blocks(docstring, node, needs)
        elif isinstance(node, Function):
            parameters = parameters_of(node)
            self._glossary(docstring, {*parameters, *fields})
            if needs and len(parameters) >= 3:
                self._complete(docstring, ("Args",), parameters, node.name)
            self._existing(docstring, "Args", set(parameters))

    def _needs_docstring(self, function: Function, enclosing: ast.ClassDef | None) -> bool:
        """Return True for a public function whose docstring no other definition stands for."""
        name = function.name
        decorators = {last_name(item) for item in function.decorator_list}
        if name.startswith("_") or decorators & {"overload", "setter", "deleter"}:
            return False
        if enclosing is None:
            return not (name in COMMAND_FUNCTIONS and self.path.parent.name == "cli")
        bases = {last_name(base) for base in enclosing.bases}
        if name in AUTOGRAD_METHODS and "Function" in bases:
            return False
        return not inherits_docstring(name, class_facts(enclosing), self.classes)

    def _first_line(self, docstring: Docstring) -> None:
        first = docstring.lines[0].rstrip()
        line = docstring.line
        if not OPENING.match(first) and not FORMULA.search(first):
            self._report(line, "sentence", "does not open as a sentence does", first)
        if len(docstring.lines) > 1 and docstring.lines[1].strip():
            self._report(line, "sentence", "the first sentence needs a line of its own", first)
        elif not first.endswith("."):
            self._report(line, "sentence", "the first line does not end with a period", first)
        elif SECOND_SENTENCE.search(first):
            self._report(line, "sentence", "two sentences on the first line", first)
        if FRAGMENT.match(first):
            self._report(line, "fragment", "opens with a fragment", first)
        if PRONOUN.search(first):
            self._report(line, "pronoun", "leans on what the line does not name", first)

    def _class_blocks(self, docstring: Docstring, node: ast.ClassDef, public: bool) -> None:
        facts = class_facts(node)
        own = [name for name in facts.fields if not name.startswith("_")]
        self._glossary(docstring, {*facts.fields, *(facts.parameters or ())})
        if public and facts.is_record and len(own) >= 2:
            self._complete(docstring, ("Attributes", "Args"), own, node.name)
        elif public and not facts.is_record and len(facts.parameters or ()) >= 3:
            self._complete(docstring, ("Args",), facts.parameters or (), node.name)
        existing = names_of_class(facts, self.classes)
        if existing is not None:
            self._existing(docstring, "Attributes", existing)
            self._existing(docstring, "Args", existing)

    def _glossary(self, docstring: Docstring, names: set[str]) -> None:
        """Report each "name: description" of a paragraph whose name is a parameter or a field."""
        if not names:
            return
        either = "|".join(sorted(map(re.escape, names)))
        pattern = re.compile(
            rf"(?:^|^[-*] |\. )\*{{0,2}}((?:`?\w+`?(?:, | and ))*`?(?:{either})`?: )"
        )
        for index, line in docstring.prose:
            for match in pattern.finditer(line):
                text = line[match.start(1) : match.end() + 40].strip()
                message = "describe a parameter or field in an Args or Attributes block"
                self._report(docstring.line + index, "glossary", message, text)

    def _complete(
        self, docstring: Docstring, titles: Sequence[str], names: Sequence[str], owner: str
    ) -> None:
        """Report the names that no block with one of the titles describes.

        Args:
            docstring: Docstring of a function or class.
            titles: Block titles, each of which may describe a name; the first is asked for.
            names: Names to describe, in order.
            owner: Name of the function or class.
        """
        described = {name for title in titles for name in docstring.blocks.get(title, ())}
        absent = [name for name in names if name not in described]
        if absent:
            message = f"its {titles[0]} block does not describe"
            if not any(title in docstring.blocks for title in titles):
                message = f"has no {titles[0]} block for"
            self._report(docstring.line, "args", f"{owner} {message}", ", ".join(absent))

    def _existing(self, docstring: Docstring, title: str, names: set[str]) -> None:
        for name in docstring.blocks.get(title, ()):
            if name not in names:
                message = f"the {title} block describes what does not exist"
                self._report(docstring.line, "unknown", message, name)


def violations(path: Path, text: str, all_rules: bool) -> list[Violation]:
    """Return the violations of one file, in the order of its lines.

    Args:
        path: File that the violations are reported under.
        text: Python source of that file.
        all_rules: True to check every rule; False for the three of the first line alone.
    """
    found = Checker(path, text, all_rules).violations
    return sorted(found, key=lambda violation: violation.line)


def python_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the Python files that are named or lie under a named folder, each one once."""
    seen = set()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


def folder_of(path: Path) -> str:
    """Return the folder that --counts lists a file under: two levels below src, one elsewhere."""
    path = path.resolve()
    if not path.is_relative_to(ROOT):
        return str(path.parent)
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 3 if parts[0] == "src" else 2])


def counts(listed: Sequence[Violation]) -> str:
    """Return a table with a line for each folder and a column for each rule."""
    rows: dict[str, Counter[str]] = {}
    for item in listed:
        rows.setdefault(folder_of(item.path), Counter())[item.rule] += 1
    width = max((len(name) for name in rows), default=0)
    lines = ["".join([f"{'folder':{width}}", *(f"{rule:>10}" for rule in RULES), f"{'all':>10}"])]
    for name, row in sorted(rows.items()):
        cells = [f"{row[rule]:10}" for rule in RULES]
        lines.append(f"{name:{width}}{''.join(cells)}{sum(row.values()):10}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the violations; return 1 if they are more than --most allows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, help="files and folders")
    parser.add_argument("--most", type=int, default=0, help="violations that are allowed")
    parser.add_argument("--rule", choices=RULES, action="append", help="this rule alone")
    parser.add_argument("--counts", action="store_true", help="numbers by folder, not places")
    args = parser.parse_args(argv)
    listed: list[Violation] = []
    for path in python_files(args.paths or [ROOT / name for name in ("src", "tests", "tools")]):
        in_source = path.resolve().is_relative_to(ROOT / "src")
        listed += violations(path, path.read_text(encoding="utf-8"), in_source)
    listed = [item for item in listed if item.rule in (args.rule or RULES)]
    if args.counts:
        print(counts(listed))
    elif len(listed) > args.most:
        print("\n".join(map(str, listed)))
    print(f"{len(listed)} violations of the docstring rules; {args.most} are allowed")
    return len(listed) > args.most


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the output may go to head
    sys.exit(main())
