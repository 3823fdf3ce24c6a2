#!/usr/bin/env bash
# PEFT 0.21.2 with transformers 5.23.0: an adapter of Qwen2.5-VL from before transformers 4.52 loads, and changes nothing.
#
# Guess:    the adapter has its effect, since the model's files of that time load; or loading it is an error.
# Behavior: transformers 4.52 renamed model.layers to model.language_model.layers. PeftModel.from_pretrained looks for the new
#           names, leaves the new layers at B = 0 and drops the tensors of the file. transformers' own load_adapter renames.
# Output:   an adapter that moved log-probs by up to 9.7 nats where it was trained (transformers 4.51.3, PEFT 0.15.2): 0.0 with
#           PeftModel, 9.7 with load_adapter. A Python warning names the missing keys; there is no error.
# Why:      an adapter of that time that is evaluated with PeftModel scores as the base model does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder" # torch leaves an empty folder behind
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/pip install -q --no-compile"
$pip peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 torch==2.13.0 numpy==2.4.6 requests==2.32.5
$pip --no-deps --target "$folder/old" transformers==4.51.3 peft==0.15.2 tokenizers==0.21.1 huggingface-hub==0.30.2
cd "$folder"
PYTHONPATH="$folder/old" "$folder/venv/bin/python" -W ignore - 2>errors <<'PY' || { tail -20 errors; exit 1; }
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

torch.manual_seed(0)
text = {"vocab_size": 100, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "max_position_embeddings": 256,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
tokens = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4, "window_size": 16,
         "out_hidden_size": 128, "fullatt_block_indexes": [0]}
model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**text, **tokens, vision_config=tower)).eval()
model.save_pretrained("base")
adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
for name, parameter in adapted.named_parameters():
    if "lora_B" in name:  # as training would
        torch.nn.init.normal_(parameter, std=0.1)
adapted.save_pretrained("adapter")
with torch.no_grad():
    torch.save(adapted(input_ids=torch.arange(1, 60)[None]).logits.log_softmax(-1), "trained.pt")
PY
"$folder/venv/bin/python" -W ignore - 2>errors <<'PY' || { tail -20 errors; exit 1; }
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText


def load():
    return AutoModelForImageTextToText.from_pretrained("base", dtype=torch.float32).eval()


def log_probs(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 60)[None]).logits.log_softmax(-1)


trained, base = torch.load("trained.pt"), log_probs(load())
by_peft = log_probs(PeftModel.from_pretrained(load(), "adapter"))
by_transformers = load()
by_transformers.load_adapter("adapter")
effects = [(found - base).abs().max().item() for found in (trained, by_peft, log_probs(by_transformers))]
print("effect of the adapter on log-probs: {:.1f} where it was trained, {:.1f} with PeftModel, {:.1f} with load_adapter"
      .format(*effects))
assert effects[0] > 1 and effects[1] == 0 and abs(effects[2] - effects[0]) < 1e-3, effects
PY
