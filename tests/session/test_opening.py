"""Mistakes are found before anything is written: no run directory, no warm-up."""

from pathlib import Path

import pytest

from jetrl.config import load_config
from jetrl.errors import UserError
from jetrl.session.session import Session


@pytest.mark.parametrize(
    "wrong",
    [
        ["algorithm.name=nowhere.py:loss"],
        ["algorithm.name=ppo", "critic.path=/nowhere"],
        ["algorithm.kl=0.1", "reference.path=/nowhere"],
    ],
)
def test_what_is_built_after_the_warm_up_is_checked_before(
    tmp_path: Path, wrong: list[str]
) -> None:
    settings = load_config("demo", [f"run.dir={tmp_path}", *wrong])
    with pytest.raises(UserError, match="nowhere"), Session(settings):
        pass
    assert not list(tmp_path.iterdir())
