#!/usr/bin/env bash
# transformers 5.23.0: packed sequences attend to each other unless use_cache=False is passed.
#
# Guess:    position_ids that start again at 0 separate the packed sequences, or never do.
# Behavior: a forward pass without attention_mask finds the borders in position_ids, but only if there is no cache. By
#           default a model makes an empty cache, and then the second sequence sees the first. An attention_mask of ones
#           has the same effect.
# Output:   difference from separate forward passes: 0.3 in the logits by default and with a mask of ones; 1e-7 with
#           use_cache=False and no mask.
# Why:      log-probs of packed rollouts depend on an argument about generation. Old log-probs from a plain call and a
#           training pass with use_cache=False (or gradient checkpointing) then differ with the same weights.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder" # torch leaves an empty folder behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.23.0 torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
model = Qwen3ForCausalLM(config).eval()
tokens = torch.randint(0, 64, (1, 12))
positions = torch.tensor([[*range(5), *range(7)]])
with torch.no_grad():
    separate = torch.cat([model(tokens[:, :5]).logits, model(tokens[:, 5:]).logits], dim=1)

    def difference(label, **arguments):
        packed = model(tokens, position_ids=positions, **arguments).logits
        found = (packed - separate).abs().max().item()
        print(f"packed, {label}: largest difference {found:.2g}")
        return found

    assert difference("default") > 0.01
    assert difference("use_cache=False", use_cache=False) < 1e-5
    ones = torch.ones_like(tokens)
    assert difference("use_cache=False and a mask of ones", use_cache=False, attention_mask=ones) > 0.01
PY
