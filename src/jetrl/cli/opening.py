"""Open the MODEL of a command line (Hugging Face directory, run, checkpoint) as a policy."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jetrl.cli.arguments import advice_in_options
from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.hf_files import is_hub_name
from jetrl.models.nvfp4_files import is_nvfp4
from jetrl.models.peft import base_of, is_adapter, is_scalar, read_adapter
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import SCALAR_HEAD, ScalarModel
from jetrl.models.source import ModelSource, open_source
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import REFERENCE, select_backend
from jetrl.runs.directory import RunDirectory
from jetrl.session.building import choose_device, limit_threads, model_of_masters
from jetrl.session.compiling import compiled_ahead
from jetrl.settings.loading import Settings, load_config
from jetrl.settings.model_sections import AdapterSettings, PrecisionSettings
from jetrl.settings.presets import DEFAULT_PRESET
from jetrl.training.checkpoint import CheckpointFolder
from jetrl.training.checkpoint_files import StoredTensors, check_intact, masters_of, state_of


class ModelLocation(NamedTuple):
    """The directory or hub name of a model or checkpoint, and its run directory if it has one."""

    path: Path
    run: Path | None


def open_policy(
    path: str | Path, preset: str | None, device: str, fallback: str = DEFAULT_PRESET, **fields: str
) -> Policy:
    """Return the policy of a model, run or checkpoint, to be read; refuse reward models.

    Arguments are as in `open_model`. Of a model directory it has no master weights, which would
    take four bytes per parameter, so it can be neither trained nor saved.
    """
    model = open_model(path, preset, device, fallback, scalar=False, trained=False, **fields)
    assert isinstance(model, Policy), "reward models were refused"
    return model


@advice_in_options()
def open_model(
    path: str | Path,
    preset: str | None,
    device: str,
    fallback: str = DEFAULT_PRESET,
    *,
    scalar: bool = True,
    trained: bool = True,
    **fields: str,
) -> Policy | ScalarModel:
    """Return the model of a model or adapter directory, hub name, run directory or checkpoint.

    Args:
        preset: The precision preset. None: the run's plan, or `fallback` without a run.
        device: As in run.device.
        scalar: Open a model with a scalar head, too.
        trained: Keep the master weights of a model directory, from which it is trained and saved.
        fields: Options of `[precision]` that change the preset.

    Raises:
        UserError: a model that is missing, damaged, or not supported on the device.
    """
    location = find_model(Path(path))
    try:
        return _model_at(
            location,
            preset=preset,
            device=device,
            fallback=fallback,
            scalar=scalar,
            trained=trained,
            fields=fields,
        )
    except (FileNotFoundError, UserError):
        if location.run != Path(path) or location.path.exists():
            raise
    # A running job has replaced that checkpoint by a newer one.
    return open_model(path, preset, device, fallback, scalar=scalar, trained=trained, **fields)


def _model_at(
    location: ModelLocation,
    preset: str | None,
    device: str,
    fallback: str,
    scalar: bool,
    trained: bool,
    fields: dict[str, str],
) -> Policy | ScalarModel:
    if preset is None and location.run is not None:
        stored = RunDirectory.open(location.run).plan()
        plan = PrecisionPlan.from_dict(stored, str(location.run / "plan.json"))
    else:
        plan = PrecisionPlan.preset(preset or fallback).replace(**fields)
    select_backend(defined=plan.defined)
    chosen, masters = choose_device(device), masters_of(location.path)
    if masters is not None:
        world().from_first("the checkpoint", lambda: check_intact(location.path))
        if not scalar and SCALAR_HEAD in StoredTensors(masters):
            raise UserError(
                f"{location.path}: a checkpoint of a reward model, which has scores and no tokens; "
                "`jetrl export` writes it as a directory for reward.model_path"
            )
        settings = _settings_on(location.run, chosen)
        plan = _plan_over(settings.model.path, plan, preset)
        state = state_of(location.path)
        model = model_of_masters(settings, plan, masters, state)
        _check_base(location.path, model, settings.model.path)
        return model
    if is_adapter(location.path):
        source = adapter_source(location, chosen, scalar)
    else:
        source = ModelSource.from_path(location.path)
    plan = _plan_over(source.origin, plan, preset)
    fixed = plan.frozen_base or not trained
    trains = (lambda _: False) if fixed and source.adapter is None else None
    limit_threads(source.config)
    with compiled_ahead(source, plan, chosen):
        kind = ScalarModel if scalar and source.config.head == ScalarModel.head else Policy
        return kind(source, plan, chosen, trains=trains)


def _settings_on(run: Path | None, device: str) -> Settings:
    """Return a run's settings on a device; kernels of a GPU need not be those that trained it."""
    assert run is not None  # by find_model
    settings = load_config(run / "config.toml", [f"run.device={device.partition(':')[0]}"])
    if settings.run.backend == REFERENCE.name:
        return settings
    return settings.model_copy(update={"run": settings.run.model_copy(update={"backend": "auto"})})


def _check_base(checkpoint: Path, policy: Policy | ScalarModel, base: str | None) -> None:
    """Raise a UserError if the adapter of a checkpoint was trained on another base."""
    adapter = state_of(checkpoint)["model"].get("adapter")
    if not isinstance(adapter, dict) or adapter.get("base") == policy.base_digest:
        return
    if base:
        here, remedy = f"the model in {base} now", "restore the run's model there"
    else:
        here = f"the random weights that the run's seed makes on {policy.device}"
        remedy = "a GPU and a CPU make different ones, so select the run's with --device"
    raise UserError(f"{checkpoint}: its adapter was trained on another base than {here}; {remedy}")


def _plan_over(base: str | Path | None, plan: PrecisionPlan, preset: str | None) -> PrecisionPlan:
    if base is None or plan.frozen_base or not is_nvfp4(hf.model_config(base)):
        return plan
    if preset is None:
        return PrecisionPlan.from_settings(PrecisionSettings(base="nvfp4"))
    return plan.replace(base="nvfp4")


def adapter_source(location: ModelLocation, device: str, scalar: bool = False) -> ModelSource:
    """Return the source of an adapter directory: the adapter and its base.

    The base of a run's adapter that names none is the run's model, random weights from its seed.
    `scalar` also allows a model with a scalar head. Raises UserError if a file is missing or
    damaged.
    """
    path, run = location.path, location.run
    base = base_of(path, optional=run is not None)
    if base is not None:
        source = ModelSource.from_path(base)
    else:
        settings = _settings_on(run, device)
        changed = {
            "adapter": AdapterSettings(),
            # The tokenizer was exported.
            "model": settings.model.model_copy(update={"tokenizer": None, "template_args": {}}),
        }
        source = open_source(settings.model_copy(update=changed), None, device)
    if scalar and is_scalar(path):
        source = source.with_scalar_head()
    source = replace(source, adapter=read_adapter(path, source.config))
    if not hf.has_tokenizer(path):
        return source
    tokenizer = hf.load_tokenizer(path)
    source = replace(source, tokenizer=tokenizer)
    if base is not None or tokenizer.eos_token_id is None:
        return source
    return replace(source, generation_config={"eos_token_id": tokenizer.eos_token_id})


def find_model(path: Path) -> ModelLocation:
    """Return the location of the model at a path; a run has its newest weights there.

    Raises UserError if there is no model.
    """
    if (path / "config.json").is_file() or is_adapter(path):
        return ModelLocation(path, path.parent if (path.parent / "config.toml").is_file() else None)
    if masters_of(path) is not None:
        steps = path.resolve().parent
        run = (steps.parent if steps.name == "sft" else steps).parent
        if not (run / "config.toml").is_file():
            raise UserError(
                f"{path}: this checkpoint is outside its run directory, whose settings are needed"
            )
        return ModelLocation(path, run)
    if (path / "config.toml").is_file():
        with contextlib.suppress(FileNotFoundError):  # a checkpoint was removed meanwhile
            return ModelLocation(_newest(path), path)
        return find_model(path)
    if is_hub_name(path):
        return ModelLocation(path, None)
    what = "neither model, adapter, run nor checkpoint" if path.exists() else "no such model"
    known = "give a Hugging Face directory or hub name, or a run directory"
    if (Path("runs") / path / "config.toml").is_file():
        known = f"did you mean runs/{path}?"
    raise UserError(f"{path}: {what}; {known}")


def _newest(run: Path) -> Path:
    """Return the directory of a run's newest weights: its exported model or a checkpoint."""
    # A checkpoint of the last step is preferred: its FP32 master weights are not rounded, as the
    # exported model is. Otherwise the newer one is used: an interrupted run has not exported its
    # last steps, and checkpoints may have been deleted.
    adapted = is_adapter(run / "model")
    model = run / "model" / ("adapter_config.json" if adapted else "config.json")
    checkpoints = CheckpointFolder(run / "checkpoints")
    steps = checkpoints.steps()
    masters = [masters_of(checkpoints.path(step)) for step in steps]
    written = [place for place in (model, *masters) if place is not None and place.exists()]
    if not written:
        raise UserError(f"{run}: this run has no model and no checkpoint yet")
    last_step: int | None = None
    with contextlib.suppress(UserError):  # a damaged line of metrics does not hide the model
        last_step = max((line["step"] for line in RunDirectory.open(run).metrics("rl")), default=0)
    if last_step is not None and steps and steps[-1] >= last_step and masters[-1] is not None:
        return masters[-1].parent  # step 0 after supervised training
    return max(written, key=lambda place: place.stat().st_mtime_ns).parent
