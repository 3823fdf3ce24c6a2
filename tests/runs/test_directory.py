import errno
import fcntl
import json
import logging
import multiprocessing
import subprocess
import sys
import warnings

import pytest

from jetrl.errors import RunStopped, StorageError, UserError
from jetrl.runs import RunDirectory
from jetrl.runs.schemas import sample_of
from jetrl.settings.loading import load_config
from jetrl.types import StepStats


def test_layout_and_settings_read_back(tmp_path, synthetic):
    settings = synthetic.settings_for(tmp_path, "demo", "train.lr=3e-5", "rollout.stop=['\\n']")
    with RunDirectory.create(settings, synthetic.PLAN) as run:
        assert load_config(run.path / "config.toml") == settings
        assert run.plan() == synthetic.PLAN
        assert run.checkpoints_dir.is_dir()
        assert run.path == tmp_path / "demo"


def test_name_in_use_is_refused_with_both_ways_out(create):
    create().close()
    with pytest.raises(UserError, match=r"'demo' is in use.*another run\.name.*--resume"):
        create()


@pytest.mark.parametrize("name", [None, "a/b", "..", "a\\b", " a", "a\n", "x" * 200])
def test_name_that_is_no_folder_name_is_refused(tmp_path, name, synthetic):
    settings = synthetic.settings_for(tmp_path)
    section = settings.run.model_copy(update={"name": name})
    with pytest.raises(UserError, match=r"run\.name"):
        RunDirectory.create(settings.model_copy(update={"run": section}), synthetic.PLAN)
    assert not list(tmp_path.iterdir())


def test_nothing_to_resume_is_refused(tmp_path, create):
    with pytest.raises(UserError, match="nothing to resume"):
        create(resume=True)
    assert not (tmp_path / "demo").exists()


def test_resume_with_another_plan_is_refused(create):
    create().close()
    with pytest.raises(UserError, match=r"another precision plan \(kv: \w+ there, \w+ here\)"):
        create(resume=True, kv="bf16")


def test_resume_reports_changed_settings(create):
    create().close()
    with create("loop.steps=200", resume=True) as run:
        assert run.changed_settings == {"loop.steps": (100, 200)}
        assert run.config()["loop"]["steps"] == 100, "nothing has gone on yet"
        run.truncate_after(-1)
        assert run.config()["loop"]["steps"] == 200
        assert run.notes == ["changed on resume: loop.steps: 100 -> 200"]


def test_metrics_read_back_bit_equal(create):
    values = {
        "reward/mean": 0.1 + 0.2,
        "policy/loss": -5e-324,
        "policy/lr": 1 / 3,
        "reward/std": 1e16,
    }
    with create() as run:
        run.write_step(StepStats(1, values))
        (line,) = run.metrics()
        assert {name: line[name].hex() for name in values} == {
            n: v.hex() for n, v in values.items()
        }
        assert list(line)[:2] == ["step", "time"]


def test_each_step_is_on_disk_when_write_returns(create):
    with create() as run:
        for step in (1, 2):
            run.write_step(StepStats(step, {"reward/mean": 0.5}))
            assert run.metrics_file.read_bytes().count(b"\n") == step


@pytest.mark.parametrize("step, phase", [(2, "rl"), (1, "rl"), (5, "sft")])
def test_step_out_of_order_is_refused(step, phase, create):
    with create() as run:
        run.write_step(StepStats(2, {"reward/mean": 0.5}))
        with pytest.raises(ValueError, match="out of order"):
            run.write_step(StepStats(step, {}), phase=phase)


@pytest.mark.parametrize("torn", [b'{"step": 3, "ti', b'{"step": 3}\xff', b"\0\0\0", b"[1]\n"])
def test_torn_last_line_is_dropped_with_a_note(torn, create):
    with create() as run:
        run.write_step(StepStats(1, {"reward/mean": 0.5}))
        run.write_step(StepStats(2, {"reward/mean": 0.6}))
    with open(run.metrics_file, "ab") as file:
        file.write(torn)
    assert [r["step"] for r in RunDirectory.open(run.path).metrics()] == [1, 2]
    with create(resume=True) as run:
        assert "line 3 is incomplete and was dropped" in run.notes[0]
        run.write_step(StepStats(3, {"reward/mean": 0.7}))
        assert [r["step"] for r in run.metrics()] == [1, 2, 3]


def test_complete_last_line_without_its_newline_is_kept(create):
    with create() as run:
        run.write_step(StepStats(1, {"reward/mean": 0.5}))
    run.metrics_file.write_bytes(run.metrics_file.read_bytes().rstrip(b"\n"))
    with create(resume=True) as run:
        run.write_step(StepStats(2, {"reward/mean": 0.7}))
        assert [r["step"] for r in run.metrics()] == [1, 2]


def test_broken_line_in_the_middle_is_named(create):
    with create() as run:
        pass
    run.metrics_file.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        run.metrics()


def test_truncate_after_forgets_metrics_and_rollouts(create, synthetic):
    with create() as run:
        run.write_step(StepStats(4, {"sft/loss": 2.0}), phase="sft")
        for step in range(1, 6):
            run.write_step(StepStats(step, synthetic.metrics_of(step)))
            run.write_rollouts(step, synthetic.samples_of(step))
        before = run.metrics_file.read_bytes().splitlines()
    with create(resume=True) as run:
        run.truncate_after(3)
        assert run.metrics_file.read_bytes().splitlines() == before[:4]
        assert run.rollout_steps() == [1, 2, 3]
        run.write_step(StepStats(4, synthetic.metrics_of(4)))
        assert [r["step"] for r in run.metrics("rl")] == [1, 2, 3, 4]
        run.truncate_after(2, phase="sft")
        assert run.metrics() == []
        assert run.rollout_steps() == []


def test_rollouts_read_back_equal(create, synthetic):
    samples = synthetic.samples_of(3)
    with create() as run:
        assert run.write_rollouts(3, samples).name == "step_000003.jsonl"
        assert [sample_of(record) for record in run.rollouts(3)] == samples


def test_failed_rewrite_leaves_the_old_file(create, synthetic, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    with create() as run:
        path = run.write_rollouts(1, synthetic.samples_of(1))
        before = path.read_bytes()
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            run.write_rollouts(1, synthetic.samples_of(2))
        assert path.read_bytes() == before
        assert [p.name for p in run.rollouts_dir.iterdir()] == [path.name]


def test_open_is_for_reading(tmp_path, create):
    create().close()
    with pytest.raises(ValueError, match="reading only"):
        RunDirectory.open(tmp_path / "demo").write_step(StepStats(1, {}))
    with pytest.raises(UserError, match="no such run directory"):
        RunDirectory.open(tmp_path / "other")
    with pytest.raises(UserError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_who_asks_at_the_same_moment_is_no_writer(create):
    with create() as run:
        path = run.path
    with open(path / ".lock", "rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert RunDirectory.open(path).state() == "new"


def test_second_writer_is_refused_while_the_first_lives(create):
    with create() as run:
        assert run.state() == "running"
        with pytest.raises(UserError, match="another process is writing"):
            create(resume=True)
    assert run.state() == "new"
    create(resume=True).close()


def test_a_file_system_without_locks_is_said_so(create, monkeypatch):
    """Lustre without -o flock, some network shares: a run can be read there, and not written."""
    with create() as run:
        path = run.path

    def no_locks(file, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert RunDirectory.open(path).state() == "new"
    with pytest.raises(UserError, match=r"gives no lock \(Function not implemented\).*run.dir"):
        create(resume=True)


def test_forked_worker_does_not_keep_the_lock(create):
    run = create()
    context = multiprocessing.get_context("fork")
    leave = context.Event()
    worker = context.Process(target=leave.wait, daemon=True)
    worker.start()
    run.close()
    create(resume=True).close()
    leave.set()
    worker.join()


def test_killed_run_is_interrupted(tmp_path):
    program = f"""
import os, signal
from jetrl.settings.loading import load_config
from jetrl.runs import RunDirectory
settings = load_config(None, ["run.dir={tmp_path}", "run.name=demo"])
run = RunDirectory.create(settings, {{}})
with run.attempt(["jetrl", "train"]):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert RunDirectory.open(tmp_path / "demo").state() == "interrupted"


@pytest.mark.parametrize(
    "state, error",
    [("interrupted", KeyboardInterrupt), ("stopped", RunStopped), ("failed", ZeroDivisionError)],
)
def test_attempt_records_how_it_ended(create, state, error):
    with create() as run, pytest.raises(error), run.attempt(["jetrl", "train"], {"device": "CPU"}):
        raise error("why")
    (attempt,) = run.attempts()
    assert run.state() == attempt.state == state
    assert "why" in attempt.reason or state == "interrupted"
    assert ("Traceback" in run.log_file.read_text()) == (state == "failed")
    assert attempt.notes == {"device": "CPU"}
    assert attempt.command == "jetrl train"
    assert "python" in attempt.versions
    assert attempt.ended >= attempt.started


def test_attempt_that_returns_is_finished_unless_it_says_otherwise(create):
    with create() as run:
        with run.attempt(["jetrl"]):
            pass
        assert run.attempts()[-1].state == "finished"
        with run.attempt(["jetrl"]) as attempt:
            attempt.end("interrupted", "Ctrl-C at step 3")
    assert (run.attempts()[-1].state, run.attempts()[-1].reason) == (
        "interrupted",
        "Ctrl-C at step 3",
    )


def test_log_takes_all_logging_and_gives_it_back(create):
    root, library = logging.getLogger(), logging.getLogger("transformers")
    level, handlers, propagate = root.level, list(root.handlers), library.propagate
    library.propagate = False
    try:
        for k in range(2):
            with create(resume=k > 0) as run, run.attempt(["jetrl", "train"]):
                logging.getLogger("jetrl.test").info("from us %d", k)
                library.warning("from a library \ud800")
                warnings.warn("a warning", stacklevel=1)
        logging.getLogger("jetrl.test").warning("after the end")
        assert library.propagate is False
    finally:
        library.propagate = propagate
    text = run.log_file.read_text()
    for expected in ("INFO jetrl.test: from us 1", "from a library", "a warning", "python 3."):
        assert expected in text
    assert text.count("==== ") == 2
    assert "after the end" not in text
    assert (root.level, root.handlers) == (level, handlers)


def test_history_adds_up_attempts(create, synthetic):
    with create() as run:
        for step in (1, 2):
            run.write_step(StepStats(step, synthetic.metrics_of(step, evaluate=step == 2)))
    events = [
        {"event": "start", "time": 100.0},
        {"event": "start", "time": 500.0},
        {"event": "end", "time": 530.0, "state": "finished"},
    ]
    lines = run.metrics()
    lines[0]["time"], lines[1]["time"] = 110.0, 520.0
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run.path / "attempts.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    history = run.history()
    assert history.elapsed_s == 10.0 + 30.0  # killed after its last metric; then a whole one
    assert (history.started, history.last_step, history.num_steps) == (100.0, 2, 2)
    assert (history.num_tokens, history.num_different) == (8192, 0)
    assert history.reward.first == lines[0]["reward/mean"]
    assert [(e.name, e.first_step) for e in history.evals] == [("eval/arithmetic/mean", 2)]


def test_package_needs_no_torch():
    program = "import jetrl.runs, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("error", [UserError("bad setting"), RunStopped("no"), KeyboardInterrupt()])
def test_an_attempt_that_ended_before_its_first_step_leaves_the_name_free(create, error):
    with create() as run, pytest.raises(type(error)), run.attempt(["jetrl", "train"]):
        raise error
    with create("loop.steps=7") as run:
        assert run.config()["loop"]["steps"] == 7
        assert len(run.attempts()) == 1  # the log of the first is kept


@pytest.mark.parametrize("left", ["metrics", "checkpoint", "rollouts"])
def test_an_attempt_that_left_something_keeps_the_name(create, left):
    with create() as run, run.attempt(["jetrl", "train"]) as attempt:
        if left == "metrics":
            run.write_step(StepStats(1, {"reward/mean": 0.5}), "sft")
        elif left == "checkpoint":
            (run.checkpoints_dir / "step_000001").mkdir()
        else:
            run.write_rollouts(1, [])
        attempt.end("stopped", "no")
    with pytest.raises(UserError, match="in use"):
        create()
