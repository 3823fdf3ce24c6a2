"""A score that leaves something behind at every completion does no harm.

Every completion is scored, and nothing that is left outlives the worker.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from jetrl.errors import RunStopped
from jetrl.tasks import Scorer
from jetrl.types import Prompt

LEAKING = f"{Path(__file__).with_name('leaking_task.py')}:Leaking"
PROMPT = Prompt(id="0", text="?")


def open_scorer(folder: Path, **limits: float) -> Scorer:
    return Scorer(LEAKING, options={"folder": str(folder)}, workers=1, **limits)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.fixture
def wait_until_gone(tmp_path: Path, wait_until: Callable) -> Callable[[], None]:
    """Return a function that waits until the processes that scores have started are gone."""

    def wait() -> None:
        started = [int(file.name) for file in tmp_path.iterdir()]
        assert started
        wait_until(lambda: not any(map(alive, started)))

    return wait


@pytest.mark.parametrize("what", ["files", "files_behind_another_error", "threads"])
def test_what_scores_leak_costs_no_completion_its_verdict(what, tmp_path):
    with open_scorer(tmp_path, memory_mib=400) as scorer:
        results = scorer.score([(PROMPT, what)] * 48)
    assert [result.failure for result in results] == [""] * 48


@pytest.mark.parametrize("how", ["process", "process_and_hang", "process_and_crash"])
def test_processes_that_a_score_started_end_with_its_worker(how, tmp_path, wait_until_gone):
    with open_scorer(tmp_path, timeout_s=60) as scorer:
        scorer.score([(PROMPT, how)] * 2)
    wait_until_gone()


def test_processes_that_a_score_started_end_with_the_run(tmp_path, wait_until_gone):
    program = textwrap.dedent(f"""
        import sys, time
        from jetrl.tasks import Scorer
        from jetrl.types import Prompt
        scorer = Scorer({LEAKING!r}, options={{"folder": {str(tmp_path)!r}}}, workers=1)
        scorer.score([(Prompt(id="0", text="?"), "process")])
        print("scored", flush=True)
        time.sleep(3600)
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline()
        parent.kill()  # while its worker is idle
    wait_until_gone()


def test_a_worker_that_does_not_start_again_stops_the_run(tmp_path):
    """A worker that does not start again is not bad input (exit code 2).

    So it is on a machine that has no processes left, or after an edit of what the task's file
    imports.
    """
    file, imported = tmp_path / "task.py", tmp_path / "what_the_task_imports.py"
    leaking = Path(__file__).with_name("leaking_task.py").read_text()
    file.write_text(f"import what_the_task_imports\n{leaking}")
    imported.touch()
    with Scorer(f"{file}:Leaking", options={"folder": str(tmp_path)}, workers=1) as scorer:
        scorer.score([(PROMPT, "process")])
        imported.write_text("import no_such_package\n")
        with pytest.raises(RunStopped, match=r"no_such_package.*go on with --resume"):
            scorer.score([(PROMPT, "process_and_crash")] * 2)


@pytest.mark.parametrize("how", ["fork_that_leaves", "fork_that_returns"])
def test_a_fork_that_comes_back_from_score_ends_there(how, tmp_path, wait_until_gone):
    with open_scorer(tmp_path, timeout_s=60) as scorer:
        results = scorer.score([(PROMPT, how)] * 3)
        assert [(result.score.reward, result.failure) for result in results] == [(1.0, "")] * 3
        wait_until_gone()


@pytest.mark.parametrize("then", ["edited", "deleted"])
def test_a_new_worker_scores_by_the_file_as_it_was(then: str, tmp_path: Path) -> None:
    file = tmp_path / "scoring.py"
    source = textwrap.dedent("""
        import os
        from jetrl.tasks import Task
        from jetrl.types import Prompt, Score
        class Always(Task):
            def prompts(self, split):
                return [Prompt(id="0", text="?")]
            def score(self, prompt, completion):
                if completion == "crash":
                    os.abort()
                return Score(1.0)
    """)
    file.write_text(source)
    with Scorer(f"{file}:Always", workers=1) as scorer:
        assert scorer.score([(PROMPT, "x")])[0].score.reward == 1.0
        if then == "deleted":
            file.unlink()
        else:
            file.write_text(source.replace("1.0", "0.0"))
        crashed, after = scorer.score([(PROMPT, "crash"), (PROMPT, "x")])
        assert "SIGABRT" in crashed.failure
        assert (after.failure, after.score.reward) == ("", 1.0)
    if then == "edited":  # a scorer that starts again means the new one
        with Scorer(f"{file}:Always", workers=1) as scorer:
            assert scorer.score([(PROMPT, "x")])[0].score.reward == 0.0
