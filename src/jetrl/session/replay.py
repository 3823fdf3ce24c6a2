"""`jetrl replay`: rerun the steps after a run's last checkpoint.

The rerun has the same bits. It uses a copy of the run (hard links to its checkpoints) that is
removed at the end. The first non-finite value ends the replay with the name of its operation. With
another precision preset or device, other tokens are sampled.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from jetrl.errors import NonFiniteError
from jetrl.precision import PrecisionPlan
from jetrl.runs.attempts import RunLock, is_locked
from jetrl.runs.directory import RunDirectory
from jetrl.runs.storage import write_atomically
from jetrl.session.nonfinite import REPLAY
from jetrl.session.session import Session
from jetrl.settings.loading import Settings, load_config, to_toml
from jetrl.settings.model_sections import PrecisionSettings
from jetrl.training import checkpoint_files as files
from jetrl.types import Json

# Settings that a replay disables or needs.
_OVERRIDES = (
    "train.on_nonfinite=stop",
    "checkpoint.every=0",
    "checkpoint.background=false",  # no background writes into a copy that is being removed
    "report.enabled=false",
    "trackers.names=[]",
)


def replay(path: Path, preset: str | None = None, device: str | None = None) -> tuple[int, str]:
    """Rerun the steps after a run's last checkpoint; the run itself does not change.

    `preset` replaces the run's plan by a precision preset. Returns the last started step, and a
    description of the first non-finite value, or "".
    """
    run = RunDirectory.open(path.resolve())
    # A run that ended with a NaN has no metrics line for that step.
    last = max((line["step"] for line in run.metrics("rl")), default=0) + 1
    number = 0
    for left in run.path.glob(f"{REPLAY}*"):
        if not is_locked(left):  # left over from a killed replay
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=REPLAY, dir=run.path) as folder:
        lock, copy = RunLock(Path(folder)), Path(folder, f"{REPLAY}run")
        try:
            with Session(_copied(run, copy, preset, device), resume=True) as session:
                session.warm_up()
                session.evaluate_start()
                # The loop of jetrl.loop.train, up to the step without a metrics line.
                for number in session.steps():
                    if number > last:
                        return last, ""
                    step = session.score(session.sample(session.draw_prompts(number)))
                    step = session.update(session.sample_dynamically(step))
                    session.record(session.evaluate(step))
        except NonFiniteError as error:
            return number, str(error)
        finally:
            lock.release()
    return number, ""


def _copied(run: RunDirectory, folder: Path, preset: str | None, device: str | None) -> Settings:
    """Copy what a resume needs from a run into a folder; return the settings to resume with."""
    where = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
    where += [f"run.device={device}"] * (device is not None)
    # The config is read again, so change fixed settings in the copy.
    settings = load_config(run.path / "config.toml", [*_OVERRIDES, *where])
    plan = run.plan()
    if preset is not None:
        # The preset may be exact although the run has a correction.
        algorithm = {"correction_under_exact_plan": settings.algorithm.correction != "none"}
        settings = settings.model_copy(
            update={
                "precision": PrecisionSettings(preset=preset),
                "algorithm": settings.algorithm.model_copy(update=algorithm),
            }
        )
        plan = PrecisionPlan.from_settings(settings.precision).to_dict()
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(settings), encoding="utf-8")
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    # Copy metrics, since a resume truncates them; link checkpoints, reference and replay buffer.
    if run.metrics_file.is_file():
        shutil.copy(run.metrics_file, folder)
    for name in ("checkpoints", "reference", *["rollouts"] * (settings.data.replay_steps > 0)):
        if (run.path / name).is_dir():
            # The run may be active: incomplete files may disappear at any time.
            ignore = shutil.ignore_patterns(".writing-*")
            shutil.copytree(run.path / name, folder / name, ignore=ignore, copy_function=_link)
    if preset is not None:
        for file in (folder / "checkpoints").rglob(files.STATE_FILE):
            _set_plan(file.parent, plan)
    return settings


def _set_plan(checkpoint: Path, plan: Json) -> None:
    """Replace the precision plan in a copied checkpoint, which loads only under its own plan."""
    if files.problem_of(checkpoint):
        return  # the resume reports the damage
    # Update the manifest for the changed file.
    path, state = checkpoint / files.STATE_FILE, files.state_of(checkpoint) | {"plan": plan}
    write_atomically(path, json.dumps(state))
    manifest = files.manifest_of(checkpoint) | {files.STATE_FILE: files.fingerprint(path)}
    write_atomically(checkpoint / files.MANIFEST_FILE, json.dumps(manifest))


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
