"""A draft head has the same bits at any number of ranks, and the policy beside it too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.ranks import run_ranks
from tests.distributed.tiny_policy import CONFIG, digest_of, random_samples

from jetrl.distributed.world import world
from jetrl.errors import RanksDiffer
from jetrl.models.draft_head import DraftHead
from jetrl.models.policy import Policy
from jetrl.precision import PrecisionPlan
from jetrl.session.ranks import compare_weights
from jetrl.settings.loading import Settings
from jetrl.training import Trainer
from jetrl.training.extras.draft_head import DraftHeadTraining


def _train() -> Any:
    """Return digests of head and policy, metrics of the head, and whether a fault is found."""
    policy = Policy.from_config(CONFIG, PrecisionPlan.preset("unified"), seed=1)
    settings = Settings.model_validate(
        {
            "train": {"tokens_per_micro_batch": 45, "updates_per_step": 2, "lr": 1e-3},
            "draft_head": {"share": 0.7, "tokens_per_update": 20},
        }
    )
    training = DraftHeadTraining(DraftHead(policy, 3, 1), settings)
    trainer = Trainer(policy, settings, draft_head=training)
    losses = []
    for step in range(3):
        metrics = trainer.step(random_samples(policy, step, 4), step).metrics
        losses.append((metrics["draft_head/loss"], metrics["draft_head/accuracy"]))
        compare_weights("here", policy, beside=trainer.tensors_beside)
    found = digest_of(training.state_tensors()), digest_of(training.head.weights), losses
    differs = ""
    with torch.no_grad():
        training.head.masters["fc.weight"][0, 0] += world().rank
    try:
        compare_weights("here", policy, beside=trainer.tensors_beside)
    except RanksDiffer as error:
        differs = str(error)
    return found, digest_of(policy.weights.quantized_tensors()), differs


@pytest.mark.parametrize("size", [2, 3])
def test_a_head_has_the_same_bits_on_any_number_of_ranks(size: int) -> None:
    found, weights, differs = _train()
    assert differs == ""
    for other, other_weights, message in run_ranks(size, _train):
        assert other == found
        assert other_weights == weights
        assert "draft head: master.fc.weight" in message
