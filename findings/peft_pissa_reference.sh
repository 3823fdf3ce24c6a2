#!/usr/bin/env bash
# PEFT 0.21.2: with PiSSA or OLoRA initialization, disable_adapter() does not give back the base model.
#
# Guess:    with the adapter off, the model is the base model, as with any LoRA.
# Behavior: these initializations move a part of each weight into the adapter. What stays in the layer is the rest, so the
#           model without the adapter is a damaged one. Nothing warns.
# Output:   outputs with the adapter off are 34% (PiSSA) and 25% (OLoRA) away from the base model's, 0% for plain LoRA.
# Why:      trainers with LoRA take the model with the adapter off as the reference of the KL penalty. Here the penalty
#           starts far from 0 and pulls toward the damaged model.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)


def distance(kind):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False))
    torch.nn.init.normal_(model[0].weight, std=0.02)
    x = torch.randn(64, 256)
    base = model(x).detach()
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=["0"], init_lora_weights=kind))
    on = (adapted(x) - base).norm() / base.norm()
    with adapted.disable_adapter():
        off = (adapted(x) - base).norm() / base.norm()
    print(f"init_lora_weights={kind!r}: distance to the base model {on:.2%} with the adapter on, {off:.2%} off")
    return on, off


assert max(distance(True)) < 1e-5
for kind in ("pissa", "olora"):
    on, off = distance(kind)
    assert on < 1e-5 and off > 0.1
PY
