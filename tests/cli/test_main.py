"""The frame of the command line: help without torch, errors in words, exit codes."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jetrl.cli.main import COMMANDS, main
from jetrl.errors import (
    MismatchError,
    NonFiniteError,
    RunStopped,
    StorageError,
    Terminated,
    UserError,
)
from jetrl.settings.loading import describe

PROGRAM = [sys.executable, "-m", "jetrl"]
DISK = (errno.ENOSPC, errno.EROFS)
NO_FOLDER = "No usable temporary directory found in ['/tmp']"
MAKE_ROOM = "Earlier data is intact; free some space and start the command again\n"


def test_help_has_examples_and_imports_no_heavy_package() -> None:
    code = (
        "import contextlib, io, sys, jetrl.cli.arguments\n"
        "from jetrl.cli.main import COMMANDS, main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'matplotlib', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert len(sys.modules) < 200\n"  # 110 now, half of them argparse's; pydantic has more
        "for command in COMMANDS:\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "        main([command, '--help'])\n"
        "    assert f'usage: jetrl {command}' in out.getvalue(), command\n"
        "    assert f'\\n    jetrl {command}' in out.getvalue(), command\n"
        "    assert 'torch' not in sys.modules, command\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_every_command(jetrl: Callable) -> None:
    for words in ([], ["--help"], ["-h"], ["help"]):
        done = jetrl(*words)
        assert done.code == 0
        assert all(f"\n  {command:8} " in done.out for command in COMMANDS)


def test_help_shows_every_setting_and_option_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for key, kind, default, _ in describe():
        assert any(line.split()[:1] == [key] and f"{kind} [{default}]" in line for line in lines)
    with pytest.raises(SystemExit):
        main(["parity", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens per completion (default: 64)" in out
    assert "default: None" not in out
    assert "default: False" not in out


def test_an_unknown_command_is_refused_with_the_nearest(jetrl: Callable) -> None:
    assert jetrl("--version").out.startswith("jetrl 0.")
    done = jetrl("trian")
    assert (done.code, done.err) == (2, "error: no command 'trian'; did you mean train?\n")
    assert "did you mean" not in jetrl("pretrain").err
    assert "commands: train, sft" in jetrl("xyzzy").err


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "demo", "--train.lr=1"], "; a setting is train.lr=VALUE"),
        (["train", "demo", "--learning_rate", "1"], "; a setting is learning_rate=VALUE"),
        (["sample", "x", "--temp", "0"], "--temp"),  # no abbreviations of --temperature
    ],
)
def test_an_unknown_option_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, words",
    [
        (UserError("bad key"), 2, "error: bad key\n"),
        (RunStopped("no reward"), 1, "stopped: no reward\n"),
        (MismatchError("3 tokens differ"), 3, "stopped: 3 tokens differ\n"),
        (NonFiniteError("NaN"), 4, "stopped: NaN\n"),
        (StorageError("disk full"), 6, "stopped: disk full\n"),
        *((OSError(number, "Full", "a"), 6, f"stopped: a: Full. {MAKE_ROOM}") for number in DISK),
        (FileNotFoundError(errno.ENOENT, NO_FOLDER), 6, f"stopped: {NO_FOLDER}. {MAKE_ROOM}"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Terminated(), 143, "terminated\n"),
    ],
)
def test_errors_become_messages_and_exit_codes(
    error: BaseException, code: int, words: str, jetrl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr("jetrl.cli.export.run", fail)
    done = jetrl("export", "a", "b")
    assert (done.code, done.out, done.err) == (code, "", words)
    error = AssertionError("ours")  # a bug of ours keeps its traceback
    with pytest.raises(AssertionError, match="ours"):
        jetrl("export", "a", "b")


def test_sys_exit_in_a_user_s_code_is_named(
    jetrl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jetrl.cli.export.run", lambda args: sys.exit(0))
    done = jetrl("export", "a", "b")
    assert done.code == 2
    said = r"sys\.exit\(\) ended the command: SystemExit: 0 \(.*test_main\.py, l"
    assert re.search(said, done.err)


def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    code = (
        "import os, sys; from jetrl.cli.main import main; assert main(['--help']) == 0\n"
        "assert os.open('file', os.O_WRONLY | os.O_CREAT) > 2\n"
        "print('text'); print('text', file=sys.stderr)\n"
        "os.system('echo text')\n"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "file").read_bytes() == b""


def test_no_file_of_a_run_takes_the_number_of_a_stream_closed_later(tmp_path: Path) -> None:
    """A task file may run `os.close(1)`; the console printed into metrics.jsonl then."""
    code = (
        "import os, sys\n"
        "from jetrl.runs.writer import open_run_directory\n"
        "from jetrl.settings.loading import load_config\n"
        "os.closerange(0, 3); sys.stderr.close()\n"
        "settings = load_config(None, ['run.dir=.', 'run.name=x'])\n"
        "with open_run_directory(settings, {}, False) as run:\n"
        "    print('a line', flush=True); print('a line', file=sys.stderr, flush=True)\n"
        "    os.system('echo a line')\n"
        "    files = [path.read_bytes() for path in run.path.iterdir() if path.is_file()]\n"
        "    sys.exit(any(b'a line' in file for file in files))\n"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_a_full_disk_and_a_closed_pipe_are_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == StorageError.exit_code
    assert done.stderr == f"stopped: No space left on device. {MAKE_ROOM}"
    reading, writing = os.pipe()
    os.close(reading)
    words = [*PROGRAM, "train", "--help"]
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_bench_without_a_gpu_says_what_it_needs(jetrl: Callable) -> None:
    result = jetrl("bench", "norm", "--out", "x.json")
    assert (result.code, "needs an NVIDIA Hopper GPU" in result.err) == (2, True)
    words = "--shape tiny --layers 1 --plan bf16 --prompts 1 --prompt-length 4 --response-length 4"
    tried = jetrl("bench", "train", "--device", "cpu", *words.split())
    assert tried.code == 0, tried.err
    assert "bf16 settings" in tried.out
