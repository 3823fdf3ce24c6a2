"""Bytes of the gradients' products while they travel between GPUs.

In a run on several GPUs a linear's gradient is made whole by each of them, sent by rows to the GPUs
that own these rows, and received from all (`precision.ordered_gradients`). A product in flight
takes its own bytes, and as many for what is received: the own rows of every GPU's product. The
latest products are in flight together, so lm_head's, the largest by far, is still held while the
MLP of the last layer makes its own.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.precision.plan import PrecisionPlan


@dataclass(frozen=True)
class ExchangedBytes:
    """The bytes held for the exchange of gradients, at the highest moments of a backward.

    Attributes:
        in_head: While lm_head's backward runs: its product.
        in_layer: While the last layer's MLP makes the product of gate_up; that product itself is
            counted with the layer.
        at_end: While the embedding's rows are exchanged, beside the products of the first layer.
    """

    in_head: int = 0
    in_layer: int = 0
    at_end: int = 0

    @staticmethod
    def of(config: ModelConfig, plan: PrecisionPlan, tokens: int, cards: int) -> ExchangedBytes:
        """Return the bytes of a micro-batch's exchange; none on one GPU.

        Args:
            config: The model's shape.
            plan: The model's precision plan.
            tokens: Tokens of the micro-batch.
            cards: How many GPUs the model is divided among.
        """
        if cards == 1:
            return ExchangedBytes()
        shapes = parameter_shapes(config)
        wide = 2 if plan.train_linear == "fp8" else 4  # bytes of an element of a linear's product

        def product(linear: str) -> int:
            rows, columns = shapes[f"layers.0.{linear}.weight"]
            return wide * rows * columns

        head = 0 if config.head == "score" else 4 * config.vocab_size * config.hidden_size
        rows = 2 * (cards + 1) * tokens * config.hidden_size  # BF16, of all GPUs and the own ones
        tied = head if config.tie_word_embeddings else 0  # received, waiting for these rows
        counted = product("gate_up") if wide == 2 else 0
        return ExchangedBytes(
            in_head=head,
            in_layer=2 * (head + product("down") + product("gate_up")) - counted,
            at_end=rows + tied + 2 * (product("gate_up") + product("o") + product("qkv")),
        )
