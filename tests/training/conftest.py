"""The samples of the training tests, and a policy so small that its numbers can be checked."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from jetrl.kernels.allowed_tokens import filtered_logits
from jetrl.models.packed import ForwardInputs, pack
from jetrl.precision.gradients import Gradients
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score, TokenFilter


def make_sample(
    group: int,
    prompt: Sequence[int],
    completion: Sequence[int],
    reward: float = 0.0,
    logprobs: Sequence[float] | None = None,
) -> Sample:
    if logprobs is None:
        logprobs = [-0.5] * len(completion)
    return Sample(
        prompt=Prompt(id=f"p{group}", text="?"),
        group=group,
        inputs=PromptInputs(tuple(prompt)),
        completion=Completion(tuple(completion), tuple(logprobs), "stop"),
        score=Score(reward),
    )


@pytest.fixture(scope="session", autouse=True)
def small_heap() -> None:
    """Keep modules out of the collections that out of memory asks for: they take a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def sample() -> Callable[..., Sample]:
    return make_sample


@dataclass
class BigramConfig:
    vocab_size: int

    def flat(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size}


class Bigram:
    """A policy whose logits of the next token are a row of a table.

    Its log-probs can be worked out by hand. It has the calls of a policy that training uses, and
    none of its numerics.
    """

    tokenizer = None
    lora = key_exponents = None
    trained_tower = "frozen"
    restore_key_exponents = staticmethod(lambda *_: None)
    decoder = nn.Module()  # without experts, whose routes would be observed

    def __init__(self, exact: bool = True, vocab_size: int = 11, seed: int = 0) -> None:
        self.device = torch.device("cpu")
        plan = {"name": "jet" if exact else "mixed", "kv": "bf16"}
        self.plan = SimpleNamespace(exact=exact, name=plan["name"], to_dict=lambda: dict(plan))
        self.plan.training_forward = lambda *_: contextlib.nullcontext()
        self.config = BigramConfig(vocab_size)
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(vocab_size, vocab_size, generator=generator)
        self.masters = {
            "table.weight": nn.Parameter(table),
            "table.bias": nn.Parameter(torch.zeros(vocab_size)),
        }
        self.weights = SimpleNamespace(shards={}, gradients=Gradients())
        self.calls: list[tuple[str, object]] = []

    def master_weights(self) -> dict[str, nn.Parameter]:
        return self.masters

    def weight_scales(self) -> dict[str, torch.Tensor]:
        return {}

    def requantize(self) -> None:
        self.calls.append(("requantize", None))

    def used(self) -> contextlib.nullcontext:
        return contextlib.nullcontext()

    def image_rows(self, images: Sequence[object]) -> None:
        assert not images

    def train_logprobs(
        self,
        inputs: ForwardInputs,
        cu_seqlens: torch.Tensor,
        targets: torch.Tensor,
        temperature: float = 1.0,
        activation_checkpointing: bool = False,
        stems: None = None,
        seen: None = None,
        token_filter: TokenFilter = TokenFilter(),  # noqa: B008
        differentiable: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert differentiable
        self.calls.append(
            ("grad" if torch.is_grad_enabled() else "no_grad", activation_checkpointing)
        )
        assert not set(targets.tolist()) & set(cu_seqlens.tolist())
        token_ids = inputs.token_ids
        logits = self.masters["table.weight"][token_ids[targets - 1]] + self.masters["table.bias"]
        chosen = token_ids[targets]
        logits = filtered_logits(logits, chosen, temperature, token_filter)
        logprobs = torch.log_softmax(logits / temperature, dim=-1).clamp(min=-1e4)
        mean, square = ((logprobs.exp() * (-logprobs) ** k).sum(-1).detach() for k in (1, 2))
        moments = torch.stack((mean, square - mean**2))
        return logprobs.gather(1, chosen[:, None]).squeeze(1), moments

    def logprob_of(self, sample: Sample) -> float:
        """The sum of the log-probs of a sample's completion, as this policy sees it now."""
        tokens = [*sample.prompt_token_ids, *sample.completion.token_ids]
        inputs, ends = pack([tokens], torch.device("cpu"))
        targets = torch.arange(len(sample.inputs), len(tokens))
        with torch.no_grad():
            logprobs, _ = self.train_logprobs(inputs, ends, targets)
        self.calls.clear()
        return float(logprobs.double().sum())

    def draw(self, rewards: Sequence[float], groups: int = 2, temperature: float = 1.0) -> list:
        """Return a sample a reward, in groups of neighbours, with this policy's own log-probs."""
        rng = np.random.default_rng(7)
        size = len(rewards) // groups
        samples = []
        for i, reward in enumerate(rewards):
            vocab_size = self.config.vocab_size
            prompt = rng.integers(0, vocab_size, 2 + i % 3)
            completion = rng.integers(0, vocab_size, 1 + i % 4)
            inputs, ends = pack([[*prompt, *completion]], torch.device("cpu"))
            targets = torch.arange(len(prompt), len(inputs))
            with torch.no_grad():
                logprobs, _ = self.train_logprobs(inputs, ends, targets, temperature)
            samples.append(
                make_sample(
                    i // size, prompt.tolist(), completion.tolist(), reward, logprobs.tolist()
                )
            )
        self.calls.clear()
        return samples


@pytest.fixture(scope="session")
def bigram() -> type[Bigram]:
    return Bigram
