#!/usr/bin/env bash
# PEFT 0.21.2: merge_adapter() and unmerge_adapter() on BF16 weights move the base model, further as the adapter learns.
#
# Guess:    unmerge restores the weights, or leaves one rounding error that does not grow.
# Behavior: merging adds the delta and rounds, unmerging subtracts it and rounds again. There is no copy to go back to. If
#           the adapter learns between calls, new errors add to the old ones; if it does not, the drift stays.
# Output:   weights near 0.02, delta near 2e-4. 2% of the weights changed after 1 call, 36% after 500; drift 3.6% of the
#           adapter's delta after 1 call, 25.1% after 500. With an adapter that does not learn: 2% and 3.7% after 500.
# Why:      trainers sync LoRA weights to a sampler by merge, send, unmerge at each step (TRL 1.16.0 does). The frozen base,
#           the KL reference and the adapter that is saved at the end then belong to different models.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder" # torch leaves an empty folder behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
from peft import LoraConfig, get_peft_model


def drifts(rate):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False))
    torch.nn.init.normal_(model[0].weight, std=0.02)
    model.bfloat16()
    start = model[0].weight.detach().float()
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["0"]))
    layer = adapted.base_model.model[0]
    b = layer.lora_B["default"].weight
    b.data.normal_(std=1e-3)
    found = {}
    for step in range(1, 501):
        b.data.add_(torch.randn_like(b) * rate)
        adapted.merge_adapter()
        adapted.unmerge_adapter()
        if step in (1, 10, 100, 500):
            drift = layer.base_layer.weight.detach().float() - start
            share = (drift != 0).float().mean().item()
            size = (drift.norm() / layer.get_delta_weight("default").float().norm()).item()
            print(f"{step} calls: {share:.0%} of the base weights changed, drift {size:.1%} of the adapter's delta")
            found[step] = size
    return found


print("an adapter that learns at a rate of 1e-5")
learning = drifts(1e-5)
print("an adapter that does not learn")
still = drifts(0)
assert learning[500] > 0.15 and learning[500] > 4 * learning[1]
assert 0 < still[500] < 1.5 * still[1]
PY
