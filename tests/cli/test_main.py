"""The frame of the command line: help without torch, errors in words, exit codes."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import jetrl.cli.export
from jetrl.cli.arguments import table
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
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
MAKE_ROOM = "What was written before is whole; make room and start the command again\n"


def test_help_imports_neither_torch_nor_other_heavy_packages() -> None:
    code = (
        "import sys, jetrl.cli.arguments\n"
        "from jetrl.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic', 'matplotlib', 'rich'}\n"
        "print(*heavy & set(sys.modules), file=sys.stderr)\n"
        "print(len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n", f"imported: {done.stderr}"
    # So that it answers at once: there are 110, half of them argparse's; pydantic has hundreds.
    assert int(done.stdout.split()[-1]) < 200


def test_the_help_of_every_command_has_an_example_and_needs_no_torch() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from jetrl.cli.main import COMMANDS, main\n"
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


def test_train_help_shows_every_setting_with_its_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for key, kind, default, _ in describe():
        assert any(line.split()[:1] == [key] and f"{kind} [{default}]" in line for line in lines)


def test_command_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["parity", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "tokens per completion (default: 64)" in out
    assert "default: None" not in out
    assert "default: False" not in out


def test_version(jetrl: Callable) -> None:
    assert jetrl("--version").out.startswith("jetrl 0.")


def test_an_unknown_command_is_refused_with_the_nearest(jetrl: Callable) -> None:
    done = jetrl("trian")
    assert (done.code, done.err) == (2, "error: no command 'trian'; did you mean train?\n")
    assert "commands: train, sft" in jetrl("xyzzy").err


@pytest.mark.parametrize("words", [["--train.lr=1"], ["--train.lr", "1"]])
def test_a_setting_as_an_option_is_told_how_to_write_it(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "demo", *words])
    assert caught.value.code == 2
    assert "; a setting is train.lr=VALUE" in capsys.readouterr().err


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["sample", "x", "--temp", "0"])  # no abbreviations: --temp is not --temperature
    assert left.value.code == 2
    assert "--temp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, code, words",
    [
        (UserError("bad key"), 2, "error: bad key\n"),
        (RunStopped("no reward"), 1, "stopped: no reward\n"),
        (MismatchError("3 tokens differ"), 3, "stopped: 3 tokens differ\n"),
        (NonFiniteError("NaN"), 4, "stopped: NaN\n"),
        (StorageError("disk full"), 6, "stopped: disk full\n"),
        *((OSError(number, "Full", "a"), 6, f"stopped: a: Full. {MAKE_ROOM}") for number in DISK),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            6,
            f"stopped: No usable temporary directory found in ['/tmp']. {MAKE_ROOM}",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (Terminated(), 143, "terminated\n"),
    ],
)
def test_errors_become_messages_and_exit_codes(
    error: BaseException, code: int, words: str, jetrl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(jetrl_export(), "run", fail)
    done = jetrl("export", "a", "b")
    assert (done.code, done.out, done.err) == (code, "", words)


def test_a_bug_of_ours_keeps_its_traceback(
    jetrl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(args: object) -> int:
        raise AssertionError("ours")

    monkeypatch.setattr(jetrl_export(), "run", fail)
    with pytest.raises(AssertionError, match="ours"):
        jetrl("export", "a", "b")


def test_sys_exit_in_a_user_s_code_is_named(
    jetrl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetrl_export(), "run", lambda args: sys.exit(0))
    done = jetrl("export", "a", "b")
    assert done.code == 2
    assert re.search(
        r"sys\.exit\(\) ended the command: SystemExit: 0 \(.*test_main\.py, l", done.err
    )


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_files_do_not_take_the_numbers_of_closed_streams(closed: str, tmp_path: Path) -> None:
    code = (
        "import os, sys; from jetrl.cli.main import main; assert main(['--help']) == 0\n"
        "assert os.open('file', os.O_WRONLY | os.O_CREAT) > 2\n"
        "print('text'); print('text', file=sys.stderr)\n"
        "os.system('echo text')\n"
    )
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert (tmp_path / "file").read_bytes() == b""


def test_output_to_a_full_disk_ends_as_a_file_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PROGRAM, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == StorageError.exit_code
    assert done.stderr == f"stopped: No space left on device. {MAKE_ROOM}"


def test_a_closed_pipe_is_no_traceback() -> None:
    code = f"import subprocess, sys; subprocess.run({[*PROGRAM, 'train', '--help']!r})"
    done = subprocess.run(
        f'"{sys.executable}" -c "{code}" | head -1'.replace("'", '\\"'),
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr


def jetrl_export() -> object:
    return jetrl.cli.export


def test_table_pads_all_columns_but_the_last() -> None:
    assert table([("a", "long cell", "x"), ("bbb", "c", "")]) == "a    long cell  x\nbbb  c"
    assert table([]) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_bench_without_a_gpu_says_what_it_needs(jetrl: Callable) -> None:
    result = jetrl("bench", "gemm", "--out", "x.json")
    assert result.code == 2
    assert "needs an NVIDIA Hopper GPU" in result.err
    with pytest.raises(SystemExit, match=r"^0$"):  # as argparse ends once help is printed
        jetrl("bench", "step", "--help")
    words = "--shape tiny --layers 1 --plan bf16 --prompts 1 --prompt-length 4 --response-length 4"
    tried = jetrl("bench", "train", "--device", "cpu", *words.split())
    assert tried.code == 0, tried.err
    assert "bf16 settings" in tried.out
