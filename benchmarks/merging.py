"""The price of sampling with an adapter that stays beside its FP8 base, and that of merging it.

    python -m benchmarks.merging --out FILE.json
    python -m benchmarks.merging --shape tiny --device cpu

Two policies have the same random base and the same adapter, whose B is random with a given standard
deviation. One keeps the adapter beside the base, as training does. The other has the adapter merged
into the base's weights before these are rounded to FP8. For each deviation:

    error, changed    what is left of the adapter's change in the merged weights
    effect            mean absolute difference of log-probs that the adapter makes to the base
    merged            mean absolute difference of log-probs between a sampler with merged weights
                      and the trainer, whose adapter stays apart; K3 KL; tokens that differ
    unmerged          the same with the adapter apart on both sides

The decode step of both is timed at each batch size, on a GPU alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from benchmarks.harness import Row, begins, command_typed, print_table, write_results
from benchmarks.parity import ALPHA, make_policy
from benchmarks.rollout import run_case
from benchmarks.shapes import SHAPES
from torch import Tensor

from jetrl.models.adapter import LoRA
from jetrl.models.peft import MergedWeights
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights
from jetrl.precision.quantize import FP8_BLOCK, dequantize, quantize
from jetrl.rollout.engine import RolloutEngine
from jetrl.types import SamplingParams

RANK, DEVIATIONS, BATCHES = 32, (1e-3, 4e-3, 2e-2), (8, 64, 256)
_SEQUENCES, _TOKENS = 64, 256  # of a comparison
_TEMPERATURE = 0.6
_MEASURED_LINEARS = 28


@dataclass(frozen=True)
class MergingLoss:
    """The loss of an adapter's change when the merged weights are rounded to a format.

    Attributes:
        error: The norm of the difference between the change of the rounded weights and the
            adapter's change, over the norm of the latter; 1 where rounding leaves nothing of it.
        changed: The share of the stored numbers that the adapter changes.
    """

    error: float
    changed: float


def merging_losses(base: Mapping[str, Tensor], merged: MergedWeights) -> dict[str, MergingLoss]:
    """Return the losses of merging into BF16 and into FP8, by format; none where nothing changes.

    They are measured on linear layers from the first to the last, 28 at most.
    """
    step = max(1, -(-len(merged.shapes) // _MEASURED_LINEARS))
    sums = {format: torch.zeros(4, dtype=torch.float64) for format in ("bfloat16", "fp8")}
    for layer in list(merged.shapes)[::step]:
        change = merged.change(layer)
        before = base[f"{layer}.weight"].to(change.device, torch.float32)
        for format, total in sums.items():
            left, left_stored = _rounded(before, format)
            right, right_stored = _rounded(before + change, format)
            error = (right - left - change).double().square().sum()
            differ = (right_stored != left_stored).sum()
            numbers = (error, change.double().square().sum(), differ, change.numel())
            total += torch.tensor([float(n) for n in numbers], dtype=torch.float64)
    losses = {}
    for format, (error, norm, differ, count) in ((f, t.tolist()) for f, t in sums.items()):
        if norm:
            losses[format] = MergingLoss((error / norm) ** 0.5, differ / count)
    return losses


def _rounded(weight: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Return a weight rounded to a format, as float32, and the stored numbers: of FP8 the codes."""
    if format == "bfloat16":
        rounded = weight.bfloat16().float()
        return rounded, rounded
    quantized = quantize(weight, (FP8_BLOCK, FP8_BLOCK))
    return dequantize(quantized), quantized.codes.view(torch.uint8)


def set_deviation(policy: Policy, deviation: float) -> None:
    """Draw B of every adapter anew, with a standard deviation."""
    generator = torch.Generator(policy.device).manual_seed(1)
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith("lora_B"):
                master.normal_(0.0, deviation, generator=generator)
    policy.requantize()


def base_of(policy: Policy) -> RandomWeights:
    """Return the base's weights, made again when they are asked for."""
    return RandomWeights(policy.config, 0, policy.device)


def merged_weights(policy: Policy) -> MergedWeights:
    """Return the base's weights with the policy's adapter merged in."""
    lora, masters = LoRA(RANK, ALPHA), policy.master_weights()
    return MergedWeights(policy.config, lora, base_of(policy), masters, policy.device)


def frozen(policy: Policy, weights: RandomWeights | MergedWeights) -> Policy:
    """Return a policy of the same plan that holds weights without an adapter and trains none."""
    source = ModelSource.from_tensors(policy.config, weights)
    return Policy(source, policy.plan, policy.device, trains=lambda name: False)


@torch.no_grad()
def differences(sampler: Policy, trainer: Policy) -> Row:
    """Return how far the log-probs of a sampler's tokens are from those of a trainer."""
    prompts = np.random.default_rng(0).integers(0, sampler.config.vocab_size, (_SEQUENCES, 64))
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True, seed=1, temperature=_TEMPERATURE)
    engine = RolloutEngine(sampler, max_batch_size=_SEQUENCES)
    completions = engine.generate(prompts.tolist(), params)
    engine.free_cache()
    ours, theirs = [], []
    for prompt, completion in zip(prompts.tolist(), completions, strict=True):
        (found,) = trainer.logprobs([[*prompt, *completion.token_ids]], _TEMPERATURE)
        theirs.append(found[len(prompt) - 1 :].cpu())
        ours.append(torch.tensor(completion.logprobs))
    left, right = torch.cat(ours), torch.cat(theirs)
    ratio = (right - left).double()
    return {
        "mean_abs_difference": float(ratio.abs().mean()),
        "k3": float((ratio.exp() - 1 - ratio).mean()),
        "different": int((left.view(torch.int32) != right.view(torch.int32)).sum()),
        "tokens": left.numel(),
    }


def row_of(policy: Policy, deviation: float, batches: Sequence[int]) -> Row:
    """Return the row of an adapter whose B has a standard deviation."""
    begins(f"B with a deviation of {deviation:g}: what rounding leaves of it")
    set_deviation(policy, deviation)
    merged = merged_weights(policy)
    losses = merging_losses(base_of(policy), merged)
    row: Row = {"deviation_of_b": deviation}
    for name, loss in losses.items():
        row |= {f"{name}_error": round(loss.error, 4), f"{name}_changed": round(loss.changed, 4)}
    begins("differences of log-probs")
    base = frozen(policy, base_of(policy))
    row["effect"] = differences(base, policy)
    del base
    whole = frozen(policy, merged)
    row["merged"] = differences(whole, policy)
    row["unmerged"] = differences(policy, policy)
    for batch in batches:
        begins(f"decode of {batch} sequences")
        times = {}
        for name, each in (("unmerged", policy), ("merged", whole)):
            times[name] = run_case(each, (batch, 128, 128), False)["decode_ms"]
        ratio = round(times["unmerged"] / times["merged"], 4)
        row[f"decode_ms_{batch}"] = {**times, "unmerged_over_merged": ratio}
    return row


def main(argv: Sequence[str] | None = None) -> None:
    """Measure both policies for each deviation, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--device", default="cuda", help="cpu: to try it out, nothing is written")
    parser.add_argument("--out", default="build/bench/merging.json", help="JSON file")
    args = parser.parse_args(argv)
    on_gpu = args.device == "cuda"
    policy = make_policy(args.shape, "unified", args.device, args.layers, adapter_rank=RANK)
    rows: list[Row] = []
    for deviation in DEVIATIONS:
        batches = BATCHES if on_gpu and not rows else ()
        rows.append({"shape": args.shape, **row_of(policy, deviation, batches)})
        print_table(rows[-1:])
        if on_gpu:
            command = command_typed("python -m benchmarks.merging", argv)
            write_results(args.out, "merging", command, rows, rank=RANK)


if __name__ == "__main__":
    main()
