"""Names of TRL, verl, prime-rl and unsloth: each is answered with a setting, or with why not."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from tools.documents.elsewhere import with_names

from jetrl import Settings
from jetrl.errors import UserError
from jetrl.settings.loading import describe, load_config
from jetrl.settings.messages import elsewhere, hint
from jetrl.tasks.dataset import Dataset

ROOT = Path(__file__).parents[2]
LINES = Path(__file__).with_name("names_elsewhere.txt").read_text(encoding="utf-8").splitlines()
NAMES = " ".join(line for line in LINES if not line.startswith("#")).split()
KEYS = {key for key, *_ in describe()}
ANSWERED = re.compile(
    r"here it is|name a key, such as|should be|jetrl has no such setting|did you mean"
)


def answer(name: str) -> str:
    """Return what a person is told who types it on the command line; a name may be ours."""
    try:
        load_config(None, [f"{name}=[1]"])
    except UserError as error:
        return str(error)
    return "here it is"


def test_names_lead_to_settings_that_there_are() -> None:
    options = {f"task.options.{name}" for name in inspect.signature(Dataset).parameters}
    here = {key.partition("=")[0] for row in elsewhere() for key in row.here}
    assert here - KEYS - options == {"--resume"}
    assert all(row.words for row in elsewhere() if not row.here)


def test_a_name_is_in_one_row() -> None:
    """A name with two rows has two answers: only a library's own ambiguity may need that."""
    own = [name for row in elsewhere() for name in row.names if name in KEYS and name in row.here]
    rows = {name: [row for row in elsewhere() if name in row.names] for name in NAMES}
    assert [name for name, found in rows.items() if len(found) > 1] == []
    assert set(own) <= {
        "model.path",
        "rollout.temperature",
        "rollout.top_p",
        "rollout.top_k",
        "algorithm.gamma",
        "rollout.stop",
    }


def test_names_of_real_configs_are_answered() -> None:
    assert len(NAMES) > 400
    assert [name for name in NAMES if not ANSWERED.search(answer(name))] == []


@pytest.mark.parametrize("prefix", ["", "actor_rollout_ref.", "train."])
def test_each_name_of_the_table_gets_its_own_answer(prefix: str) -> None:
    for row in elsewhere():
        for name in row.names:
            full = f"{prefix}{name.replace('*', 'x')}"
            if full in KEYS or full in Settings.model_fields:
                continue
            got = hint(full.split("."), Settings)
            assert str(row) in got or any(key in got for key in row.here), full


def test_a_misspelt_name_is_answered_too() -> None:
    """Every ninth name without one of its letters."""
    names = [name for name in NAMES if len(name) > 6][::9]
    missed = [name for name in names if not ANSWERED.search(answer(name[:-4] + name[-3:]))]
    assert len(missed) <= len(names) / 10, missed


def test_the_tables_of_verl_are_answered_line_by_line(tmp_path: Path) -> None:
    recipe = tmp_path / "verl.toml"
    text = (
        "[actor_rollout_ref.actor.optim]\nlr = 1e-6\n[trainer]\ntotal_epochs = 15\nlogger = 'x'\n"
    )
    recipe.write_text(text)
    with pytest.raises(UserError) as caught:
        load_config(recipe)
    assert [line.partition(": ")[2] for line in str(caught.value).splitlines()] == [
        "unknown setting actor_rollout_ref.actor.optim.lr; here it is train.lr",
        f"unknown setting trainer.total_epochs; {hint(('total_epochs',), Settings)}",
        "unknown setting trainer.logger; here it is trackers.names",
    ]
    assert f"{recipe}, line 4: " in str(caught.value)


@pytest.mark.parametrize(
    "sections, words",
    [
        (
            {"train": {"learning_rate": 1}},
            "Settings: unknown setting train.learning_rate; here it is train.lr",
        ),
        ({"train": {"lr": "fast"}}, 'Settings: train.lr = "fast": should be a valid number'),
        ({"train": 3}, "Settings: train = 3: "),
        ({"nope": {}}, "Settings: unknown setting nope; "),
        ({"rollout": {"samples_per_prompt": 1}}, "Settings: rollout.samples_per_prompt = 1: grpo"),
    ],
)
def test_settings_in_python_raise_user_errors(sections: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        Settings(**sections)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    "theirs, here",
    [
        ("token-mean", "here it is token_mean"),
        ("seq-mean-token-mean", "here it is sequence_mean"),
        ("seq-mean-token-sum", "here it is sequence_sum"),
        ("seq-mean-token-sum-norm", "here it is constant"),
        ("token-sum", "jetrl has no equivalent"),
    ],
)
def test_the_aggregations_of_verl_have_their_names_here(theirs: str, here: str) -> None:
    with pytest.raises(UserError, match=f"{theirs} is a loss_agg_mode of verl; {here}$"):
        load_config(None, [f"algorithm.aggregation={theirs}"])
    name = f"actor_rollout_ref.actor.loss_agg_mode={theirs}"
    with pytest.raises(UserError, match=rf"here it is algorithm\.aggregation.*{theirs}"):
        load_config(None, [name])


def test_settings_do_not_change() -> None:
    with pytest.raises(
        UserError, match="settings are immutable, cannot set lr = 1; create new ones"
    ):
        Settings().train.lr = 1  # type: ignore[misc]


def test_the_document_has_the_table() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    assert with_names(text) == text, "run: make docs"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.name=dpo", "jetrl sft --task dpo"),
        ("early_stop=3", "checkpoint.keep_best keeps the best"),
        ("algorithm.early_stop=3", "checkpoint.keep_best keeps the best"),
        ("length_penalty=1", "algorithm.overlong_buffer is a penalty"),
        ("mask_truncated_completions=true", "no such setting: a truncated completion counts"),
    ],
)
def test_a_name_that_resembles_another_setting_is_not_taken_for_it(override, says) -> None:
    with pytest.raises(UserError) as caught:
        load_config("demo", [override])
    assert says in str(caught.value)
    assert "did you mean" not in str(caught.value)


def test_dotted_keys_in_python_are_settings() -> None:
    settings = load_config("demo", sections={"rollout.prompts_per_step": 4, "train": {"lr": 1e-5}})
    assert (settings.rollout.prompts_per_step, settings.train.lr) == (4, 1e-5)
    with pytest.raises(UserError, match=r"unknown setting rollout\.prompts; "):
        load_config("demo", sections={"rollout.prompts": 4})
