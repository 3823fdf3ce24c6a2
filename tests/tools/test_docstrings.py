"""The docstring linter: every rule reports what it forbids and leaves alone what it allows."""

from __future__ import annotations

from pathlib import Path

import pytest

import docstrings


def rules_of(text: str, all_rules: bool = True) -> list[str]:
    """Return the names of the rules that a source text breaks, in the order of its lines."""
    return [item.rule for item in docstrings.violations(Path("x.py"), text, all_rules)]


def module(docstring: str) -> str:
    return f'"""{docstring}"""\n'


@pytest.mark.parametrize(
    "first",
    [
        "Return the pages that a sequence holds.",
        "The paged key-value cache of one call of `generate`.",
        "`python -m jetrl` is `jetrl`.",
        "8 bits of exponent and none of mantissa.",
        '"length" and "stop" are reasons to finish.',
        "x [T, K] @ w [K, N] -> y [T, N].",
        "Return a mask, e.g. `causal`, for a batch.",
        "Return a sequence and the number of its pages.",
        "Run in a process of its own.",
        "Thatch the roof.",
    ],
)
def test_a_first_line_that_is_a_sentence_passes(first: str) -> None:
    assert rules_of(module(first)) == []
    assert rules_of(module(f"{first}\n\nMore of it, likewise, as it is: here.\n")) == []


@pytest.mark.parametrize(
    "first",
    [
        "return the pages that a sequence holds.",
        "(line, name) of every import.",
        "Return the pages that a sequence holds",
        "Is the sequence finished?",
        "The pages that a sequence holds:",
        "Return the pages. Then forget the sequence.",
        "Return the pages that a sequence\nholds.",
        "Return the pages that a sequence holds.\nAnd its tokens.",
        "x -> y",
    ],
)
def test_a_first_line_that_is_no_sentence_is_reported(first: str) -> None:
    assert rules_of(module(first)) == ["sentence"]


@pytest.mark.parametrize(
    "first",
    [
        "What an engine has to know.",
        "Of a step, by phase.",
        "All of the tensors.",
        "Whether a run has ended.",
        "Those that run now.",
        "One with random weights.",
        "None without a critic.",
        "Its pages.",
    ],
)
def test_a_fragment_is_reported(first: str) -> None:
    assert rules_of(module(first)) == ["fragment"]


@pytest.mark.parametrize(
    "first",
    [
        "Return the pages of it.",
        "Return the longest of its sequences.",
        "Write the first of these.",
        "Return the pages and the number of them.",
        "Quantize the gradient likewise.",
        "Continue where the run goes on.",
        "Read the weights anew.",
    ],
)
def test_a_pronoun_without_its_noun_is_reported(first: str) -> None:
    assert rules_of(module(first)) == ["pronoun"]


def test_the_first_line_rules_hold_for_tests_and_nested_functions_too() -> None:
    text = "def _f(a, b, c):\n    def g():\n        '''Whether so.'''\n"
    assert rules_of(text, all_rules=False) == ["fragment"]
    assert rules_of(module("Say so.") + text) == ["fragment"]
    assert rules_of("def f(a, b, c):\n    pass\n", all_rules=False) == []


def function(signature: str, *body: str) -> str:
    lines = ["    " + line if line else "" for line in ("", *body)]
    return f'"""A module."""\n\ndef {signature}:\n    """Add numbers.\n' + "\n".join(
        [*lines, '    """', ""]
    )


@pytest.mark.parametrize(
    "body",
    [
        "first: a number.",
        "`first`: a number.",
        "Add two numbers. first: a number.",
        "- first: a number.",
        "first, second: numbers.",
    ],
)
def test_a_parameter_described_in_a_paragraph_is_reported(body: str) -> None:
    assert rules_of(function("f(first, second)", body)) == ["glossary"]


@pytest.mark.parametrize(
    "body",
    [
        ("Args:", "    first: A number.", "    second: Another: a larger one."),
        ("The rule is first come, first: served.",),
        ("third: nobody's name.",),
    ],
)
def test_a_block_and_other_colons_are_no_glossary(body: tuple[str, ...]) -> None:
    assert rules_of(function("f(first, second)", *body)) == []


def test_a_field_described_in_a_paragraph_is_reported() -> None:
    text = (
        '"""A module."""\n\n@dataclass\nclass Pair:\n    """A pair. left: a number."""\n\n'
        "    left: int\n"
    )
    assert rules_of(text) == ["glossary"]


@pytest.mark.parametrize(
    "signature",
    ["f(a, b, c)", "f(a, *, b, c)", "f(a, *b, **c)", "f(a, /, b, c)"],
)
def test_three_parameters_need_an_args_block(signature: str) -> None:
    described = ("Args:", "    a: A number.", "    b (int): A number.", "        Or none.")
    assert rules_of(function(signature, "Slowly.")) == ["args"]
    assert rules_of(function(signature, *described)) == ["args"]
    assert rules_of(function(signature, *described, "    c: A number.")) == []
    stars = ("Args:", "    a: A number.", "    *b: Numbers.", "    **c: Numbers.")
    assert rules_of(function(signature, *stars)) == []


@pytest.mark.parametrize("signature", ["f(a, b)", "_f(a, b, c)", "__call__(a, b, c)"])
def test_few_parameters_and_private_functions_need_none(signature: str) -> None:
    assert rules_of(function(signature, "Slowly.")) == []


def test_self_and_cls_are_no_parameters() -> None:
    text = (
        '"""A module."""\n\nclass Leaf:\n    """A class."""\n\n'
        '    def f(self, a, b):\n        """Add."""\n\n'
        '    @classmethod\n    def g(cls, a, b):\n        """Add."""\n'
    )
    assert rules_of(text) == []
    assert rules_of(text.replace("a, b", "a, b, c")) == ["args", "args"]


INIT = '''"""A module."""

class Line:
    """A line."""

    def __init__(self, start, end, width):
        self.start, self.length = start, end - start
'''


def test_the_parameters_of_init_are_described_by_the_class() -> None:
    block = (
        "\n\n    Args:\n        start: A point.\n        end: A point.\n        width: A length.\n"
    )
    assert rules_of(INIT) == ["args"]
    assert rules_of(INIT.replace("A line.", f"A line.{block}    ")) == []
    assert rules_of(INIT.replace("class Line", "class _Line")) == []
    assert rules_of(INIT.replace(", width", "")) == []


RECORD = '''"""A module."""

@dataclass(frozen=True)
class Line:
    """A line."""

    kind: ClassVar[str] = "line"
    start: int
    end: int
    _cache: int = 0
'''


def test_the_fields_of_a_record_are_described_by_its_attributes() -> None:
    block = "\n\n    Attributes:\n        start: A point.\n        end: A point.\n"
    assert rules_of(RECORD) == ["args"]
    assert rules_of(RECORD.replace("A line.", f"A line.{block}    ")) == []
    assert rules_of(RECORD.replace("    end: int\n", "")) == []
    assert rules_of(RECORD.replace("@dataclass(frozen=True)\n", "")) == []
    named = RECORD.replace("@dataclass(frozen=True)\n", "").replace("Line:", "Line(NamedTuple):")
    assert rules_of(named) == ["args"]


def test_a_block_that_names_what_does_not_exist_is_reported() -> None:
    assert rules_of(function("_f(a)", "Args:", "    b: A number.")) == ["unknown"]
    assert rules_of(function("_f(a)", "Raises:", "    UserError: At night.")) == []
    attributes = "\n\n    Attributes:\n        start: A point.\n        NAME: A number.\n    "
    small = INIT.replace(", width", "")
    assert rules_of(small.replace("A line.", "A line." + attributes)) == ["unknown"]
    assert (
        rules_of(small.replace("A line.", "A line." + attributes.replace("NAME", "length"))) == []
    )


def test_a_name_of_a_base_class_exists_and_one_of_a_foreign_base_may() -> None:
    text = (
        '"""A module."""\n\nclass Base:\n    """A base."""\n\n    size = 1\n\n'
        'class Leaf(Base):\n    """A class.\n\n    Attributes:\n        size: A number.\n    """\n'
    )
    assert rules_of(text) == []
    assert rules_of(text.replace("size: ", "other: ")) == ["unknown"]
    assert rules_of(text.replace("size: ", "other: ").replace("Leaf(Base)", "Leaf(Foreign)")) == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        '"""A module."""\n\ndef f():\n    pass\n',
        '"""A module."""\n\nclass Leaf:\n    pass\n',
        '"""A module."""\n\nclass Leaf:\n    """A class."""\n\n    def f(self):\n        pass\n',
        '"""A module."""\n\nif True:\n    def f():\n        pass\n',
    ],
)
def test_what_is_public_needs_a_docstring(text: str) -> None:
    assert rules_of(text) == ["missing"]
    assert rules_of(text, all_rules=False) == []


@pytest.mark.parametrize(
    "definition",
    [
        "def _f():\n    pass\n",
        'class _Leaf:\n    """A class."""\n\n    def f(self):\n        pass\n',
        'class Leaf:\n    """A class."""\n\n    def __len__(self):\n        return 0\n',
        'class Leaf:\n    """A class."""\n\n    @f.setter\n    def f(self, value):\n        pass\n',
        "@overload\ndef f():\n    ...\n",
        'def f():\n    """Add."""\n    def g():\n        pass\n',
        'class F(torch.autograd.Function):\n    """A gradient."""\n\n'
        "    @staticmethod\n    def forward(ctx):\n        pass\n",
    ],
)
def test_what_is_private_or_said_elsewhere_needs_none(definition: str) -> None:
    assert rules_of(f'"""A module."""\n\n{definition}') == []


def test_a_method_that_a_base_or_a_protocol_documents_needs_none() -> None:
    text = (
        '"""A module."""\n\nclass {base}:\n    """A base."""\n\n'
        '    def f(self):\n        """Add."""\n\n'
        'class Leaf{bases}:\n    """A class."""\n\n    def f(self):\n        pass\n'
    )
    assert rules_of(text.format(base="Base", bases="(Base)")) == []
    assert rules_of(text.format(base="Base(Protocol)", bases="")) == []
    assert rules_of(text.format(base="Base", bases="")) == ["missing"]


def test_the_command_counts_and_allows_as_many_as_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.py"
    file.write_text('"""Whether so."""\n\ndef f():\n    """Of it"""\n')
    assert docstrings.main([str(file)]) == 1
    printed = capsys.readouterr().out
    assert f"{file}:4: [fragment] opens with a fragment: Of it" in printed
    assert "4 violations" in printed
    assert docstrings.main([str(tmp_path), "--most", "3"]) == 1
    assert docstrings.main([str(tmp_path), "--most", "4"]) == 0
    assert docstrings.main([str(tmp_path), "--rule", "pronoun"]) == 1
    assert "1 violations" in capsys.readouterr().out
    assert docstrings.main([str(tmp_path), "--counts", "--most", "4"]) == 0
    assert str(tmp_path) in capsys.readouterr().out


def test_the_linter_passes_its_own_rules() -> None:
    path = Path(docstrings.__file__)
    assert docstrings.violations(path, path.read_text(encoding="utf-8"), True) == []
