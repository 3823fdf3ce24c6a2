"""The portable backward of integer attention on a GPU: the bits of its reference."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
program = pytest.importorskip("tests.kernels.interpreted_attention_backward")
Case = program.Case

LENGTHS = (200, 1, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2111)
# Stems of 128 and 256 rows, branches with and without whole blocks, and whole sequences.
RUNS = (128, 172, 1, 256, 444, 64, 1244, 12, 1)
STEM_OF = (-1, 0, 0, -1, 3, -1, 3, 0, 3)
SHAPES = [(8, 2, 128), (32, 8, 128), (4, 4, 64), (15, 5, 64)]
CASES = [
    *program.CASES,
    *(Case((200, 65, 320), kind=kind, heads=8, groups=2, head_dim=128) for kind in program.FACTORS),
    *(Case((300, 5), bad=which, heads=4, groups=2, head_dim=64) for which in program.NOT_FINITE),
    *(Case((77, 513), heads=h, groups=g, head_dim=d, kind="uneven") for h, g, d in SHAPES),
    Case(LENGTHS, heads=8, groups=2, head_dim=128),
    Case(LENGTHS, heads=3, groups=1, head_dim=64, kind="sharp"),
    Case(RUNS, STEM_OF, heads=8, groups=2, head_dim=128, kind="uneven"),
    Case(RUNS, STEM_OF, heads=8, groups=4, head_dim=64, sums_bytes=1),
    Case(RUNS, STEM_OF, heads=4, groups=1, head_dim=128, rows=64),
    Case((1024, *(300 + 40 * i for i in range(8))), (-1, *[0] * 8), heads=4, head_dim=128),
    Case((8192,), heads=4, groups=1, head_dim=128),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_have_the_bits_of_the_reference(case: program.Case) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert program.differences(case, torch.device("cuda")) == []


def test_gradients_are_written_and_equal_when_run_again() -> None:
    case = Case((700, 129), heads=8, groups=2, head_dim=128)
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    torch.empty(2**28, dtype=torch.uint8, device="cuda").fill_(255)  # NaN in memory that is reused
    for _ in range(3):
        assert program.differences(case, torch.device("cuda")) == []
