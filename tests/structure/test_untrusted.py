"""Files read from disk run no code, and text that a model wrote reaches no interpreter.

Calls that could do so are reported by name, with file and line.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetrl.cli import main
from jetrl.untrusted import check_trusted

SOURCE = Path(__file__).parents[2] / "src" / "jetrl"
FILES = sorted(SOURCE.rglob("*.py"))

# The one place that unpickles: a scoring worker, what the scorer that started it sent.
MAY_UNPICKLE = {
    "session/compiling.py": {"pickle.load"},  # what the parent process wrote into a pipe
    "tasks/sandbox/worker.py": {"pickle.load", "pickle.loads"},
}
# torch.load and its kind unpickle; safetensors and JSON are what is read instead.
FORBIDDEN_CALLS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "torch.hub.load"),
    *("marshal.load", "marshal.loads", "shelve.open", "dill.load", "dill.loads", "joblib.load"),
    *("cloudpickle.load", "cloudpickle.loads", "pandas.read_pickle", "pd.read_pickle"),
    *("yaml.load", "yaml.unsafe_load", "eval", "exec", "compile", "os.system", "os.popen"),
    *("numpy.load", "np.load"),  # without allow_pickle it is safe; nothing here needs it
}
FORBIDDEN_METHODS = {"recv"}  # of a multiprocessing connection; a socket's takes a size


def offences(tree: ast.AST, allowed: frozenset[str] = frozenset()) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each call that must not be there."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS and name not in allowed:
            yield node.lineno, name
        if name.rpartition(".")[2] in FORBIDDEN_METHODS and "." in name and not node.args:
            yield node.lineno, name
        for keyword in node.keywords:
            value = ast.unparse(keyword.value)
            if keyword.arg == "trust_remote_code" and value != "False":
                yield node.lineno, f"trust_remote_code={value}"
            if keyword.arg == "shell" and value != "False":
                yield node.lineno, f"shell={value}"
            if keyword.arg in ("allow_pickle", "weights_only"):
                yield node.lineno, keyword.arg


def test_nothing_read_runs_code() -> None:
    found = []
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        tree = ast.parse(path.read_text(encoding="utf-8"))
        allowed = frozenset(MAY_UNPICKLE.get(name, ()))
        found += [f"{name}:{line}: {what}" for line, what in offences(tree, allowed)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "state = torch.load(path)",
        "pickle.load(file)",
        "x = pickle.loads(data)",
        "message = connection.recv()",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=settings.trust)",
        "np.load(path)",
        "np.lib.load(path, allow_pickle=True)",
        "eval(answer)",
        "subprocess.run(command, shell=True)",
    ],
)
def test_the_check_sees_it(text: str) -> None:
    assert len(list(offences(ast.parse(text)))) == 1
    assert list(offences(ast.parse("data = socket.recv(65536)"))) == [], "not a connection's"


@pytest.mark.parametrize("command", main.COMMANDS)
@pytest.mark.parametrize("trusted", [False, True])
def test_no_command_but_those_that_train_may_import_a_users_file_unasked(
    command: str, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate of `jetrl.untrusted` is closed while a command runs, and open after it."""

    def run(words: argparse.Namespace) -> int:
        check_trusted(Path("evil.py"))
        return 0

    words = argparse.Namespace(trust_task=trusted)
    monkeypatch.setattr(main, "parse", lambda *_: (SimpleNamespace(run=run), words))
    closed = not trusted and command not in ("train", "sft", "study")
    assert main.main([command]) == (2 if closed else 0)
    check_trusted(Path("evil.py"))


def test_a_users_file_passes_the_gate_before_it_is_imported() -> None:
    """Two places run a file by its path, and a process that a third one starts."""
    sources = {str(path.relative_to(SOURCE)): path.read_text("utf-8") for path in FILES}
    running = {name: text for name, text in sources.items() if "spec_from_file_location" in text}
    del running["tasks/harness/host.py"]
    starts = [
        name
        for name, text in sources.items()
        if "= HarnessProcess(" in text or "return HarnessProcess(" in text
    ]
    assert starts == ["tasks/endpoint.py"]
    gate = sources["tasks/endpoint.py"]
    assert gate.index("check_trusted()") < gate.index("return HarnessProcess(")
    assert set(running) == {"tasks/user_files.py", "training/objectives.py"}
    for text in running.values():
        assert text.index("check_trusted(file)") < text.index("exec_module(module)")
