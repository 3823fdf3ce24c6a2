#!/usr/bin/env bash
# TRL 1.16.0: with two reward functions, None from one of them counts as 0, not as "leave this sample out".
#
# Guess:    a reward function that cannot judge a sample returns None, and the sample does not count as wrong.
# Behavior: a sample is left out only if every function returns None. Otherwise the sum (multi_objective_aggregation at its
#           default, sum_then_normalize) ignores the None, which is the sum with 0 in its place. The metric of the
#           function (rewards/NAME/mean) does leave the sample out.
# Output:   correctness [None, 1, 1, 0] plus format [1, 1, 1, 1], scale_rewards "none": advantages [-0.5, 0.5, 0.5, -0.5].
#           The sample without a verdict is pushed down exactly like the wrong one, while rewards/correct/mean says 0.667.
# Why:      with a verifier that can time out and any second reward (format, length), a timeout is punished as an error.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export TMPDIR="$folder" # torch leaves an empty folder behind
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile trl==1.16.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 \
  torch==2.13.0 numpy==2.4.6
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/errors" <<'PY' || { tail -20 "$folder/errors"; exit 1; }
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer

words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklm"]
backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=1, pad_token_id=0,
    )
)  # fmt: skip


def correct(completions, **columns):
    return [None, 1.0, 1.0, 0.0]


def form(completions, **columns):
    return [1.0, 1.0, 1.0, 1.0]


found = []


class Trainer(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        found.append(batch["advantages"].tolist())
        return batch


settings = GRPOConfig(
    output_dir="out", per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=1,
    logging_steps=1, scale_rewards="none", use_cpu=True, bf16=False, report_to=[], disable_tqdm=True,
)  # fmt: skip
trainer = Trainer(
    model, [correct, form], args=settings, processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"prompt": "a b"}] * 4),
)  # fmt: skip
trainer.remove_callback(PrinterCallback)
trainer.train()
mean = float(trainer.state.log_history[0]["rewards/correct/mean"])
print("correct [None, 1, 1, 0] + form [1, 1, 1, 1]: advantages", found[0], "rewards/correct/mean", round(mean, 3))
assert found[0] == [-0.5, 0.5, 0.5, -0.5]
assert abs(mean - 2 / 3) < 1e-6
PY
