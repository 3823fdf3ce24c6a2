"""Whole runs on drawn shapes: exact, resumed with the same bits, and what they refuse."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image as Pillow
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.distributed.ranks import run_ranks
from tests.e2e.small import SMALL, before_call, cut, demo, trained, without_last_checkpoint
from tests.e2e.small import metrics as lines_of
from tests.models.test_images import change, model

from jetrl.cli.main import main
from jetrl.errors import UserError
from jetrl.loop import sft
from jetrl.models.tiny import make_tiny
from jetrl.runs.directory import RunDirectory
from jetrl.runs.metrics import reproducible
from jetrl.runs.report import write_report
from jetrl.runs.schemas import ROLLOUT_LINE
from jetrl.runs.storage import Record
from jetrl.session.open import RunContext, check_run
from jetrl.training.sft import SftTrainer

TASK = """
from jetrl.tasks.shapes import Shapes

class Mine(Shapes):
    def score(self, prompt, completion):
        assert not prompt.images, "workers get no images"
        return float(len(completion) % 2)

    def self_test(self):
        return []
"""


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    return str(getattr(request, "param", "idefics3"))


@pytest.fixture
def words(family: str, tmp_path: Path) -> list[str]:
    (tmp_path / "mine.py").write_text(TASK)
    base = [word for word in SMALL if not word.startswith("model.")]
    return [
        *base,
        f"model.path={model(tmp_path / 'model', family)}",
        f"task={tmp_path / 'mine.py'}:Mine",
        "task.options={count=20}",
        *["sft.steps=0", "train.updates_per_step=2", "rollout.keep_every=1", "eval.every=2"],
        *["eval.prompts=2", "checkpoint.every=1", "checkpoint.keep_last=3", "loop.steps=3"],
    ]


def uncut_and_resumed(words: list[str], tmp_path: Path) -> list[list[Record]]:
    """Return the metrics of a run and of its resumed copy, whose last steps have equal bits."""
    uncut = trained(words, tmp_path, "uncut")
    without_last_checkpoint(uncut.run_path, tmp_path / "cut")
    resumed = trained(words, tmp_path, "cut", resume=True)
    records = [RunDirectory.open(done.run_path).metrics() for done in (uncut, resumed)]
    assert reproducible(records[0][-1]) == reproducible(records[1][-1])
    return records


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"], indirect=True)
def test_a_run_is_exact_and_a_resumed_one_has_its_bits(words: list[str], tmp_path: Path) -> None:
    run = partial(trained, words, tmp_path)
    uncut = run("uncut")
    without_last_checkpoint(uncut.run_path, tmp_path / "cut")
    resumed = run("cut", resume=True)
    records = [RunDirectory.open(done.run_path) for done in (uncut, resumed)]
    last = [reproducible(record.metrics()[-1]) for record in records]
    assert last[0] == last[1]
    for metrics in records[0].metrics()[1:]:
        assert (metrics["mismatch/num_different"], metrics["mismatch/num_tokens"] > 60) == (0, True)
        assert 0 < metrics["reward/mean"] < 1
        assert metrics["policy/grad_norm"] > 0
    page = write_report(uncut.run_path).read_text()
    assert page.count('src="data:image/jpeg;base64,') >= 4
    (uncut.run_path / "rollouts" / "images").rename(tmp_path / "previews")
    assert "data:image/jpeg" not in write_report(uncut.run_path).read_text()
    seen = {
        each for step in (1, 2, 3) for line in records[0].rollouts(step) for each in line["images"]
    }
    previews = {file.stem: file.read_bytes() for file in (tmp_path / "previews").iterdir()}
    assert previews.keys() == seen
    assert all(max(Pillow.open(io.BytesIO(each)).size) == 96 for each in previews.values())
    lines = records[0].rollouts(1)
    assert {len(line["images"]) for line in lines} == {1}
    assert lines[0]["prompt_token_ids"].count(lines[0]["prompt_token_ids"][5]) >= 4


@pytest.mark.parametrize(
    "family, precision",
    [("idefics3", "preset=bf16"), ("qwen2_5_vl", "preset=int8"), ("qwen3_vl", "base=nvfp4")],
    indirect=["family"],
)
def test_a_run_with_an_adapter_is_exact_and_is_resumed_sampled_and_evaluated(
    precision: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = ["adapter.kind=lora", "adapter.rank=4", "algorithm.kl=0.01", "train.lr=1e-2"]
    words = [*words, *adapter, f"precision.{precision}", "loop.steps=2"]
    _, *records = uncut_and_resumed(words, tmp_path)[0]
    uncut = tmp_path / "uncut"
    for metrics in records:
        assert metrics["mismatch/num_different"] == 0
        assert metrics["policy/grad_norm"] > 0
    assert 0 < records[0]["policy/kl_ref"] < records[-1]["policy/kl_ref"]
    Pillow.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    for source in (uncut, uncut / "model"):
        image = ["--image", str(tmp_path / "red.png"), "--max-tokens", "6"]
        assert main(["sample", str(source), *image, "Which color?"]) == 0
    said = capsys.readouterr().out.partition("<image>Which color?")[2]
    first, _, again = said.partition("<image>Which color?")
    assert first.strip() == again.strip() != ""
    assert main(["eval", str(uncut), "--prompts", "2", "--trust-task"]) == 0


SUPERVISED = [
    *("sft.steps=4", "sft.until=1.1", "sft.check_every=2", "sft.lr=1e-3", "sft.warmup_steps=0"),
    *("loop.steps=0", "train.tokens_per_micro_batch=64", "train.updates_per_step=1"),
]


def supervised(words: list[str], folder: str, name: str, resume: bool = False) -> str:
    return sft(demo([*words, *SUPERVISED], Path(folder), name=name), resume=resume).digest


@pytest.mark.parametrize("family", ["qwen3_vl"], indirect=True)
def test_supervised_training_learns_resumes_and_is_the_same_on_ranks(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tmp_path)
    uncut = supervised(words, folder, "uncut")
    lines = lines_of(tmp_path / "uncut")
    losses = [line["sft/loss"] for line in lines if "sft/loss" in line]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    with monkeypatch.context() as patch:
        before_call(SftTrainer, "step", 4, cut, patch.setattr)
        with pytest.raises(RuntimeError, match="cut"):
            supervised(words, folder, "cut")
    assert supervised(words, folder, "cut", resume=True) == uncut
    assert run_ranks(2, supervised, words, folder, "two") == [uncut, uncut]
    for name in ("cut", "two"):
        assert lines_of(tmp_path / name) == lines


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize(
    "row, message",
    [
        ({}, None),
        ({"prompt": "<image>seen?", "messages": None, "completion": "yes"}, None),
        (
            {"prompt": "<image>seen?", "messages": None, "completion": "an <image>"},
            r"prompt 'train-0': its demonstration has <image>, a place of an image, and only",
        ),
        (
            {"prompt": "<image>seen?", "messages": None, "completion": "yes" * 50},
            r"prompt 'train-0' and its demonstration have 1\d\d tokens, and the model's context is",
        ),
    ],
)
def test_rows_with_images_have_answers_to_imitate(
    family: str, row: dict[str, object], message: str | None, words: list[str], tmp_path: Path
) -> None:
    """The layouts of TRL; the images have no place in the first one's messages."""
    template = "{% for m in messages %}{{ m['content'] }}={% endfor %}"
    change(tmp_path / "model" / "tokenizer_config.json", chat_template=template)
    config = tmp_path / "model" / "config.json"
    text = json.loads(config.read_text())["text_config"] | {"max_position_embeddings": 99}
    change(config, text_config=text)
    Pillow.new("RGB", (20, 20), "red").save(tmp_path / "red.png")
    said = [("user", "seen?"), ("assistant", "a red"), ("user", "sure?"), ("assistant", "yes")]
    told = [{"role": role, "content": content} for role, content in said]
    rows = [{"messages": told, "images": ["red.png"], **row}, {"prompt": "1+1=", "completion": "2"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    task = ["task=dataset", f"task.path={tmp_path}", "task.options={checker='zero'}"]
    words = [*words, *task, "eval.every=0", "task.split=train"]
    if message is None:
        trained(words, tmp_path, "run", "sft.steps=2", "loop.steps=0", "sft.until=none")
        assert lines_of(tmp_path / "run")[-1]["sft/tokens"] > 8
        return
    with pytest.raises(UserError, match=message):
        trained(words, tmp_path, "run", "sft.steps=2", "loop.steps=0", "sft.until=none")


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_completions_that_cross_steps_keep_their_positions(
    family: str, words: list[str], tmp_path: Path
) -> None:
    partial_words = ["rollout.oversample=1.0", "rollout.max_batch_size=12", "rollout.max_tokens=10"]
    words = [*words, *partial_words, "rollout.page_size=4"]
    records = uncut_and_resumed(words, tmp_path)
    assert sum(metrics["partial_rollout/unfinished"] for metrics in records[0][1:]) > 0
    for metrics in records[0][1:]:
        assert metrics["mismatch/num_different"] == 0


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_the_memory_plan_counts_tokens_of_images(
    family: str, words: list[str], tmp_path: Path
) -> None:
    def checked(most: int) -> RunContext:
        area = {"shortest_edge": 256, "longest_edge": most}
        change(tmp_path / "model" / "preprocessor_config.json", size=area)
        with contextlib.ExitStack() as stack:
            return check_run(demo(words, tmp_path), stack)

    def numbers(run: RunContext, what: str) -> list[int]:
        (row,) = (row.what for row in run.memory.plan.rows if what in row.what)
        return [int(word) for word in row.split() if word.isdecimal()]

    # Four prompts with a picture of 96 x 96 pixels each: 4 and 16 tokens.
    small, large, bounded = checked(256), checked(1024), checked(4 * 96 * 96)
    counts = [numbers(run, "prompt tokens")[0] for run in (small, large)]
    assert counts[1] - counts[0] == 4 * 12
    assert [numbers(run, "image tower: a forward") for run in (small, large)] == [[4], [16]]
    note = "images have up to 144 tokens, and preprocessor_config.json allows 576: max_pixels"
    assert [note in " ".join(run.notes) for run in (large, bounded)] == [False, True]


@pytest.mark.parametrize(
    "setting, message",
    [
        ("algorithm.name=ppo critic.path=policy", "a critic or reward model reads text only"),
        ("precision.preset=integer", "the bits of an image tower are not defined"),
    ],
)
def test_parts_that_read_text_only_are_named(
    setting: str, message: str, words: list[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trained(words, tmp_path, "run", *setting.split())


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
@pytest.mark.parametrize(
    "key, setting", [("reference.path", "algorithm.kl=0.1"), ("teacher.path", "algorithm.name=opd")]
)
@pytest.mark.parametrize("most, tokens", [(512, 4), (4096, 64)])
def test_a_model_with_other_tokens_of_images_is_refused(
    key: str, setting: str, most: int, tokens: int, family: str, words: list[str], tmp_path: Path
) -> None:
    other = model(tmp_path / "second", family)
    words = [*words, setting, "loop.steps=1", f"{key}={other}"]
    assert trained(words, tmp_path, "alike").steps == 1
    area = {"shortest_edge": 256, "longest_edge": most}
    change(other / "preprocessor_config.json", size=area)
    with pytest.raises(UserError, match=rf"has 16 tokens for an image, and {key} {tokens}: give"):
        trained(words, tmp_path, "other")


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_a_teacher_reads_its_own_prompts_with_their_images(
    family: str, words: list[str], tmp_path: Path
) -> None:
    own = ["algorithm.name=opd", f"teacher.path={tmp_path / 'model'}", "loop.steps=1"]
    words = [*words, *own, "train.updates_per_step=1"]

    def kl(name: str, template: str) -> float:
        done = trained(words, tmp_path, name, f"teacher.prompt={template}")
        return float(RunDirectory.open(done.run_path).metrics()[-1]["teacher/kl"])

    # Most prompts have the same text and differ by their images only.
    assert kl("alike", "{prompt}") == 0
    assert kl("told", "{prompt} ({answer})") > 0


def test_a_line_cannot_name_a_file_elsewhere() -> None:
    assert ROLLOUT_LINE.validate_python({"images": ["0" * 64]}).images == ["0" * 64]
    for name in ("../config", "0" * 63 + "/", "A" * 64, "0" * 64 + "\n"):
        with pytest.raises(ValidationError):
            ROLLOUT_LINE.validate_python({"images": [name]})


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"], indirect=True)
def test_recorded_and_replayed_steps_have_their_images_and_bits(
    words: list[str], tmp_path: Path
) -> None:
    words = [
        *words,
        "loop.steps=2",
        "eval.every=0",
        "sft.until=none",
        "data.replay_steps=1",
        "train.lr=1e-3",
    ]
    first = trained(words, tmp_path, "first")
    again = trained(words, tmp_path, "again", "data.rollouts=first")
    without_last_checkpoint(first.run_path, tmp_path / "cut")
    assert trained(words, tmp_path, "cut", resume=True).digest == first.digest == again.digest
    for metrics in RunDirectory.open(again.run_path).metrics()[1:]:
        assert (metrics["mismatch/num_different"], metrics["mismatch/num_tokens"] > 60) == (0, True)
    assert page_of(again.run_path) == page_of(first.run_path) >= 4
    # Weights that drew none of the tokens: the tokens count as another policy's.
    other = trained(
        words, tmp_path, "other", "data.rollouts=first", "run.seed=5", "sft.steps=1", "loop.steps=1"
    )
    assert RunDirectory.open(other.run_path).metrics("rl")[-1]["mismatch/num_tokens"] == 0
    shutil.rmtree(sorted((tmp_path / "cut" / "checkpoints").glob("step_*"))[-1])
    assert main(["replay", str(tmp_path / "cut"), "--trust-task"]) == 0


def page_of(run: Path) -> int:
    return write_report(run).read_text().count('src="data:image/jpeg;base64,')


@pytest.mark.parametrize("family", ["qwen2_5_vl"], indirect=True)
def test_an_image_that_has_changed_since_it_was_recorded_is_named(
    family: str, words: list[str], tmp_path: Path
) -> None:
    rows = [{"prompt": "seen?", "answer": "1", "image": f"{n}.png"} for n in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number in range(4):
        Pillow.new("RGB", (20, 20), (number, 0, 0)).save(tmp_path / f"{number}.png")
    task = ["task=dataset", f"task.path={tmp_path}", "task.options={format='text'}"]
    words = [*words, *task, "eval.every=0", "sft.until=none", "data.replay_steps=1"]
    trained(words, tmp_path, "first", "loop.steps=1")
    again = ["again", "data.rollouts=first", "loop.steps=1"]
    assert trained(words, tmp_path, *again).steps == 1
    shutil.rmtree(tmp_path / "again")
    was = RunDirectory.open(tmp_path / "first").rollouts(1)
    (hash_of_2,) = {line["images"][0] for line in was if line["prompt_id"] == "train-2"}
    Pillow.new("RGB", (20, 20), "blue").save(tmp_path / "2.png")
    named = rf"step_000001.jsonl: prompt 'train-2': image number 0 was {hash_of_2} .*: restore the"
    with pytest.raises(UserError, match=named):
        trained(words, tmp_path, *again)
    with pytest.raises(UserError, match=named):
        trained(words, tmp_path, "first", "loop.steps=2", resume=True)
    (tmp_path / "2.png").unlink()
    with pytest.raises(UserError, match=r"line 3: column 'image': .*2\.png: No such file"):
        trained(words, tmp_path, "first", "loop.steps=2", resume=True)
    # The same picture with another number of tokens.
    Pillow.new("RGB", (20, 20), (2, 0, 0)).save(tmp_path / "2.png")
    area = {"shortest_edge": 1024, "longest_edge": 1024}
    change(tmp_path / "model" / "preprocessor_config.json", size=area)
    with pytest.raises(UserError, match=r"with another tokenizer, .* or image processor: token"):
        trained(words, tmp_path, *again)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize(
    "family, part, preset",
    [
        ("idefics3", "all", "int8"),
        ("qwen2_5_vl", "all", "bf16"),
        ("qwen3_vl", "connector", "unified"),
    ],
    indirect=["family"],
)
def test_a_run_that_trains_its_tower_is_exact_and_a_resumed_one_has_its_bits(
    part: str, preset: str, words: list[str], tmp_path: Path
) -> None:
    own = [f"train.tower={part}", f"precision.preset={preset}", "train.lr=1e-3"]
    words = [*words, *own, "algorithm.kl=0.01"]
    records, uncut = uncut_and_resumed(words, tmp_path), tmp_path / "uncut"
    assert records[0][-1]["digest"] == records[1][-1]["digest"]
    for metrics in records[0][1:]:
        assert preset == "bf16" or metrics["mismatch/num_different"] == 0
        assert metrics["mismatch/num_tokens"] > 60
    assert records[0][-1]["policy/kl_ref"] > 0
    before, after = tensors(tmp_path / "model"), tensors(uncut / "model")
    moved = {
        name for name in before if not torch.equal(before[name].to(after[name].dtype), after[name])
    }
    seen = {name for name in moved if "visual." in name or "vision_model" in name}
    joins = {name for name in moved if "merger" in name or "connector" in name}
    assert len(joins) > 0
    assert (seen <= joins) == (part == "connector")
    kept = tensors(uncut / "reference")
    assert all(torch.equal(kept[name], before[name].float()) for name in seen | joins)
    assert main(["export", str(uncut), str(tmp_path / "out")]) == 0
    exported = tensors(tmp_path / "out")
    assert all(torch.equal(exported[name], after[name]) for name in seen | joins)
    with pytest.raises(UserError, match=rf"model train.tower is '{part}' in the check.* None here"):
        trained([*words, "train.tower=frozen"], tmp_path, "cut", "loop.steps=4", resume=True)


def test_settings_without_a_tower_to_train_are_refused(words: list[str], tmp_path: Path) -> None:
    text = make_tiny(tmp_path / "text")
    with pytest.raises(UserError, match=r"^train.tower = all: Qwen3ForCausalLM reads text only"):
        trained([*words, "train.tower=all"], tmp_path, "blind", f"model.path={text}")
    with pytest.raises(UserError, match=r"train.tower = connector: with adapter.kind = lora"):
        trained([*words, "train.tower=connector", "adapter.kind=lora"], tmp_path, "adapter")
