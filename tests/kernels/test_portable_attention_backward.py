"""The portable backward of integer attention has the bits of its reference."""

from __future__ import annotations

from tests.kernels.interpreted import interpreted

from jetrl.kernels.attention.layout import QueryTiles


def test_gradients_have_the_bits_of_the_reference() -> None:
    assert interpreted("interpreted_attention_backward.py") == []


def test_lists_of_a_stem_with_two_branches_and_a_whole_sequence() -> None:
    lists = QueryTiles.packed([0, 256, 260, 400, 465], "cpu", [-1, 0, 0, -1]).padded
    assert lists.num_places == 256 + 128 + 256 + 128
    assert lists.blocks.tolist() == [
        [0, 256, 0, 2], [128, 256, 2, 2], [256, 260, 4, 1], [260, 400, 5, 1], [388, 400, 6, 1],
        [400, 465, 7, 1],
    ]  # fmt: skip
    # Both branches see all 256 keys of the stem before their own.
    assert lists.query_blocks.tolist() == [
        [512, 388, 400, 384, 0, 256], [256, 256, 260, 256, 0, 256], [384, 260, 400, 384, 0, 256],
        [128, 128, 256, 0, 0, 0], [0, 0, 256, 0, 0, 0], [640, 400, 465, 640, 0, 0],
    ]  # fmt: skip
    # The stem's own queries, four and two blocks of 64, are in its first sequence.
    assert lists.key_blocks.tolist() == [
        [0, 4, 256, 1, 0], [0, 0, 384, 3, 1], [128, 2, 256, 1, 2], [128, 0, 384, 3, 3],
        [384, 3, 0, 0, 5], [640, 2, 0, 0, 7], [256, 1, 0, 0, 4], [512, 1, 0, 0, 6],
    ]  # fmt: skip
