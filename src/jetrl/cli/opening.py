"""From what a user calls a model (a Hugging Face directory, a run, a checkpoint) to a policy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.runs import RunDirectory
from jetrl.session.building import choose_device, limit_threads, policy_of_masters
from jetrl.settings.loading import load_config
from jetrl.settings.presets import DEFAULT_PRESET
from jetrl.training import Checkpoints

MASTERS = "masters.safetensors"  # of a checkpoint


class Found(NamedTuple):
    """Where a model is. path: a Hugging Face directory, or a checkpoint (then `run` is its run).
    run: the run directory it is of, if any."""

    path: Path
    run: Path | None

    @property
    def is_checkpoint(self) -> bool:
        return (self.path / MASTERS).is_file()


def open_policy(
    path: str | Path, preset: str | None, device: str, fallback_plan: str = DEFAULT_PRESET
) -> Policy:
    """The policy at `path` under a plan: the preset if given, else the run's own plan, else
    `fallback_plan`. device: auto, cpu or cuda.

    Raises:
        UserError: `path` is no model; the message says what was looked for. And what
            `Policy.from_pretrained` raises.
    """
    found = find_model(Path(path))
    if preset is not None:
        plan = PrecisionPlan.preset(preset)
    elif found.run is not None:
        plan = PrecisionPlan.from_dict(RunDirectory.open(found.run).plan())
    else:
        plan = PrecisionPlan.preset(fallback_plan)
    if found.is_checkpoint:
        return policy_of_checkpoint(found, plan, device)
    policy = Policy.from_pretrained(found.path, plan, choose_device(device))
    limit_threads(policy.config)
    return policy


def find_model(path: Path) -> Found:
    """The model that `path` stands for. A run stands for the newest of its exported model and its
    checkpoints (a run that was cut has no model of its last steps).

    Raises:
        UserError: `path` is none of the three, or a run with neither model nor checkpoint.
    """
    if (path / "config.json").is_file():
        return Found(path, path.parent if (path.parent / "config.toml").is_file() else None)
    if (path / MASTERS).is_file():
        run = path.resolve().parent.parent
        if not (run / "config.toml").is_file():
            raise UserError(f"{path}: a checkpoint outside of its run, whose settings it needs")
        return Found(path, run)
    if (path / "config.toml").is_file():
        candidates = [path / "model" / "config.json", *path.glob(f"checkpoints/step_*/{MASTERS}")]
        written = [file for file in candidates if file.is_file()]
        if not written:
            raise UserError(f"{path}: this run has no model and no checkpoint yet")
        return Found(max(written, key=lambda file: file.stat().st_mtime_ns).parent, path)
    if not path.exists():
        raise UserError(f"{path}: no such model; give a Hugging Face directory or a run directory")
    raise UserError(
        f"{path}: neither a Hugging Face directory (config.json), nor a run directory "
        "(config.toml), nor a checkpoint"
    )


def policy_of_checkpoint(found: Found, plan: PrecisionPlan, device: str) -> Policy:
    """The policy of the run's settings with the checkpoint's master weights."""
    assert found.run is not None  # find_model
    Checkpoints.check(found.path)
    settings = load_config(found.run / "config.toml", [f"run.device={choose_device(device)}"])
    return policy_of_masters(settings, plan, found.path / MASTERS)
