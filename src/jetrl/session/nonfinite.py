"""What went wrong once, kept so that it can be run again: `jetrl replay`.

    runs/NAME/nonfinite/step_000007/
        reproduction.json           what it was, and where it was found first
        config.toml                 the run's settings
        masters.safetensors         the weights that it happened with
        micro_batches.safetensors   of an update: its packed tokens, log-probs and advantages
        samples.jsonl               of an update: its completions, to be read
        tokens.json                 of sampling: the sequence whose logits were not finite

Nothing in it is code. It is whole when reproduction.json is there, which is written last.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.runs.jsonl import write_atomically, write_jsonl
from jetrl.runs.rollout_records import record_of
from jetrl.session.building import build_critic, policy_of_masters
from jetrl.settings.loading import Settings, load_config, to_toml
from jetrl.training import Critic, SftTrainer, Trainer
from jetrl.training.checkpoint_files import write_tensors
from jetrl.training.first_nonfinite import Watch, watch
from jetrl.training.micro_batches import MicroBatch
from jetrl.types import Sample

FORMAT = 1
FACTS, CONFIG, MASTERS = "reproduction.json", "config.toml", "masters.safetensors"
MICRO_BATCHES, SAMPLES, TOKENS = "micro_batches.safetensors", "samples.jsonl", "tokens.json"

Kind = Literal["update", "supervised update", "sampling"]


@dataclass(frozen=True)
class Facts:
    """kind, step, update (its number in the step, from 0): what went wrong, and when. what: the
    numbers, in words. first: the first value that was not finite when it was repeated at once, ""
    if it did not happen again. seed: run.seed, that all draws are made from."""

    kind: Kind
    step: int
    update: int
    what: str
    first: str
    seed: int
    device: str
    format: int = FORMAT


@dataclass(frozen=True)
class Replay:
    """A reproduction that was run again. numbers: the update's metrics, or the largest logit.
    norms: the gradient norm of each parameter, those not finite first, then the largest. first:
    where the first value was that is not finite, "" if all are."""

    facts: Facts
    numbers: dict[str, float]
    norms: list[tuple[str, float]]
    first: str

    @property
    def finite(self) -> bool:
        return not self.first and all(math.isfinite(value) for value in self.numbers.values())


def keep(
    folder: Path,
    facts: Facts,
    settings: Settings,
    policy: Policy,
    micro_batches: Sequence[MicroBatch] = (),
    samples: Sequence[Sample] = (),
    token_ids: Sequence[int] = (),
    saved_masters: Path | None = None,
) -> None:
    """Writes a reproduction; one that is there already is replaced.

    Args:
        saved_masters: a file that holds the very weights: it is linked to instead of written again.

    Raises:
        OSError: it cannot be written.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_atomically(folder / CONFIG, to_toml(settings))
    try:
        linked = saved_masters is not None and _link(saved_masters, folder / MASTERS)
        if not linked:
            write_tensors(folder / MASTERS, policy.named_masters())
        if micro_batches:
            tensors = {
                f"{number}.{name}": tensor
                for number, micro in enumerate(micro_batches)
                for name, tensor in micro.to_tensors().items()
            }
            save_file(tensors, folder / MICRO_BATCHES)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    if samples:
        write_jsonl(folder / SAMPLES, (record_of(facts.step, sample) for sample in samples))
    if token_ids:
        write_atomically(folder / TOKENS, json.dumps(list(token_ids)))
    write_atomically(folder / FACTS, json.dumps(asdict(facts), indent=1) + "\n")


def replay(path: Path, preset: str | None = None, device: str | None = None) -> Replay:
    """Runs a reproduction again: the forwards and backwards of its update, or the forward of its
    sequence, with every operation looked at. No weight is changed.

    Args:
        path: its folder, or the reproduction.json in it. preset: another precision plan than the
            run's. device: another than the run's.

    Raises:
        UserError: it is none, or damaged; the model or task that it needs is not there.
    """
    folder = path.parent if path.name == FACTS else path
    facts, settings = _read_facts(folder), load_config(folder / CONFIG)
    if device is not None:
        run = settings.run.model_copy(update={"device": device})
        settings = settings.model_copy(update={"run": run})
    plan = (
        PrecisionPlan.from_settings(settings.precision)
        if preset is None
        else PrecisionPlan.preset(preset)
    )
    policy = policy_of_masters(settings, plan, folder / MASTERS)
    if facts.kind == "sampling":
        tokens = _token_ids(folder)
        with watch(policy) as seen:
            largest = forward_again(policy, tokens)
        return Replay(facts, {"largest |logit|": largest}, [], _words(seen))
    trainer = _trainer(facts, policy, settings)
    micro_batches = _micro_batches(folder, policy.device)
    with watch(policy) as seen:
        numbers = trainer.accumulate(micro_batches)
    norms = [
        (name, float(master.grad.norm()))
        for name, master in policy.named_masters().items()
        if master.grad is not None
    ]
    norms.sort(key=lambda item: (math.isfinite(item[1]), -item[1]))
    return Replay(facts, numbers, norms, _words(seen))


def forward_again(policy: Policy, token_ids: Sequence[int]) -> float:
    """The trainer's forward of a sequence, whose operations give the sampler's bits. Returns the
    largest |logit| of its last token."""
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
    if facts.kind == "supervised update":
        return SftTrainer(policy, settings)
    value_model = build_critic(settings, policy)
    critic = None if value_model is None else Critic(value_model, settings)
    # What the reference said is in the micro-batches: any policy takes its place.
    return Trainer(policy, settings, reference=policy, critic=critic)


def _words(seen: Watch) -> str:
    return "" if seen.first is None else str(seen.first)


def _read_facts(folder: Path) -> Facts:
    file = folder / FACTS
    try:
        facts = Facts(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no reproduction ({FACTS}); give a folder of runs/NAME/nonfinite"
        ) from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: not a reproduction's: {error}") from None
    if facts.format != FORMAT:
        raise UserError(f"{file}: format {facts.format}; this version reads {FORMAT}")
    return facts


def _micro_batches(folder: Path, device: torch.device) -> list[MicroBatch]:
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in _load(folder / MICRO_BATCHES).items():
        number, _, field = name.partition(".")
        parts.setdefault(int(number), {})[field] = tensor
    return [MicroBatch.from_tensors(parts[number], device) for number in sorted(parts)]


def _token_ids(folder: Path) -> list[int]:
    try:
        token_ids = json.loads((folder / TOKENS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / TOKENS}: {error}") from None
    if not isinstance(token_ids, list) or not token_ids or {*map(type, token_ids)} != {int}:
        raise UserError(f"{folder / TOKENS}: not the token ids of a sequence")
    return token_ids


def _load(file: Path) -> Mapping[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: missing or damaged: {error}") from None
    return tensors


def _link(source: Path, target: Path) -> bool:
    with contextlib.suppress(OSError):  # another file system, or one without links: it is written
        os.link(source, target)
        return True
    return False
