"""When the samples of an update share their prompts: decided by their lengths alone."""

from __future__ import annotations

import pytest

from jetrl.settings.loading import Settings
from jetrl.training.packing import WORTH_SHARING, saved_share, shares_prompts


def group(sample, index: int, prompt: int, completions: list[int]):
    tokens = [index] + [1] * (prompt - 1)
    return [sample(index, tokens, [2] * n, 0.0) for n in completions]


def test_the_saved_share_counts_each_stem_once(sample) -> None:
    # 256 of a prompt of 300 tokens once in place of three times; 100 tokens have no whole block.
    samples = group(sample, 0, 300, [10, 20, 30]) + group(sample, 1, 100, [5, 5])
    assert saved_share(samples) == 512 / (960 + 210)
    assert saved_share(samples[:1] + samples[3:]) == 0.0
    assert saved_share([]) == 0.0


@pytest.mark.parametrize("completion, shared", [(2543, True), (2545, False)])
def test_auto_shares_where_enough_is_saved(sample, completion: int, shared: bool) -> None:
    """A group of 8 saves 7 stems of 256 tokens, which is 8% of 8 * (256 + n) for n of 2544."""
    samples = group(sample, 0, 256, [completion] * 8)
    assert WORTH_SHARING == 0.08
    assert shares_prompts("auto", samples) is shared
    assert shares_prompts(True, samples)
    assert not shares_prompts(False, samples)


def test_auto_decides_for_each_update(sample) -> None:
    samples = group(sample, 0, 128, [10, 10]) + group(sample, 1, 20, [10, 10])
    assert shares_prompts("auto", samples, [0, 1])
    assert not shares_prompts("auto", samples, [2, 3])
    assert not shares_prompts("auto", samples, [0, 2])


@pytest.mark.parametrize("text, value", [("auto", "auto"), (True, True), (False, False)])
def test_the_setting_has_three_values(text: str | bool, value: str | bool) -> None:
    settings = Settings.model_validate({"train": {"share_prompts": text}})
    assert settings.train.share_prompts == value
    assert Settings.model_validate({}).train.share_prompts == "auto"
