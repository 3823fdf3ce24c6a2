"""The records that cross borders between the parts of jetrl.

Small frozen dataclasses, no torch. Token-level fields are in token order; `T` is the number of
tokens of a packed batch, `S` its number of sequences. Reward and advantage are different fields:
a reward is what a task gave a completion, an advantage is what the algorithm made of a group.

A literal example of the life of one answer:

    prompt     = Prompt(id="train-17", text="12+7=", answer="19")
    completion = Completion(token_ids=(21, 29, 2), logprobs=(-0.1, -0.7, -0.0),
                            finish_reason="stop", text="19")
    sample     = Sample(prompt=prompt, group=0, prompt_token_ids=(21, 22, 13, 27, 31),
                        completion=completion, score=Score(1.0))
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "cancelled"]
Reply = str | Mapping[str, str]
"""What an environment says after a turn: text that goes on as it is (text prompts), or a message
for the chat template."""


@dataclass(frozen=True)
class Prompt:
    """One question. Exactly one of `text` and `messages` is given.

    `text` is sent to the model as it is; `messages` (role and content) go through the tokenizer's
    chat template. `answer` and `metadata` are for the task's `score` alone. `task` names the task
    that it is of, where several are mixed; "" else.
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"Prompt {self.id!r}: give exactly one of text and messages")
        if not isinstance(self.id, str):  # what a checkpoint keeps by id comes back by a text
            kind = type(self.id).__name__
            raise ValueError(f"Prompt {self.id!r}: its id is a {kind}, and a text is needed")

    @property
    def asked(self) -> str:
        """What is asked, for people: the text, or what the last message says."""
        if self.text is not None:
            return self.text
        return str((self.messages or ({},))[-1].get("content", ""))


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    n: completions for each prompt. max_tokens: at most this many tokens a completion.
    temperature: logits are divided by it; 0 means greedy, with log-probs of temperature 1. Below
        1e-20 float32 has no room for the quotients.
    top_p, top_k: keep the most probable tokens up to this mass / number (1.0 and 0 keep all). The
        log-probs reported are those of the full distribution at `temperature`, which is what the
        trainer computes; below top_p = 1 the policy gradient is therefore slightly biased.
    stop_token_ids: a completion ends with, and includes, the first of these. stop: strings that end
        a completion; the text is cut before the string, the tokens that spelt it stay.
    seed: with the prompt's tokens and the sample's number it fixes every draw, whatever else is in
        the batch.
    ignore_eos: do not add the model's own end-of-sequence ids to stop_token_ids.
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("n", "max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not isinstance(value, SupportsIndex):
                raise ValueError(f"SamplingParams: {name} must be an integer, not {value!r}")
            object.__setattr__(self, name, operator.index(value))
        checks = [
            (self.n >= 1, f"n must be at least 1, not {self.n}"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (
                self.temperature == 0 or 1e-20 <= self.temperature <= 1e20,
                f"temperature must be 0 or from 1e-20 to 1e20, not {self.temperature}",
            ),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], not {self.top_p}"),
            (0 <= self.top_k < 2**63, f"top_k must be in [0, 2**63), 0 for off, not {self.top_k}"),
            (all(self.stop), "a stop string must not be empty"),
            (0 <= self.seed < 2**63, f"seed must be in [0, 2**63), not {self.seed}"),
        ]
        for holds, message in checks:
            if not holds:
                raise ValueError(f"SamplingParams: {message}")


@dataclass(frozen=True)
class Turn:
    """One turn of a completion. completion: the text that the model wrote in it, without special
    tokens and stop string. reply: what the environment said to it, None after the last turn."""

    completion: str
    reply: Reply | None = None


@dataclass(frozen=True)
class Completion:
    """What the sampler drew for one prompt.

    token_ids and logprobs have the same length: natural-log probabilities, float32 values held
    exactly as Python floats. text is the decoded completion without special tokens and without the
    stop string ("" when the engine has no tokenizer).

    Of a task with turns, token_ids holds what the environment said too. environment: the spans
    [start, end) of token_ids that it wrote; their log-probs are 0 and they are not trained on.
    turns: the texts, one for each turn; () where there was no environment. failure: why the
    environment could not answer, which ended the completion ("" when it always did).

    versions: of one that was cut off ("cancelled") or gone on with, the version of the policy that
    drew each token; () of any other.

        Completion(token_ids=(5, 9, 7, 7, 6), logprobs=(-0.1, -0.2, 0.0, 0.0, -0.3),
                   finish_reason="stop", text="2+3=5.", environment=((2, 4),),
                   turns=(Turn("2+3", "=5"), Turn(".")))
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    text: str = ""
    environment: tuple[tuple[int, int], ...] = ()
    turns: tuple[Turn, ...] = ()
    failure: str = ""
    versions: tuple[int, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Tokens that the model drew."""
        return len(self.token_ids) - sum(end - start for start, end in self.environment)


@dataclass(frozen=True)
class Unfinished:
    """A completion that was cut off, and what it takes to go on with it. key: of its random
    numbers. completion: with finish_reason "cancelled"; of no tokens if it had not begun."""

    prompt_token_ids: tuple[int, ...]
    key: int
    completion: Completion


@dataclass(frozen=True)
class Score:
    """What a task gave: the reward that is trained on, and named parts of it for the logs."""

    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One scored completion. `group` numbers the prompt within the step: samples of one prompt
    share it, and the algorithm compares them with each other. `failure` says why the scorer gave
    no verdict of its own ("" when it did)."""

    prompt: Prompt
    group: int
    prompt_token_ids: tuple[int, ...]
    completion: Completion
    score: Score
    failure: str = ""


@dataclass(frozen=True)
class Example:
    """A worked answer to imitate, as token ids. environment: as in `Completion`; what it spans is
    not imitated."""

    prompt: Sequence[int]
    completion: Sequence[int]
    environment: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Batch:
    """Sequences packed end to end, no padding: the input of one forward and backward.

    token_ids: int64 [T]. cu_seqlens: int64 [S+1], starts of the sequences and T. loss_mask: bool
    [T], True where the token was sampled (its log-prob, given the tokens before it, is trained on),
    never at a sequence's first token. rollout_logprobs: float32 [T], the sampler's, 0 elsewhere.
    advantages: float32 [T], 0 elsewhere. sample_ids: int64 [S], which sample each sequence is.

        Batch(token_ids=[5, 6, 7, 8, 9], cu_seqlens=[0, 3, 5], loss_mask=[F, F, T, F, T],
              rollout_logprobs=[0, 0, -0.5, 0, -0.1], advantages=[0, 0, 1, 0, -1],
              sample_ids=[4, 0])
    """

    token_ids: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    sample_ids: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True)
class StepStats:
    """What one step of the loop reports: metric names as in docs/metrics.md, plain floats."""

    step: int
    metrics: Mapping[str, float]
    samples: Sequence[Sample] = ()
