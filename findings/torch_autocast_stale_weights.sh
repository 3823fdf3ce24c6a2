#!/usr/bin/env bash
# torch 2.13.0: inside one autocast region, a model still computes with the weights from before optimizer.step().
#
# Guess:    a forward pass after the step uses the new weights.
# Behavior: autocast caches the BF16 copy of each FP32 parameter until the outermost region ends. A step changes the
#           parameter and not the copy, also under no_grad.
# Output:   weights go from 1 to -1: forward gives 4 before and 4 after the step, and -4 after the region.
# Why:      a training loop under one `with torch.autocast(...)` samples every rollout from the initial policy. Nothing
#           warns; the log-probs of sampler and trainer even agree. Open a region per forward pass, or pass
#           cache_enabled=False.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch


def train(cache):
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    x = torch.ones(1, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        before = model(x)
        before.sum().backward()
        optimizer.step()
        with torch.no_grad():
            inside = model(x).item()
    outside = model(x).item()
    print(f"cache_enabled={cache}: before {before.item():g}, after the step {inside:g}, after the region {outside:g}")
    return before.item(), inside, outside


assert train(True) == (4, 4, -4)
assert train(False) == (4, -4, -4)
PY
