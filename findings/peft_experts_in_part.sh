#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.23.0: an adapter of experts loads in part if the model has other MLPs beside them.
#
# Guess:    an adapter that was trained with transformers 4 has its effect, or loading it is an error.
# Behavior: transformers 5 holds all experts of a layer in one tensor, and PEFT converts adapters of single experts on loading.
#           That works if every MLP is of experts. With dense layers (mlp_only_layers) or shared experts, it does not.
# Output:   adapters trained with transformers 4.57.3 and PEFT 0.18.0 on q_proj, gate_proj, up_proj and down_proj. Experts in
#           all layers: log-probs are 5e-6 off. One of two layers dense: 3.0 off, of an effect of 3.7. Shared experts: 3.3 of
#           4.5. The warnings (rank_pattern keys were ignored) are the same in all three cases.
# Why:      the adapter is evaluated as another, worse one. Merge it with the versions that trained it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder" # torch leaves an empty folder behind
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip install -q --no-compile"
$pip peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 requests==2.32.5
$pip --no-deps --target "$folder/old" transformers==4.57.3 peft==0.18.0 tokenizers==0.22.1 huggingface-hub==0.36.0
cd "$folder"
PYTHONPATH="$folder/old" "$folder/venv/bin/python" -W ignore - 2>errors <<'PY' || { tail -20 errors; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_experts": 4,
         "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 32, "initializer_range": 0.2, "max_position_embeddings": 256}
configs = {"experts in all layers": Qwen3MoeConfig(**sizes), "a dense layer": Qwen3MoeConfig(**sizes, mlp_only_layers=[0]),
           "shared experts": Qwen2MoeConfig(**sizes, shared_expert_intermediate_size=32)}
for name, config in configs.items():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(f"{name}/base")
    with torch.no_grad():
        base = model(input_ids=torch.arange(1, 60)[None]).logits.log_softmax(-1)
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets)).eval()
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:  # as training would
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(f"{name}/adapter")
    with torch.no_grad():
        trained = adapted(input_ids=torch.arange(1, 60)[None]).logits.log_softmax(-1)
    torch.save((base, trained), f"{name}/log_probs.pt")
PY
"$folder/venv/bin/python" -W ignore - 2>errors <<'PY' || { tail -20 errors; exit 1; }
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def log_probs(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, 60)[None]).logits.log_softmax(-1)


for name in ("experts in all layers", "a dense layer", "shared experts"):
    bare, trained = torch.load(f"{name}/log_probs.pt")
    base = AutoModelForCausalLM.from_pretrained(f"{name}/base", dtype=torch.float32)
    before = log_probs(base)
    assert (before - bare).abs().max() < 1e-3, "the base itself is the same"
    loaded = log_probs(PeftModel.from_pretrained(base, f"{name}/adapter"))
    effect, missed = ((x - trained).abs().max().item() for x in (before, loaded))
    whole = name == "experts in all layers"
    print(f"{name}: the adapter moves log-probs by up to {effect:.2f}; loaded, they are up to {missed:.2g} off")
    assert effect > 1 and (missed < 1e-3) == whole, (effect, missed)
PY
