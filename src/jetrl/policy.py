"""The policy: the only owner of weights. FP32 masters, their working copies, and two forward calls.

`rollout_forward` is what the sampler runs, `train_logprobs` what the trainer runs. Both go through
one decoder and one set of working copies; the optimizer changes masters, and `requantize` makes the
working copies anew, in the one place where a weight is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedTokenizerBase

from jetrl.errors import UserError
from jetrl.kernels.logprob import chosen_logprobs
from jetrl.models import hf
from jetrl.models.attention import KeyValues, PackedKeyValues
from jetrl.models.decoder import Decoder
from jetrl.models.families import ModelConfig
from jetrl.models.tiny import random_weights
from jetrl.precision.hopper import hopper
from jetrl.precision.linear import Linear
from jetrl.precision.plan import PrecisionPlan

_LOGITS_AT_ONCE = 2**24  # float32 logits held for one chunk of rows of the training side


class Policy:
    """A language model under a precision plan.

    config: what the decoder is made of. plan: what is FP8. tokenizer, generation_config: as in the
    Hugging Face directory, or None and {}.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: PrecisionPlan,
        weights: Mapping[str, Tensor],
        device: str | torch.device = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
        generation_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.plan, self.device = config, plan, torch.device(device)
        self._check_device()
        self.tokenizer = tokenizer
        self.generation_config = dict(generation_config or {})
        self._masters = {
            name: nn.Parameter(weight.to(self.device, torch.float32))
            for name, weight in weights.items()
        }
        self.decoder = Decoder(config, plan, self._masters)

    @classmethod
    def from_pretrained(
        cls, path: str | Path, plan: PrecisionPlan, device: str | torch.device = "cpu"
    ) -> Policy:
        """A policy from a Hugging Face directory (config.json, safetensors, tokenizer if present).

        Raises:
            UserError: what is missing, damaged or unsupported, by file and tensor name.
        """
        config = ModelConfig.from_hf(hf.read_config(path))
        weights = hf.load_weights(path, config)
        tokenizer = hf.load_tokenizer(path) if hf.has_tokenizer(path) else None
        return cls(config, plan, weights, device, tokenizer, hf.read_generation_config(path))

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        plan: PrecisionPlan,
        seed: int = 0,
        device: str | torch.device = "cpu",
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Policy:
        """A policy with random weights from the contents of a config.json."""
        model = ModelConfig.from_hf(config)
        return cls(model, plan, random_weights(model, seed, device), device, tokenizer)

    def save_pretrained(
        self,
        path: str | Path,
        dtype: Literal["bfloat16", "float32", "fp8"] = "bfloat16",
        overwrite: bool = False,
    ) -> None:
        """Write a Hugging Face directory; dtype bfloat16, float32 or fp8 (block-scaled, as vLLM and
        transformers read it)."""
        weights = {name: master.detach() for name, master in self._masters.items()}
        hf.save_model(
            path,
            self.config,
            weights,
            dtype,
            tokenizer=self.tokenizer,
            generation_config=self.generation_config or None,
            bf16_layers=[
                layer
                for layer in range(self.config.num_layers)
                if self.plan.linear_format("train", layer, self.config.num_layers) == "bf16"
                and self.plan.exact
            ],
            scales=self.plan.scales,
            overwrite=overwrite,
        )

    def _check_device(self) -> None:
        """UserError for a device, or a model on it, that no kernel is there for."""
        if self.device.type == "cpu":
            return
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise UserError(f"device {self.device}: not there; use run.device=cpu")
        hopper("precision.gemm_hopper").require_hopper(self.device)
        config, plan = self.config, self.plan
        group = config.num_heads // config.num_kv_heads
        if plan.kv != "fp32" and (config.head_dim not in (64, 128) or group > 16):
            raise UserError(
                f"the GPU's attention takes head_dim 64 or 128 and at most 16 query heads a key "
                f"head, not {config.head_dim} and {group}; use run.device=cpu, or the fp32 preset"
            )
        if plan.train_linear == "fp8" and plan.grad_output == "e5m2":
            raise UserError(
                "precision.grad_output=e5m2: Hopper's block-scaled GEMM takes e4m3 only"
            )

    def named_masters(self) -> dict[str, nn.Parameter]:
        """The FP32 master weights by name, the very parameters that the optimizer changes."""
        return self._masters

    def weight_scales(self) -> dict[str, Tensor]:
        """The scales, float32, of each FP8 working copy, by its layer's name."""
        linears = [module for module in self.decoder.modules() if isinstance(module, Linear)]
        return {linear.name: scales for linear in linears for scales in linear.weight_scales()}

    def requantize(self) -> None:
        """Make the working copies from the masters: call it after every change of the masters."""
        with torch.no_grad():
            self.decoder.requantize()

    @torch.no_grad()
    def rollout_forward(self, token_ids: Tensor, positions: Tensor, kv: KeyValues) -> Tensor:
        """The sampler's forward: int64 [T] tokens and positions -> hidden [T, D]. Keys and values
        come from, and go to, `kv`."""
        hidden: Tensor = self.decoder(token_ids, positions, kv, "rollout")
        return hidden

    @torch.no_grad()
    def rollout_logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> float32 logits [R, V]."""
        return self.decoder.logits(hidden, "rollout")

    def train_logprobs(
        self,
        token_ids: Tensor,
        cu_seqlens: Tensor,
        targets: Tensor,
        temperature: float = 1.0,
        checkpoint_layers: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The trainer's forward: log-probs of chosen tokens of a packed batch.

        token_ids: int64 [T], sequences end to end. cu_seqlens: int64 [S+1]. targets: int64 [R],
        indices into token_ids, never a sequence's first. checkpoint_layers: recompute layers in
        backward.

        Returns (log-prob of each target given what precedes it, float32 [R], differentiable;
        entropy of that distribution in nats, float32 [R], not differentiable). Full logits are held
        for a chunk of rows at a time only.
        """
        positions = _positions(cu_seqlens)
        kv = PackedKeyValues(cu_seqlens, self.plan)
        hidden = self.decoder(token_ids, positions, kv, "train", checkpoint_layers)
        head = self.decoder.lm_head
        if hidden.is_cuda and self.plan.lm_head == "bf16" and self.decoder.trace is None:
            fused = hopper("kernels.logprob_triton").lm_head_logprobs
            on_gpu: tuple[Tensor, Tensor] = fused(
                hidden[targets - 1],
                head.weight,
                head.operand("train"),
                token_ids[targets],
                temperature,
            )
            return on_gpu
        at_once = _LOGITS_AT_ONCE * (8 if token_ids.is_cuda else 1)
        rows = max(1, at_once // self.config.vocab_size)
        parts = [
            checkpoint(
                self._head, hidden[part - 1], token_ids[part], temperature, use_reentrant=False
            )
            for part in targets.split(rows)
        ]
        logprobs, entropy = (torch.cat(list(x)) for x in zip(*parts, strict=True))
        return logprobs, entropy

    def _head(self, hidden: Tensor, chosen: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        return chosen_logprobs(self.decoder.logits(hidden, "train"), chosen, temperature)

    def logprobs(
        self, sequences: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[Tensor]:
        """Log-probs of each sequence's tokens from the second on: float32 [len - 1] each, from one
        packed forward, differentiable in the masters.

        Raises:
            UserError: an empty sequence, one longer than the context, or a token id out of range.
        """
        self.check_sequences(sequences)
        if not sequences:
            return []
        lengths = torch.tensor([len(s) for s in sequences], device=self.device)
        token_ids = torch.tensor([t for s in sequences for t in s], device=self.device)
        cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        targets = (_positions(cu_seqlens) > 0).nonzero().flatten()
        logprobs, _ = self.train_logprobs(token_ids, cu_seqlens, targets, temperature)
        return list(logprobs.split((lengths - 1).tolist()))

    def check_sequences(self, sequences: Sequence[Sequence[int]]) -> None:
        """UserError naming the first sequence that this model cannot take."""
        limit, vocabulary = self.config.max_position_embeddings, self.config.vocab_size
        for index, sequence in enumerate(sequences):
            if not 1 <= len(sequence) <= limit:
                raise UserError(
                    f"sequence {index} has {len(sequence)} tokens; the model takes 1 to {limit}"
                )
            if min(sequence) < 0 or max(sequence) >= vocabulary:
                bad = next(t for t in sequence if not 0 <= t < vocabulary)
                raise UserError(f"sequence {index}: token id {bad} is outside [0, {vocabulary})")


def _positions(cu_seqlens: Tensor) -> Tensor:
    """int64 [T]: each token's place in its own sequence."""
    lengths = cu_seqlens.diff()
    starts = cu_seqlens[:-1].repeat_interleave(lengths)
    return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device) - starts
