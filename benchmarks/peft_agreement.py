"""How far transformers with peft is from jetrl, on an adapter's directory that jetrl wrote.

    pip install peft
    python -m benchmarks.peft_agreement --families qwen3 qwen2_5_vl --out found.json

For a tiny random model of each family, with its head tied to its embedding and not: an adapter of
rank 8 on all linear layers (of the language model, if the family has images), with random A and B
and, in the rows that say so, modules that are replaced whole. `by` names the writer: jetrl's
`save_pretrained` or peft's, which unties what it replaces unless `ensure_weight_tying` is set
(`kept tied`). transformers and peft read it over the same base. Differences are of the log-probs of
random tokens:

    effect              mean, that the adapter makes to its base
    fp32                largest, between jetrl under fp32 and peft in FP32
    bf16, unified       mean, between jetrl under that plan and peft in FP32
    peft_bf16           mean, between peft in BF16 and peft in FP32: the rounding's own size
    merged              mean, between the model of `jetrl export --merge` in transformers and peft
    written_back        if the adapter that peft saves gives jetrl the same bits
    continued           largest, between peft with what jetrl saves of the adapter after reading it,
                        without training what is replaced whole, and peft
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import print_table, write_results
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from jetrl.cli.main import main as jetrl
from jetrl.models import hf
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import FAMILIES
from jetrl.models.peft import read_adapter
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan

_PACKAGES = ("torch", "transformers", "peft")


def read(base: Path, preset: str, adapter: Path) -> Policy:
    """Return jetrl's policy with an adapter, of which only A and B would be trained."""
    adapter_here = read_adapter(adapter, hf.model_config(base))
    plan = PrecisionPlan.preset(preset).replace(bf16_rounding="nearest")  # as torch rounds for PEFT
    return Policy.from_pretrained(base, plan, adapter=adapter_here)


def ours(base: Path, preset: str, adapter: Path, tokens: Tensor) -> Tensor:
    """Return jetrl's log-probs of tokens [S, T], float32 [S, T - 1]."""
    with torch.no_grad():
        return torch.stack(read(base, preset, adapter).logprobs(tokens.tolist()))


def theirs(model: Any, tokens: Tensor) -> Tensor:
    """Return the log-probs of tokens [S, T] by a model of transformers, float32 [S, T - 1]."""
    with torch.no_grad():
        logprobs = model.eval()(tokens).logits.float().log_softmax(-1)
    return logprobs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def in_transformers(path: Path, dtype: torch.dtype) -> Any:
    """Return the model of a directory."""
    sees = hf.model_config(path).vision is not None
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=dtype)


def write_adapter(base: Path, path: Path, lora: LoRA) -> None:
    """Write an adapter with random numbers for a base."""
    plan = PrecisionPlan.preset("bf16")
    adapter = Adapter.new(hf.model_config(base), lora, seed=0)
    policy = Policy.from_pretrained(base, plan, adapter=adapter)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for master in policy.master_weights().values():
            master.add_(0.05 * torch.randn(master.shape, generator=generator))
    policy.save_pretrained(path)


def write_peft_adapter(base: Path, path: Path, modules: list[str], tied: bool) -> None:
    """Write an adapter with random numbers for a base, by peft."""
    from peft import LoraConfig, get_peft_model

    family = FAMILIES[hf.model_config(base).family]
    language = family.language_module
    targets = "all-linear" if family.vision is None else rf"{language}\.layers\..*_proj"
    config = LoraConfig(
        r=8, lora_alpha=32, target_modules=targets, ensure_weight_tying=tied, task_type="CAUSAL_LM",
        modules_to_save=[module.replace("LANGUAGE", language) for module in modules],
    )  # fmt: skip
    model = in_transformers(base, torch.float32)
    torch.manual_seed(0)  # of A
    model = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)


def write_with_jetrl(base: Path, path: Path, whole: bool) -> None:
    """Write an adapter with random numbers for a base; `whole`: with embedding, norms and head."""
    lora = LoRA(8, 32.0, train_embeddings=whole, train_norms=whole, train_head=whole)
    write_adapter(base, path, lora)


EVERYTHING = "embedding, norms, head"
# By, modules replaced whole, if the base ties its head, and the function that writes the adapter.
CASES: list[tuple[str, str, bool, Callable[[Path, Path], None]]] = [
    ("jetrl", "", True, partial(write_with_jetrl, whole=False)),
    ("jetrl", EVERYTHING, False, partial(write_with_jetrl, whole=True)),
    ("jetrl", EVERYTHING, True, partial(write_with_jetrl, whole=True)),
    ("peft", "norm", False, partial(write_peft_adapter, modules=["LANGUAGE.norm"], tied=False)),
    *(
        ("peft", shown, True, partial(write_peft_adapter, modules=modules, tied=tied))
        for shown, modules, tied in (
            ("embedding", ["embed_tokens"], False),
            ("head", ["lm_head"], False),
            ("embedding, head", ["embed_tokens", "lm_head"], False),
            ("embedding, kept tied", ["embed_tokens"], True),
        )
    ),
]


def row_of(
    family: str, by: str, whole: str, tied: bool, write: Callable[[Path, Path], None], folder: Path
) -> dict[str, Any]:
    """Return the row of a family and one of `CASES`, made in an empty folder."""
    from peft import PeftModel

    names = ("base", "adapter", "back", "merged", "continued")
    base, adapter, back, merged, continued = (folder / name for name in names)
    make_tiny(base, family, initializer_range=0.1, seed=3, tie_word_embeddings=tied)
    write(base, adapter)
    tokens = torch.randint(3, 90, (8, 48), generator=torch.Generator().manual_seed(2))

    def peft(dtype: torch.dtype, path: Path = adapter) -> Any:
        return PeftModel.from_pretrained(in_transformers(base, dtype), path)

    wide = peft(torch.float32)
    reference = theirs(wide, tokens)
    wide.save_pretrained(back)
    assert jetrl(["export", str(adapter), str(merged), "--merge"]) == 0
    model, merged_model = (in_transformers(path, torch.float32) for path in (base, merged))

    def mean(logprobs: Tensor) -> float:
        return float(f"{float((logprobs - reference).abs().mean()):.2g}")

    read(base, "fp32", adapter).save_pretrained(continued)
    again = theirs(peft(torch.float32, continued), tokens)
    same = ours(base, "fp32", adapter, tokens)
    return {
        "family": family,
        "tied": tied,
        "by": by,
        "replaced_whole": whole,
        "effect": mean(theirs(model, tokens)),
        "fp32": float(f"{float((same - reference).abs().max()):.2g}"),
        "bf16": mean(ours(base, "bf16", adapter, tokens)),
        "unified": mean(ours(base, "unified", adapter, tokens)),
        "peft_bf16": mean(theirs(peft(torch.bfloat16), tokens)),
        "merged": mean(theirs(merged_model, tokens)),
        "written_back": torch.equal(same, ours(base, "fp32", back, tokens)),
        "continued": float(f"{float((again - reference).abs().max()):.2g}"),
    }


def main() -> None:
    """Compare each family, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="build/bench/peft_agreement.json", type=Path)
    parser.add_argument("--families", nargs="+", choices=[*FAMILIES], default=[*FAMILIES])
    args = parser.parse_args()
    rows = []
    for family in args.families:
        for case in CASES:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(row_of(family, *case, Path(folder)))
    print_table(rows)
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    command = f"python -m benchmarks.peft_agreement --families {' '.join(args.families)}"
    write_results(args.out, "peft_agreement", command, rows, versions=versions)


if __name__ == "__main__":
    main()
