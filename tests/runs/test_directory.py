from __future__ import annotations

import dataclasses
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
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory, check_start
from jetrl.runs.writer import RunWriter
from jetrl.settings.loading import load_config
from jetrl.types import Completion, StepStats, Turn

REWARD = {"reward/mean": 0.5}


def test_layout_and_settings_read_back(tmp_path, synthetic):
    settings = synthetic.settings_for(tmp_path, "demo", "train.lr=3e-5", "rollout.stop=['\\n']")
    with RunWriter.create(settings, synthetic.PLAN) as run:
        assert load_config(run.path / "config.toml") == settings
        assert run.plan() == synthetic.PLAN
        assert run.checkpoints_dir.is_dir()
        assert run.path == tmp_path / "demo"


def test_a_name_in_use_nothing_to_resume_and_another_plan_are_refused(tmp_path, create):
    with pytest.raises(UserError, match="nothing to resume"):
        create(resume=True)
    assert not (tmp_path / "demo").exists()
    create().close()
    with pytest.raises(UserError, match=r"'demo' is in use.*another run\.name.*--resume"):
        create()
    with pytest.raises(UserError, match=r"another precision plan \(kv: \w+ there, \w+ here\)"):
        create(resume=True, kv="bf16")
    with pytest.raises(UserError, match="no such run directory"):
        RunDirectory.open(tmp_path / "other")
    with pytest.raises(UserError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_resume_reports_changed_settings(create):
    create().close()
    with create("loop.steps=200", resume=True) as run:
        assert run.changed_settings == {"loop.steps": (100, 200)}
        assert run.config()["loop"]["steps"] == 100, "nothing has gone on yet"
        run.truncate_after(-1)
        assert run.config()["loop"]["steps"] == 200
        assert run.notes == ["changed on resume: loop.steps: 100 -> 200"]


def test_metrics_are_on_disk_when_written_and_read_back_bit_equal(create):
    values = {
        "reward/mean": 0.1 + 0.2,
        "policy/loss": -5e-324,
        "policy/lr": 1 / 3,
        "reward/std": 1e16,
    }
    with create() as run:
        for step in (1, 2):
            run.write_step(StepStats(step, values))
            assert run.metrics_file.read_bytes().count(b"\n") == step
        for line in run.metrics():
            assert {n: line[n].hex() for n in values} == {n: v.hex() for n, v in values.items()}
            assert list(line)[:2] == ["step", "time"]
        for step, phase in ((2, "rl"), (1, "rl"), (5, "sft")):
            with pytest.raises(ValueError, match="out of order"):
                run.write_step(StepStats(step, {}), phase=phase)


@pytest.mark.parametrize("torn", [b'{"step": 3, "ti', b'{"step": 3}\xff', b"\0\0\0", b"[1]\n"])
def test_torn_last_line_is_dropped_with_a_note(torn, create):
    with create() as run:
        run.write_step(StepStats(1, REWARD))
        run.write_step(StepStats(2, REWARD))
    with open(run.metrics_file, "ab") as file:
        file.write(torn)
    assert [r["step"] for r in RunDirectory.open(run.path).metrics()] == [1, 2]
    with create(resume=True) as run:
        assert "line 3 is incomplete and was dropped" in run.notes[0]
        run.write_step(StepStats(3, REWARD))
        assert [r["step"] for r in run.metrics()] == [1, 2, 3]


def test_complete_last_line_without_its_newline_is_kept_and_a_broken_one_named(create):
    with create() as run:
        run.write_step(StepStats(1, REWARD))
    run.metrics_file.write_bytes(run.metrics_file.read_bytes().rstrip(b"\n"))
    with create(resume=True) as run:
        run.write_step(StepStats(2, REWARD))
        assert [r["step"] for r in run.metrics()] == [1, 2]
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
        assert run.truncate_after(3) == []
        assert run.metrics_file.read_bytes().splitlines() == before[:4]
        assert run.rollout_steps() == [1, 2, 3]
        run.write_step(StepStats(4, synthetic.metrics_of(4)))
        assert [r["step"] for r in run.metrics("rl")] == [1, 2, 3, 4]
        assert run.truncate_after(5) == []
        [lost] = run.truncate_after(9)
        assert lost.endswith("jsonl has lost the lines of steps 5 to 8; it continues with step 9")
        [lost] = run.truncate_after(2, phase="sft")
        assert "steps 1 to 2; it continues with step 3" in lost
        assert run.metrics() == []
        assert run.rollout_steps() == []


def test_rollouts_read_back_equal_and_a_failed_rewrite_leaves_them(create, synthetic, monkeypatch):
    plain, *others = synthetic.samples_of(3)
    turns = (Turn("x", {"role": "tool", "content": "42"}), Turn("y", "=5"), Turn("."))
    completion = Completion((5, 7, 6), (-0.1, 0.0, -2.5e-7), "stop", "x42y", ((1, 2),), turns)
    chat = dataclasses.replace(
        plain.prompt, text=None, messages=({"role": "user", "content": "2+3?"},), task="sums"
    )
    with_turns = dataclasses.replace(plain, prompt=chat, completion=completion, readable="= 5")
    samples = [plain, with_turns, *others]
    with create() as run:
        path = run.write_rollouts(3, samples)
        assert path.name == "step_000003.jsonl"
        for record, sample in zip(run.rollouts(3), samples, strict=True):
            read = sample.completion
            assert record["token_ids"] == list(read.token_ids)
            assert record["logprobs"] == list(read.logprobs), "the same bits"
            assert record.get("environment", []) == [list(span) for span in read.environment]
            assert [turn["reply"] for turn in record.get("turns", [])] == [
                t.reply for t in read.turns
            ]
            assert (record["messages"] is None) == (sample.prompt.messages is None)
            own = (sample.group, sample.failure, sample.score.reward, dict(sample.score.parts))
            assert own == tuple(record[key] for key in ("group", "failure", "reward", "parts"))
        before = path.read_bytes()

        def full(descriptor):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            run.write_rollouts(3, others)
        assert path.read_bytes() == before
        assert [p.name for p in run.rollouts_dir.iterdir()] == [path.name]


def test_second_writer_is_refused_while_the_first_lives(create):
    with create() as run:
        assert run.state() == "running"
        with pytest.raises(UserError, match="another process is writing"):
            create(resume=True)
        context = multiprocessing.get_context("fork")
        leave = context.Event()
        worker = context.Process(target=leave.wait, daemon=True)
        worker.start()
    with open(run.path / ".lock", "rb") as asking:  # who asks at the same moment is no writer
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert run.state() == "new"
    create(resume=True).close()  # though a forked worker still lives
    leave.set()
    worker.join()


def test_a_file_system_without_locks_is_said_so(create, monkeypatch):
    """Lustre without -o flock, some network shares: a run can be read there, and not written."""
    create().close()

    def no_locks(file, kind):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(UserError, match=r"support locks \(Function not implemented\).*run.dir"):
        create(resume=True)


def test_killed_run_is_interrupted_and_the_package_needs_no_torch(tmp_path):
    program = f"""
import os, signal, sys
from jetrl.settings.loading import load_config
from jetrl.runs.writer import RunWriter
assert "torch" not in sys.modules
settings = load_config(None, ["run.dir={tmp_path}", "run.name=demo"])
run = RunWriter.create(settings, {{}})
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
    assert (attempt.notes, attempt.command) == ({"device": "CPU"}, "jetrl train")
    assert "python" in attempt.versions
    assert attempt.ended >= attempt.started
    with create("loop.steps=7") as run:  # it ended before its first step: the name is free
        assert run.config()["loop"]["steps"] == 7
        assert len(run.attempts()) == 1


@pytest.mark.parametrize("left", ["metrics", "checkpoint", "rollouts"])
def test_an_attempt_that_left_something_keeps_the_name(create, left):
    with create() as run, run.attempt(["jetrl", "train"]) as attempt:
        if left == "metrics":
            run.write_step(StepStats(1, REWARD), "sft")
        elif left == "checkpoint":
            (run.checkpoints_dir / "step_000001").mkdir()
        else:
            run.write_rollouts(1, [])
        attempt.end("stopped", "no")
    with pytest.raises(UserError, match="in use"):
        create()


LARGEST = {  # settings that readers of a run directory check, at their bounds
    "loop.steps": 10**12,
    "sft.steps": 10**12,
    "report.samples": 10**6,
    "precision.first_layers_bf16": 1024,
    "precision.last_layers_bf16": 1024,
}


def test_what_the_settings_take_the_readers_take(create):
    overrides = [f"{key}={value}" for key, value in LARGEST.items()]
    settings = load_config(None, [*overrides, "run.name=large"])
    plan = PrecisionPlan.from_settings(settings.precision).to_dict()
    with create(*overrides, **plan) as run:
        assert run.config()["loop"]["steps"] == 10**12
        assert run.plan()["first_layers_bf16"] == 1024


@pytest.mark.parametrize("key", LARGEST)
def test_what_readers_would_refuse_is_no_setting(key):
    with pytest.raises(UserError, match=rf"{key} = .*: should be less than"):
        load_config(None, [f"{key}={2 * LARGEST[key]}"])


def test_a_run_does_not_write_settings_that_it_cannot_read(create, tmp_path):
    """Found before training, and in a dry run; nothing is made."""
    text = "\N{WAVING HAND SIGN}" * 2**22  # of 4 bytes each; TOML is parsed by the character
    for overrides, plan, words in (
        ([f'task.options.text="{text}"'], {}, "larger than the 16 MiB"),
        ([], {"name": 2**60}, "plan.json: name = "),
    ):
        with pytest.raises(UserError, match=words):
            create(*overrides, **plan)
        settings = load_config(None, [*overrides, f"run.dir={tmp_path}", "run.name=x"])
        with pytest.raises(UserError, match=words):
            check_start(settings, plan, resume=False)
    assert not list(tmp_path.iterdir())


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
    assert run.attempts()[-1].state == "finished"
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
