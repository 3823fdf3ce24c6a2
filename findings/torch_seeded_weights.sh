#!/usr/bin/env bash
# torch 2.13.0 on a CPU: the same seed gives other normal weights with other vector instructions.
#
# Guess:    normal_ with a seeded generator depends on the version of torch and the kind of device only; uniform_ of the same
#           seed is the same on all CPUs.
# Behavior: normal_ turns uniform numbers into normal ones by vectorized log, cos and sqrt, whose last bits depend on the
#           CPU's instructions. uniform_ is equal.
# Output:   1,000,000 values, one seed, with and without ATEN_CPU_CAPABILITY=default on one AVX512 machine: 385013 differ,
#           by up to 2.3e-06; of uniform_ none.
# Why:      a model or an adapter that is initialized from a seed on two machines is not the same model; ship the weights,
#           or draw uniform numbers and transform them with operations that are rounded once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile torch==2.13.0 numpy==2.4.6
cat > "$folder/draw.py" <<'PY'
import sys

import torch

drawn = {}
for name in ("normal_", "uniform_"):
    drawn[name] = getattr(torch.empty(1_000_000), name)(generator=torch.Generator().manual_seed(0))
drawn["capability"] = torch.backends.cpu.get_cpu_capability()
torch.save(drawn, sys.argv[1])
PY
"$folder/venv/bin/python" "$folder/draw.py" "$folder/best.pt"
ATEN_CPU_CAPABILITY=default "$folder/venv/bin/python" "$folder/draw.py" "$folder/default.pt"
"$folder/venv/bin/python" - "$folder/best.pt" "$folder/default.pt" <<'PY'
import sys

import torch

best, default = map(torch.load, sys.argv[1:])
if best["capability"] == default["capability"]:
    sys.exit("this CPU has no vector instructions beyond the default: nothing to compare")
normal, uniform = (best[name] != default[name] for name in ("normal_", "uniform_"))
apart = (best["normal_"] - default["normal_"]).abs().max().item()
print(f"normal_: {int(normal.sum())} of {len(normal)} values differ, by up to {apart:.1e}; uniform_: {int(uniform.sum())}")
assert normal.sum() > 10_000 and not uniform.any()
PY
