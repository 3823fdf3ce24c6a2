#!/usr/bin/env bash
# transformers 5.23.0: Qwen2.5-VL without mm_token_type_ids numbers the tokens of images like text, and says nothing.
#
# Guess:    a forward with input_ids, pixel_values and image_grid_thw has the three rotary positions of image tokens, since
#           image_token_id in config.json says which these are; or it raises an error.
# Behavior: only with mm_token_type_ids, which the processor returns next to input_ids. Without it all three positions are
#           the token's index: of the image, whose rows and columns are lost, and of all text after it. Qwen3-VL raises an
#           error.
# Output:   8 x 8 image tokens and 9 others: the last is at position 72 instead of 16, and with random weights the log-probs
#           of the text after the image differ by up to 4.29 nats. No warning.
# Why:      a trainer that joins prompts and completions itself has longer input_ids than the processor's token types. If it
#           drops them, the log-probs of completions are those of other positions than the sampler's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile transformers==5.23.0 torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - 2>"$folder/errors" <<'PY' || { tail -20 "$folder/errors"; exit 1; }
import warnings

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

warnings.simplefilter("error")
torch.manual_seed(0)
IMAGE, AFTER = 90, 6
text = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
        "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}
tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "window_size": 16,
         "out_hidden_size": 128, "fullatt_block_indexes": [1], "initializer_range": 0.2}
config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, image_token_id=IMAGE, video_token_id=91,
                          vision_start_token_id=92, vision_end_token_id=93)
model = Qwen2_5_VLForConditionalGeneration(config).eval()
grid = torch.tensor([[1, 16, 16]])  # 8 x 8 tokens
input_ids = torch.tensor([[1, 92, *[IMAGE] * 64, 93, *range(2, 2 + AFTER)]])
given = {"input_ids": input_ids, "image_grid_thw": grid, "pixel_values": torch.randn(256, 96)}
types = (input_ids == IMAGE).int()
positions = []
model.model.language_model.rotary_emb.register_forward_pre_hook(lambda _, args: positions.append(args[1]))


def log_probs(**more):
    model.model.rope_deltas = None
    with torch.no_grad():
        found = model(**given, **more).logits[0, :-1].log_softmax(-1)
    return found.gather(1, input_ids[0, 1:, None])[-AFTER:, 0]


with_types, without = log_probs(mm_token_type_ids=types), log_probs()
last = [found[:, 0, -1].tolist() for found in positions]
apart = (with_types - without).abs().max().item()
print(f"last token at positions {last[0]} with mm_token_type_ids, {last[1]} without; "
      f"log-probs of the text after the image differ by up to {apart:.2f} nats")
assert last == [[16] * 3, [72] * 3], last
assert apart > 0.1, apart
PY
