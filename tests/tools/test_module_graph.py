"""The import graph sees imports in functions, by a string and through a package's lazy names."""

from __future__ import annotations

from pathlib import Path

from module_graph import ModuleGraph, read_graph

HELPER = "def device(module):\n    return importlib.import_module(f'p.{module}')\n"
LAZY = (
    "if TYPE_CHECKING:\n    from p.lazy.home import Name\n"
    "def __getattr__(name):\n    return importlib.import_module(f'{__name__}.{name}')\n"
)


def graph_of(tmp_path: Path, **files: str) -> ModuleGraph:
    """Return the graph of a package `p` with these files, named without their suffix."""
    for name, text in {"__init__": "", **files}.items():
        path = tmp_path / "p" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".py").write_text(text, encoding="utf-8")
    return read_graph(tmp_path / "p")


def test_imports_at_the_top_and_in_functions_are_edges_but_not_for_type_checkers(
    tmp_path: Path,
) -> None:
    graph = graph_of(
        tmp_path,
        a="import p.b\nfrom p import c\nimport os",
        b="def f():\n    from p.c import x",
        c="from p import nothing\nif TYPE_CHECKING:\n    import p.a",
    )
    assert graph.edges == {"p": set(), "p.a": {"p.b", "p.c"}, "p.b": {"p.c"}, "p.c": {"p"}}
    assert graph.circles() == []


def test_imports_by_a_string_are_edges(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        helper=HELPER,
        a="device('b').f()",
        b="importlib.import_module('p.a')",
        c="importlib.import_module('numpy')",
    )
    assert graph.edges["p.a"] == {"p.b"}
    assert graph.edges["p.b"] == {"p.a"}
    assert [(s.module, s.line, s.targets, s.kind) for s in graph.strings] == [
        ("p.a", 1, ("p.b",), "named"),
        ("p.b", 1, ("p.a",), "named"),
    ]
    assert graph.circles() == [("p.a", "p.b")]


def test_a_computed_name_leads_to_all_that_it_may_be(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        **{
            "folder/main": "importlib.import_module(f'p.folder.{a}')",
            "folder/one": "",
            "folder/two": "import p.folder.main",
        },
        table="X = {'a': 'p.folder.one'}\ndef f(x, y):\n    importlib.import_module(X[x])",
    )
    assert graph.edges["p.folder.main"] == {"p.folder.one", "p.folder.two"}
    assert graph.edges["p.table"] == {"p.folder.one"}
    assert [place.kind for place in graph.strings] == ["computed", "computed"]
    assert graph.circles() == [("p.folder.main", "p.folder.two")]


def test_a_lazy_name_leads_to_its_home(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        **{"lazy/__init__": LAZY, "lazy/home": "from p.lazy.other import x", "lazy/other": ""},
        user="from p.lazy import Name",
    )
    assert graph.edges["p.user"] == {"p.lazy.home"}
    assert graph.edges["p.lazy"] == set()
    assert [place.kind for place in graph.strings] == ["public"]


def test_circles_are_listed_once_and_the_largest_first(tmp_path: Path) -> None:
    graph = graph_of(
        tmp_path,
        a="import p.b",
        b="import p.a",
        c="import p.d",
        d="import p.e",
        e="import p.c\nimport p.a",
    )
    assert graph.circles() == [("p.c", "p.d", "p.e"), ("p.a", "p.b")]
