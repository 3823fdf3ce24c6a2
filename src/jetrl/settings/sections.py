"""Sections of a run's settings: every key with its type, range and meaning.

Section names are stable (docs/settings.md). Defaults suit a real model on a GPU; recipes override
them.

Each section validates its own values; `Settings` validates combinations across sections. Messages
name the keys and say which one to change.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from jetrl.errors import UserError
from jetrl.settings import model_sections
from jetrl.settings.algorithms import ALGORITHMS, Algorithm, AlgorithmSettings
from jetrl.settings.messages import explain
from jetrl.settings.model_sections import PrecisionSettings, Speculation
from jetrl.settings.presets import PRESETS, codes_alike
from jetrl.settings.section import (
    COMMAS,
    ONE_OR_MORE,
    Beta,
    Many,
    Mass,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    ReportSamples,
    Seconds,
    Section,
    Share,
    Steps,
    Text,
    without_none,
)

PageSize = Annotated[int, Field(ge=1, le=2**16)]


Schedule = Literal["constant", "linear", "cosine"]


class RunSettings(Section):
    """The section `[run]`: run directory, seed, time limit and device."""

    name: str | None = None
    """run directory name. Default: the recipe's name, or MODEL-TASK on the command line"""
    dir: str = "runs"
    """parent folder of run directories"""
    seed: NonNegative = 0
    """seed of data order, sampling and initial weights"""
    max_hours: PositiveFloat | None = None
    """end this attempt within this many hours, with a checkpoint. Default: no limit"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if available"""
    backend: Literal["auto", "hopper", "triton", "reference"] = "auto"
    """kernels of the GPU; triton: any NVIDIA GPU from 8.0 on, FP8 from 8.9 on; reference: plain
    PyTorch, slow, on any GPU with run.device = cuda"""

    @field_validator("name")
    @classmethod
    def one_folder_name(cls, name: str | None) -> str | None:
        """Check that the name is a single folder name."""
        if name is not None and (not name.strip() or "/" in name or name in (".", "..")):
            raise ValueError("a run name must be a single, non-empty folder name without a slash")
        return name


class ModelSettings(Section):
    """The section `[model]`: the policy's weights or architecture, and its tokenizer."""

    path: str | None = None
    """Hugging Face model directory or hub name: NAME[@REVISION]"""
    config: dict[str, Any] | str | None = None
    """config.json contents or path; weights are initialized at random from run.seed"""
    tokenizer: str | None = None
    """tokenizer directory; 'characters': one token per character. Default: model.path"""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """extra variables for the chat template, such as enable_thinking = false"""

    _config = field_validator("config", "template_args", mode="before")(without_none)

    @model_validator(mode="after")
    def one_source(self) -> ModelSettings:
        """Check that the model has a single source."""
        if self.path is not None and self.config is not None:
            raise ValueError("model.path and model.config are both set: keep one of them")
        return self


MOST_COMPLETIONS = 2**20  # per step; more would fill host memory with texts
MOST_WORKERS = 1024  # scoring processes; each one imports the task's modules


class TaskSettings(Section):
    """The section `[task]`: the source of prompts and rewards, and scoring limits."""

    name: str = "arithmetic"
    """built-in task name, data file such as mine.jsonl, reasoning_gym:NAME, or file.py:Class"""
    path: str | None = None
    """data file or folder, if the task reads one"""
    split: str = "train"
    """training split"""
    eval_split: str = "test"
    """eval split"""
    system_prompt: str | None = None
    """system prompt for chat prompts"""
    options: dict[str, Any] = Field(default_factory=dict)
    """keyword arguments of the task"""
    special_tokens_as_text: Literal["replies", "all", "none"] = "replies"
    """where to escape special tokens such as <|im_end|>: `replies` (environment output), `all`
    (also prompts and demonstrations), `none`"""
    max_turns: Positive | None = None
    """maximum turns per completion. Default: from the task (1 for most)"""
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS)] = 2
    """maximum scoring processes, started on demand; 0: score in this process"""
    timeout_s: Seconds = 10.0
    """CPU-time limit per score in seconds; the wall-clock limit is 10x. A score that times out
    fails and counts as 0. For a TRL-style reward function, the limit covers one call with all
    completions of a step"""
    max_lost_s: NonNegativeFloat = 120.0
    """maximum seconds per worker and step lost to scores that hang or crash; the remaining
    completions of the step then get no score"""
    memory_mib: NonNegative = 1024
    """memory limit per scoring process in MiB, in addition to the task's imports; 0: no limit"""

    _options = field_validator("options", mode="before")(without_none)

    @property
    def is_text(self) -> bool:
        """True if the task is raw text."""
        return self.name == "text"


class DataSettings(Section):
    """The section `[data]`: prompt order and sample selection (docs/data.md)."""

    order: Literal["shuffle", "sequential", "curriculum", "pass_rate"] = "shuffle"
    """sequential: the order of the data; curriculum: by difficulty, easiest first; pass_rate:
    sample prompts with a pass rate near 50% more often"""
    difficulty: Text = "difficulty"
    """field of a row (prompt.metadata) with a number that curriculum sorts by, ascending"""
    explore: Mass = 0.1
    """minimum sampling weight of a prompt under pass_rate; a prompt with a pass rate of 50% has
    weight 1"""
    batch: Literal["all", "shuffle_r1"] = "all"
    """shuffle_r1: train on the pairs of each group with the largest advantage differences"""
    keep_pairs: Mass = 0.5
    """fraction of each group's pairs kept under shuffle_r1"""
    rollouts: Text | None = None
    """train on the rollouts of this run (a directory, or a name in run.dir) instead of sampling;
    with its model and settings, the bits are the same. Default: sample"""
    replay_steps: Annotated[int, Field(ge=0, le=1000)] = 0
    """also train on the samples of this many earlier steps, with their exact ratios"""

    @model_validator(mode="after")
    def read_by_something(self) -> DataSettings:
        """Check that the chosen order and batch use each key that is set."""
        readers = {"explore": ("order", "pass_rate"), "keep_pairs": ("batch", "shuffle_r1")}
        readers["difficulty"] = ("order", "curriculum")
        for key, (other, reader) in readers.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default and getattr(self, other) != reader:
                raise ValueError(
                    f"data.{key} = {value} has no effect with data.{other} = "
                    f"{getattr(self, other)}: set data.{other}={reader}"
                )
        return self


class RolloutSettings(Section):
    """The section `[rollout]`: number of completions, sampling parameters and limits."""

    prompts_per_step: Many = 32
    """prompts per step"""
    samples_per_prompt: Many = 8
    """completions per prompt (group size)"""
    max_tokens: Positive = 1024
    """maximum tokens per completion"""
    temperature: NonNegativeFloat = 1.0
    """sampling temperature"""
    top_p: Mass = 1.0
    """nucleus sampling: keep the most probable tokens up to this cumulative probability; 1: all"""
    top_k: NonNegative = 0
    """keep only the k most probable tokens; 0: all"""
    min_p: Beta = 0.0
    """keep only tokens with at least this fraction of the largest probability; 0: all"""
    truncated_logprobs: bool = True
    """train the distribution that top_p, top_k and min_p leave, renormalized; false: log-probs,
    ratios and gradient are of all tokens, which is biased"""
    stop: Annotated[tuple[Text, ...], ONE_OR_MORE] = ()
    """stop strings, in addition to the task's"""
    max_batch_size: Many = 256
    """maximum number of sequences decoded concurrently"""
    page_size: PageSize = 64
    """tokens per KV page"""
    num_pages: Positive | None = None
    """number of KV pages. Default: enough for the batch"""
    max_prefill_tokens: Positive = 8192
    """maximum prompt tokens per prefill forward"""
    keep_every: Positive = 1
    """save completions and their log-probs every N steps; the first and last step are always
    saved"""
    oversample: NonNegativeFloat = 0.0
    """extra prompts to sample at once, as a fraction of prompts_per_step; sampling ends when
    prompts_per_step are complete, and unfinished prompts carry over to the next step"""
    serve_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """port of this machine at which other programs may ask the policy while it trains, as `jetrl
    serve` answers; 0: any that is free. Default: none"""
    speculation: Speculation | None = None
    """speculative decoding; does not change the sampled tokens. text: draft from the prompt's own,
    sibling and earlier completions; head: draft with a small network trained next to the policy;
    auto: both, if faster. Default: text if faster, on a GPU under an exact plan with oversample =
    0; else off"""

    @property
    def excludes_tokens(self) -> bool:
        """Return True if sampling excludes tokens; greedy sampling has no filter."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def asks_head(self) -> bool:
        """Return True if a draft head is trained and used."""
        return self.speculation in ("head", "auto")


TowerPart = Literal["frozen", "connector", "all"]


class TrainSettings(Section):
    """The section `[train]`: the optimizer and the updates per step."""

    lr: PositiveFloat = 1e-6
    """peak learning rate of AdamW"""
    warmup_steps: NonNegative = 0
    """linear warm-up, in optimizer updates"""
    schedule: Schedule = "constant"
    """learning-rate schedule after warm-up"""
    min_lr_ratio: Share = 0.1
    """ratio of final to peak lr, for linear and cosine"""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """AdamW betas"""
    eps: PositiveFloat = 1e-8
    """AdamW epsilon"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW decoupled weight decay"""
    optimizer_states: Literal["fp32", "compact"] = "fp32"
    """AdamW moments: fp32 (8 bytes per parameter) or compact (3 bytes; docs/optimizer.md)"""
    grad_clip: PositiveFloat = 1.0
    """maximum global gradient norm"""
    updates_per_step: Positive = 1
    """optimizer updates per step, on disjoint samples"""
    tokens_per_micro_batch: Positive = 16384
    """maximum tokens per forward and backward; reduced if they do not fit in GPU memory
    (docs/memory.md)"""
    router_aux_loss: NonNegativeFloat = 0.0
    """weight of a load-balancing loss over experts, mean over layers; 0: none. A model's own is
    `router_aux_loss_coef` in its config.json, which is not read; the loss of transformers is
    num_experts_per_tok times this one"""
    compare_routes: bool | Literal["auto"] = "auto"
    """measure experts/routes_different by an additional forward per micro-batch; auto: only if the
    plan does not promise equal routes"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """action if an update has a NaN or infinite loss or gradient"""
    activation_checkpointing: bool = False
    """recompute layers in the backward pass: less memory, about a third more time"""
    graphs: Literal["off", "auto", "on"] = "auto"
    """launch an update as captured CUDA graphs, which is faster for models below 1B parameters and
    keeps the memory of a micro-batch. auto: only if no bit can change and the model is small
    (docs/training.md)"""
    tower: TowerPart = "frozen"
    """what is trained of an image tower: nothing, the connector (what makes its features as wide as
    the language model) or all of it (docs/images.md)"""
    share_prompts: bool | Literal["auto"] = "auto"
    """compute whole 128-token blocks of a prompt once per micro-batch instead of once per sample;
    helps if prompts are long compared with completions. auto: only in updates where it saves at
    least 8% of the tokens"""

    @model_validator(mode="after")
    def compact_states_have_bounds(self) -> TrainSettings:
        """Check that compact states can represent the moments.

        Three bytes hold a first moment bounded by the root of the second, and roots up to 2**14.
        """
        if self.optimizer_states == "compact":
            if self.betas[0] ** 2 >= self.betas[1]:
                needs = f"betas[0]**2 below betas[1], not train.betas = {list(self.betas)}"
                raise ValueError(f"train.optimizer_states=compact needs {needs}")
            if self.grad_clip > 2**14:
                needs = f"at most {2**14}, not train.grad_clip = {self.grad_clip:g}"
                raise ValueError(f"train.optimizer_states=compact needs gradients of {needs}")
        return self


class LoopSettings(Section):
    """The section `[loop]`."""

    steps: Steps = 100
    """RL steps"""
    epochs: PositiveFloat | None = None
    """passes over the training prompts; overrides loop.steps"""


TextLength = Annotated[int, Field(ge=2)]  # a token to predict, and one before it


class SftSettings(Section):
    """Supervised training on the task's demonstrations: `jetrl sft`, or before RL if steps > 0."""

    steps: Steps = 0
    """optimizer updates; `jetrl train` runs them before RL"""
    examples_per_step: Many = 64
    """demonstrations per update"""
    tokens_per_step: Positive = 65536
    """of task text: maximum tokens per update"""
    lengths: Annotated[tuple[TextLength, ...], ONE_OR_MORE] = (2048,)
    """of task text: maximum tokens of a sequence, one number per stage; longer documents are cut"""
    length_steps: tuple[Positive, ...] = ()
    """of task text: updates of each stage but the last, as in lengths = [2048, 8192],
    length_steps = [900]"""
    lr: PositiveFloat = 1e-4
    """peak learning rate of AdamW"""
    warmup_steps: NonNegative = 0
    """linear warm-up, in optimizer updates"""
    schedule: Schedule = "constant"
    """learning-rate schedule after warm-up"""
    dpo_beta: PositiveFloat = 0.1
    """of `jetrl sft --task dpo`: a smaller one lets the policy move farther from the reference"""
    until: float | None = None
    """stop early once the mean reward on the eval set reaches this value. Default: never"""
    check_every: Positive = 25
    """updates between checks of sft.until"""

    @model_validator(mode="after")
    def stages_agree(self) -> SftSettings:
        """Check that each stage of lengths has its updates."""
        if len(self.length_steps) != len(self.lengths) - 1:
            raise ValueError(
                f"sft.lengths has {len(self.lengths)} stages, so sft.length_steps needs "
                f"{len(self.lengths) - 1} numbers, not {len(self.length_steps)}"
            )
        if 0 < self.steps <= sum(self.length_steps):
            raise ValueError(
                f"sft.length_steps add up to {sum(self.length_steps)}, so sft.steps = {self.steps} "
                "leaves no update for the last length"
            )
        if max(self.lengths) > self.tokens_per_step:
            raise ValueError(
                f"sft.tokens_per_step = {self.tokens_per_step} is below sft.lengths = "
                f"{max(self.lengths)}: an update needs room for one sequence"
            )
        return self

    @staticmethod
    def unread_by(is_text: bool) -> tuple[str, ...]:
        """Return the keys that only the other kind of task reads: raw text, or demonstrations."""
        of_text = ("tokens_per_step", "lengths", "length_steps")
        return ("examples_per_step", "until", "check_every") if is_text else of_text

    @property
    def checks(self) -> int:
        """Updates between checks of `until`; 0 without it."""
        return 0 if self.until is None else self.check_every

    def length(self, update: int) -> int:
        """Return the maximum tokens of a sequence of text in an update (from 1)."""
        ends = list(itertools.accumulate(self.length_steps))
        return self.lengths[bisect.bisect_left(ends, update)]


class EvalSettings(Section):
    """The section `[eval]`: evaluation on the eval set."""

    every: NonNegative = 10
    """steps between evaluations; 0: never"""
    prompts: NonNegative = 128
    """number of eval prompts, taken from the start; 0: all"""
    samples: Many = 1
    """completions per prompt, for mean@n and pass@n"""
    temperature: NonNegativeFloat = 0.0
    """sampling temperature; 0: greedy"""
    top_p: Mass = 1.0
    """nucleus sampling: keep the most probable tokens up to this cumulative probability; 1: all"""
    min_p: Beta = 0.0
    """keep only tokens with at least this fraction of the largest probability; 0: all"""
    max_tokens: Positive | None = None
    """maximum tokens per completion. Default: rollout.max_tokens"""
    threshold: float = 1.0
    """minimum reward of a solved completion in pass@k"""


class CheckpointSettings(Section):
    """The section `[checkpoint]`: how often to save checkpoints, and which to keep."""

    every: NonNegative = 50
    """steps (or supervised updates) between checkpoints; 0: only at the end"""
    keep_last: Positive = 2
    """number of most recent checkpoints to keep"""
    keep_best: NonNegative = 0
    """number of best checkpoints to keep in addition, by mean eval reward (else training reward)"""
    export: Literal["last", "best"] = "last"
    """weights of the model that a run writes at its end; best: of the best checkpoint that it
    kept, which needs keep_best of at least 1"""
    background: bool = True
    """copy to CPU memory and write in the background while training continues"""


class DistributedSettings(Section):
    """The section `[distributed]`: multi-process runs, started by torchrun."""

    timeout_s: Seconds = 1800.0
    """seconds a rank waits for other ranks, which may still be sampling, before the run ends"""
    same_bits_down_to: NonNegative = 0
    """size micro-batches for this many GPUs; runs on this many or more GPUs are then bitwise
    identical. 0: the GPU count of this run"""


class WatchdogSettings(Section):
    """The section `[watchdog]`: hang detection."""

    enabled: bool = True
    """end a hung run with exit code 5 and write hang.txt"""
    factor: Annotated[float, Field(ge=1.0, le=1e3)] = 10.0
    """a phase hangs if it is silent for this many times its longest silence so far"""
    min_s: Seconds = 300.0
    """minimum seconds of silence that count as a hang"""
    first_s: Seconds = 3600.0
    """timeout in seconds of a phase's first run"""


class ReportSettings(Section):
    """The section `[report]`."""

    enabled: bool = True
    """write report.html and its plots"""
    samples: ReportSamples = 8
    """number of rollouts shown in report.html"""


DEFAULT_PROJECT = "jetrl"
Tracker = Literal["wandb", "trackio", "tensorboard"]


class TrackerSettings(Section):
    """The section `[trackers]`: external experiment trackers (docs/trackers.md)."""

    names: Annotated[tuple[Tracker, ...], ONE_OR_MORE, COMMAS] = ()
    """trackers to log to (extra: trackers); `trackers = "wandb"` is short for one"""
    project: Text | None = None
    """project name at the tracker. Default: $WANDB_PROJECT, or jetrl"""
    group: Text | None = None
    """run group at the tracker, such as the seeds of one experiment"""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return {"names": value} if isinstance(value, str | list | tuple) else value


class Settings(Section):
    """Settings of a run, created by `loading.load_config` and written by `loading.to_toml`.

    Raises UserError for unknown keys, wrong values and conflicting values.
    """

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    adapter: model_sections.AdapterSettings = model_sections.AdapterSettings()
    precision: PrecisionSettings = PrecisionSettings()
    task: TaskSettings = TaskSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    draft_head: model_sections.DraftHeadSettings = model_sections.DraftHeadSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reference: model_sections.ReferenceSettings = model_sections.ReferenceSettings()
    teacher: model_sections.TeacherSettings = model_sections.TeacherSettings()
    critic: model_sections.CriticSettings = model_sections.CriticSettings()
    reward: model_sections.RewardSettings = model_sections.RewardSettings()
    sft: SftSettings = SftSettings()
    train: TrainSettings = TrainSettings()
    loop: LoopSettings = LoopSettings()
    eval: EvalSettings = EvalSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    distributed: DistributedSettings = DistributedSettings()
    watchdog: WatchdogSettings = WatchdogSettings()
    report: ReportSettings = ReportSettings()
    trackers: TrackerSettings = TrackerSettings()

    def __init__(self, **sections: Any) -> None:
        try:
            super().__init__(**sections)
        except ValidationError as error:
            raise UserError(explain(error, type(self), {"": "Settings"})) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # not called for JSON

    @model_validator(mode="after")
    def agree(self) -> Settings:
        """Check combinations across sections."""
        problems = [*self._single_problems(), *self._length_problems(), *self._unread_problems()]
        problems += self.adapter.base_problems(self.precision)
        if self.loop.steps > 0:
            problems += self._learning_problems()
            problems += self.adapter.problems(self.algorithm, self.reference)
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def longest_answer(self) -> int:
        """Maximum completion length in tokens, in training and evaluation."""
        return max(self.rollout.max_tokens, (self.eval.every and self.eval.max_tokens) or 0)

    def _learning_problems(self) -> Iterator[str]:
        rollout, train = self.rollout, self.train
        if train.updates_per_step > rollout.prompts_per_step:
            yield (
                f"train.updates_per_step = {train.updates_per_step} needs as many prompts, but "
                f"rollout.prompts_per_step = {rollout.prompts_per_step}"
            )
        completions = rollout.prompts_per_step * rollout.samples_per_prompt
        if completions > MOST_COMPLETIONS:
            yield (
                f"rollout.prompts_per_step x rollout.samples_per_prompt = {completions:,} "
                f"completions per step; at most {MOST_COMPLETIONS:,}"
            )
        if self.algorithm.name in ALGORITHMS:
            yield from self.algorithm_problems(ALGORITHMS[self.algorithm.name])
        if rollout.samples_per_prompt == 1 and self.data.batch == "shuffle_r1":
            yield "data.batch = shuffle_r1 needs rollout.samples_per_prompt of at least 2"
        for section, settings in (("rollout", rollout), ("eval", self.eval)):
            if settings.temperature and not 1e-20 <= settings.temperature <= 1e20:
                yield (
                    f"{section}.temperature = {settings.temperature}: logits divided by it do not "
                    "fit in float32; use 0 or 1e-20 to 1e20"
                )
        if self.data.replay_steps and rollout.keep_every > 1:
            yield (
                f"data.replay_steps = {self.data.replay_steps} needs rollout.keep_every=1: a "
                "resumed run reads its buffer from its rollouts"
            )
        if self.rollout.temperature == 0:
            yield "rollout.temperature = 0 makes all completions of a group equal; use 1.0"
        if self.algorithm.calibrate_clip_every:
            yield from self._calibration_problems()
        if self.reference.offload and not self.algorithm.kl and self.reference.path is None:
            yield "reference.offload is set, but there is no reference: algorithm.kl = 0"

    def _calibration_problems(self) -> Iterator[str]:
        preset = self.precision.preset
        if self.train.updates_per_step == 1:
            yield "algorithm.calibrate_clip_every needs train.updates_per_step of at least 2"
        sides = PRESETS[preset]
        if not codes_alike(sides.rollout_linear, sides.train_linear):
            yield (
                "algorithm.calibrate_clip_every needs FP8 or INT8 on both sides, unlike "
                f"precision.preset = {preset}"
            )
        for key, value in self._off_policy:
            yield f"algorithm.calibrate_clip_every needs {key} = 0, not {value}"

    @property
    def _off_policy(self) -> Iterator[tuple[str, float]]:
        """Settings that are not 0 with which a step trains on tokens of earlier policies."""
        oversample, replay = self.rollout.oversample, self.data.replay_steps
        yield from [("rollout.oversample", oversample)] * (oversample > 0)
        yield from [("data.replay_steps", replay)] * (replay > 0)

    def algorithm_problems(self, record: Algorithm) -> Iterator[str]:
        """Yield messages about settings that conflict with the algorithm of an RL run."""
        rollout, name = self.rollout, self.algorithm.name
        if rollout.samples_per_prompt == 1 and record.compares_group:
            why = f"{name} compares the completions of one prompt; use at least 2"
            yield f"rollout.samples_per_prompt = 1: {why}"
        kl_in_reward = self.algorithm.kl and self.algorithm.kl_term(record)[1] == "reward"
        if self.data.batch == "shuffle_r1" and kl_in_reward and record.compares_group:
            why = f"{name} subtracts the KL from the rewards that it compares"
            instead = "set algorithm.kl_in=loss, algorithm.kl=0 or data.batch=all"
            yield f"data.batch = shuffle_r1: {why}; {instead}"
        buffer = self.algorithm.value("overlong_buffer", record) or 0
        if buffer > rollout.max_tokens:
            yield (
                f"algorithm.overlong_buffer = {buffer} is more than rollout.max_tokens = "
                f"{rollout.max_tokens}"
            )
        for key, value in self._off_policy if record.loss == "ratio" else ():
            why = f"{name} has an unbounded importance ratio for tokens of earlier policies"
            instead = f"use an algorithm that clips, such as grpo, or {key}=0"
            yield f"{key} = {value}: {why}; {instead}"
        if record.needs_critic and self.critic.path is None:
            yield f"algorithm.name = {name} needs a critic, as with critic.path=policy"
        if self.critic.path is not None and not record.needs_critic:
            yield f"critic.path is set, but algorithm.name = {name} has no critic; leave it out"
        if not record.needs_teacher and self.teacher.path is not None:
            yield f"teacher.path is set, but algorithm.name = {name} has no teacher; leave it out"
        if record.needs_teacher:
            yield from self._teacher_problems()

    def _teacher_problems(self) -> Iterator[str]:
        rollout, teacher = self.rollout, self.teacher
        if teacher.path is None:
            yield f"algorithm.name = {self.algorithm.name} needs a teacher: set teacher.path"
        if teacher.reward and rollout.samples_per_prompt == 1:
            why = (
                "it compares the completions of one prompt; use rollout.samples_per_prompt above 1"
            )
            yield f"teacher.reward = {teacher.reward}: {why}"
        if not teacher.reward and self.data.batch == "shuffle_r1":
            yield "data.batch = shuffle_r1 chooses by rewards, which teacher.reward = 0 leaves out"
        if teacher.kl == "vocabulary" and rollout.excludes_tokens and rollout.truncated_logprobs:
            why = "the KL over the vocabulary is not defined for what filters leave"
            yield f"teacher.kl = vocabulary with rollout.top_p, top_k or min_p: {why}; use kl=token"

    def _single_problems(self) -> Iterator[str]:
        if self.checkpoint.export == "best" and not self.checkpoint.keep_best:
            yield "checkpoint.export = best needs checkpoint.keep_best of at least 1"
        if self.loop.epochs is not None and not self.loop.steps:
            yield "loop.epochs needs loop.steps above 0, or unset"
        if self.rollout.speculation == "head" and not self.loop.steps:
            yield "rollout.speculation = head needs loop.steps above 0; use text or off"
        if self.eval.samples > 1 and self.eval.temperature == 0:
            yield (
                f"eval.samples = {self.eval.samples} with eval.temperature = 0 draws the same "
                "completion each time; set eval.temperature, or eval.samples = 1"
            )

    def _unread_problems(self) -> Iterator[str]:
        """Yield a message for each setting that has no effect because another one is unset."""
        unread, sft = self._unread, self.sft
        decays = {self.train.schedule, sft.schedule} != {"constant"}
        yield from unread("train.schedule=linear or cosine", decays, "train.min_lr_ratio")
        has_critic = self.critic.path is not None
        yield from unread("critic.path (ppo has a critic)", has_critic, "critic.lr", "critic.clip")
        keys = [f"draft_head.{key}" for key in model_sections.DraftHeadSettings.model_fields]
        # Resuming without the head is allowed: `rollout.speculation = off` is then explicit.
        drafts = self.rollout.asks_head or "speculation" in self.rollout.model_fields_set
        yield from unread("rollout.speculation=head or auto", drafts, *keys)
        keys = [f"teacher.{key}" for key in ("kl", "weight", "reward", "prompt")]
        yield from unread("teacher.path", self.teacher.path is not None, *keys)
        tracked = bool(self.trackers.names)
        yield from unread("trackers.names", tracked, "trackers.project", "trackers.group")
        corrects = self.algorithm.correction != "none"
        key = "algorithm.correction_under_exact_plan"
        yield from unread("algorithm.correction", corrects, key)
        has_noise = self.adapter.noise_start > 0
        keys = ["adapter.noise_end", "adapter.noise_stages"]
        yield from unread("adapter.noise_start", has_noise, *keys)
        keys = ["eval.top_p", "eval.min_p"]
        yield from unread("eval.temperature above 0", self.eval.temperature > 0, *keys)
        key, filters = "rollout.truncated_logprobs", self.rollout.excludes_tokens
        yield from unread("rollout.top_p, top_k or min_p", filters, key)
        train_linear = PRESETS[self.precision.preset].train_linear
        is_coded = codes_alike(train_linear, train_linear)
        keys = ["precision.grad_output", "precision.wgrad_input"]
        yield from unread("a precision.preset that trains in 8 bits", is_coded, *keys)
        # An explicit `sft.steps = 0` disables a recipe's supervised updates.
        warms_up = bool(sft.steps) or "steps" in sft.model_fields_set
        keys = [f"sft.{key}" for key in SftSettings.model_fields if key != "steps"]
        yield from unread("sft.steps above 0", warms_up, *keys)
        is_text = self.task.is_text
        needs = "a task with demonstrations" if is_text else "task.name=text"
        yield from unread(needs, False, *(f"sft.{key}" for key in SftSettings.unread_by(is_text)))

    def _unread(self, needs: str, is_read: bool, *keys: str) -> Iterator[str]:
        """Yield a message for each given key that is set, unless `is_read`."""
        for full in () if is_read else keys:
            section, _, key = full.partition(".")
            own = getattr(self, section)
            value = getattr(own, key)
            if value != type(own).model_fields[key].default:
                yield (
                    f"{full} = {value} has no effect without {needs}: set that too, or leave it out"
                )

    def _length_problems(self) -> Iterator[str]:
        rollout, config = self.rollout, self.model.config
        context = config.get("max_position_embeddings") if isinstance(config, dict) else None
        lengths = {"rollout.max_tokens": rollout.max_tokens}
        if self.eval.max_tokens is not None:
            lengths["eval.max_tokens"] = self.eval.max_tokens
        for key, tokens in lengths.items():
            if rollout.num_pages is not None and rollout.num_pages * rollout.page_size <= tokens:
                yield (
                    f"rollout.num_pages = {rollout.num_pages} x rollout.page_size = "
                    f"{rollout.page_size} tokens cannot hold one prompt and {key} = {tokens}: "
                    f"at least {tokens // rollout.page_size + 1} pages"
                )
            if isinstance(context, int) and context <= tokens:
                yield (
                    f"{key} = {tokens} leaves no room for a prompt in the model's context of "
                    f"{context} (model.config.max_position_embeddings)"
                )
