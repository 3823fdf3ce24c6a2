"""Bytes of the products of a micro-batch that are held beside the sums of gradients.

On one GPU that is lm_head's alone, which backward makes in chunks and adds to the sum when it is
complete. In a run on several GPUs a linear's product is made whole by each of them, sent by rows to
the GPUs that own these rows, and received from all (`precision.gradients`). A product in
flight takes its own bytes, and as many for what is received: the own rows of every GPU's product.
A large product travels in slices. The latest products and slices are in flight together, so
lm_head's, the largest by far, is still held while the MLP of the last layer makes its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jetrl.models.adapter import LoRA
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.precision.plan import PrecisionPlan

# As of precision.gradients: bytes that travel at one time, and how many times together,
# the one that has just begun among them.
_AT_ONCE, _TOGETHER = 2**29, 4


@dataclass(frozen=True)
class ProductBytes:
    """The bytes of products beside the sums, at the highest moments of a backward.

    Attributes:
        in_layer: While the last layer's MLP makes the product of gate_up; that product itself is
            counted with the layer.
        at_end: While the embedding's rows are added, on several GPUs beside the products of the
            first layer.
    """

    in_head: int = 0
    in_layer: int = 0
    at_end: int = 0

    @staticmethod
    def of(
        config: ModelConfig,
        plan: PrecisionPlan,
        tokens: int,
        several: bool,
        cards: int,
        lora: LoRA | None = None,
    ) -> ProductBytes:
        """Return the bytes beside the sums in the backward of a micro-batch.

        Args:
            lora: The adapter that is trained; None: all parameters are.
        """
        if lora is not None:
            return _of_adapter(config, tokens, several, cards, lora)
        tied = config.tie_word_embeddings
        head = 0 if config.head == "score" else 4 * config.vocab_size * config.hidden_size
        if cards == 1:  # The product of the first micro-batch is the sum.
            beside = head if several else 0
            return ProductBytes(beside, beside, 0 if tied else beside)
        shapes = parameter_shapes(config)
        in_bf16 = plan.train_linear == "fp8" and plan.grad_output != "bf16"

        def product(linear: str) -> int:
            rows, columns = shapes[f"layers.0.{linear}.weight"]
            return (2 if in_bf16 else 4) * rows * columns

        # While the MLP makes its products: all slices of lm_head's, then the latest with the MLP's.
        slice_bytes = min(head, _AT_ONCE)
        mlp = 2 * (product("down") + product("gate_up"))
        mlp -= product("gate_up") if in_bf16 else 0
        received = max(_TOGETHER * slice_bytes, (_TOGETHER - 2) * slice_bytes + mlp)
        if tied:  # It is received whole, and waits for the embedding's rows.
            received = max(head, mlp)
        rows = 2 * (cards + 1) * tokens * config.hidden_size  # BF16, of all GPUs and the own ones
        return ProductBytes(
            in_head=head,
            in_layer=head + min(received, head + mlp),
            at_end=rows
            + (head if tied else 0)
            + 2 * (product("gate_up") + product("o") + product("qkv")),
        )


def _of_adapter(
    config: ModelConfig, tokens: int, several: bool, cards: int, lora: LoRA
) -> ProductBytes:
    """Return the bytes of products where an adapter is trained, and the layers' weights are not."""
    trains_head = config.head == "lm" and (
        lora.train_embeddings if config.tie_word_embeddings else lora.train_head
    )
    head = 4 * config.vocab_size * config.hidden_size if trains_head else 0
    if cards == 1:
        beside = head if several else 0
        return ProductBytes(beside, beside, 0 if config.tie_word_embeddings else beside)
    shapes = lora.shapes(config).values()
    whole = 4 * sum(math.prod(s.a_shape) + math.prod(s.b_shape) for s in shapes)
    rows = 2 * (cards + 1) * tokens * config.hidden_size if lora.train_embeddings else 0
    return ProductBytes(head, 2 * head, (cards + 1) * whole + rows + 2 * head)
