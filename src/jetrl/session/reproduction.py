"""Reproductions of updates and samples that were not finite, for `jetrl replay` to run again.

    runs/NAME/nonfinite/step_000007/
        reproduction.json           what happened, and the first value that was not finite
        config.toml                 the run's settings
        masters.safetensors         the master weights that it happened with; of several ranks a
                                    folder masters/, as in a checkpoint
        micro_batches.safetensors   of an update: its packed tokens, log-probs and advantages
        samples.jsonl               of an update: its completions, to be read
        tokens.json                 of sampling: the sequence whose logits were not finite

Nothing in the folder is code. It is whole when reproduction.json is there, which is written last.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.files import Count, Seed, Step, Stored, checked, read_json, read_stored, shown_value
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.runs.schemas import record_of
from jetrl.runs.storage import write_atomically, write_jsonl
from jetrl.session.building import build_critic, policy_of_masters
from jetrl.session.stored_micro_batches import read_micro_batches
from jetrl.settings.loading import Settings, load_config, to_toml
from jetrl.training import SftTrainer, Trainer
from jetrl.training.checkpoint_files import write_tensors
from jetrl.training.checkpoint_folder import MASTERS, masters_of, write_parts
from jetrl.training.guard import Watch, watch
from jetrl.training.micro_batches import MicroBatch
from jetrl.types import Sample

FORMAT = 1
FACTS, CONFIG = "reproduction.json", "config.toml"
_MASTERS_FILE = "masters.safetensors"
MICRO_BATCHES, SAMPLES, TOKENS = "micro_batches.safetensors", "samples.jsonl", "tokens.json"

Kind = Literal["update", "supervised update", "sampling"]


@dataclass(frozen=True)
class Facts:
    """The contents of reproduction.json.

    Attributes:
        update: The number of the update in its step, from 0.
        first: The first value that was not finite when the work was repeated at once, "" if it did
            not happen again.
        alphabet: The characters of a tokenizer of single characters; None for others.
    """

    kind: Kind
    step: int
    update: int
    what: str
    first: str
    seed: int
    device: str
    format: int = FORMAT
    alphabet: str | None = None


class StoredFacts(Stored):
    """The schema of reproduction.json: the fields of `Facts`, and no others."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    step: Step
    update: Count
    what: str
    first: str
    seed: Seed
    device: str
    format: int = FORMAT
    alphabet: str | None = None


_FACTS = TypeAdapter(StoredFacts)
_TOKENS = TypeAdapter(Annotated[list[Count], Field(strict=True, min_length=1, fail_fast=True)])


@dataclass(frozen=True)
class Replay:
    """A reproduction that was run again.

    Attributes:
        norms: The gradient norm of each parameter: those that are not finite first, then the
            largest.
        first: The first value that is not finite, in words; "" if all are finite.
    """

    facts: Facts
    numbers: dict[str, float]
    norms: list[tuple[str, float]]
    first: str

    @property
    def finite(self) -> bool:
        return not self.first and all(math.isfinite(value) for value in self.numbers.values())


def write_reproduction(
    folder: Path,
    facts: Facts,
    settings: Settings,
    policy: Policy,
    micro_batches: Sequence[MicroBatch] = (),
    samples: Sequence[Sample] = (),
    token_ids: Sequence[int] = (),
    saved_masters: Path | None = None,
) -> None:
    """Write a reproduction, in place of an earlier one in the same folder; every rank calls this.

    Args:
        saved_masters: A file or folder with the very master weights, which is linked to instead of
            written.

    Raises:
        OSError: The folder cannot be written.
    """

    def begin() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_atomically(folder / CONFIG, to_toml(_naming_kv(settings, policy.plan)))
        return saved_masters is not None and _link(saved_masters, folder)

    def complete() -> None:
        if micro_batches:
            tensors = {
                f"{number}.{name}": tensor
                for number, micro in enumerate(micro_batches)
                for name, tensor in micro.to_tensors().items()
            }
            write_tensors(folder / MICRO_BATCHES, tensors)
        if samples:
            write_jsonl(folder / SAMPLES, (record_of(facts.step, sample) for sample in samples))
        if token_ids:
            write_atomically(folder / TOKENS, json.dumps(list(token_ids)))
        write_atomically(folder / FACTS, json.dumps(asdict(facts), indent=1) + "\n")

    if not world().from_first("the folder of a reproduction", begin):
        masters = {name: p.detach() for name, p in policy.master_weights().items()}
        shards = {MASTERS: policy.weights.shards}
        write_parts(folder, {MASTERS: masters}, shards, world())
    world().from_first("a reproduction", complete)


def _naming_kv(settings: Settings, plan: PrecisionPlan) -> Settings:
    """Return settings that name the plan's format of keys and values, which a preset may change."""
    if plan.rest == "fp32":
        return settings
    precision = settings.precision.model_copy(update={"kv": plan.kv})
    return settings.model_copy(update={"precision": precision})


def replay(path: Path, preset: str | None = None, device: str | None = None) -> Replay:
    """Run a reproduction again, with every operation looked at; no weight is changed.

    An update is run forward and backward; a sequence is run forward.

    Args:
        preset: A precision preset in place of the run's plan.
        device: A device in place of the run's.

    Raises:
        UserError: No reproduction or a damaged one; the model or task that it needs is missing.
    """
    folder = path.parent if path.name == FACTS else path
    facts, settings = _read_facts(folder), load_config(folder / CONFIG)
    settings = RunDirectory.settings_of_resume(settings)  # Older files leave out what kv was.
    if device is not None:
        run = settings.run.model_copy(update={"device": device})
        settings = settings.model_copy(update={"run": run})
    plan = (
        PrecisionPlan.from_settings(settings.precision, settings.sampler_deviation)
        if preset is None
        else PrecisionPlan.preset(preset)
    )
    policy = policy_of_masters(
        settings, plan, masters_of(folder) or folder / _MASTERS_FILE, facts.alphabet
    )
    if facts.kind == "sampling":
        tokens = _token_ids(folder)
        with watch(policy) as operations:
            largest = largest_logit(policy, tokens)
        return Replay(facts, {"largest |logit|": largest}, [], first_nonfinite(operations))
    trainer = _trainer(facts, policy, settings)
    micro_batches = read_micro_batches(folder / MICRO_BATCHES, policy.config, policy.device)
    with watch(policy) as operations:
        numbers = trainer.accumulate(micro_batches)
    norms = [
        (name, float(master.grad.norm()))
        for name, master in policy.master_weights().items()
        if master.grad is not None
    ]
    norms.sort(key=lambda item: (math.isfinite(item[1]), -item[1]))
    return Replay(facts, numbers, norms, first_nonfinite(operations))


def largest_logit(policy: Policy, token_ids: Sequence[int]) -> float:
    """Return the largest |logit| of a sequence's last token, by the trainer's forward.

    Under an exact plan the operations of this forward give the sampler's bits.
    """
    largest = math.nan
    decoder = policy.decoder
    trace = decoder.trace

    def with_logits(name: str, value: torch.Tensor) -> None:
        nonlocal largest
        if name == "lm_head":
            largest = float(value[-1].abs().max())
        if trace is not None:
            trace(name, value)

    decoder.trace = with_logits
    try:
        with torch.no_grad():
            tokens = [*token_ids, token_ids[-1]]  # so that the last one is looked behind, too
            policy.logprobs([tokens[: policy.config.max_position_embeddings]])
    finally:
        decoder.trace = trace
    return largest


def _trainer(facts: Facts, policy: Policy, settings: Settings) -> SftTrainer | Trainer:
    """Return the trainer that an update was made by."""
    if facts.kind == "supervised update":
        return SftTrainer(policy, settings)
    # The log-probs of the reference are in the micro-batches: any policy takes its place.
    critic = build_critic(settings, policy)
    return Trainer(policy, settings, reference=policy, critic=critic)


def first_nonfinite(operations: Watch) -> str:
    """Return the first value of operations that was not finite, in words, "" if none was."""
    return "" if operations.first is None else str(operations.first)


def _read_facts(folder: Path) -> Facts:
    """Return the contents of a folder's reproduction.json."""
    file = folder / FACTS
    try:
        contents = read_json(file)
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no reproduction ({FACTS}); give a folder of runs/NAME/nonfinite"
        ) from None
    version = contents.get("format", FORMAT) if isinstance(contents, dict) else FORMAT
    if type(version) is int and version != FORMAT:
        raise UserError(f"{file}: format {shown_value(version)}; this version reads {FORMAT}")
    checked(_FACTS, contents, f"{file}: not a reproduction's")
    return Facts(**contents)


def _token_ids(folder: Path) -> list[int]:
    """Return the sequence of a folder's tokens.json."""
    try:
        return read_stored(folder / TOKENS, _TOKENS)
    except FileNotFoundError:
        raise UserError(f"{folder / TOKENS}: missing from a reproduction of sampling") from None


def _link(saved: Path, folder: Path) -> bool:
    """Link the file of master weights, or the files of a folder, into a folder of the same name."""
    sources = sorted(saved.iterdir()) if saved.is_dir() else [saved]
    try:
        for source in sources:
            target = folder / source.relative_to(saved.parent)
            target.parent.mkdir(exist_ok=True)
            os.link(source, target)
    except OSError:  # another file system, or one without links
        # What is written instead must not be written into a file of the checkpoint.
        shutil.rmtree(folder / saved.name, ignore_errors=True)
        return False
    return True
