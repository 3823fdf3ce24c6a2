"""The micro-batches of a reproduction are checked before a kernel reads their tokens."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from jetrl.errors import UserError
from jetrl.session.stored_micro_batches import read_micro_batches

CONFIG = SimpleNamespace(vocab_size=10, max_position_embeddings=3)
LONG = SimpleNamespace(vocab_size=10, max_position_embeddings=200)


def tensors():
    return {
        "0.token_ids": torch.tensor([5, 6, 7, 8, 9]),
        "0.cu_seqlens": torch.tensor([0, 3, 5]),
        "0.loss_mask": torch.tensor([False, False, True, False, True]),
        "0.rollout_logprobs": torch.zeros(5),
        "0.advantages": torch.zeros(5),
        "0.sample_ids": torch.tensor([4, 0]),
        "0.before": torch.zeros(2),
    }


def test_what_a_run_writes_is_read(tmp_path):
    save_file(tensors(), tmp_path / "m.safetensors")
    (micro,) = read_micro_batches(tmp_path / "m.safetensors", CONFIG, "cpu")
    assert micro.batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert micro.before.tolist() == [0.0, 0.0]


def with_stems(**changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Two sequences of 130 and 129 tokens that share the first 128."""
    tokens = torch.arange(128) % 9
    mask = torch.zeros(259, dtype=torch.bool)
    mask[[129, 258]] = True
    stems = {
        "0.token_ids": torch.cat([tokens, tokens[:2], tokens, tokens[:1]]),
        "0.cu_seqlens": torch.tensor([0, 130, 259]),
        "0.loss_mask": mask,
        "0.rollout_logprobs": torch.zeros(259),
        "0.advantages": torch.zeros(259),
        "0.sample_ids": torch.tensor([0, 1]),
        "0.stem_ids": torch.tensor([0, 0]),
        "0.stem_lengths": torch.tensor([128, 128]),
    }
    return stems | {f"0.{name}": tensor for name, tensor in changes.items()}


def test_shared_prompts_are_read(tmp_path):
    save_file(with_stems(), tmp_path / "m.safetensors")
    (micro,) = read_micro_batches(tmp_path / "m.safetensors", LONG, "cpu")
    assert micro.batch.num_computed_tokens == 131


ODD_STEMS = [
    ({"stem_ids": torch.tensor([0])}, "stem_ids: not int64 [2]"),
    ({"stem_lengths": torch.zeros(2)}, "stem_lengths: not int64 [2]"),
    ({"stem_lengths": torch.tensor([128, 64])}, "stem_lengths: 64 is no number of whole blocks"),
    ({"stem_lengths": torch.tensor([128, 256])}, "stem_lengths: 256"),
    ({"stem_lengths": torch.tensor([-128, 128])}, "stem_lengths: -128"),
    ({"stem_lengths": torch.tensor([128, 0])}, "stem_ids: sequence 1 does not begin with"),
    ({"token_ids": torch.arange(259) % 7}, "stem_ids: sequence 1 does not begin with"),
    ({"loss_mask": torch.arange(259) == 5}, "loss_mask: trains on the stem of sequence 0"),
]


@pytest.mark.parametrize("changes, message", ODD_STEMS, ids=range(len(ODD_STEMS)))
def test_odd_stems_are_named(tmp_path, changes, message):
    file = tmp_path / "m.safetensors"
    save_file(with_stems(**changes), file)
    with pytest.raises(UserError, match=rf"m\.safetensors: tensor 0\.{re.escape(message)}"):
        read_micro_batches(file, LONG, "cpu")


ODD = [
    ({"x": torch.zeros(1)}, "'x': no part"),
    ({"1.token_ids": torch.tensor([1])}, "1.cu_seqlens is missing"),
    ({"0.token_ids": torch.tensor([5, 6, 7, 8, 10])}, "0.token_ids: not tokens"),
    ({"0.token_ids": torch.tensor([5, 6, 7, 8, -1])}, "0.token_ids: not tokens"),
    ({"0.token_ids": torch.zeros(5)}, "0.token_ids is torch.float32 [5]"),
    ({"0.cu_seqlens": torch.tensor([0, 5])}, "0.cu_seqlens: not sequences of 1 to 3"),
    ({"0.cu_seqlens": torch.tensor([0, 3, 3, 5])}, "0.cu_seqlens"),
    ({"0.cu_seqlens": torch.tensor([0, 3, 2**40])}, "0.cu_seqlens"),
    ({"0.cu_seqlens": torch.tensor([0])}, "0.cu_seqlens"),
    ({"0.advantages": torch.zeros(4)}, "0.advantages has 4 numbers, not 5"),
    ({"0.sample_ids": torch.tensor([1])}, "0.sample_ids has 1 numbers, not 2"),
    ({"0.before": torch.zeros(3)}, "0.before is torch.float32 [3], not float32 [2]"),
    (
        {"0.loss_mask": torch.tensor([True, False, False, False, True])},
        "0.loss_mask: trains on the first token",
    ),
]


@pytest.mark.parametrize("changes, message", ODD, ids=range(len(ODD)))
def test_odd_tensors_are_named(tmp_path, changes, message):
    file = tmp_path / "m.safetensors"
    save_file(tensors() | changes, file)
    with pytest.raises(UserError, match=rf"m\.safetensors: tensor {re.escape(message)}"):
        read_micro_batches(file, CONFIG, "cpu")


def test_damaged_files_are_named(tmp_path):
    file = tmp_path / "m.safetensors"
    with pytest.raises(UserError, match="No such file"):
        read_micro_batches(file, CONFIG, "cpu")
    file.write_bytes(b"damaged")
    with pytest.raises(UserError, match="truncated or not a safetensors file"):
        read_micro_batches(file, CONFIG, "cpu")
    save_file({}, file)
    with pytest.raises(UserError, match="no micro-batch"):
        read_micro_batches(file, CONFIG, "cpu")
