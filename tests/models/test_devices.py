"""A device that is not there is a user's mistake, wherever the weights come from."""

from pathlib import Path

import pytest
import torch

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan

PLAN = PrecisionPlan.preset("unified")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "model")
    config = hf.read_config(path)
    for make in (
        lambda: Policy.from_config(config, PLAN, device="cuda"),
        lambda: Policy.from_pretrained(path, PLAN, "cuda"),
        lambda: Policy.from_pretrained(path, PLAN, "cuda", frozen=True),
        lambda: ScalarModel.from_language_model(path, PLAN, "cuda"),
    ):
        with pytest.raises(UserError, match=r"device cuda: not there; use run\.device=cpu"):
            make()
