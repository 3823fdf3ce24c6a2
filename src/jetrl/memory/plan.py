"""The memory plan: rows of what is held, in bytes at each moment that can be a run's highest.

    rollout    sampling: weights, optimizer states, KV pages, decode's graphs
    reward     a reward model's forward, where there is one
    reference  the forward of a reference that is elsewhere else (reference.offload)
    backward   where a micro-batch's activations are all there and its backward begins
    optimizer  the end of backward and the optimizer's step: all gradients
    critic     the critic's own backward, where there is a critic

The peak of the update is the highest of the last four. Gradients live from the first backward of
an update to its optimizer step; KV pages from the step's first rollout to what follows it. On a GPU
decode's graphs stay, with the memory that their forwards work in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from jetrl.memory import activations
from jetrl.memory.activations import MicroBatch
from jetrl.memory.pages import gpu_pages_room, most_contexts
from jetrl.memory.weights import frozen_bytes, optimizer_bytes, working_bytes
from jetrl.models import hf
from jetrl.models.attention import kv_bytes_per_token, staged_bytes_per_token
from jetrl.models.families import ModelConfig, num_parameters
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import Settings

Moment = Literal["rollout", "reward", "reference", "backward", "optimizer", "critic"]
MOMENTS: tuple[Moment, ...] = (
    "rollout", "reward", "reference", "backward", "optimizer", "critic",
)  # fmt: skip
GIB = 2**30
# cuBLAS's workspaces, DeepGEMM's and Triton's scratch; measured with torch 2.11.
_LIBRARIES = 128 * 2**20


@dataclass(frozen=True)
class Row:
    """what: in words. bytes: by moment; none where it is left out."""

    what: str
    bytes: Mapping[Moment, int]


@dataclass(frozen=True)
class MemoryPlan:
    """micro_batch: what an update is cut into, as planned here."""

    rows: tuple[Row, ...]
    micro_batch: MicroBatch

    def at(self, moment: Moment) -> int:
        """Bytes held at a moment."""
        return sum(row.bytes.get(moment, 0) for row in self.rows)

    @property
    def rollout(self) -> int:
        """Bytes at most while sampling."""
        return self.at("rollout")

    @property
    def update(self) -> int:
        """Bytes at most while training."""
        return max(self.at(moment) for moment in MOMENTS[2:])

    @property
    def peak(self) -> int:
        return max(map(self.at, MOMENTS))

    def table(self) -> list[tuple[str, ...]]:
        """Lines of cells, in GiB: a head, the rows, the sums."""
        moments = [moment for moment in MOMENTS if self.at(moment)]

        def cells(what: str, sizes: Mapping[Moment, int]) -> tuple[str, ...]:
            shown = (f"{sizes[m] / GIB:9.3f}" if sizes.get(m) else " " * 9 for m in moments)
            return (what, *shown)

        head = ("GiB", *(f"{moment:>9}" for moment in moments))
        rows = [cells(row.what, row.bytes) for row in self.rows]
        return [head, *rows, cells("all", {moment: self.at(moment) for moment in moments})]


@dataclass(frozen=True)
class OtherModels:
    """What the models beside the policy are made of, those that are not copies of it. None: not
    there, or like the policy."""

    reference: ModelConfig | None = None
    critic: ModelConfig | None = None
    reward: ModelConfig | None = None

    @staticmethod
    def of(settings: Settings) -> OtherModels:
        """Read from their directories' config.json.

        Raises:
            UserError: a directory cannot be read, or holds a model of another kind.
        """

        def read(path: str | None) -> ModelConfig | None:
            own = path is None or path == "policy"
            return None if own else ModelConfig.from_hf(hf.read_config(str(path)))

        paths = (settings.reference.path, settings.critic.path, settings.reward.model_path)
        return OtherModels(*map(read, paths))


@dataclass(frozen=True)
class Load:
    """What a step asks for. sequences: completions sampled at once at most; 0: nothing is sampled,
    and no other model is beside the one that is trained. tokens: of a sequence at most, prompt
    included. trained: sequences of one update. prompts: tokens of all prompts that a call samples,
    each counted once for its completions. together: sequences that no micro-batch divides. goes_on:
    forwards over prompts read what came before: replies of an environment, and completions that the
    step before cut off."""

    sequences: int
    tokens: int
    trained: int
    prompts: int
    together: int = 1
    goes_on: bool = False

    @staticmethod
    def of(
        settings: Settings,
        config: ModelConfig,
        longest_prompt: int | None = None,
        max_turns: int | None = None,
    ) -> Load:
        """longest_prompt: in tokens; None: not known, and taken to be as long as an answer.
        max_turns: of a completion; None: not known but from the settings."""
        rollout, held_out = settings.rollout, settings.eval
        most = rollout.prompts_per_step * rollout.samples_per_prompt
        answer, sequences, prompts = rollout.max_tokens, most, rollout.prompts_per_step
        if held_out.every:
            answer = max(answer, held_out.max_tokens or 0)
            sequences = max(sequences, (held_out.prompts or most) * held_out.samples)
            prompts = max(prompts, held_out.prompts or most)
        prompt = answer if longest_prompt is None else longest_prompt
        return Load(
            sequences=min(sequences, rollout.max_batch_size),
            tokens=min(config.max_position_embeddings, prompt + answer),
            trained=-(-most // settings.train.updates_per_step),
            prompts=prompts * prompt,
            goes_on=(max_turns or settings.task.max_turns or 1) > 1 or rollout.oversample > 0,
        )

    @staticmethod
    def of_pairs(settings: Settings, longest: int) -> Load:
        """Of a reward model's training. longest: tokens of a sequence."""
        return Load(0, longest, 2 * settings.sft.examples_per_step, 0, together=2)


def memory_plan(
    settings: Settings,
    config: ModelConfig,
    others: OtherModels | None = None,
    load: Load | None = None,
    free: int | None = None,
    tokens: int | None = None,
    device: str = "cuda",
) -> MemoryPlan:
    """The plan of a run.

    Args:
        config: of the policy, or of a reward model that is trained. others: of the models beside
            it; default: none but copies of it.
        load: of a step; default: `Load.of` the settings.
        free: bytes of the device before anything is loaded, which bound the KV pages on a GPU;
            None: as many pages as the load can use.
        tokens: of a micro-batch; default: train.tokens_per_micro_batch.
        device: cpu or cuda, whose libraries have memory of their own.
    """
    plan = PrecisionPlan.from_settings(settings.precision)
    load, others = load or Load.of(settings, config), others or OtherModels()
    wanted = settings.train.tokens_per_micro_batch if tokens is None else tokens
    batch = _micro_batch(wanted, load)
    moments = _moments(settings, others, load)
    rows = _trained_model(settings, config, plan, moments)
    if load.sequences:
        rows += _others(settings, config, others, plan, moments)
        resident = sum(row.bytes.get("rollout", 0) for row in rows)
        left = None if free is None else max(0, free - resident)
        there: tuple[Moment, ...] = ("rollout",) if device == "cpu" else moments
        rows += _rollout(settings, config, plan, load, left, there)
        rows += _forwards(settings, config, others, plan, load, wanted, moments)
    rows += _training("", "backward", config, plan, batch, settings)
    if device != "cpu":
        rows.append(_always(moments, "libraries", _LIBRARIES))
    if "critic" in moments:
        critic = (others.critic or config).with_scalar_head()
        rows += _training("critic: ", "critic", critic, plan, batch, settings)
    return MemoryPlan(tuple(row for row in rows if any(row.bytes.values())), batch)


def _moments(settings: Settings, others: OtherModels, load: Load) -> tuple[Moment, ...]:
    """Those that there are."""
    there: dict[Moment, bool] = {
        "rollout": load.sequences > 0,
        "reward": load.sequences > 0 and others.reward is not None,
        "reference": load.sequences > 0 and _measures(settings) and settings.reference.offload,
        "critic": load.sequences > 0 and settings.critic.path is not None,
    }
    return tuple(moment for moment in MOMENTS if there.get(moment, True))


def _measures(settings: Settings) -> bool:
    """Whether there is a reference."""
    return settings.algorithm.kl > 0 or settings.reference.path is not None


def _micro_batch(wanted: int, load: Load) -> MicroBatch:
    """The largest that packing makes: whole sequences up to `wanted` tokens, or one longer one (a
    longer pair)."""
    whole = load.trained * load.tokens
    tokens = min(max(wanted, load.together * load.tokens), whole)
    return MicroBatch(tokens, load.tokens, several=whole > tokens)


def _always(moments: tuple[Moment, ...], what: str, size: int) -> Row:
    """A row of what is there at every moment."""
    return Row(what, dict.fromkeys(moments, size))


def _trained_model(
    settings: Settings, config: ModelConfig, plan: PrecisionPlan, moments: tuple[Moment, ...]
) -> list[Row]:
    states = f"optimizer states, {settings.train.optimizer_states}"
    copies = "working copies for sampling and training" if config.head == "lm" else "working copies"
    return [
        _always(moments, "master weights, FP32", 4 * num_parameters(config)),
        _always(moments, states, optimizer_bytes(settings, config)),
        _always(moments, copies, working_bytes(config, plan)),
    ]


def _others(
    settings: Settings,
    config: ModelConfig,
    others: OtherModels,
    plan: PrecisionPlan,
    moments: tuple[Moment, ...],
) -> list[Row]:
    """The models beside the policy, but for their forward and backward."""
    rows = []
    there: tuple[Moment, ...]
    if _measures(settings):
        there = ("reference",) if settings.reference.offload else moments
        size = frozen_bytes(others.reference or config, plan)
        rows.append(_always(there, "reference: working copies alone", size))
    if settings.critic.path is not None:
        of = (others.critic or config).with_scalar_head()
        size = 4 * num_parameters(of) + optimizer_bytes(settings, of) + working_bytes(of, plan)
        rows.append(_always(moments, "critic: masters, optimizer states, copies", size))
    if others.reward is not None:
        there = ("reward",) if settings.reward.offload else moments
        size = frozen_bytes(others.reward, plan)
        rows.append(_always(there, "reward model: working copies alone", size))
    return rows


def _forwards(
    settings: Settings,
    config: ModelConfig,
    others: OtherModels,
    plan: PrecisionPlan,
    load: Load,
    wanted: int,
    moments: tuple[Moment, ...],
) -> list[Row]:
    """Of a reward model and a reference, without gradients, of as many tokens as a micro-batch."""
    completions = settings.rollout.prompts_per_step * settings.rollout.samples_per_prompt
    tokens = min(max(wanted, load.tokens), completions * load.tokens)
    rows = []
    if others.reward is not None:
        size = activations.forward_bytes(others.reward, plan, tokens)
        rows.append(Row(f"reward model: a forward of {tokens} tokens", {"reward": size}))
    if "reference" in moments:
        of = others.reference or config
        size = activations.forward_bytes(of, plan, tokens) + activations.chunk_bytes(of, tokens)
        rows.append(Row(f"reference: a forward of {tokens} tokens", {"reference": size}))
    return rows


def _rollout(
    settings: Settings,
    config: ModelConfig,
    plan: PrecisionPlan,
    load: Load,
    left: int | None,
    moments: tuple[Moment, ...],
) -> list[Row]:
    """left: bytes of the device beside what is there in any case; None: as many as it takes.
    moments: those when decode's graphs are there."""
    rollout = settings.rollout
    contexts = most_contexts(rollout.max_prefill_tokens, load.sequences, load.tokens)
    page = rollout.page_size * kv_bytes_per_token(config, plan)
    needed = -(-load.tokens // rollout.page_size)
    pages = rollout.num_pages or needed * load.sequences
    if left is not None and rollout.num_pages is None:
        room = gpu_pages_room(left, contexts * staged_bytes_per_token(config, plan))
        pages = max(needed, min(pages, room // page))
    what = f"KV pages: {pages} of {rollout.page_size} tokens"
    # Where pages are short, sequences lose theirs, and go on like completions that were cut off.
    goes_on = load.goes_on or pages < needed * load.sequences
    read = load.sequences * load.tokens if goes_on else load.prompts
    prompts = min(rollout.max_prefill_tokens, read)
    logits = 4 * load.sequences * config.vocab_size
    # Decode's graphs keep what a forward of the largest batch makes; the first tokens after prompts
    # are drawn from logits outside of them, at most as many.
    graphs = activations.forward_bytes(config, plan, load.sequences) + logits
    decode = dict.fromkeys(moments, graphs) | {"rollout": graphs + logits}
    prefill = activations.forward_bytes(config, plan, prompts, contexts if goes_on else 0)
    over = f", contexts of {contexts}" if goes_on else ""
    return [
        Row(what, {"rollout": pages * page}),
        Row("decode's graphs and logits", decode),
        Row(f"a forward of {prompts} prompt tokens{over}", {"rollout": prefill}),
    ]


def _training(
    whose: str,
    moment: Moment,
    config: ModelConfig,
    plan: PrecisionPlan,
    batch: MicroBatch,
    settings: Settings,
) -> list[Row]:
    """Gradients and activations of one model's update. With one micro-batch nothing but lm_head's
    gradient is there when its activations are."""
    end: Moment = "optimizer" if moment == "backward" else moment
    gradients = 4 * num_parameters(config)
    head = 1 if config.head == "score" else config.vocab_size
    first = gradients if batch.several else 4 * head * config.hidden_size
    recomputed = settings.train.activation_checkpointing
    kept = activations.kept_bytes(config, plan, batch.tokens, recomputed)
    on_top = activations.on_top_bytes(config, plan, batch, recomputed)
    last = activations.last_bytes(config, plan, batch)
    if end == moment:  # one column: the higher of begin and end
        if not batch.several and gradients + last > first + kept + on_top:
            first, kept, on_top = gradients, 0, last
        sizes = {moment: first}, {moment: kept}, {moment: on_top}
    else:
        sizes = (
            {moment: first, end: gradients},
            {moment: kept},
            {moment: on_top, end: last},
        )
    names = ("gradients, FP32", f"activations of {batch.tokens} tokens", "while gradients are made")
    return [Row(whose + name, size) for name, size in zip(names, sizes, strict=True)]
