"""Settings: what is accepted, what is refused and in which words, and TOML written back."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.documents.settings import with_tables

from jetrl.errors import UserError
from jetrl.settings import loading
from jetrl.settings.loading import (
    Settings,
    describe,
    find_recipe,
    load_config,
    packaged_recipes,
    to_toml,
)
from jetrl.settings.sections import ModelSettings, RolloutSettings, TaskSettings

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """Let a test see the warnings that another test of this process has met already."""
    loading._warn_once.cache_clear()


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def message(*overrides: str, recipe: str | Path | None = None) -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, overrides)
    return str(caught.value)


def test_overrides_win_over_the_recipe_and_later_ones_over_earlier(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.toml", "[train]\nlr = 1e-5\neps = 1e-6\n")
    settings = load_config(recipe, ["train.lr=2e-6", "train.lr=3e-6"])
    assert (settings.train.lr, settings.train.eps) == (3e-6, 1e-6)


@pytest.mark.parametrize(
    "override, section, key, value",
    [
        ("train.lr=2e-6", "train", "lr", 2e-6),
        ("train.activation_checkpointing=true", "train", "activation_checkpointing", True),
        ("train.betas=[0.8, 0.9]", "train", "betas", (0.8, 0.9)),
        ('rollout.stop=["</a>", "\\n"]', "rollout", "stop", ("</a>", "\n")),
        ("run.name=2024-05-01", "run", "name", "2024-05-01"),
        ('run.name="a b"', "run", "name", "a b"),
        ("model=Qwen/Qwen3-8B", "model", "path", "Qwen/Qwen3-8B"),
        ("model.path=some/dir = x", "model", "path", "some/dir = x"),
        ("task=my.py:MyTask", "task", "name", "my.py:MyTask"),
        ("task.options={digits = 2}", "task", "options", {"digits": 2}),
        ("task.options.digits=2", "task", "options", {"digits": 2}),
        ("rollout.num_pages=none", "rollout", "num_pages", None),
        ("precision.preset=jet", "precision", "preset", "jet"),
    ],
)
def test_override_values(override: str, section: str, key: str, value: object) -> None:
    got = getattr(getattr(load_config(None, [override]), section), key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    "override, words",
    [
        ("train.lrr=1", "did you mean train.lr?"),
        ("rollout.max_token=3", "did you mean rollout.max_tokens?"),
        ("max_tokens=3", "did you mean rollout.max_tokens or eval.max_tokens?"),
        ("train.learning_rate=1", "here it is train.lr"),
        ("num_generations=8", "here it is rollout.samples_per_prompt"),
        ("trian.lr=3", "did you mean train.lr?"),
        ("task.checker=math", "as in task.options.checker"),
        ("zebra.stripes=3", "known sections: run, model, adapter"),
        ("rollout=3", "name a key, such as rollout.prompts_per_step"),
        ("train.lr=fast", 'train.lr = "fast": should be a valid number'),
        ('train.lr="1e-6"', 'train.lr = "1e-6": should be a valid number'),
        ("train.lr=nan", "finite"),
        ("train.lr=0", "greater than 0"),
        ("loop.steps=1.5", "should be a valid integer"),
        ("loop.steps=-1", "greater than or equal to 0"),
        ("rollout.top_p=0", "greater than 0"),
        ("precision.preset=unifed", "'nvfp4' or 'fp4'"),
        ("train.activation_checkpointing=1", "boolean"),
        ("train.betas=[0.9, 1.0]", "less than 1"),
        ("rollout.stop=5", "should be a valid string"),
        ('rollout.stop=["a", ""]', 'rollout.stop = "": String should have at least 1 character'),
        ("trackers=wandbb", "'wandb', 'trackio' or 'tensorboard'"),
        ("model.config=5", "an object or should be a valid string"),
        ("run.name=a/b", "single, non-empty folder name"),
        ("task.options={day = 1979-05-27}", "task.options.day is a date; write it as text"),
    ],
)
def test_a_wrong_override_is_refused_and_named(override: str, words: str) -> None:
    text = message(override)
    assert text.startswith(f"override {override!r}: ")
    assert words in text


def test_a_list_takes_a_plain_value_and_none(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.toml", 'trackers = "wandb"\n[rollout]\nstop = "END"\n')
    settings = load_config(recipe)
    assert (settings.trackers.names, settings.rollout.stop) == (("wandb",), ("END",))
    assert load_config(None, ["trackers=trackio"]).trackers.names == ("trackio",)
    assert load_config(recipe, ["trackers=none"]).trackers.names == ()
    assert Settings(trackers="trackio").trackers.names == ("trackio",)
    assert load_config(recipe, ["trackers=wandb,trackio"]).trackers.names == ("wandb", "trackio")


def test_mistakes_of_a_recipe_are_named_with_their_line(tmp_path: Path) -> None:
    recipe = write(tmp_path / "r.toml", "# one\n[train]\nlr = 1e-6\nupdates = 2\n")
    assert message(recipe=recipe).startswith(f"{recipe}, line 4: unknown setting train.updates")
    write(recipe, "[train]\n\nlr = 'quick'\n")
    assert message(recipe=recipe).startswith(f'{recipe}, line 3: train.lr = "quick": ')
    write(recipe, "train = 3\n")
    assert "train is a section: write [train]" in message(recipe=recipe)
    write(recipe, "[train]\nlr = 1\nlr = 2\n")
    got = message(recipe=recipe)
    assert got.startswith(f"recipe {recipe}: not valid TOML: ")
    assert "line 3" in got
    recipe.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in message(recipe=recipe)


def test_every_wrong_value_is_named_at_once() -> None:
    text = message("train.lr=0", "loop.steps=x")
    assert "train.lr" in text.splitlines()[0]
    assert "loop.steps" in text.splitlines()[1]


@pytest.mark.parametrize(
    "override",
    ["train", "train=3", "=3", ".lr=3", "train.=3", "train.lr.x=3", "task.name.x=3", "lr"],
)
def test_a_malformed_override_is_refused(override: str) -> None:
    assert override in message("train.lr=1e-6", "task.name=gsm8k", override)


def test_a_missing_recipe_is_refused_with_the_nearest(tmp_path: Path) -> None:
    assert "did you mean demo?" in message(recipe="dmo")
    assert "there is: demo" in message(recipe=tmp_path / "nothing-like-it.toml")
    assert "a folder, not a TOML file" in message(recipe=tmp_path)
    write(tmp_path / "config.toml", "")
    assert f"jetrl train run.name={tmp_path.name} --resume" in message(recipe=tmp_path)


def test_recipes_are_found_by_name_and_by_path() -> None:
    assert set(packaged_recipes()) >= {"demo", "gsm8k-smoke"}
    assert find_recipe("demo").read_text() == (ROOT / "recipes" / "demo.toml").read_text()
    assert find_recipe(ROOT / "recipes" / "demo.toml") == ROOT / "recipes" / "demo.toml"


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_are_valid_and_round_trip(name: str, tmp_path: Path) -> None:
    settings = load_config(name)
    assert load_config(write(tmp_path / "again.toml", to_toml(settings))) == settings


@pytest.mark.parametrize(
    "overrides, words",
    [
        (
            ["train.updates_per_step=9", "rollout.prompts_per_step=8"],
            "train.updates_per_step = 9 needs as many prompts, but rollout.prompts_per_step = 8",
        ),
        (["rollout.samples_per_prompt=1"], "use at least 2"),
        (["rollout.temperature=0"], "makes all completions of a group equal"),
        (["eval.temperature=1e-40"], "logits divided by it do not fit in float32"),
        (["rollout.num_pages=16", "rollout.max_tokens=1024"], "at least 17 pages"),
        (
            ["model.config={max_position_embeddings = 64}", "rollout.max_tokens=64"],
            "rollout.max_tokens = 64 leaves no room for a prompt in the model's context of 64",
        ),
        (
            ["data.batch=shuffle_r1", "algorithm.name=rloo", "algorithm.kl=0.1"],
            "data.batch = shuffle_r1: rloo subtracts the KL from the rewards that it compares",
        ),
        (
            ["algorithm.overlong_buffer=2000"],
            "algorithm.overlong_buffer = 2000 is more than rollout.max_tokens = 1024",
        ),
        (["data.explore=0.3"], "data.explore = 0.3 has no effect with data.order = shuffle"),
        (["model.path=a", "model.config=b"], "model.path and model.config are both set"),
        (["algorithm.name=ppo"], "ppo needs a critic, as with critic.path=policy"),
        (["critic.path=policy"], "grpo has no critic"),
        (["rollout.speculation=head", "loop.steps=0"], "= head needs loop.steps above 0"),
        (["reward.rule=0.0"], "both 0"),
        (["reward.model=0.5"], "needs reward.model_path"),
        (["reward.model_path=x"], "reward.model = 0"),
        (["precision.base=nvfp4"], "is not trained: set adapter.kind=lora"),
        (["adapter.noise_start=0.01"], "noise_start is set: set adapter.kind=lora"),
        (["adapter.kind=lora", "adapter.noise_start=1e-4"], "noise_start = 0.0001 is below"),
    ],
)
def test_settings_that_do_not_agree_are_refused_with_words(
    overrides: list[str], words: str
) -> None:
    assert words in message(*overrides)


AWKWARD = [
    'quotes " and \\ backslash',
    "line\nbreak\ttab\r\x00\x1b\x7f",
    "déjà vu 日本語 🚀 \u2028",
    "'single' # not a comment",
    "",
]


@pytest.mark.parametrize("text", AWKWARD)
def test_to_toml_round_trips_any_text(text: str, tmp_path: Path) -> None:
    settings = Settings(
        task=TaskSettings(system_prompt=text, options={text: text, "list": [text, [text]]}),
        rollout=RolloutSettings(stop=(f"{text}x",)),
    )
    assert load_config(write(tmp_path / "r.toml", to_toml(settings)), ["run.name=none"]) == settings


def test_to_toml_round_trips_nested_tables_and_drops_null(tmp_path: Path) -> None:
    config = {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "a.b": {"deep": [1, 2.5, True]}},
        "empty": {},
        "none": [],
        "big": 2**40,
        "small": 1e-30,
        "pad_token_id": None,
    }
    settings = Settings(model=ModelSettings(config=config))
    assert isinstance(settings.model.config, dict)
    assert "pad_token_id" not in settings.model.config  # TOML has no null: unset is left out
    again = load_config(write(tmp_path / "r.toml", to_toml(settings)), ["run.name=none"])
    assert again == settings
    assert again.model.config == {k: v for k, v in config.items() if v is not None}


def test_describe_has_every_key_with_words() -> None:
    rows = {key: rest for key, *rest in describe()}
    keys = {
        f"{section}.{key}" for section, values in Settings().model_dump().items() for key in values
    }
    assert set(rows) == keys
    assert rows["train.lr"] == ["number", "1e-06", "peak learning rate of AdamW"]
    assert rows["rollout.stop"][:2] == ["list of text", "[]"]
    assert rows["rollout.num_pages"][:2] == ["integer", "unset"]
    assert [key for key, (_, _, words) in rows.items() if not words] == []


def test_the_settings_document_is_current() -> None:
    """The document docs/settings.md lists every key with its type, default and description."""
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert with_tables(text) == text, "run: make docs"
    assert "| `lr` | number | `1e-06` | peak learning rate of AdamW |" in text
    with pytest.raises(UserError, match="no heading '## `train`'"):
        with_tables(text.replace("## `train`", "## `training`"))


def test_another_task_sets_the_recipes_task_section_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "[task]\nname = 'gsm8k'\npath = 'data'\nworkers = 0\n[task.options]\nstrict = true\n"
    recipe = write(tmp_path / "r.toml", text)
    other = load_config(recipe, ["task.options.digits=3", "task=arithmetic"]).task
    assert other == TaskSettings(name="arithmetic", options={"digits": 3})
    assert "task.path and task.workers and task.options are for another task" in caplog.text
    same = load_config(recipe, ["task=gsm8k", "task.timeout_s=3"]).task
    assert (same.path, same.options, same.timeout_s) == ("data", {"strict": True}, 3.0)
    assert load_config(recipe, ["task.split=test"]).task.path == "data"


def test_another_kind_of_task_sets_the_recipes_supervised_settings_of_the_first_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for sections, overrides in (
        (None, ["task=text"]),
        ({"task": "text"}, []),
        ({"task.name": "text"}, []),
    ):
        own = [*overrides, "task.path=a.txt"]
        sft = load_config("demo", own, sections).sft
        assert (sft.until, sft.steps, sft.lr, sft.warmup_steps) == (None, 600, 1e-3, 50)
        with pytest.raises(UserError, match=r"sft.until = 0.3 has no effect without a task with"):
            load_config("demo", [*own, "sft.until=0.3"], sections)
    said = "sft.until and sft.check_every and sft.examples_per_step are for another"
    assert caplog.text.count(said) == 1
    text = "[task]\nname = 'text'\npath = 'a.txt'\n[sft]\nsteps = 9\nlengths = [64]\n"
    recipe = write(tmp_path / "r.toml", text)
    assert load_config(recipe).sft.lengths == (64,)
    assert load_config(recipe, ["task=arithmetic"]).sft.lengths == (2048,)
    assert load_config("demo", ["task.path=none"]).sft.until == 0.4


def test_a_path_on_the_command_line_takes_the_place_of_the_recipes_config(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = load_config("demo", ["model.path=models/mine"]).model
    assert (model.path, model.config, model.tokenizer) == ("models/mine", None, None)
    words = "replaces the recipe's model.config and model.tokenizer"
    assert caplog.messages == [f"model.path=models/mine {words}"]


@pytest.mark.parametrize(
    "overrides, kept",
    [
        (["model.path=models/mine", "model.tokenizer=models/other"], "models/other"),
        (["model.path=models/mine", "model.config=none"], "characters"),  # one's own choice
    ],
)
def test_a_tokenizer_on_the_command_line_is_kept(overrides: list[str], kept: str) -> None:
    model = load_config("demo", overrides).model
    assert (model.path, model.config, model.tokenizer) == ("models/mine", None, kept)


_EXTREMES = [
    *("rollout.prompts_per_step=1000000000", "rollout.samples_per_prompt=1000000000"),
    *("rollout.max_batch_size=1000000000", "rollout.page_size=1000000", "eval.samples=1000000000"),
    *("task.timeout_s=1e300", "distributed.timeout_s=1e300", "watchdog.first_s=1e300"),
    *("watchdog.min_s=1e300", "watchdog.factor=1e300", "sft.examples_per_step=1000000000"),
]


@pytest.mark.parametrize("override", _EXTREMES)
def test_extremes_that_ended_in_a_traceback_are_refused_by_name(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=rf"{key} = .*: should be less than or equal to"):
        load_config(None, [override])


@pytest.mark.parametrize("key", ["run.seed", "rollout.top_k", "eval.every", "rollout.max_tokens"])
def test_whole_numbers_beyond_64_bits_are_refused(key: str) -> None:
    with pytest.raises(UserError, match=rf"{key}.*should be less than 9223372036854775808"):
        load_config("demo", [f"{key}={2**70}"])


@pytest.mark.parametrize(
    "override, needs",
    [
        ("train.min_lr_ratio=0.5", "train.schedule=cosine"),
        ("critic.lr=1e-4", "critic.path=policy algorithm.name=ppo"),
        ("critic.clip=0.1", "critic.path=policy algorithm.name=ppo"),
        ("draft_head.tokens=2", "rollout.speculation=head"),
        ("draft_head.lr=1e-4", "rollout.speculation=auto"),
        ("trackers.project=math", "trackers=wandb"),
        ("trackers.group=seeds", "trackers=wandb"),
        ("algorithm.correction_under_exact_plan=true", "algorithm.correction=tis"),
        ("adapter.noise_end=1e-3", "adapter.noise_start=0.01"),
        ("adapter.noise_stages=3", "adapter.noise_start=0.01"),
        ("eval.top_p=0.9", "eval.temperature=1.0"),
        ("precision.grad_output=e5m2", "precision.preset=unified"),
        ("precision.wgrad_input=1x128", "precision.preset=unified"),
        ("sft.lr=1e-3", "sft.steps=5"),
        ("sft.until=0.5", "sft.steps=5"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_by_name(override: str, needs: str) -> None:
    base = ["precision.preset=bf16", "adapter.kind=lora"]
    found = message(*base, override)
    key = override.partition("=")[0]
    assert key in found
    assert f"has no effect without {needs.partition('=')[0]}" in found or "precision" in key
    load_config(None, [*base, override, *needs.split()])


def test_partial_rollouts_need_a_loss_that_bounds_old_tokens() -> None:
    found = message("algorithm.name=rloo", "rollout.oversample=0.5")
    assert "rollout.oversample = 0.5: rloo has an unbounded importance ratio" in found
    for name in ("grpo", "gspo", "cispo"):
        load_config(None, [f"algorithm.name={name}", "rollout.oversample=0.5"])


def test_a_recipes_supervised_updates_are_switched_off_by_their_number() -> None:
    assert load_config("demo", ["sft.steps=0", "sft.lr=1e-3"]).sft.steps == 0


def test_the_completions_of_a_step_have_a_bound() -> None:
    most = ["rollout.prompts_per_step=131072", "rollout.samples_per_prompt=8"]
    assert load_config("demo", most).rollout.samples_per_prompt == 8
    with pytest.raises(UserError, match="= 1,179,648 completions per step; at most 1,048,576"):
        load_config("demo", [most[0], "rollout.samples_per_prompt=9"])
