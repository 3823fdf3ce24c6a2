"""The division into micro-batches: what is cut, where, and how the size falls. No model runs."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from tests.training.shared import settings

from jetrl.errors import OutOfMemoryStop, UserError
from jetrl.training.micro_batches import (
    MicroBatch,
    MicroBatchSize,
    Minibatch,
    at_targets,
    batch_logprobs,
    sizes_of,
)
from jetrl.training.packing import pack, with_advantages
from jetrl.types import STEM_BLOCK, Batch, Image, ImageGrid, ImageSpan, PromptInputs


def batch_of_three(sample):
    """Return sequences of 3, 2 and 4 tokens, of which 1, 1 and 2 are trained."""
    samples = [
        sample(0, [5, 6], [7], logprobs=[-0.5]),
        sample(1, [8], [9], logprobs=[-1.5]),
        sample(2, [1, 2], [3, 4], logprobs=[-2.5, -3.5]),
    ]
    (batch,) = pack(samples, 100)
    return with_advantages(batch, [np.float32([1]), np.float32([2]), np.float32([3, 4])])


@pytest.mark.parametrize(
    ("sequences", "tokens", "trained"),
    [
        (range(1), [5, 6, 7], [10.0]),
        (range(1, 2), [8, 9], [20.0]),
        (range(1, 3), [8, 9, 1, 2, 3, 4], [20.0, 30.0, 40.0]),
    ],
)
def test_a_part_has_every_number_of_its_sequences_and_no_other(sample, sequences, tokens, trained):
    known = torch.tensor([10.0, 20.0, 30.0, 40.0])
    whole = MicroBatch(batch_of_three(sample), before=known, returns=-known)
    part = whole.select(sequences)
    assert part.batch.token_ids.tolist() == tokens
    lengths = np.diff(part.batch.cu_seqlens).tolist()
    assert part.batch.cu_seqlens[0] == 0
    assert lengths == [[3, 2, 4][i] for i in sequences]
    assert part.batch.sample_ids.tolist() == list(sequences)
    assert at_targets(part.batch.advantages, part.batch, "cpu").tolist() == [
        n / 10 for n in trained
    ]
    assert set(part.known()) == {"before", "returns"}
    assert part.before.tolist() == trained
    assert part.returns.tolist() == [-n for n in trained]
    assert sizes_of(part.batch) == (len(tokens), len(sequences))


def test_a_part_is_the_batch_of_its_sequences_packed_alone(sample):
    first, second = (Image(b"", 4, 4, digest=name) for name in (b"a", b"b"))
    images = [
        (ImageSpan(first, 1, 2), ImageSpan(second, 3, 1)),
        (),
        (ImageSpan(second, 0, 2, grid=ImageGrid(0, rows=1, columns=2)),),
    ]
    inputs = [PromptInputs(tuple(range(1, 6 - i)), spans) for i, spans in enumerate(images)]
    samples = [
        dataclasses.replace(sample(0, one.token_ids, [7, 8], logprobs=[-0.5, -i]), inputs=one)
        for i, one in enumerate(inputs)
    ]
    (whole,) = pack(samples, 100, share_prompts=True)
    for i in range(3):
        part = MicroBatch(whole).select(range(i, i + 1)).batch
        (alone,) = pack(samples, 100, share_prompts=True, sample_ids=[i])
        for field in dataclasses.fields(Batch):
            got, expected = getattr(part, field.name), getattr(alone, field.name)
            assert np.array_equal(got, expected), field.name


def test_ranges_are_full_and_a_longer_sequence_stands_alone():
    size = MicroBatchSize(5)
    assert size.ranges([2, 3, 1, 9, 5]) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert size.ranges([6, 1]) == [range(1), range(1, 2)]
    assert size.ranges([1]) == [range(1)]


def test_a_stem_counts_once_in_each_range():
    size = MicroBatchSize(10)
    # 6 + 2 + 2 fill the first range; the next one computes the stem of 4 tokens again.
    assert size.ranges([6, 6, 6, 6, 4], [(0, 4)] * 5) == [range(3), range(3, 5)]
    # Stems of other prompts are not shared.
    assert size.ranges([6, 6], [(0, 4), (1, 4)]) == [range(1), range(1, 2)]
    assert size.ranges([6, 3, 6], [(0, 4), (1, 0), (0, 4)]) == [range(2), range(2, 3)]


def test_a_range_after_the_first_holds_as_many_tokens_and_forgets_its_stems():
    assert MicroBatchSize(4).ranges([4, 2, 2]) == [range(1), range(1, 3)]
    # The second stem, of 4 tokens, is computed again next to the sequence of 6 tokens.
    stems = [(0, 4), (1, 4), (0, 4), (1, 4)]
    assert MicroBatchSize(11).ranges([6, 5, 6, 6], stems) == [range(2), range(2, 3), range(3, 4)]


def test_the_prompt_that_a_batch_shares_counts_once_in_its_division(sample):
    prompt = [1] * (2 * STEM_BLOCK)
    samples = [sample(i, prompt, [2], logprobs=[-0.5]) for i in range(3)]
    (batch,) = pack(samples, 1000, share_prompts=True)
    computed = batch.num_computed_tokens
    assert computed < batch.num_tokens
    parts = MicroBatchSize(computed).split([MicroBatch(batch)])
    assert [part.batch.num_sequences for part in parts] == [3]
    parts = MicroBatchSize(computed - 1).split([MicroBatch(batch)])
    assert [part.batch.num_sequences for part in parts] == [2, 1]


@pytest.mark.parametrize(("planned", "tokens"), [(None, 9), (5, 5), (20, 9)])
def test_the_first_size_is_the_setting_or_the_plan_if_smaller(planned, tokens):
    assert MicroBatchSize.of(settings().train, planned).tokens == tokens


def test_the_size_falls_to_half_of_the_largest_that_can_be_divided(caplog):
    size = MicroBatchSize(1000)
    assert size.take_metrics() == {}
    with caplog.at_level(logging.WARNING):
        size.halve([(40, 2), (70, 3), (900, 1)], "no room")
    assert size.tokens == 35
    assert "35 tokens per micro-batch instead of train.tokens_per_micro_batch = 1000" in caplog.text
    size.halve([(900, 2)], "no room")
    assert size.tokens == 17
    assert size.take_metrics() == {"memory/train_retries": 2.0}
    assert size.take_metrics() == {}
    for _ in range(6):
        size.halve([(900, 2)], "no room")
    assert size.tokens == 1
    with pytest.raises(OutOfMemoryStop, match=r"one sequence .*longest has 900 tokens"):
        size.halve([(40, 1), (900, 1)], "no room")


def test_only_the_update_that_failed_is_divided_again(sample):
    size = MicroBatchSize(100)
    minibatch = Minibatch([MicroBatch(batch_of_three(sample))], size)
    assert (minibatch.num_tokens, minibatch.num_sequences) == (4, 3)
    assert minibatch.tokens_of(minibatch.micro_batches[0]) == 9
    minibatch.shrink("no room")
    assert size.tokens == 4
    assert [micro.batch.num_tokens for micro in minibatch.micro_batches] == [3, 2, 4]


def test_a_token_that_the_model_does_not_have_is_named(bigram, sample):
    policy = bigram()
    last = policy.config.vocab_size - 1
    (batch,) = pack([sample(0, [0, last], [2])], 100)
    assert len(batch_logprobs(policy, batch)[0]) == 1
    for token in (-1, last + 1):
        (batch,) = pack([sample(0, [1, token], [2])], 100)
        with pytest.raises(UserError, match=f"the model has 0 to {last}"):
            batch_logprobs(policy, batch)
