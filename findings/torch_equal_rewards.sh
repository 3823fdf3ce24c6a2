#!/usr/bin/env bash
# torch 2.13.0 on a CPU: many groups of equal rewards get advantages that are not 0.
#
# Guess:    r - mean(r) is 0 for equal rewards, so (r - mean) / (std + eps) is 0 for any eps.
# Behavior: the float32 sum behind mean() rounds, so the mean can be one unit in the last place off. std() is 0 or as
#           small, and the difference is divided by little more than eps: 1e-4 in TRL 1.16.0, 1e-6 in verl 0.9.1.
# Output:   rewards 0.01, 0.02, ..., 0.99 in groups of 5 to 16: about half of the groups have an advantage other than 0, at
#           most 0.002 with eps 1e-4 and 0.2 with 1e-6. Rewards a thousand times larger: 1.8 and 180. The numbers vary
#           with the vector width of the CPU.
# Why:      a group without signal pushes all its samples up or down together, and more so the larger the rewards are. Set
#           the advantage to 0 if max == min, and keep rewards near 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch


def advantages(scale):
    found = []
    for size in (5, 6, 7, 8, 10, 12, 16):
        rewards = (torch.arange(1, 100) / 100 * scale)[:, None].expand(-1, size).contiguous()
        difference = rewards - rewards.mean(dim=1, keepdim=True)
        std = rewards.std(dim=1, keepdim=True)
        found.append(torch.stack([(difference / (std + eps))[:, 0].abs() for eps in (1e-4, 1e-6)]))
    small, tiny = torch.cat(found, dim=1)
    share = (small > 0).float().mean().item()
    print(f"rewards up to {scale}: {share:.0%} of the groups not 0, at most {small.max():.2g} (1e-4), {tiny.max():.2g} (1e-6)")
    return share, small.max().item(), tiny.max().item()


share, small, tiny = advantages(1)
assert share > 0.05 and tiny > 0.01
share, small, tiny = advantages(1000.1)
assert share > 0.05 and small > 0.1 and tiny > 0.5
PY
