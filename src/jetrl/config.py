"""The settings tree: typed, documented, without torch.

A run's settings come from a TOML recipe and dotted overrides (`train.lr=2e-6`). Every key is here;
a key that is not is an error that names the nearest one. Section names are fixed (docs/settings.md).
Defaults are meant for a real model on a GPU; the recipes set what differs.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from jetrl.errors import UserError

Preset = Literal["fp32", "bf16", "mixed", "jet", "unified"]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A section of the settings: immutable, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=())


class RunSettings(Section):
    name: str | None = Field(None, description="run name; default: the recipe's name")
    dir: str = Field("runs", description="folder that holds run directories")
    seed: NonNegative = Field(0, description="fixes data order, sampling and initial weights")
    max_hours: Annotated[float, Field(gt=0)] | None = Field(
        None, description="checkpoint and stop after this many hours"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where it can run")


class ModelSettings(Section):
    path: str | None = Field(None, description="a Hugging Face model directory")
    config: dict[str, Any] | str | None = Field(
        None, description="config.json contents (or its path): random weights from run.seed"
    )
    tokenizer: str | None = Field(
        None,
        description="tokenizer directory if not model.path; 'characters': one token a character",
    )

    @model_validator(mode="after")
    def one_source(self) -> ModelSettings:
        if self.path is not None and self.config is not None:
            raise ValueError("model.path and model.config are both set: keep one of them")
        return self


class PrecisionSettings(Section):
    preset: Preset = Field("unified", description="what is FP8, on which side (docs/precision.md)")
    grad_output: Literal["e4m3", "e5m2", "bf16"] | None = Field(
        None, description="format of output gradients in DGrad and WGrad; default: the preset's"
    )
    scales: Literal["fp32", "pow2"] | None = Field(None, description="default: the preset's (fp32)")
    first_layers_bf16: NonNegative = Field(0, description="decoder layers at the start kept in BF16")
    last_layers_bf16: NonNegative = Field(0, description="decoder layers at the end kept in BF16")
    kv: Literal["fp8", "bf16"] | None = Field(None, description="keys and values; default: the preset's")
    lm_head: Literal["bf16", "fp8"] | None = Field(None, description="default: the preset's (bf16)")


class TaskSettings(Section):
    name: str = Field(
        "arithmetic", description="a built-in name, reasoning_gym:NAME, or file.py:Class"
    )
    path: str | None = Field(None, description="data file or folder, where the task reads one")
    split: str = Field("train", description="split that is trained on")
    eval_split: str = Field("test", description="held-out split")
    system_prompt: str | None = Field(None, description="put before chat prompts")
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the task by name")
    workers: NonNegative = Field(2, description="scoring processes; 0: score in this process")
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        10.0, description="a score that takes longer counts 0 and its worker is restarted"
    )


class RolloutSettings(Section):
    prompts_per_step: Positive = Field(32, description="prompts drawn each step")
    samples_per_prompt: Positive = Field(8, description="completions a prompt (the group)")
    max_tokens: Positive = Field(1024, description="tokens a completion at most")
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: NonNegative = Field(0, description="0: off")
    stop: tuple[str, ...] = Field((), description="strings that end a completion, beside the task's")
    max_batch_size: Positive = Field(256, description="sequences decoded together at most")
    page_size: Positive = Field(64, description="tokens a KV page")
    num_pages: Positive | None = Field(None, description="KV pages; default: what the batch can use")
    max_prefill_tokens: Positive = Field(8192, description="prompt tokens a forward at most")


class AlgorithmSettings(Section):
    name: Literal["grpo"] = "grpo"
    clip: Annotated[float, Field(gt=0)] = Field(0.2, description="ratio clipped to 1 - clip, 1 + clip")
    clip_high: Annotated[float, Field(gt=0)] | None = Field(
        None, description="upper clip where it differs from the lower"
    )
    normalize_std: bool = Field(True, description="divide a group's advantages by its std")
    kl: Annotated[float, Field(ge=0)] = Field(0.0, description="weight of the KL to a frozen reference")


class TrainSettings(Section):
    lr: Annotated[float, Field(gt=0)] = Field(1e-6, description="peak learning rate of AdamW")
    warmup_steps: NonNegative = Field(0, description="optimizer updates of linear warm-up")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after warm-up")
    min_lr_ratio: Share = Field(0.1, description="final lr over peak lr, for linear and cosine")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip: Annotated[float, Field(gt=0)] = Field(1.0, description="maximum global gradient norm")
    updates_per_step: Positive = Field(1, description="optimizer updates a step, on disjoint samples")
    tokens_per_micro_batch: Positive = Field(16384, description="tokens a forward and backward")
    activation_checkpointing: bool = Field(False, description="recompute layers in backward")


class LoopSettings(Section):
    steps: NonNegative = Field(100, description="RL steps")


class SftSettings(Section):
    """Supervised training on the task's own worked answers: `jetrl sft`, or before RL if steps > 0."""

    steps: NonNegative = Field(0, description="optimizer updates; `jetrl train` runs them first")
    examples_per_step: Positive = 64
    lr: Annotated[float, Field(gt=0)] = 1e-4
    warmup_steps: NonNegative = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"


class EvalSettings(Section):
    every: NonNegative = Field(10, description="steps between evaluations; 0: never")
    prompts: NonNegative = Field(128, description="held-out prompts, from the start; 0: all")
    samples: Positive = Field(1, description="completions a prompt: mean@n and pass@n")
    temperature: Annotated[float, Field(ge=0)] = Field(0.0, description="0: greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Positive | None = Field(None, description="default: rollout.max_tokens")
    threshold: float = Field(1.0, description="a reward of at least this counts as solved in pass@k")


class CheckpointSettings(Section):
    every: NonNegative = Field(50, description="steps between checkpoints; 0: only the last")
    keep_last: Positive = 2


class ReportSettings(Section):
    enabled: bool = True
    samples: NonNegative = Field(8, description="rollouts shown in report.html")


class TrackerSettings(Section):
    names: tuple[Literal["wandb", "trackio", "tensorboard"], ...] = ()
    project: str = "jetrl"


class Settings(Section):
    """All settings of a run. `load_config` makes it; `to_toml` writes it back."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    precision: PrecisionSettings = PrecisionSettings()
    task: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    sft: SftSettings = SftSettings()
    train: TrainSettings = TrainSettings()
    loop: LoopSettings = LoopSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    report: ReportSettings = ReportSettings()
    trackers: TrackerSettings = TrackerSettings()


def load_config(recipe: str | Path | None = None, overrides: Sequence[str] = ()) -> Settings:
    """Settings from a TOML recipe and `key=value` overrides, later ones winning.

    A value is read as TOML where it can be (`1e-6`, `true`, `["a"]`) and as text otherwise;
    `task=NAME` is short for `task.name=NAME`. Relative paths stay relative to the working folder.

    Raises:
        UserError: no such file, TOML that does not parse, an unknown key (the nearest is named), a
            value of the wrong type or out of range; always with the key and where it came from.
    """
    tree: dict[str, Any] = {}
    source = "the defaults"
    if recipe is not None:
        source = str(recipe)
        tree = _read_toml(Path(recipe))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r}: write it as section.key=value")
        if key in Settings.model_fields:
            if key != "task":
                raise UserError(f"override {override!r}: {key} is a section; name a key of it")
            key = "task.name"
        _assign(tree, key.split("."), _parse_value(text), override)
    _reject_unknown(tree, Settings, (), source)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise UserError(_explain(error, source)) from None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"recipe {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"recipe {path}: not UTF-8 text ({error.reason})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"recipe {path}: not valid TOML: {error}") from None


def _parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return None if text == "none" else text


def _assign(tree: dict[str, Any], keys: Sequence[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise UserError(f"override {override!r}: {key} is not a section")
    tree[keys[-1]] = value


def _reject_unknown(
    tree: Mapping[str, Any], model: type[BaseModel], path: tuple[str, ...], source: str
) -> None:
    for key, value in tree.items():
        field = model.model_fields.get(key)
        full = ".".join((*path, key))
        if field is None:
            known = list(_all_keys(Settings)) if path == () else list(model.model_fields)
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            prefix = ".".join(path)
            hint = f"; did you mean {prefix + '.' if prefix else ''}{near[0]}?" if near else ""
            if not near:
                hint = f"; known here: {', '.join(model.model_fields)}"
            raise UserError(f"unknown setting {full} in {source} or an override{hint}")
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            if not isinstance(value, Mapping):
                raise UserError(f"setting {full} in {source}: a section, not {value!r}")
            _reject_unknown(value, section, (*path, key), source)


def _all_keys(model: type[BaseModel]) -> Iterator[str]:
    """Section names, then dotted keys: what a mistyped top-level name is compared with."""
    for name, field in model.model_fields.items():
        yield name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            for key in field.annotation.model_fields:
                yield f"{name}.{key}"


def _explain(error: ValidationError, source: str) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error":
            lines.append(message)
        else:
            lines.append(f"setting {key} = {item['input']!r}: {message}")
    return f"in {source} or an override: " + "; ".join(lines)


def to_toml(settings: Settings) -> str:
    """The settings as TOML that `load_config` reads back to an equal object; unset keys are left out."""
    lines: list[str] = []
    for name, section in settings.model_dump(mode="json", exclude_none=True).items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        inside = ", ".join(
            f"{json.dumps(str(k))} = {_toml_value(v)}" for k, v in value.items() if v is not None
        )
        return "{ " + inside + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value)  # TOML basic strings take JSON's escapes
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def describe(model: type[BaseModel] = Settings) -> Iterator[tuple[str, str, str, str]]:
    """Every setting as (dotted key, type, default, description): what `--help` and the docs show."""
    for name, section in model.model_fields.items():
        section_model = typing.cast(type[BaseModel], section.annotation)
        for key, field in section_model.model_fields.items():
            default = field.get_default(call_default_factory=True)
            yield f"{name}.{key}", _type_name(field.annotation), str(default), field.description or ""


def _type_name(annotation: Any) -> str:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _type_name(typing.get_args(annotation)[0])
    if origin is Literal:
        return " | ".join(str(value) for value in typing.get_args(annotation))
    if origin in (typing.Union, types.UnionType):
        parts = [a for a in typing.get_args(annotation) if a is not type(None)]
        return " | ".join(_type_name(part) for part in parts)
    return getattr(annotation, "__name__", str(annotation)) if origin is None else origin.__name__
