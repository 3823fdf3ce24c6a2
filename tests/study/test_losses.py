"""The script counts lost runs from committed results, and leaves out those that it is told to."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOWS = ROOT / "benchmarks" / "results" / "study" / "flows_first_start.json"
SPEC = importlib.util.spec_from_file_location("losses", ROOT / "benchmarks" / "study" / "losses.py")
losses = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(losses)


def last_line(capsys, *words):
    """Return the last line of the script's output."""
    losses.main([str(word) for word in words])
    return capsys.readouterr().out.splitlines()[-1]


def test_the_lost_run_of_the_first_start_is_counted(capsys):
    line = last_line(capsys, FLOWS)
    assert line.startswith("mixed and alike: 1 of 25; all others: 0 of 63;")
    assert line.endswith("p 0.2841")  # 25 of 88


def test_runs_that_a_commit_has_are_left_out(tmp_path, capsys):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "empty"], check=True)
    file = shutil.copy(FLOWS, tmp_path / "flows.json")
    assert " 1 of 25;" in last_line(capsys, file, "--not-in", "HEAD")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "results"], check=True)
    assert " 0 of 0;" in last_line(capsys, file, "--not-in", "HEAD")
    with pytest.raises(SystemExit, match="--not-in nothing: "):
        losses.main([str(file), "--not-in", "nothing"])
