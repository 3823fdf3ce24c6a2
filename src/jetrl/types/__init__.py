"""The records that cross borders between the parts of jetrl.

They are frozen dataclasses without torch. Token-level fields are in token order; `T` is the number
of tokens of a packed batch, `S` its number of sequences. A reward is a task's verdict on a
completion; the algorithm computes advantages from the rewards of a group.

The life of one answer:

    prompt     = Prompt(id="train-17", text="12+7=", answer="19")
    completion = Completion(token_ids=(21, 29, 2), logprobs=(-0.1, -0.7, -0.0),
                            finish_reason="stop", text="19")
    inputs     = PromptInputs(token_ids=(21, 22, 13, 27, 31))
    sample     = Sample(prompt=prompt, group=0, inputs=inputs,
                        completion=completion, score=Score(1.0))
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

PlainText = Literal["replies", "all", "none"]
"""Texts in which special tokens are plain text: replies, all texts of a task, or none."""
FinishReason = Literal["stop", "length", "cancelled"]
Json = dict[str, Any]
"""A JSON object."""
Metrics = dict[str, float]
"""Values by the name of their metric."""
Message = Mapping[str, Any]
"""A chat message: role and content, and what else the chat template reads (`conversation`)."""
Reply = str | Mapping[str, str]
"""An environment's reply to a turn: plain text for text prompts, a message for chat prompts."""
IMAGE_MARK = "<image>"
"""The place of an image in a prompt's text."""
IMAGE_MARKS = (IMAGE_MARK, "<|image_pad|>")
"""All texts that are a place of an image: the above, and the token of Qwen-VL's chat templates."""


@dataclass(frozen=True)
class Image:
    """An image file, checked by `types.images`, and its size in pixels.

    Attributes:
        source: The bytes of the file, or a function that reads or draws them when needed, so that
            many images take little memory.
        digest: A hash of 32 bytes; images of equal digest have equal pixels.
    """

    source: bytes | Callable[[], bytes] = field(repr=False, compare=False)
    width: int
    height: int
    digest: bytes = field(repr=False)

    @property
    def data(self) -> bytes:
        """The bytes of the file. Raises UserError if they can no longer be read."""
        return self.source if isinstance(self.source, bytes) else self.source()


@dataclass(frozen=True)
class ImageGrid:
    """The rows and columns of an image's features, for rotary positions by time, row and column.

    Attributes:
        position: The rotary position of the first feature, counted from the sequence's start.
    """

    position: int
    rows: int
    columns: int


@dataclass(frozen=True)
class ImageSpan:
    """Tokens of a sequence whose embeddings are features of an image.

    Attributes:
        first: The first of the image's features that the span has; a token has one feature.
        grid: The image's grid; None if each token advances the rotary position by one.
    """

    image: Image
    start: int
    length: int
    first: int = 0
    grid: ImageGrid | None = None

    @property
    def spared(self) -> int:
        """The tokens of a whole image minus the rotary positions that it takes."""
        return 0 if self.grid is None else self.length - max(self.grid.rows, self.grid.columns)

    def within(self, start: int, stop: int, at: int = 0) -> ImageSpan | None:
        """Return the part in tokens [start, stop), counted so that token `start` is `at`."""
        begin, end = max(start, self.start), min(stop, self.start + self.length)
        if begin >= end:
            return None
        skipped = begin - self.start
        return replace(
            self, start=begin - start + at, length=end - begin, first=self.first + skipped
        )


@dataclass(frozen=True)
class Prompt:
    """A question to the model, as plain text or as chat messages.

    Attributes:
        id: The prompt's name within its task's split.
        text: The plain text for the model; give exactly one of `text` and `messages`.
        messages: Chat messages (role, content, an assistant's tool_calls and reasoning_content),
            which go through the tokenizer's chat template.
        answer: The right answer, only for the task's `score`.
        metadata: More that the task's `score` needs.
        task: The name of the prompt's task if several are mixed, otherwise "".
        in_thought: Whether the completion begins inside a thought, because the chat template or the
            prompt ends with <think>. Set when prompts are encoded.
        tools: JSON schemas of tools, for the chat template.
        template_args: Arguments of the chat template for this prompt, such as enable_thinking.
        images: The images, in the order of their places in the text: `<image>`, or an image part of
            a message.

    Raises:
        ValueError: Both or neither of `text` and `messages` are given, or `id` is not a text.
    """

    id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    task: str = ""
    in_thought: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"Prompt {self.id!r}: give exactly one of text and messages")
        if not isinstance(self.id, str):  # Checkpoints keep values by id as JSON texts.
            kind = type(self.id).__name__
            raise ValueError(f"Prompt {self.id!r}: its id is a {kind}, and a text is needed")

    @property
    def asked(self) -> str:
        """The text, or the content of the last message."""
        if self.text is not None:
            return self.text
        return str((self.messages or ({},))[-1].get("content") or "")


@dataclass(frozen=True)
class PromptInputs(Sequence[int]):
    """All that the model reads of a prompt, on the host; `models.packed.ForwardInputs` on a device.

    As a sequence it is its token ids, so that a tokenizer decodes it.

    Two prompts are the same to the model if their keys are equal. Random keys, shared prompts and
    drafts compare keys, never tokens.

    Attributes:
        token_ids: The tokens, at least one.
        images: The tokens that have features of images in place of their embeddings.
    """

    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self.token_ids[index]

    def positions(self, start: int, stop: int) -> Sequence[int]:
        """Return the rotary positions of tokens [start, stop); those after the prompt follow it.

        Tokens after an image with a grid follow its last row or column. Its own tokens turn by
        other positions (`models.packed.ImageRows.turns`).
        """
        positions: list[int] = []
        spared = 0
        for span in self.images:
            end = min(max(start, span.start + span.length), stop)
            positions += range(start - spared, end - spared)
            start, spared = end, spared + span.spared
        return [*positions, *range(start - spared, stop - spared)]

    @property
    def offset(self) -> int:
        """The rotary position of tokens after the prompt minus their place in the sequence."""
        return -sum(span.spared for span in self.images)

    def image_spans(self, start: int, stop: int, at: int = 0) -> list[ImageSpan]:
        """Return the images in tokens [start, stop), counted so that token `start` is `at`."""
        parts = (span.within(start, stop, at) for span in self.images)
        return [part for part in parts if part is not None]

    def content(self) -> bytes:
        """Return all that the model reads, as bytes that differ if it differs."""
        images = [
            span.image.digest + array("q", (span.start, span.length, span.first)).tobytes()
            for span in self.images
        ]
        return b"".join([array("q", self.token_ids).tobytes(), *images])

    def key(self, size: int = 32) -> bytes:
        """Return a hash of the content, of `size` bytes."""
        return hashlib.blake2b(self.content(), digest_size=size).digest()

    def first(self, num_tokens: int) -> PromptInputs:
        """Return the inputs of the first tokens."""
        images = tuple(self.image_spans(0, num_tokens))
        return replace(self, token_ids=self.token_ids[:num_tokens], images=images)


# NumPy and torch values become Python values: comparing a token id with a tensor would not work.
_CONVERTED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("n", "max_tokens", "top_k", "seed"), ("an integer", operator.index)),
    **dict.fromkeys(("temperature", "top_p", "min_p"), ("a number", lambda value: float(+value))),
    "stop_token_ids": ("a list of token ids", lambda ids: tuple(map(operator.index, ids))),
    "stop": ("a list of texts", lambda stop: (stop,) if isinstance(stop, str) else tuple(stop)),
}


@dataclass(frozen=True)
class TokenFilter:
    """The tokens that sampling keeps: by top_k, of those by top_p, of those by min_p.

    `kernels.allowed_tokens` has the exact rule. The defaults keep all tokens.
    """

    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """Return whether the filter is off, so that any token can be sampled."""
        return self == _KEEPS_ALL


_KEEPS_ALL = TokenFilter()


@dataclass(frozen=True)
class SamplingParams:
    """The settings of sampling.

    Attributes:
        n: Completions for each prompt.
        max_tokens: Maximum tokens per completion.
        temperature: The divisor of logits, from 1e-20 to 1e20; 0 draws greedily and reports the
            log-probs of temperature 1.
        top_p: Keep the most probable tokens up to this mass; 1.0: all.
        top_k: Keep this many most probable tokens; 0: all.
        stop_token_ids: Tokens that end a completion and belong to it.
        stop: Strings that end a completion; the text is cut before the string, the tokens stay.
        seed: With the prompt's tokens and the sample's number it fixes every draw, in any batch.
        ignore_eos: Whether the model's own end-of-sequence ids end no completion.
        min_p: Keep tokens of at least this fraction of the largest probability; 0.0: all.
        truncated_logprobs: Whether log-probs are of the distribution that top_k, top_p and min_p
            leave, renormalized; otherwise of all tokens.

    Raises:
        ValueError: A value is outside its range.
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
    min_p: float = 0.0
    truncated_logprobs: bool = True

    def __post_init__(self) -> None:
        for name, (words, convert) in _CONVERTED.items():
            try:
                object.__setattr__(self, name, convert(getattr(self, name)))
            except TypeError:
                what = f"{name} must be {words}, not {getattr(self, name)!r}"
                raise ValueError(f"SamplingParams: {what}") from None
        bounds = {
            "n": ("at least 1", self.n >= 1),
            "max_tokens": ("at least 1", self.max_tokens >= 1),
            "temperature": ("0 or from 1e-20 to 1e20", 1e-20 <= (self.temperature or 1) <= 1e20),
            "top_p": ("in (0, 1]", 0 < self.top_p <= 1),
            "top_k": ("in [0, 2**63), 0 for off", 0 <= self.top_k < 2**63),
            "min_p": ("in [0, 1)", 0 <= self.min_p < 1),
            "stop": ("texts, none empty", all(isinstance(s, str) and s for s in self.stop)),
            "seed": ("in [0, 2**63)", 0 <= self.seed < 2**63),
        }
        for name, (words, holds) in bounds.items():
            if not holds:
                what = f"{name} must be {words}, not {getattr(self, name)}"
                raise ValueError(f"SamplingParams: {what}")

    @property
    def token_filter(self) -> TokenFilter:
        return TokenFilter(self.top_p, self.top_k, self.min_p)

    @property
    def logprobs_filter(self) -> TokenFilter:
        """The filter of the distribution that log-probs refer to; greedy draws have none."""
        return self.token_filter if self.truncated_logprobs and self.temperature else _KEEPS_ALL


@dataclass(frozen=True)
class Turn:
    """A turn of a completion in a task with turns.

    `completion` is the model's text, without special tokens and stop string; in a demonstration it
    may be an assistant's message, which the chat template writes. The environment's `reply` is None
    after the last turn.
    """

    completion: str | Message
    reply: Reply | None = None

    @property
    def text(self) -> str:
        """The completion's text; of a message its content."""
        said = self.completion
        return said if isinstance(said, str) else str(said.get("content") or "")


@dataclass(frozen=True)
class Completion:
    """The tokens that the sampler drew for one prompt, with their log-probs.

    Attributes:
        token_ids: The tokens, those of an environment's replies included.
        logprobs: The natural-log probability of each token, a float32 value held exactly.
        finish_reason: "stop", "length", or "cancelled" if sampling was cut off.
        text: The decoded completion without special tokens and stop string; "" without a tokenizer.
        environment: The spans [start, end) of token_ids that the environment wrote; their log-probs
            are 0 and they are not trained on.
        turns: The texts of the turns; () if there was no environment.
        failure: The reason why the environment could not answer, which ended the completion.
        versions: The version of the policy that drew each token, if the completion was cut off or
            continued, else ().
        unusable_reply: Whether the failure is a reply that could not be given to the model.
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
    unusable_reply: bool = False

    @property
    def num_sampled(self) -> int:
        """The number of tokens without those of an environment."""
        return len(self.token_ids) - sum(end - start for start, end in self.environment)


@dataclass(frozen=True)
class Unfinished:
    """A completion that was cut off, to be continued with the random numbers of `key`."""

    inputs: PromptInputs
    key: int
    completion: Completion

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self.inputs.token_ids


@dataclass(frozen=True)
class Score:
    """A task's verdict on a completion; `parts` are named parts of the reward, for the logs.

    A reward of None leaves the completion out of its group's statistics, with advantage 0.
    """

    reward: float | None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A scored completion, of the prompt `group` in the step; algorithms compare groups.

    `failure` is the reason for a missing verdict of the task, else "". `readable` is the prompt and
    the completion as a person would write them, to be shown next to them; "" for nothing. `extra`
    is what a reward function noted about the completion (TRL's `log_extra`). An episode of a
    harness may have several samples in a row, with the same reward: all but the first `continues`
    it, and statistics of rewards count the episode once.
    """

    prompt: Prompt
    group: int
    inputs: PromptInputs
    completion: Completion
    score: Score
    failure: str = ""
    readable: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
        return self.inputs.token_ids


@dataclass(frozen=True)
class Example:
    """A worked answer to imitate, as token ids, except for the spans of an environment.

    Attributes:
        images: The tokens of the prompt that have features of images.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    environment: Sequence[tuple[int, int]] = ()
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)


STEM_BLOCK = 128  # Tokens: the kernels of attention's backward take so many keys at a time.


def stem_length(prompt_length: int) -> int:
    """Return the number of tokens of a prompt that its samples can share: its whole blocks."""
    return prompt_length // STEM_BLOCK * STEM_BLOCK


@dataclass(frozen=True)
class Batch:
    """Sequences packed end to end without padding: the input of one forward and backward.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], each token's rotary position.
        cu_seqlens: int64 [S+1], the starts of the sequences, and T.
        loss_mask: bool [T], True for sampled tokens whose log-prob, given the tokens before, is
            trained on; never at a sequence's first token.
        rollout_logprobs: float32 [T], the sampler's; 0 elsewhere.
        advantages: float32 [T]; 0 elsewhere.
        sample_ids: int64 [S], the number of each sequence's sample.
        stem_ids: int64 [S]; sequences of equal number begin with the same tokens, which a forward
            may compute once (`models.packed`). None: each is computed whole.
        stem_lengths: int64 [S], the number of those tokens; None with stem_ids.
        images: The tokens, of all T, that have features of images in place of their embeddings.
        Batch(token_ids=[5, 6, 7, 8, 9], positions=[0, 1, 2, 0, 1], cu_seqlens=[0, 3, 5],
              loss_mask=[F, F, T, F, T], rollout_logprobs=[0, 0, -0.5, 0, -0.1],
              advantages=[0, 0, 1, 0, -1], sample_ids=[4, 0])
    """

    token_ids: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    advantages: np.ndarray
    sample_ids: np.ndarray
    stem_ids: np.ndarray | None = None
    stem_lengths: np.ndarray | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return len(self.token_ids)

    @property
    def num_computed_tokens(self) -> int:
        """The number of tokens that a forward computes: shared ones count once."""
        if self.stem_ids is None or self.stem_lengths is None:
            return self.num_tokens
        lengths = self.stem_lengths.tolist()
        once = dict(zip(self.stem_ids.tolist(), lengths, strict=True))
        return self.num_tokens - sum(lengths) + sum(once.values())

    @property
    def num_sequences(self) -> int:
        """S, the number of sequences."""
        return len(self.cu_seqlens) - 1


@dataclass(frozen=True)
class StepStats:
    """The report of a training step (0: before the first), by the names of docs/metrics.md."""

    step: int
    metrics: Metrics
    samples: Sequence[Sample] = ()
