"""The standard run: two steps of a tiny model under `integer`, whose digest every machine shares.

A step samples, computes log-probs again, and updates the weights (GRPO; a completion's reward is
the parity of its last token). The digest is that of a run (`runs.digest`), so equal digests mean
equal tokens, log-probs, losses, gradient norms and weights.
"""

from __future__ import annotations

import numpy as np
import torch

from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import selected_backend
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import RolloutEngine
from jetrl.session.digest import RunDigest
from jetrl.settings.loading import load_config
from jetrl.training.trainer import Trainer
from jetrl.types import Prompt, PromptInputs, Sample, SamplingParams, Score

DIGEST = "8934ebe0659838ceb0a8d35fc4b8334e34f36bca5ddc3f75e2c9689d968dbeb5"
"""The digest of the standard run, on every machine."""

_SHAPE = {
    "model_type": "qwen3", "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 700,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip
_LENGTHS = (1, 40, 130)  # of prompts; some end in the second block of keys
_SAMPLES, _MAX_TOKENS, _STEPS = 4, 12, 2


def standard_digest(device: str, backend: str = "auto") -> str:
    """Run the standard run on a device, and return its digest in 64 hex digits."""
    plan = PrecisionPlan.preset("integer")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # synchronizing several takes longer than the work
    try:
        return _digest(plan, device, backend)
    finally:
        torch.set_num_threads(threads)


def _digest(plan: PrecisionPlan, device: str, backend: str) -> str:
    with selected_backend(backend, defined=plan.defined):
        policy = Policy.from_config(_SHAPE, plan, seed=0, device=device)
        trainer = Trainer(policy, load_config(None, ["train.lr=1e-3", f"loop.steps={_STEPS}"]))
        engine = RolloutEngine(policy, max_batch_size=8)
        digest = RunDigest()
        for step in range(1, _STEPS + 1):
            samples = _samples(policy, engine, step)
            metrics = trainer.step(samples).metrics
            assert metrics["policy/grad_norm"] > 0, "a step moves the weights"
            digest.advance(("rl", step), [policy], metrics, samples)
    return digest.text


def _samples(policy: Policy, engine: RolloutEngine, step: int) -> list[Sample]:
    random = np.random.Generator(np.random.Philox(derive_seed("standard run", step)))
    prompts = [random.integers(0, policy.config.vocab_size, n).tolist() for n in _LENGTHS]
    params = SamplingParams(n=_SAMPLES, max_tokens=_MAX_TOKENS, seed=step, ignore_eos=True)
    completions = engine.generate(prompts, params)
    return [
        Sample(
            prompt=Prompt(id=str(index // _SAMPLES), text="?"),
            group=index // _SAMPLES,
            inputs=PromptInputs(tuple(prompts[index // _SAMPLES])),
            completion=completion,
            score=Score(float(completion.token_ids[-1] % 2)),
        )
        for index, completion in enumerate(completions)
    ]
