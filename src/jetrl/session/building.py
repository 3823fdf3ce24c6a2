"""Build the models of a run from its settings: policy, reference, reward and value model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from string import Formatter

import torch
from torch import Tensor

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.chat import encode_prompt
from jetrl.models.families import ModelConfig, num_parameters
from jetrl.models.model import Model
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import SCALAR_HEAD, ScalarModel, check_same_tokenizer
from jetrl.models.source import CHARACTERS, ModelSource, open_source
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import HOPPER, REFERENCE, TRITON_DEFINED, accelerator, select_backend
from jetrl.session.compiling import compiled_ahead
from jetrl.settings.loading import Settings
from jetrl.settings.model_sections import RewardSettings
from jetrl.tasks import build_task
from jetrl.training.checkpoint_files import StoredTensors
from jetrl.types import Json, Prompt, PromptInputs, Sample, Score

_SMALL_MODEL = 20_000_000  # parameters
_WITH_GPU = {each.name: each for each in (HOPPER, TRITON_DEFINED)}  # of run.backend


def build_policy(
    settings: Settings, plan: PrecisionPlan, alphabet: str | None, device: str | None = None
) -> Policy:
    """Return the policy of a run.

    Args:
        alphabet: The characters of the task, for model.tokenizer=characters; None: printable ASCII.
        device: Default: run.device. On "meta", everything is checked, but no weights are read.

    Raises:
        UserError: a model that is missing, damaged, or not supported on the device.
    """
    device = device or device_of(settings, plan)
    source = open_source(settings, alphabet, device)
    limit_threads(source.config)
    with compiled_ahead(source, plan, device, settings.rollout):
        return Policy(source, plan, device)


def model_of_masters(
    settings: Settings, plan: PrecisionPlan, saved: Path, state: Json
) -> Policy | ScalarModel:
    """Return the policy or reward model of a run with the master weights of a checkpoint.

    `saved` is the checkpoint's file of master weights, `state` its state.json. Without an alphabet
    in the state, model.tokenizer=characters uses the task's. Raises UserError if the checkpoint is
    of another model.
    """
    alphabet = state.get("alphabet")
    if settings.model.tokenizer == CHARACTERS and alphabet is None:
        alphabet = build_task(settings.task).alphabet
    stored = StoredTensors(saved)
    build = build_scalar_model if SCALAR_HEAD in stored else build_policy
    model = build(settings, plan, alphabet)
    wrong = stored.differences(model)
    if wrong:
        raise UserError(f"{saved}: not of the run's model: {', '.join(wrong[:5])}")
    if "key_exponents" in state:  # absent if the run's own plan does not smooth keys
        model.restore_key_exponents(state["key_exponents"], str(saved.parent))
    stored.copy_to(model)
    model.requantize()
    return model


def build_scalar_model(
    settings: Settings, plan: PrecisionPlan, alphabet: str | None, device: str | None = None
) -> ScalarModel:
    """Return the reward model to train: the model of `[model]` with its own or a new scalar head.

    Arguments are as in `build_policy`.
    """
    device = device or device_of(settings, plan)
    source = open_source(settings, alphabet, device, head="score")
    limit_threads(source.config)
    with compiled_ahead(source, plan, device, settings.rollout):
        return ScalarModel(source, plan, device)


def build_reference(
    settings: Settings, policy: Policy, run_path: Path, begun: bool = False
) -> Policy | None:
    """Return the frozen reference of the KL term, None without one. All ranks call this function.

    It is the model at reference.path, or else the policy at the start of RL: its base if it has an
    adapter, or an FP32 copy in the run directory. `begun` is True if RL has begun before.
    """
    if settings.reference.path is not None:
        return read_reference(settings, policy)
    if settings.algorithm.kl == 0:
        return None
    # The base shares its weights with the policy and takes no memory.
    if policy.lora is not None:
        return policy.base()
    path = run_path / "reference"
    # After a warm-up, `check_kept` has checked that the copy exists.
    if not (begun and world().from_first("whether the reference is kept", path.exists)):
        # An existing copy is from an attempt that ended before its first step.
        policy.save_pretrained(path, dtype="float32", overwrite=True)
    reference = _frozen(settings, policy, path, policy.key_exponents)
    if policy.trained_tower == "frozen":
        reference.tower = policy.tower
    return reference


def check_kept(settings: Settings, path: Path) -> None:
    """Raise a UserError if the KL term needs the policy after its warm-up and `path` is missing."""
    needed = settings.algorithm.kl and settings.adapter.kind is None and settings.sft.steps
    if needed and settings.reference.path is None and not path.exists():
        raise UserError(
            f"algorithm.kl = {settings.algorithm.kl}: this run began without it, and did not keep "
            "the policy as the warm-up left it; set reference.path, or algorithm.kl=0"
        )


def read_reference(settings: Settings, policy: Policy) -> Policy | None:
    """Return the frozen model at reference.path; None if it is not set.

    Raises UserError if its vocabulary differs from the policy's.
    """
    path = settings.reference.path
    if path is None:
        return None
    reference = _frozen(settings, policy, path)
    _check_vocabulary(policy, reference, f"reference.path = {path}")
    return reference


def largest_image(model: Model, prompts: Iterable[PromptInputs]) -> int:
    """Return the most tokens of an image in the prompts; 0 without images."""
    images = (span.image for prompt in prompts for span in prompt.images)
    return 0 if model.tower is None else max(map(model.tower.num_features, images), default=0)


def image_bound(model: Model, largest: int) -> Iterator[str]:
    """Yield a note if images of four times as many tokens as the `largest` are allowed."""
    if model.tower is not None and 0 < 4 * largest <= model.tower.most_features:
        yield (
            f"images have up to {largest:,} tokens, and preprocessor_config.json allows "
            f"{model.tower.most_features:,}: {model.tower.bound} there bounds the memory that a "
            "larger one takes"
        )


def check_image_tokens(
    policy: Model, key: str, other: Model | None, prompts: Sequence[Prompt]
) -> None:
    """Raise a UserError if a model counts other tokens for an image than the policy.

    It gets the policy's tokens, and computes the features itself. `key` is its setting.
    Comparing numbers is enough: with equal numbers, rows and columns are equal too, since both
    models scale the sides of one image by one factor and round them.
    """
    if policy.tower is None or other is None or other.tower is None:
        return
    for prompt in prompts:
        for image in prompt.images:
            counts = policy.tower.num_features(image), other.tower.num_features(image)
            if counts[0] != counts[1]:
                raise UserError(
                    f"prompt {prompt.id!r}: the policy has {counts[0]} tokens for an image, and "
                    f"{key} {counts[1]}: give both one preprocessor_config.json"
                )


def _frozen(
    settings: Settings, policy: Policy, path: str | Path, key_exponents: Tensor | None = None
) -> Policy:
    reference = Policy.from_pretrained(
        path, policy.plan, policy.device, frozen=True, key_exponents=key_exponents
    )
    if settings.reference.offload:
        reference.offload()
    return reference


def dpo_reference(settings: Settings, policy: Policy, alphabet: str | None) -> Policy:
    """Return the frozen reference of DPO: reference.path, or the model that training starts from.

    It has only quantized weights, in the formats of the policy's plan. Raises UserError if an
    adapter's own base is not where training starts.
    """
    reference = read_reference(settings, policy)
    if reference is not None:
        return reference
    # Built again, not copied: a resumed run has the same one.
    if policy.lora is None:
        source = open_source(settings, alphabet, str(policy.device))
        reference = Policy(source, policy.plan, policy.device, frozen=True)
        if settings.reference.offload:
            reference.offload()
        return reference
    if settings.adapter.path or settings.adapter.changes_base:
        raise UserError("DPO: training starts from another model than the base; set reference.path")
    return policy.base()


def build_teacher(settings: Settings, policy: Policy) -> Policy:
    """Return the frozen model at teacher.path, in the formats of the policy's plan.

    Raises UserError if its vocabulary differs from the policy's.
    """
    path = str(settings.teacher.path)
    teacher = Policy.from_pretrained(path, policy.plan, policy.device, frozen=True)
    _check_vocabulary(policy, teacher, f"teacher.path = {path}")
    return teacher


def end_token_notes(policy: Policy, teacher: Policy) -> list[str]:
    """Return a warning if a teacher ends its answers with other tokens than the policy."""
    ends = [
        set(hf.eos_token_ids(model.config, model.generation_config, model.tokenizer))
        for model in (policy, teacher)
    ]
    if ends[0] == ends[1] or policy.tokenizer is None:
        return []
    own, others = (policy.tokenizer.convert_ids_to_tokens(sorted(ids)) for ids in ends)
    return [
        f"warning: the teacher ends its answers with {others}, the policy with {own}: answers may "
        "grow to rollout.max_tokens or shrink; use a teacher with the policy's end tokens"
    ]


def teacher_prompts(
    settings: Settings, teacher: Policy, prompts: Sequence[tuple[Prompt, PromptInputs]]
) -> dict[bytes, PromptInputs]:
    """Return the teacher's own prompts (`teacher.prompt`), by the keys of the policy's.

    {} if it reads the policy's. Raises UserError for an unknown field of the template, a prompt
    without an answer or text, two answers to one prompt, or a prompt that does not fit.
    """
    template = settings.teacher.prompt
    if template is not None:
        _check_template(template)
    made: dict[bytes, PromptInputs] = {}
    for prompt, inputs in () if template is None else prompts:
        where = f"teacher.prompt: prompt {prompt.id!r}"
        if "{answer}" in str(template) and prompt.answer is None:
            raise UserError(f"{where} has no answer")
        messages = prompt.messages or ({"content": prompt.text},)
        if not isinstance(messages[-1].get("content"), str):
            raise UserError(f"{where}: its last message is not a text")
        text = str(template).format(prompt=messages[-1]["content"], answer=prompt.answer)
        own = replace(prompt, text=text)
        if prompt.messages is not None:
            own = replace(prompt, messages=(*messages[:-1], {**messages[-1], "content": text}))
        encoded = encode_prompt(
            teacher.tokenizer, own, settings.task.system_prompt, teacher.plain_text, teacher.tower
        )
        if len(encoded) + settings.rollout.max_tokens > teacher.config.max_position_embeddings:
            raise UserError(
                f"{where} and rollout.max_tokens do not fit in the "
                f"{teacher.config.max_position_embeddings} tokens of the teacher's context"
            )
        if made.setdefault(inputs.key(), encoded) != encoded:
            raise UserError(f"{where}: another prompt has the same text, with another answer")
    return made


def _check_template(template: str) -> None:
    """Raise UserError unless `teacher.prompt` is a text with the fields prompt and answer."""
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise UserError(f"teacher.prompt = {template!r:.80}: {error}") from None
    for _, name, form, conversion in parts:
        # str.format would also read attributes, and pad a text to any width.
        if name not in ("prompt", "answer") or form or conversion:
            raise UserError(
                f"teacher.prompt: a template has {{prompt}} and {{answer}}, not "
                f"{':'.join(filter(None, (name, form, conversion)))!r:.80}"
            )
    if not template:
        raise UserError("teacher.prompt is empty: leave it out, and the teacher reads the policy's")


class Reward:
    """The weighted sum of a task's score and a reward model's score (`[reward]`).

    The reward model runs under `plan`, with at most `tokens_at_once` tokens per packed forward.
    """

    def __init__(
        self,
        settings: RewardSettings,
        policy: Model,
        plan: PrecisionPlan,
        max_tokens: int,
        tokens_at_once: int,
    ) -> None:
        self._settings, self._tokens_at_once = settings, tokens_at_once
        self._model: ScalarModel | None = None
        if settings.model_path is None:
            return
        where = f"reward.model_path = {settings.model_path}"
        model = ScalarModel.from_pretrained(settings.model_path, plan, policy.device, frozen=True)
        # Its input is the policy's token ids of prompt and completion.
        check_same_tokenizer(policy.tokenizer, model.tokenizer, where)
        if model.config.max_position_embeddings <= max_tokens:
            raise UserError(
                f"{where}: its context of {model.config.max_position_embeddings} tokens has no "
                f"room for a prompt and rollout.max_tokens = {max_tokens}"
            )
        if settings.offload:
            model.offload()
        self._model = model

    @property
    def has_model(self) -> bool:
        """True if there is a reward model."""
        return self._model is not None

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        rule, weight = self._settings.rule, self._settings.model
        if self._model is None:
            scores = [0.0] * len(samples)
        else:
            sequences = [[*s.prompt_token_ids, *s.completion.token_ids] for s in samples]
            with self._model.used():
                scores = self._model.scores(sequences, self._tokens_at_once).tolist()
        rewarded = []
        for sample, score in zip(samples, scores, strict=True):
            # Parts are for metrics; `rule` is the task's own score.
            own, total = sample.score.reward, weight * score if self.has_model else None
            parts = {**sample.score.parts, **({} if own is None else {"rule": own})}
            parts |= {"model": score} if self.has_model else {}
            if own is not None:
                total = rule * own + weight * score
            rewarded.append(replace(sample, score=Score(total, parts)))
        return rewarded


def build_reward(settings: Settings, policy: Policy, tokens_at_once: int) -> Reward | None:
    """Return the rewards of `[reward]`; None if the reward is the task's score, unweighted."""
    if not settings.reward.is_weighed:
        return None
    plan = policy.plan.without_base
    return Reward(settings.reward, policy, plan, settings.rollout.max_tokens, tokens_at_once)


def value_model(settings: Settings, policy: Policy) -> ScalarModel | None:
    """Return the value model at critic.path, on the policy's device; None without one.

    Raises UserError if its vocabulary differs from the policy's.
    """
    path, plan, device = settings.critic.path, policy.plan.without_base, policy.device
    if path is None:
        return None
    base = policy.base_source
    if path == "policy" and base is not None and base.origin is not None:
        # All parameters of a critic are trained; a frozen base has no master weights to copy.
        path = base.origin
    if path != "policy":
        model = ScalarModel.from_language_model(path, plan, device)
        _check_vocabulary(policy, model, f"critic.path = {path}")
        return model
    # critic.path=policy: the policy's decoder with a new head.
    if base is None:
        base = ModelSource.from_tensors(policy.config, policy.whole_masters(), policy.tokenizer)
    return ScalarModel(base.with_scalar_head(), plan, device, key_exponents=policy.key_exponents)


def _check_vocabulary(policy: Policy, other: Model, where: str) -> None:
    """Raise a UserError if another model has not all of the policy's tokens, with equal ids."""
    if policy.tokenizer is not None or other.tokenizer is not None:
        check_same_tokenizer(policy.tokenizer, other.tokenizer, where)
    if other.config.vocab_size < policy.config.vocab_size:
        raise UserError(
            f"{where}: its vocab_size {other.config.vocab_size} is below the policy's "
            f"{policy.config.vocab_size}"
        )


def device_of(settings: Settings, plan: PrecisionPlan | None = None) -> str:
    """Return the device of a run, and select the backend of its GPU (run.device, run.backend).

    `plan`: the plan to select kernels for; None: that of the settings.
    """
    run = settings.run
    if lacks_gpu(settings, plan):
        raise UserError(
            f"run.backend = {run.backend} needs {_WITH_GPU[run.backend].gpus}, and this machine "
            "has none: use run.backend=auto"
        )
    # References are slow on a GPU, so only run.device = cuda runs them there.
    auto = run.device == "auto" and run.backend == REFERENCE.name
    return choose_device("cpu" if auto else run.device)


def lacks_gpu(settings: Settings, plan: PrecisionPlan | None = None) -> bool:
    """Select run.backend; return True if it names kernels of a GPU that is not in this machine.

    Raises UserError if run.device is cpu.
    """
    run, plan = settings.run, plan or PrecisionPlan.from_settings(settings.precision)
    select_backend(run.backend, defined=plan.defined)
    if run.backend not in _WITH_GPU:
        return False
    if run.device == "cpu":
        raise UserError(
            f"run.backend = {run.backend} needs {_WITH_GPU[run.backend].gpus}, and run.device is "
            "cpu: leave one of them out"
        )
    return accelerator() is None


def choose_device(name: str) -> str:
    """Return the device for a name; `auto` is a supported GPU, or else the CPU.

    With several ranks, each has the GPU with its local rank as number.
    """
    if name == "auto":
        name = "cpu" if accelerator() is None else "cuda"
    return f"cuda:{world().local_rank}" if name == "cuda" and world().size > 1 else name


def limit_threads(config: ModelConfig) -> None:
    """Limit torch to one CPU thread for a small model, unless OMP_NUM_THREADS is set.

    Synchronizing threads would take more time than the work, up to 30 times on a busy machine.
    """
    if "OMP_NUM_THREADS" not in os.environ and is_small(config):
        torch.set_num_threads(1)


def is_small(config: ModelConfig) -> bool:
    """Return whether a CPU can train a model in reasonable time: below 20M parameters."""
    return num_parameters(config) < _SMALL_MODEL
