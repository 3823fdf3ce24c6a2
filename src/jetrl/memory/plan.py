"""The memory plan: the bytes that a run allocates at each moment that can be the peak.

    rollout    sampling: weights, optimizer states, KV pages, CUDA graphs of decode
    reward     forward of a reward model, if there is one
    reference  forward of an offloaded reference (reference.offload)
    backward   start of a backward, when all activations of a micro-batch are allocated
    optimizer  end of backward, and the optimizer step: all gradients
    critic     backward of the critic, if there is one

Gradients exist from the first backward of an update to its optimizer step, KV pages only during
rollout, CUDA graphs always. On several GPUs prompts are divided, and so are the master weights,
optimizer states and gradients of matrices, by rows; quantized weights are whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from jetrl.distributed.shards import shard_of
from jetrl.errors import named
from jetrl.kernels.adamw import state_bytes
from jetrl.kernels.attention.layout import SPLIT_KEYS
from jetrl.kernels.reverse_kl import COPIES, MOST_LOGITS
from jetrl.memory import activations
from jetrl.memory.activations import PlannedMicroBatch
from jetrl.memory.graphs import captures_updates
from jetrl.memory.pages import gpu_pages, most_contexts, most_rows, text_bytes
from jetrl.models import hf
from jetrl.models.adapter import LoRA, adapter_names
from jetrl.models.attention import kv_bytes_per_token, staged_bytes_per_token
from jetrl.models.draft_head import KNOWN_TOKENS, draft_head_shapes
from jetrl.models.families import ModelConfig, num_parameters, parameter_shapes, stored_tensors
from jetrl.models.nvfp4_files import left_in_16_bits
from jetrl.models.peft import adapted_config, lora_of
from jetrl.models.vision import tower_shapes, trained_shapes
from jetrl.precision.formats import number_format
from jetrl.precision.plan import PrecisionPlan, Side
from jetrl.settings.loading import Settings
from jetrl.settings.model_sections import verified_drafts
from jetrl.settings.sections import TowerPart

Moment = Literal["rollout", "reward", "reference", "backward", "optimizer", "critic"]
MOMENTS: tuple[Moment, ...] = get_args(Moment)
GIB = 2**30
# Workspaces of cuBLAS, DeepGEMM and Triton, measured with torch 2.11.
_LIBRARIES = 128 * 2**20
# Bytes of a GPU that no row counts: kernel code (0.2 GiB) and fragmentation.
_RESERVE = 3 * 2**29
_LEAST = GIB / 2000  # bytes that are not shown as 0.000 GiB


@dataclass(frozen=True)
class Row:
    """A row of the memory plan, with its bytes by moment."""

    what: str
    bytes: Mapping[Moment, int]


@dataclass(frozen=True)
class OtherModels:
    """The configs of other models; None if there is none, or (except reward) the policy's."""

    reference: ModelConfig | None = None
    critic: ModelConfig | None = None
    teacher: ModelConfig | None = None
    reward: ModelConfig | None = None

    @staticmethod
    def of(settings: Settings) -> OtherModels:
        """Read config.json of each model directory in the settings."""

        def read(key: str, path: str | None) -> ModelConfig | None:
            own = path is None or path == "policy"
            with named(key):
                return None if own else hf.model_config(str(path))

        return OtherModels(
            reference=read("reference.path", settings.reference.path),
            critic=read("critic.path", settings.critic.path),
            teacher=read("teacher.path", settings.teacher.path),
            reward=read("reward.model_path", settings.reward.model_path),
        )


@dataclass(frozen=True)
class Workload:
    """The largest workload of a training step.

    Attributes:
        sequences: Completions of one sampling call on all GPUs; 0 without sampling.
        tokens: Tokens of the longest sequence, including its prompt.
        trained: Sequences per update.
        prompts: Tokens of all prompts of a sampling call, each counted once.
        together: Sequences that must share a micro-batch: 2 for the pairs of a reward model.
        continues: Whether prefill reads keys of earlier tokens (replies of an environment,
            continued completions).
        most_held: Maximum tokens of all sequences together; None if all may be the longest.
        prompt: Tokens of the longest prompt.
        image: Tokens of the largest image.
        reference: Whether an update without sampling forwards a frozen reference (DPO).
    """

    sequences: int
    tokens: int
    trained: int
    prompts: int
    together: int = 1
    continues: bool = False
    most_held: int | None = None
    prompt: int = 0
    image: int = 0
    reference: bool = False

    @staticmethod
    def of(
        settings: Settings,
        config: ModelConfig,
        longest_prompt: int | None = None,
        max_turns: int | None = None,
        largest_image: int = 0,
    ) -> Workload:
        """Return the largest workload of a reinforcement learning step.

        By default `longest_prompt` is as many tokens as an answer, and `max_turns` is from the
        settings.
        """
        rollout, held_out = settings.rollout, settings.eval
        most = rollout.prompts_per_step * rollout.samples_per_prompt
        answer, sequences = settings.longest_answer, most
        prompts = rollout.prompts_per_step
        if held_out.every:
            sequences = max(sequences, (held_out.prompts or most) * held_out.samples)
            prompts = max(prompts, held_out.prompts or most)
        prompt = answer if longest_prompt is None else longest_prompt
        return Workload(
            sequences=sequences,
            tokens=min(config.max_position_embeddings, prompt + answer),
            trained=-(-most * (1 + settings.data.replay_steps) // settings.train.updates_per_step),
            prompts=prompts * prompt,
            continues=(max_turns or settings.task.max_turns or 1) > 1 or rollout.oversample > 0,
            prompt=prompt,
            image=largest_image,
        )

    @staticmethod
    def of_pairs(settings: Settings, longest: int, reference: bool = False) -> Workload:
        """Return the workload of training on pairs of sequences of up to `longest` tokens."""
        return Workload(
            sequences=0,
            tokens=longest,
            trained=2 * settings.sft.examples_per_step,
            prompts=0,
            together=2,
            reference=reference,
        )

    @staticmethod
    def of_text(settings: Settings) -> Workload:
        """Return the workload of training on raw text."""
        sft, longest = settings.sft, max(settings.sft.lengths)
        trained = -(-sft.tokens_per_step // longest)
        return Workload(sequences=0, tokens=longest, trained=trained, prompts=0)

    def of_a_rank(self, settings: Settings, cards: int) -> Workload:
        """Return the workload of one GPU, which samples all completions of a prompt.

        `trained` still counts all GPUs: micro-batches are packed first, then divided.
        """
        each = settings.rollout.samples_per_prompt
        sequences = self.sequences
        if cards > 1:
            sequences = min(sequences, -(-sequences // (each * cards)) * each)
        together = min(sequences, settings.rollout.max_batch_size)
        return replace(self, sequences=together, prompts=-(-self.prompts // cards))


@dataclass(frozen=True)
class PlannedRun:
    """A run whose memory is planned, on `cards` GPUs with `load` divided among them.

    `config` is that of the trained model: the policy, or a reward model. `hopper`: whether a GPU
    runs Hopper's kernels; others do not capture updates.
    """

    settings: Settings
    config: ModelConfig
    others: OtherModels
    load: Workload
    cards: int = 1
    device: str = "cuda"
    hopper: bool = True

    @property
    def tokens(self) -> int:
        """The setting for the tokens of a micro-batch."""
        return self.settings.train.tokens_per_micro_batch


class MemoryPlan:
    """The memory of a run; on several GPUs, of the GPU that needs the most.

    `free` bytes before loading limit the KV pages; None for no limit. Micro-batches have up to
    `tokens` tokens; `micro_batch` is the largest of the run. `reserve` bytes of a GPU must stay
    free, for memory that no row counts.
    """

    def __init__(self, run: PlannedRun, free: int | None, tokens: int) -> None:
        self.rows: list[Row] = []
        self._settings = settings = run.settings
        self._others, self._cards, self._tokens = run.others, run.cards, tokens
        self._config = config = adapted_config(settings.adapter, run.config)
        self._load = load = run.load.of_a_rank(settings, run.cards)
        self._on_gpu = run.device != "cpu"
        self._hopper = self._on_gpu and run.hopper
        self.reserve = _RESERVE if self._on_gpu else 0
        self._plan = PrecisionPlan.from_settings(settings.precision)
        self._lora = lora_of(settings.adapter, config)
        self._tower: TowerPart = settings.train.tower
        self._critic = (self._others.critic or config).with_scalar_head()
        whole = load.trained * load.tokens
        most = min(max(tokens, load.together * load.tokens), whole)
        shared = settings.train.share_prompts is not False
        self.micro_batch = PlannedMicroBatch(most, load.tokens, whole > most, shared)
        reference, sampled = settings.reference, load.sequences > 0
        self._has_reference = settings.algorithm.kl > 0 or reference.path is not None
        occurs: dict[Moment, bool] = {
            "rollout": True,
            "reward": self._others.reward is not None,
            "reference": self._has_reference and reference.offload,
            "critic": settings.critic.path is not None,
        }
        self._moments = tuple(m for m in MOMENTS if m not in occurs or (sampled and occurs[m]))
        self._add_weights()
        if sampled:
            self._add_other_weights()
            self._add_rollout(free)
            self._add_forwards()
        elif load.reference:
            reference_config = self._others.reference or config
            if self._lora is None or self._others.reference is not None:
                size = quantized_bytes(reference_config, self._plan, sides=("train",))
                self._add("reference: quantized weights only", size)
            most = self.micro_batch.tokens
            size = activations.forward_bytes(reference_config, self._plan, most)
            self._add(f"reference: a forward of {most} tokens", size, "backward")
        self._add_training("", "backward", "optimizer", config, self._plan, self._lora)
        if self._on_gpu:
            self._add("libraries", _LIBRARIES)
        if "critic" in self._moments:
            base = self._plan.without_base
            self._add_training("critic: ", "critic", "critic", self._critic, base, None)

    def at(self, moment: Moment) -> int:
        return sum(row.bytes.get(moment, 0) for row in self.rows)

    @property
    def update(self) -> int:
        """Maximum bytes during training."""
        return max(self.at(moment) for moment in MOMENTS[2:])

    @property
    def peak(self) -> int:
        """Maximum bytes at any moment."""
        return max(map(self.at, MOMENTS))

    @property
    def needed(self) -> int:
        """Bytes that must be free before the run: the peak and the reserve."""
        return self.peak + self.reserve

    @property
    def captures(self) -> bool:
        """True if updates are captured as graphs."""
        train, frozen = self._settings.train, self._lora is not None
        if not self._hopper or self._load.together > 1:  # pairs are not captured
            return False
        return captures_updates(train, self._config, self._plan, self._cards, frozen)

    def _add(self, what: str, size: int | Mapping[Moment, int], only: Moment | None = None) -> None:
        """Add a row: bytes by moment, or the same bytes at all moments or at `only` one."""
        if isinstance(size, int):
            size = dict.fromkeys(self._moments if only is None else (only,), size)
        if any(size.values()):
            self.rows.append(Row(what, size))

    def _add_weights(self) -> None:
        config, plan, lora = self._config, self._plan, self._lora
        base = quantized_bytes(config, plan)
        if lora is not None and plan.reads_masters:  # forwards read the frozen base in FP32
            base += 4 * num_parameters(config)
        masters = "master weights, FP32" if lora is None else "master weights of the adapter, FP32"
        trained = _trained_shapes(config, self._cards, lora, self._tower)
        self._add(masters, 4 * sum(map(math.prod, trained.values())))
        states = self._optimizer_bytes(trained)
        self._add(f"optimizer states, {self._settings.train.optimizer_states}", states)
        self._add("adapter as forwards read it", adapter_bytes(config, plan, lora))
        sides = " for sampling and training" if config.head == "lm" else ""
        self._add(f"quantized weights{sides}", base)
        self._add("image tower", tower_bytes(config, plan))

    def _add_other_weights(self) -> None:
        settings, others, plan = self._settings, self._others, self._plan
        moment: Moment | None  # the only moment of an offloaded model; None: all moments
        # The reference of an adapter is its base, which is counted already, unless it has a path.
        if self._has_reference and (settings.adapter.kind is None or settings.reference.path):
            size = quantized_bytes(others.reference or self._config, plan, sides=("train",))
            moment = "reference" if settings.reference.offload else None
            self._add("reference: quantized weights only", size, moment)
            if others.reference is not None or self._tower != "frozen":
                size = tower_bytes(others.reference or self._config, plan)
                self._add("image tower of the reference", size)
        if others.teacher is not None:
            size = quantized_bytes(others.teacher, plan, sides=("train",))
            self._add("teacher: quantized weights only", size)
            self._add("image tower of the teacher", tower_bytes(others.teacher, plan))
        if settings.critic.path is not None:
            weights = 4 * trained_parameters(self._critic, self._cards)
            weights += quantized_bytes(self._critic, plan.without_base)
            states = self._optimizer_bytes(_trained_shapes(self._critic, self._cards))
            self._add("critic: weights, optimizer states", weights + states)
        if settings.rollout.asks_head:
            self._add("draft head: weights, optimizer states", self._draft_head_bytes())
        if others.reward is not None:
            size = quantized_bytes(others.reward, plan.without_base, sides=("train",))
            moment = "reward" if settings.reward.offload else None
            self._add("reward model: quantized weights only", size, moment)

    def _optimizer_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        states = self._settings.train.optimizer_states
        return sum(state_bytes(shape, states) for shape in shapes.values())

    def _draft_head_bytes(self) -> int:
        width, size = activations.activation_bytes(self._plan), self._config.hidden_size
        shapes = draft_head_shapes(size)
        weights = sum(map(math.prod, shapes.values())) * (4 + width) + self._optimizer_bytes(shapes)
        rows = min(KNOWN_TOKENS, self._config.vocab_size) + self._settings.draft_head.most_tokens
        return weights + width * size * rows

    def _add_rollout(self, free: int | None) -> None:
        """Add KV pages, decode and prefill; `free` bytes limit the pages."""
        rollout, config, load = self._settings.rollout, self._config, self._load
        sampler = self._plan.on("rollout")
        contexts = most_contexts(rollout.max_prefill_tokens, load.sequences, load.tokens)
        page = rollout.page_size * kv_bytes_per_token(config, sampler)
        needed = -(-load.tokens // rollout.page_size)
        pages = rollout.num_pages or needed * load.sequences
        if free is not None and rollout.num_pages is None:
            left = max(0, free - self.at("rollout"))
            staged = contexts * staged_bytes_per_token(config, sampler)
            pages = max(needed, min(pages, gpu_pages(left, staged, page, needed)))
        self._add(f"KV pages: {pages} of {rollout.page_size} tokens", {"rollout": pages * page})
        self._add_decode()
        # Without enough pages, sequences are preempted and later prefilled again.
        held = needed * load.sequences
        if load.most_held is not None:
            # A sequence's last page is partly filled.
            held = min(held, load.most_held // rollout.page_size + load.sequences)
        continues = load.continues or pages < held
        read = load.sequences * load.tokens if continues else load.prompts
        prompts = min(rollout.max_prefill_tokens, read)
        earlier = contexts if continues else 0
        over = f", contexts of {contexts}" if continues else ""
        prefill = self._forward_bytes(prompts, earlier)
        self._add(f"a forward of {prompts} prompt tokens{over}", {"rollout": prefill})
        seen: dict[Moment, int] = {"rollout": prompts, "backward": self.micro_batch.tokens}
        self._add(
            "features of images, if all tokens have them",
            {at: activations.image_bytes(config, self._plan, n) for at, n in seen.items()},
        )
        self._add_tower_forward("", config, "rollout")

    def _add_decode(self) -> None:
        """Add decode's CUDA graphs, which keep the activations of the largest batch, and drafts.

        Logits of prefill are outside of graphs: at most one row per sequence.
        """
        rollout, config, load = self._settings.rollout, self._config, self._load
        device = "cuda" if self._on_gpu else "cpu"
        drafts = verified_drafts(rollout.speculation, self._plan.exact, device, rollout.oversample)
        rows = most_rows(load.sequences, drafts)
        logit = 4 * config.vocab_size
        splits = -(-load.tokens // (self._plan.attention_split or SPLIT_KEYS))
        graphs = self._forward_bytes(rows, splits=splits) + rows * logit
        text = text_bytes(rollout.max_batch_size, config.max_position_embeddings, drafts)
        kept: tuple[Moment, ...] = self._moments if self._on_gpu else ("rollout",)
        decode = dict.fromkeys(kept, graphs) | {"rollout": graphs + load.sequences * logit}
        self._add("decode's graphs and logits", decode)
        self._add("text of drafts", dict.fromkeys(kept, text))

    def _add_tower_forward(self, whose: str, config: ModelConfig, moment: Moment) -> None:
        size = activations.tower_bytes(config, self._plan, self._load.image)
        self._add(f"{whose}image tower: a forward of {self._load.image} tokens", {moment: size})

    def _add_tower_backward(self) -> None:
        """Add the backward of a trained image tower, which is the last part of a backward."""
        vision, image, size = self._config.vision, self._load.image, 0
        if vision is None or not image or self._tower == "frozen":
            return
        width, item = self._config.hidden_size, activations.activation_bytes(self._plan)
        size = vision.saved_bytes(image, item, whole=self._tower == "all")
        size += vision.forward_bytes(image, width, item)
        size += 4 * image * width * (1 + vision.deep_layers)  # the gradient of features
        shapes = trained_shapes(vision, width, self._tower).values()
        # Gradients of a part, and their sums of a micro-batch, which become those of the first one.
        sums = 4 if self.micro_batch.several or self._cards > 1 else 0
        size += (item + sums) * sum(map(math.prod, shapes))
        self._add(f"image tower: a backward of {image} tokens", {"optimizer": size})

    def _forward_bytes(self, tokens: int, contexts: int = 0, splits: int = 1) -> int:
        """Return the bytes of a forward of the policy during sampling."""
        return activations.forward_bytes(
            self._config,
            self._plan,
            tokens,
            contexts,
            adapted=self._settings.adapter.kind is not None,
            splits=splits,
        )

    def _add_forwards(self) -> None:
        settings, others = self._settings, self._others
        rollout, load, reward = settings.rollout, self._load, others.reward
        completions = rollout.prompts_per_step * rollout.samples_per_prompt
        tokens = min(max(self._tokens, load.tokens), completions * load.tokens)
        if reward is not None:
            size = activations.forward_bytes(reward, self._plan.without_base, tokens)
            self._add(f"reward model: a forward of {tokens} tokens", {"reward": size})
        if others.teacher is not None:
            # Next to the policy's activations: a forward without gradient, then logits of a chunk.
            most = self.micro_batch.tokens
            size = activations.forward_bytes(others.teacher, self._plan, most)
            if settings.teacher.kl == "vocabulary":
                logits = min(MOST_LOGITS, most * others.teacher.vocab_size)
                size = max(size, 4 * COPIES * logits)
            self._add(f"teacher: a forward of {most} tokens", size, "backward")
            self._add_tower_forward("teacher: ", others.teacher, "backward")
        if self._has_reference and (others.reference is not None or self._tower != "frozen"):
            moment: Moment = "reference" if "reference" in self._moments else "backward"
            reference = others.reference or self._config
            self._add_tower_forward("reference: ", reference, moment)
        if "reference" in self._moments:
            reference = self._others.reference or self._config
            size = activations.forward_bytes(reference, self._plan, tokens)
            size += activations.logits_bytes(reference, self._plan, tokens)
            self._add(f"reference: a forward of {tokens} tokens", {"reference": size})

    def _add_training(
        self,
        whose: str,
        moment: Moment,
        end: Moment,
        config: ModelConfig,
        plan: PrecisionPlan,
        lora: LoRA | None,
    ) -> None:
        """Add gradients and activations of an update, whose end is in the column `end`."""
        batch, recomputed = self.micro_batch, self._settings.train.activation_checkpointing
        trained = _trained_shapes(config, self._cards, lora, "frozen" if whose else self._tower)
        gradients = 4 * sum(map(math.prod, trained.values()))
        first = gradients if batch.several else 4 * math.prod(trained.get(_head_name(config), (0,)))
        kept = activations.kept_bytes(config, plan, batch.tokens, recomputed, lora)
        wgrad = activations.wgrad_bytes(config, plan, batch, self._cards, lora)
        on_top = activations.on_top_bytes(config, plan, batch, recomputed, wgrad, lora)
        last = activations.last_bytes(config, plan, batch, lora) + wgrad.at_end
        # If both moments share a column, it shows the higher one.
        start_is_higher = batch.several or first + kept + on_top >= gradients + last
        ends = not (end == moment and start_is_higher)
        for name, at_start, at_end in (
            ("gradients, FP32", first, gradients),
            (f"activations of {batch.tokens} tokens", kept, 0),
            ("while gradients are made", on_top, last),
        ):
            self._add(whose + name, {moment: at_start} | ({end: at_end} if ends else {}))
        if not whose:
            self._add_tower_backward()
        if not whose and self.captures:
            self._add_graphs(gradients, first, kept)

    def _add_graphs(self, gradients: int, first: int, kept: int) -> None:
        """Add the memory that graphs of updates keep, in addition to that of an eager update.

        Gradients and activations are allocated at all moments. So are copies of attention's
        outputs, which segments read. A micro-batch of a new size runs eagerly next to them.
        """
        config, width = self._config, activations.activation_bytes(self._plan)
        width *= config.num_heads * config.head_dim
        copies = width * config.num_layers * self.micro_batch.tokens
        at = dict.fromkeys(self._moments, gradients + kept + copies)
        at |= {"backward": gradients - first + kept + copies, "optimizer": kept + copies}
        self._add("graphs of updates", at)


def shown(plan: MemoryPlan, indent: str = "  ") -> str:
    """Return the plan as a table, without rows that are 0.000 in every column."""
    moments = [moment for moment in MOMENTS if plan.at(moment)]
    rows = [row for row in plan.rows if max(row.bytes.values()) >= _LEAST]
    held = {moment: plan.at(moment) for moment in moments}
    rows.append(Row("held", held))
    if plan.reserve:
        rows.append(Row("left for kernels' code and holes", dict.fromkeys(moments, plan.reserve)))
        rows.append(Row("needed", {m: size + plan.reserve for m, size in held.items()}))
    width = max(len(row.what) for row in rows)
    lines = ["".join(("GiB".ljust(width), *(f"{moment:>11}" for moment in moments)))]
    for row in rows:
        sizes = (f"{row.bytes[m] / GIB:.3f}" if row.bytes.get(m) else "" for m in moments)
        lines.append("".join((row.what.ljust(width), *(f"{size:>11}" for size in sizes))))
    return "\n".join((indent + line).rstrip() for line in lines)


def _head_name(config: ModelConfig) -> str:
    if config.head == "score":
        return "score.weight"
    return "embed.weight" if config.tie_word_embeddings else "lm_head.weight"


@functools.lru_cache(maxsize=32)  # the search for settings that fit makes hundreds of plans
def _trained_shapes(
    config: ModelConfig, cards: int, lora: LoRA | None = None, tower: TowerPart = "frozen"
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of trained weights on the GPU with the most rows; adapters are whole."""

    def owned(shape: tuple[int, ...]) -> tuple[int, ...]:
        shard = shard_of(shape[0], 0, cards) if len(shape) == 2 else None
        return shape if shard is None else (max(shard.counts()), *shape[1:])

    shapes = {
        name: owned(shape)
        for name, shape in parameter_shapes(config).items()
        if lora is None or lora.trains(name)
    }
    for layer, adapter in ({} if lora is None else lora.shapes(config)).items():
        shapes |= dict(zip(adapter_names(layer), (adapter.a_shape, adapter.b_shape), strict=True))
    if config.vision is not None:
        of_tower = trained_shapes(config.vision, config.hidden_size, tower)
        shapes |= {name: owned(shape) for name, shape in of_tower.items()}
    return shapes


def trained_parameters(config: ModelConfig, cards: int, lora: LoRA | None = None) -> int:
    return sum(map(math.prod, _trained_shapes(config, cards, lora).values()))


@functools.lru_cache(maxsize=32)
def adapter_bytes(config: ModelConfig, plan: PrecisionPlan, lora: LoRA | None) -> int:
    """Return the bytes of the BF16 copy of an adapter; the fp32 plan has none."""
    if lora is None or plan.reads_masters:
        return 0
    shapes = lora.shapes(config).values()
    rows = sum(len(s.parts) * s.padded_rank * s.num_columns for s in shapes)
    return 2 * (rows + sum(s.num_rows * s.padded_rank for s in shapes))


def tower_bytes(config: ModelConfig, plan: PrecisionPlan) -> int:
    """Return the bytes of the image tower; 0 for a model that reads text only."""
    if config.vision is None:
        return 0
    shapes = tower_shapes(config.vision, config.hidden_size).values()
    return number_format(plan.rest).dtype.itemsize * sum(map(math.prod, shapes))


@functools.lru_cache(maxsize=32)
def quantized_bytes(
    config: ModelConfig, plan: PrecisionPlan, sides: tuple[Side, ...] = ("rollout", "train")
) -> int:
    """Return the bytes of the rotary table and of quantized weights.

    NVFP4 files may store some linear layers in 16 bits. A tied head in the format of the embedding
    takes no bytes of its own.
    """
    rest = number_format(plan.rest)
    tables = 2 if config.layers_without_rope else 1  # rotary positions, and angles of zero
    total = tables * 4 * config.max_position_embeddings * config.rotary_dim
    vocabulary = (config.vocab_size, config.hidden_size)
    total += rest.weight_bytes(vocabulary)
    heads = {plan.rounding(side, number_format(plan.on(side).lm_head)) for side in sides}
    shared = config.tie_word_embeddings and heads == {plan.rounding("train", rest)}
    if config.head == "lm" and not shared:
        total += sum(rounding.format.weight_bytes(vocabulary) for rounding in heads)
    left = left_in_16_bits(config) if plan.frozen_base else set()
    stored = stored_tensors(config)
    for name, shape in parameter_shapes(config).items():
        part = stored[name][0]
        matrix = len(shape) == 2 and part.layer is not None
        if name in left or (matrix and not part.linear_weight):
            total += rest.weight_bytes(shape)
        elif part.linear_weight and part.layer is not None:
            formats = plan.linear_formats(part.layer, config.num_layers)
            roundings = {plan.rounding(side, formats[side]) for side in sides}
            total += sum(rounding.format.weight_bytes(shape) for rounding in roundings)
        elif name.endswith("norm.weight"):
            total += rest.dtype.itemsize * shape[0]
    return total
