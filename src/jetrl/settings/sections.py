"""The sections of a run's settings: every key, with its type, range and meaning.

Section names are fixed (docs/settings.md). Defaults are meant for a real model on a GPU; recipes
set other values.

A section checks its own values; `Settings` checks that sections agree. A message names the keys and
says which one to change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from jetrl.errors import UserError
from jetrl.settings import model_sections
from jetrl.settings.algorithms import ALGORITHMS, Algorithm, AlgorithmSettings
from jetrl.settings.messages import explain
from jetrl.settings.precision_section import PrecisionSettings, SamplerDeviationSettings
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

MOST_TOKENS = 7  # of a draft: a forward verifies 8 tokens of a sequence
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
PageSize = Annotated[int, Field(ge=1, le=2**16)]


class DraftHeadSettings(Section):
    """The draft head, which RL trains with rollout.speculation = head or auto (docs/rollout.md)."""

    tokens: Tokens = 3
    """tokens that it guesses, one after the other"""
    lr: PositiveFloat = 5e-4
    """learning rate of its AdamW"""
    share: Mass = 0.2
    """fraction of the tokens of a step's first update that it learns from"""
    most_tokens: Positive = 16384
    """maximum tokens per step that it learns from"""
    tokens_per_update: Positive = 1024
    """tokens of one of its updates"""


Speculation = Literal["off", "text", "head", "auto"]


def verified_drafts(
    asked: Speculation | None, exact: bool, device: str, oversample: float
) -> Speculation:
    """Return which drafts a run verifies; by default those of text, if the run repeats its bits.

    `auto` sizes forwards by measured times, which changes the draws of an inexact plan, and with
    oversampling which completions are cut off. `asked` is rollout.speculation (None: unset),
    `exact` the plan's promise that sampler and trainer agree, and the device "cpu" or a GPU.
    """
    return asked or ("auto" if exact and device != "cpu" and not oversample else "off")


Schedule = Literal["constant", "linear", "cosine"]


class RunSettings(Section):
    """The section `[run]`: the run's directory, seed, limits and device."""

    name: str | None = None
    """name of the run's directory; unset: the recipe's, or on the command line the model's and the
    task's"""
    dir: str = "runs"
    """folder that holds run directories"""
    seed: NonNegative = 0
    """fixes data order, sampling and initial weights"""
    max_hours: PositiveFloat | None = None
    """this attempt ends, with a checkpoint, within these hours; unset: no limit"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if it can run"""

    @field_validator("name")
    @classmethod
    def one_folder_name(cls, name: str | None) -> str | None:
        """Check that the name is the name of a single folder."""
        if name is not None and (not name.strip() or "/" in name or name in (".", "..")):
            raise ValueError("a run's name is one folder name: no slash, not empty")
        return name


class ModelSettings(Section):
    """The section `[model]`: the policy's weights or shape, and its tokenizer."""

    path: str | None = None
    """a Hugging Face model directory, or a name of its hub: NAME[@REVISION]"""
    config: dict[str, Any] | str | None = None
    """config.json contents, or its path: random weights from run.seed"""
    tokenizer: str | None = None
    """tokenizer directory, if not model.path; 'characters': one token each"""
    template_args: dict[str, Any] = Field(default_factory=dict)
    """values for names that the chat template reads, such as enable_thinking = false"""

    _config = field_validator("config", "template_args", mode="before")(without_none)

    @model_validator(mode="after")
    def one_source(self) -> ModelSettings:
        """Check that the model has a single source."""
        if self.path is not None and self.config is not None:
            raise ValueError("model.path and model.config are both set: keep one of them")
        return self


MOST_COMPLETIONS = 2**20  # of a step: more would fill the host's memory with texts
MOST_WORKERS = 1024  # Scoring processes: each has a Python with the task's imports.


class TaskSettings(Section):
    """The section `[task]`: the source of prompts and scores, and the limits of a score."""

    name: str = "arithmetic"
    """a built-in name, rows such as mine.jsonl, reasoning_gym:NAME, or file.py:Class"""
    path: str | None = None
    """data file or folder, if the task reads one"""
    split: str = "train"
    """split that is trained on"""
    eval_split: str = "test"
    """held-out split"""
    system_prompt: str | None = None
    """put before chat prompts"""
    options: dict[str, Any] = Field(default_factory=dict)
    """passed to the task by name"""
    special_tokens_as_text: Literal["replies", "all", "none"] = "replies"
    """texts in which the name of a special token, such as <|im_end|>, is plain text and not a
    control token: replies of the environment; all: prompts and worked answers too"""
    max_turns: Positive | None = None
    """maximum turns per completion; unset: the task's own (1 for most)"""
    workers: Annotated[int, Field(ge=0, le=MOST_WORKERS)] = 2
    """maximum scoring processes, started as they are needed; 0: score in this process"""
    timeout_s: Seconds = 10.0
    """seconds of CPU time per score, or ten times as long by the clock; a score that takes longer
    is a failure and counts 0. A reward function with TRL's signature has as long for its call with
    all completions of a step"""
    max_lost_s: NonNegativeFloat = 120.0
    """seconds per worker that a step may lose to scores that hang or crash; then the rest of its
    completions get no score"""
    memory_mib: NonNegative = 1024
    """MiB that a score may take in addition to its task's imports; 0: no limit"""

    _options = field_validator("options", mode="before")(without_none)


class DataSettings(Section):
    """The section `[data]`: the order of prompts, and the choice of samples (docs/data.md)."""

    order: Literal["shuffle", "pass_rate"] = "shuffle"
    """pass_rate: draw prompts that are solved about half of the time more often"""
    explore: Mass = 0.1
    """under pass_rate: minimum weight of a prompt; one solved half of the time has 1"""
    batch: Literal["all", "shuffle_r1"] = "all"
    """shuffle_r1: updates draw the pairs of a group whose advantages differ most"""
    keep_pairs: Mass = 0.5
    """under shuffle_r1: fraction of a group's pairs kept"""

    @model_validator(mode="after")
    def read_by_something(self) -> DataSettings:
        """Check that the order or the batch reads each key that is set."""
        readers = {"explore": ("order", "pass_rate"), "keep_pairs": ("batch", "shuffle_r1")}
        for key, (other, reader) in readers.items():
            value, default = getattr(self, key), type(self).model_fields[key].default
            if value != default and getattr(self, other) != reader:
                has = f"data.{other} = {getattr(self, other)}: set data.{other}={reader}"
                raise ValueError(f"data.{key} = {value} means nothing with {has}")
        return self


class RolloutSettings(Section):
    """The section `[rollout]`: the number of completions, their sampling and its limits."""

    prompts_per_step: Many = 32
    """prompts drawn each step"""
    samples_per_prompt: Many = 8
    """completions per prompt (the group)"""
    max_tokens: Positive = 1024
    """maximum tokens per completion"""
    temperature: NonNegativeFloat = 1.0
    """logits are divided by it"""
    top_p: Mass = 1.0
    """keep the most probable tokens up to this mass; 1: all"""
    top_k: NonNegative = 0
    """keep this many most probable tokens; 0: all"""
    stop: Annotated[tuple[Text, ...], ONE_OR_MORE] = ()
    """strings that end a completion, in addition to the task's"""
    max_batch_size: Many = 256
    """maximum sequences decoded together"""
    page_size: PageSize = 64
    """tokens per KV page"""
    num_pages: Positive | None = None
    """KV pages; unset: what the batch can use"""
    max_prefill_tokens: Positive = 8192
    """maximum prompt tokens per forward"""
    keep_every: Positive = 1
    """steps between files of a step's completions with their log-probs; those of the first and the
    last step are always kept"""
    oversample: NonNegativeFloat = 0.0
    """extra prompts to sample at once, as a fraction of prompts_per_step: sampling ends when
    prompts_per_step are complete; unfinished ones carry over to the next step"""
    speculation: Speculation | None = None
    """text: draft tokens from the prompt's own, sibling and earlier completions and verify several
    in a forward, which changes no token; head: from a small network that is trained next to the
    policy; auto: both, if that is faster; off; unset: text, if that is faster, on a GPU under a
    plan that is exact with oversample = 0, else off"""

    @property
    def asks_head(self) -> bool:
        """Return whether a draft head is trained and used."""
        return self.speculation in ("head", "auto")


class TrainSettings(Section):
    """The section `[train]`: the optimizer and the updates of a step."""

    lr: PositiveFloat = 1e-6
    """peak learning rate of AdamW"""
    warmup_steps: NonNegative = 0
    """optimizer updates of linear warm-up"""
    schedule: Schedule = "constant"
    """learning rate after warm-up"""
    min_lr_ratio: Share = 0.1
    """final lr over peak lr, for linear and cosine"""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """AdamW's decay of its two moments"""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon"""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decoupled weight decay"""
    optimizer_states: Literal["fp32", "compact"] = "fp32"
    """AdamW's two moments: 8 bytes per parameter, or compact: 3, for a model of billions
    (docs/optimizer.md)"""
    grad_clip: PositiveFloat = 1.0
    """maximum global gradient norm"""
    updates_per_step: Positive = 1
    """optimizer updates per step, on disjoint samples"""
    tokens_per_micro_batch: Positive = 16384
    """maximum tokens per forward and backward; fewer if the memory plan of a GPU has no room
    (docs/memory.md)"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """what an update with a NaN or infinite loss or gradient does to the run"""
    activation_checkpointing: bool = False
    """recompute layers in backward: less memory, a third more time"""
    share_prompts: bool | Literal["auto"] = "auto"
    """compute the whole blocks of 128 tokens of a prompt once for all of its samples in a
    micro-batch: less work if prompts are long compared with completions; auto: in updates in which
    it saves at least 8% of the tokens"""

    @model_validator(mode="after")
    def compact_states_have_bounds(self) -> TrainSettings:
        """Check that compact states can hold the moments.

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
    """passes over the training prompts, in place of loop.steps; unset: loop.steps"""


class SftSettings(Section):
    """Supervised training on the task's worked answers: `jetrl sft`, or before RL if steps > 0."""

    steps: Steps = 0
    """optimizer updates; `jetrl train` runs them first"""
    examples_per_step: Many = 64
    """worked answers per update"""
    lr: PositiveFloat = 1e-4
    """peak learning rate of AdamW"""
    warmup_steps: NonNegative = 0
    """optimizer updates of linear warm-up"""
    schedule: Schedule = "constant"
    """learning rate after warm-up"""
    until: float | None = None
    """end early once the held-out mean reward reaches this; unset: never"""
    check_every: Positive = 25
    """updates between checks of sft.until"""


class EvalSettings(Section):
    """The section `[eval]`: the held-out evaluation."""

    every: NonNegative = 10
    """steps between evaluations; 0: never"""
    prompts: NonNegative = 128
    """held-out prompts, from the start; 0: all"""
    samples: Many = 1
    """completions per prompt: mean@n and pass@n"""
    temperature: NonNegativeFloat = 0.0
    """0: greedy"""
    top_p: Mass = 1.0
    """keep the most probable tokens up to this mass; 1: all"""
    max_tokens: Positive | None = None
    """maximum tokens per completion; unset: rollout.max_tokens"""
    threshold: float = 1.0
    """a reward of at least this counts as solved in pass@k"""


class CheckpointSettings(Section):
    """The section `[checkpoint]`: how often checkpoints are written, and which are kept."""

    every: NonNegative = 50
    """steps, or supervised updates, between checkpoints; 0: only the last"""
    keep_last: Positive = 2
    """number of last checkpoints kept; older ones are removed"""
    keep_best: NonNegative = 0
    """this many with the highest held-out mean (else reward) are kept as well"""
    background: bool = True
    """copy to CPU memory and write while training goes on; false: write first"""


class DistributedSettings(Section):
    """The section `[distributed]`: a run of several processes, which torchrun starts."""

    timeout_s: Seconds = 1800.0
    """seconds that a rank waits for others, which may still be sampling, before the run ends"""
    same_bits_down_to: NonNegative = 0
    """size micro-batches for this many GPUs, so that a run on that many or more has the same bits;
    0: for the number of this run"""


class WatchdogSettings(Section):
    """The section `[watchdog]`: the silence that counts as a hang."""

    enabled: bool = True
    """end a run that hangs, with hang.txt, exit code 5"""
    factor: Annotated[float, Field(ge=1.0, le=1e3)] = 10.0
    """a silence this many times the longest of its phase so far is a hang"""
    min_s: Seconds = 300.0
    """a shorter silence, in seconds, is never a hang"""
    first_s: Seconds = 3600.0
    """seconds of silence that are a hang in a phase that has not ended before"""


class ReportSettings(Section):
    """The section `[report]`."""

    enabled: bool = True
    """write report.html and its plots"""
    samples: ReportSamples = 8
    """rollouts shown in report.html"""


DEFAULT_PROJECT = "jetrl"
Tracker = Literal["wandb", "trackio", "tensorboard"]


class TrackerSettings(Section):
    """The section `[trackers]`: services that metrics are sent to as well (docs/trackers.md)."""

    names: Annotated[tuple[Tracker, ...], ONE_OR_MORE, COMMAS] = ()
    """also send metrics to these (extra: trackers); `trackers = "wandb"` is short for one"""
    project: Text | None = None
    """project name at the tracker; unset: $WANDB_PROJECT, or jetrl"""
    group: Text | None = None
    """group of runs at the tracker, such as the seeds of one experiment"""

    @model_validator(mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return {"names": value} if isinstance(value, str | list | tuple) else value


class Settings(Section):
    """The settings of a run, made by `loading.load_config` and written by `loading.to_toml`.

    Raises UserError if a key is unknown, or a value is wrong or conflicts with another.
    """

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    adapter: model_sections.AdapterSettings = model_sections.AdapterSettings()
    precision: PrecisionSettings = PrecisionSettings()
    sampler_deviation: SamplerDeviationSettings = SamplerDeviationSettings()
    task: TaskSettings = TaskSettings()
    data: DataSettings = DataSettings()
    rollout: RolloutSettings = RolloutSettings()
    draft_head: DraftHeadSettings = DraftHeadSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    reference: model_sections.ReferenceSettings = model_sections.ReferenceSettings()
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
        """Check that the sections agree with each other."""
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
        """Maximum tokens of a completion, in training or in an evaluation."""
        return max(self.rollout.max_tokens, (self.eval.every and self.eval.max_tokens) or 0)

    def _learning_problems(self) -> Iterator[str]:
        rollout, train = self.rollout, self.train
        if train.updates_per_step > rollout.prompts_per_step:
            asked = f"train.updates_per_step = {train.updates_per_step} needs as many prompts"
            yield f"{asked}, but rollout.prompts_per_step = {rollout.prompts_per_step}"
        completions = rollout.prompts_per_step * rollout.samples_per_prompt
        if completions > MOST_COMPLETIONS:
            keys = "rollout.prompts_per_step x rollout.samples_per_prompt"
            yield f"{keys} = {completions:,} completions per step; at most {MOST_COMPLETIONS:,}"
        if self.algorithm.name in ALGORITHMS:
            yield from self.algorithm_problems(ALGORITHMS[self.algorithm.name])
        if rollout.samples_per_prompt == 1 and self.data.batch == "shuffle_r1":
            yield "data.batch = shuffle_r1 needs rollout.samples_per_prompt of at least 2"
        for section, settings in (("rollout", rollout), ("eval", self.eval)):
            if settings.temperature and not 1e-20 <= settings.temperature <= 1e20:
                why = "float32 has no room for logits divided by it; take 0 or 1e-20 to 1e20"
                yield f"{section}.temperature = {settings.temperature}: {why}"
        if self.rollout.temperature == 0:
            yield "rollout.temperature = 0 draws the same completion for a whole group; take 1.0"
        if self.algorithm.calibrate_clip_every:
            yield from self._calibration_problems()
        if self.reference.offload and not self.algorithm.kl and self.reference.path is None:
            yield "reference.offload is set, but there is no reference: algorithm.kl = 0"

    def _calibration_problems(self) -> Iterator[str]:
        preset = self.precision.preset
        if self.train.updates_per_step == 1:
            yield "algorithm.calibrate_clip_every needs train.updates_per_step of at least 2"
        if not codes_alike(*PRESETS[preset][:2]):
            needs = f"FP8 or INT8 on both sides, unlike precision.preset = {preset}"
            yield f"algorithm.calibrate_clip_every needs {needs}"
        if self.rollout.oversample:
            yield "algorithm.calibrate_clip_every needs rollout.oversample = 0"

    def algorithm_problems(self, record: Algorithm) -> Iterator[str]:
        """Yield messages about settings that conflict with an RL run's algorithm."""
        rollout, name = self.rollout, self.algorithm.name
        if rollout.samples_per_prompt == 1 and record.compares_group:
            why = f"{name} compares the completions of one prompt; take at least 2"
            yield f"rollout.samples_per_prompt = 1: {why}"
        kl_in_reward = self.algorithm.kl and self.algorithm.kl_term(record)[1] == "reward"
        if self.data.batch == "shuffle_r1" and kl_in_reward and record.compares_group:
            why = f"{name} takes the KL from the rewards that it compares"
            instead = "set algorithm.kl_in=loss, algorithm.kl=0 or data.batch=all"
            yield f"data.batch = shuffle_r1: {why}; {instead}"
        buffer = self.algorithm.value("overlong_buffer", record) or 0
        if buffer > rollout.max_tokens:
            most = f"rollout.max_tokens = {rollout.max_tokens}"
            yield f"algorithm.overlong_buffer = {buffer} is more than {most}"
        if rollout.oversample and record.loss == "ratio":
            why = f"{name} weighs tokens of earlier policies by a ratio without a bound"
            instead = "take an algorithm that clips, such as grpo, or rollout.oversample=0"
            yield f"rollout.oversample = {rollout.oversample}: {why}; {instead}"
        if record.needs_critic and self.critic.path is None:
            yield f"algorithm.name = {name} needs a critic, as with critic.path=policy"
        if self.critic.path is not None and not record.needs_critic:
            yield f"critic.path is set, but algorithm.name = {name} has no critic; leave it out"

    def _single_problems(self) -> Iterator[str]:
        if self.loop.epochs is not None and not self.loop.steps:
            yield "loop.epochs needs loop.steps above 0, or unset"
        if self.rollout.speculation == "head" and not self.loop.steps:
            yield "rollout.speculation = head needs loop.steps above 0; take text or off"
        if self.eval.samples > 1 and self.eval.temperature == 0:
            why = "draws the same completion each time; set eval.temperature, or eval.samples = 1"
            yield f"eval.samples = {self.eval.samples} with eval.temperature = 0 {why}"

    def _unread_problems(self) -> Iterator[str]:
        """Yield a message for each setting that nothing reads, since another one is not set."""
        unread, sft = self._unread, self.sft
        decays = {self.train.schedule, sft.schedule} != {"constant"}
        yield from unread("train.schedule=linear or cosine", decays, "train.min_lr_ratio")
        has_critic = self.critic.path is not None
        yield from unread("critic.path (ppo has a critic)", has_critic, "critic.lr", "critic.clip")
        keys = [f"draft_head.{key}" for key in DraftHeadSettings.model_fields]
        # A run may lose its head again: then `rollout.speculation = off` is set on purpose.
        drafts = self.rollout.asks_head or "speculation" in self.rollout.model_fields_set
        yield from unread("rollout.speculation=head or auto", drafts, *keys)
        tracked = bool(self.trackers.names)
        yield from unread("trackers.names", tracked, "trackers.project", "trackers.group")
        corrects = self.algorithm.correction != "none"
        key = "algorithm.correction_under_exact_plan"
        yield from unread("algorithm.correction", corrects, key)
        has_noise = self.adapter.noise_start > 0
        keys = ["adapter.noise_end", "adapter.noise_stages"]
        yield from unread("adapter.noise_start", has_noise, *keys)
        yield from unread("eval.temperature above 0", self.eval.temperature > 0, "eval.top_p")
        is_coded = PRESETS[self.precision.preset].train_linear in ("fp8", "int8")
        keys = ["precision.grad_output", "precision.wgrad_input"]
        yield from unread("a precision.preset that trains in 8 bits", is_coded, *keys)
        # `sft.steps = 0` as a setting switches a recipe's supervised updates off, on purpose.
        warms_up = bool(sft.steps) or "steps" in sft.model_fields_set
        keys = [f"sft.{key}" for key in SftSettings.model_fields if key != "steps"]
        yield from unread("sft.steps above 0", warms_up, *keys)

    def _unread(self, needs: str, is_read: bool, *keys: str) -> Iterator[str]:
        """Yield a message for each of the keys that is set, unless they are read."""
        for full in () if is_read else keys:
            section, _, key = full.partition(".")
            own = getattr(self, section)
            value = getattr(own, key)
            if value != type(own).model_fields[key].default:
                instead = "set that too, or leave it out"
                yield f"{full} = {value} has no effect without {needs}: {instead}"

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
                where = f"the model's context of {context} (model.config.max_position_embeddings)"
                yield f"{key} = {tokens} leaves no room for a prompt in {where}"
