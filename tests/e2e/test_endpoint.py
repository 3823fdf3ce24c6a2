"""Whole runs of the task `endpoint`: a harness with the real `openai` client, and its failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.distributed.ranks import run_ranks
from tests.distributed.runs import results
from tests.e2e.small import metrics, task_of, without_last_checkpoint
from tests.serve.conftest import TEMPLATE
from tests.training.shared import config

from jetrl import load_config, train
from jetrl.cli.main import main
from jetrl.errors import RunStopped, UserError
from jetrl.models.policy import Policy
from jetrl.models.tiny import train_bpe_tokenizer
from jetrl.precision.plan import PrecisionPlan
from jetrl.runs.directory import RunDirectory
from jetrl.session import episodes

PLAY = """
import asyncio, os, time
from openai import AsyncOpenAI, OpenAI

async def play(episode):
    messages = [{"role": "user", "content": episode.row["ask"]}]
    said = ""
    async with AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key) as client:
        for turn in range(1 + episode.row["n"] % 3):
            await asyncio.sleep(0.01 * ((episode.sample * 7) % 3))
            answer = await client.chat.completions.create(
                model=episode.model, messages=messages, max_tokens=8)
            said = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": f"more {turn}"})
            if episode.row["n"] == 2 and turn == 1:  # history that is rewritten
                messages = [messages[0], {"role": "user", "content": "again"}]
    return {"reward": sum(map(str.isalpha, said)) / 8, "spaces": said.count(" ")}

def leaves(episode):
    client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    said = client.completions.create(model=episode.model, prompt="a", max_tokens=99, stream=True)
    next(iter(said))
    said.close()
    return 1.0

def dies(episode):
    if episode.row["n"] == 1:
        os._exit(3)
    return one_turn(episode)

def gone(episode):
    os._exit(4)

def one_turn(episode):
    client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
    client.completions.create(model=episode.model, prompt="a", max_tokens=4)
    return 1.0

def fails(episode):
    kind = episode.row["n"]
    if kind == 0:
        return one_turn(episode)
    if kind == 1:
        return None if one_turn(episode) else 0
    if kind == 2:
        raise ValueError("a bug of the harness")
    if kind == 3:
        return float("nan")
    if kind == 4:
        time.sleep(60)
    if kind == 5:
        client = OpenAI(base_url=episode.base_url, api_key=episode.api_key)
        return client.completions.create(model=episode.model, prompt="a" * 500).seed

class Rows:
    def __init__(self, count): self.count = count
    def rows(self, split): return [{"n": i} for i in range(self.count)]
    def play(self, episode): return one_turn(episode)
"""
# A taskset of verifiers with its own agent, which asks twice through the interception server.
TASKSET = """
import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Letters", "Twice"]

class Data(vf.TaskData):
    letter: str

class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def share(self, trace):
        said = "".join(str(message.content) for message in trace.assistant_messages)
        return said.count(self.data.letter) / (1 + len(said))

    @vf.reward(weight=2.0)
    async def turns(self, trace):
        return float(trace.num_turns)

class Letters(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        return [Task(Data(prompt=f"say {x}", letter=x), self.config.task) for x in "aeinst"]

class Twice(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__):
        messages = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(
                    model=ctx.model, messages=messages, max_tokens=8)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said},
                             {"role": "user", "content": "again"}]
        return ProgramResult(0, "", "")
"""
VERIFIERS_PYTHON = os.environ.get("JETRL_VERIFIERS_PYTHON", sys.executable)
SHORT = """
    eval.every=0 report.enabled=false run.device=cpu precision.preset=int8 checkpoint.every=0
    rollout.samples_per_prompt=4
"""
WORDS = """
    task=endpoint rollout.prompts_per_step=3 rollout.samples_per_prompt=2 rollout.max_tokens=120
    eval.every=0 checkpoint.every=1 checkpoint.keep_last=3 report.enabled=false loop.steps=2
    run.device=cpu precision.preset=int8 train.lr=1e-2 task.options.test_share=0.4
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "text.txt").write_text("the words of a text, and some more of them")
    tokenizer = train_bpe_tokenizer([folder / "text.txt"], 270)
    tokenizer.chat_template = TEMPLATE
    raw = config(vocab_size=270, num_hidden_layers=1, initializer_range=0.2, eos_token_id=2)
    raw["max_position_embeddings"] = 256
    Policy.from_config(raw, PrecisionPlan.preset("int8"), tokenizer=tokenizer).save_pretrained(
        folder / "tiny"
    )
    return folder / "tiny"


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> Any:
    (tmp_path / "play.py").write_text(PLAY)
    rows = [json.dumps({"ask": f"question {i}", "n": i}) for i in range(6)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows[: 6 if split == "train" else 2]))

    def build(function: str, *words: str, name: str = "run") -> Any:
        own = [f"model.path={model}", f"run.dir={tmp_path}", f"run.name={name}"]
        harness = [f"task.options.harness={tmp_path}/play.py:{function}"] if function else []
        own += [f"task.path={tmp_path}", *harness]
        return load_config(None, [*WORDS.split(), *own, *words])

    return build


def records_of(path: Path, steps: int) -> list[Any]:
    return [r for step in range(1, steps + 1) for r in RunDirectory.open(path).rollouts(step)]


def test_episodes_are_trained_as_they_were_drawn(settings: Any, tmp_path: Path) -> None:
    """No token differs; other concurrency, or a resume, has the same bits."""
    words = ["eval.every=2", "eval.prompts=2", "eval.samples=1"]
    whole = train(settings("play", *words, name="whole"))
    for line in metrics(whole.run_path, "rl")[1:]:
        assert line["mismatch/num_different"] == 0
        assert line["mismatch/num_tokens"] > 40
        assert line["reward/failures"] == 0
    records = records_of(whole.run_path, 2)
    assert any(record.get("continues") for record in records)
    assert any(len(record["turns"]) > 1 for record in records)
    for record in records:
        assert 0 <= record["reward"] <= 1
        assert set(record["parts"]) == {"spaces"}
    alone = train(settings("play", *words, "task.options.concurrency=1", name="alone"))
    assert metrics(alone.run_path, "rl") == metrics(whole.run_path, "rl")
    assert alone.digest == whole.digest != ""

    without_last_checkpoint(whole.run_path, tmp_path / "cut")
    resumed = train(settings("play", *words, name="cut"), resume=True)
    assert resumed.digest == whole.digest


def _trained(given: Any) -> Path:
    return train(given).run_path


def test_two_ranks_with_a_harness_each_have_the_results_of_one(settings: Any) -> None:
    words = ["eval.every=2", "eval.prompts=2", "eval.samples=1"]
    alone = _trained(settings("play", *words, name="alone"))
    two = run_ranks(2, _trained, settings("play", *words, name="two"))
    assert results(two[0]) == results(alone)
    last = RunDirectory.open(two[0]).metrics("rl")[-1]
    assert last["distributed/size"] == 2
    assert last["mismatch/num_different"] == 0 < last["mismatch/num_tokens"]


def test_jetrl_eval_says_that_it_plays_no_episodes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "play.py").write_text(PLAY)
    (tmp_path / "test.jsonl").write_text('{"ask": "a", "n": 0}\n')
    given = ["--task", "endpoint", "--path", str(tmp_path), "--device", "cpu"]
    assert (
        main(["eval", str(model), *given, "--option", f"harness={tmp_path}/play.py:one_turn"]) == 2
    )
    assert "jetrl eval plays no episodes of a harness" in capsys.readouterr().err


def test_a_command_plays_too(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "import json, os, sys\n"
        "from openai import OpenAI\n"
        "row = json.loads(sys.stdin.readline())['row']\n"
        "client = OpenAI()  # by the environment's variables\n"
        "said = client.completions.create(\n"
        "    model=os.environ['OPENAI_MODEL'], prompt=row['ask'], max_tokens=3)\n"
        "print('talk')\n"
        "print(json.dumps({'reward': len(said.choices[0].text)}))\n"
        "sys.exit(7 if row['n'] == 1 else 0)\n"
    )
    command = json.dumps([sys.executable, str(tmp_path / "agent.py")])
    done = train(settings("", f"task.options.command={command}", "loop.steps=2"))
    records = records_of(done.run_path, 2)
    failures = {r["failure"] for r in records if r["reward"] is None}
    assert len(records) == 12
    assert [r["reward"] is None for r in records] == [bool(r["failure"]) for r in records]
    assert failures == {f"RuntimeError: {sys.executable} ended with 7: "} or all(
        "ended with 7" in failure for failure in failures
    )
    # An episode that failed is in the files, with its tokens, and out of the statistics.
    assert all(len(r["token_ids"]) == 3 for r in records if r["failure"])


def test_episodes_that_fail_are_named_and_left_out(settings: Any) -> None:
    words = ["rollout.prompts_per_step=6", "loop.steps=1", "task.options.timeout_s=3"]
    done = train(settings("fails", *words))
    (record,) = [m for m in RunDirectory.open(done.run_path).metrics("rl") if m["step"] == 1]
    assert record["reward/failures"] == 10
    assert record["reward/left_out"] == 10
    assert record["reward/mean"] == 1.0
    found = {r["prompt_id"]: r["failure"] for r in records_of(done.run_path, 1)}
    assert found["train-0"] == ""
    assert "returned no reward" in found["train-1"]
    assert found["train-2"].startswith("ValueError: a bug of the harness (play.py, line ")
    assert "nan" in found["train-3"]
    assert found["train-4"] == "no end after 3 s"
    assert "no room for an answer in a context of 120" in found["train-5"]


def test_a_harness_that_dies_loses_only_what_it_played(settings: Any) -> None:
    words = ["rollout.prompts_per_step=6", "loop.steps=1", "task.options.concurrency=1"]
    done = train(settings("dies", *words))
    records = records_of(done.run_path, 1)
    died = [r for r in records if r["failure"]]
    assert {r["prompt_id"] for r in died} == {"train-1"}
    assert all("the harness process ended with exit code 3" in r["failure"] for r in died)
    assert all(r["reward"] == 1.0 for r in records if not r["failure"])


def test_a_harness_without_any_reward_stops_the_run(settings: Any) -> None:
    only = ["rollout.prompts_per_step=6", "task.options.concurrency=6", "loop.steps=1"]
    with pytest.raises(RunStopped, match=r"none of the step's .* scored by task endpoint"):
        train(settings("gone", *only))


def test_a_harness_that_leaves_its_requests_is_named(settings: Any) -> None:
    with pytest.raises(RunStopped, match="the harness left each of its requests before"):
        train(settings("leaves", "loop.steps=1"))


def test_rows_of_the_harness_and_of_reasoning_gym(settings: Any, model: Path) -> None:
    done = train(settings("Rows", "task.path=none", "task.options.arguments={count = 3}"))
    assert {r["prompt_id"] for r in records_of(done.run_path, 1)} == {
        "train-0",
        "train-1",
        "train-2",
    }
    gym = "task.options.harness=reasoning_gym:chain_sum"
    asked = "task.options.arguments={size = 4, test_size = 2}"
    done = train(settings("", "task.path=none", gym, asked, "rollout.max_tokens=250", name="gym"))
    assert all(r["reward"] in (0.0, 0.01) for r in records_of(done.run_path, 2))


def test_the_game_of_the_examples(settings: Any) -> None:
    """A policy of random weights says what is no letter, and hears so until its turns are over."""
    game = Path(__file__).parents[2] / "examples" / "guess_the_letter.py"
    words = ["task.path=none", f"task.options.harness={game}:Game", "loop.steps=1"]
    done = train(settings("", *words))
    records = records_of(done.run_path, 1)
    assert [record["failure"] for record in records] == [""] * 6
    for record in records:
        heard = {turn["reply"].split("\n")[2] for turn in record["turns"][:-1]}
        assert heard <= {"invalid", "earlier", "later"}
        assert record["reward"] or record["parts"]["turns"] == len(record["turns"]) == 3
    assert metrics(done.run_path, "rl")[-1]["mismatch/num_different"] == 0


def test_an_environment_of_verifiers(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Play its tasks with its agent and rewards, by the package of JETRL_VERIFIERS_PYTHON."""
    if subprocess.run(
        [VERIFIERS_PYTHON, "-c", "import verifiers.v1"], capture_output=True
    ).returncode:
        pytest.skip("verifiers is not installed for JETRL_VERIFIERS_PYTHON")
    (tmp_path / "letters_of_mine.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)  # the harness imports from there
    words = ["task.path=none", "task.options.harness=verifiers:letters-of-mine"]
    words += ["task.options.arguments={agent = 'letters-of-mine', test_size = 2}"]
    done = train(settings("", *words, f"task.options.python={VERIFIERS_PYTHON}"))
    records = records_of(done.run_path, 2)
    assert {record["failure"] for record in records} == {""}
    assert {record["prompt_id"] for record in records} <= {f"train-{n}" for n in range(4)}
    for record in records:
        task = json.loads(record["prompt"])
        assert task["task"] >= 2  # the first two are for testing
        (first, second) = record["turns"]
        said = first["completion"] + second["completion"]
        share = said.count(task["prompt"][-1]) / (1 + len(said))
        assert record["parts"] == {"share": pytest.approx(share), "turns": 4.0}
        assert record["reward"] == pytest.approx(share + 4)
    assert all(line["mismatch/num_different"] == 0 for line in metrics(done.run_path, "rl")[1:])


@pytest.mark.parametrize(
    "function, words, message",
    [
        ("nothing", [], "harness .*play.py:nothing: AttributeError: .* has no 'nothing'"),
        ("play", ["task.options.python=no-python"], "task.options.python = no-python: No such"),
        ("", [], "give one of task.options.harness and .command"),
        ("play", ["rollout.oversample=0.5"], "rollout.oversample does not work"),
        ("play", ["task.max_turns=3"], "task.max_turns does not work with task endpoint"),
        ("play", ["task.path=none"], "the harness has no `rows`: set task.path"),
        (
            "",
            ["task.options.harness=verifier:x"],
            "did you mean 'verifiers:NAME'|AttributeError|No",
        ),
    ],
)
def test_settings_that_cannot_work(
    settings: Any, function: str, words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(settings(function, *words))


def test_a_teacher_has_no_prompts_for_those_of_a_harness(settings: Any, model: Path) -> None:
    words = ["algorithm.name=opd", f"teacher.path={model}", "teacher.prompt={prompt}!"]
    with pytest.raises(UserError, match=r"teacher\.prompt does not work with task endpoint"):
        train(settings("play", *words))


def test_other_clients_are_answered_between_updates(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client of `rollout.serve_port` gets the version of the weights that drew its tokens."""
    urls: list[str] = []
    answers: list[dict[str, Any]] = []
    original = episodes.ServedPolicy.__init__

    def opened(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        urls.append(self.url)

    monkeypatch.setattr(episodes.ServedPolicy, "__init__", opened)
    monkeypatch.setenv(episodes.KEY_VARIABLE, "secret")

    def ask() -> None:
        while not urls:
            time.sleep(0.01)
        body = {"prompt": "a word", "max_tokens": 8, "seed": 1, "return_token_ids": True}
        headers = {"Authorization": "Bearer secret"}
        assert httpx2.post(f"{urls[0]}/v1/completions", json=body).status_code == 401
        while True:
            try:
                reply = httpx2.post(
                    f"{urls[0]}/v1/completions", json=body, headers=headers, timeout=60
                )
            except httpx2.TransportError:
                return  # the run has ended
            if reply.status_code == 503:
                return
            assert reply.status_code == 200, reply.text
            answers.append(reply.json())

    client = threading.Thread(target=ask)
    client.start()
    words = [f"run.dir={tmp_path}", "run.name=run"]
    words += [f"task.name={task_of(tmp_path, 'return float(len(completion) % 2)')}"]
    words += ["rollout.serve_port=0", "loop.steps=4"]
    words += ["rollout.max_tokens=6", "train.lr=0.1", "rollout.prompts_per_step=4"]
    done = train(load_config(None, [*words, *SHORT.split(), f"model.path={model}"]))
    client.join(60)
    versions = [answer["weight_version"] for answer in answers]
    assert versions == sorted(versions)
    assert {2, 3, 4} <= {*versions}
    by_version = {a["weight_version"]: a["choices"][0]["token_ids"] for a in answers}
    for answer in answers:
        assert answer["choices"][0]["token_ids"] == by_version[answer["weight_version"]]
    assert len({tuple(ids) for ids in by_version.values()}) > 1
    assert all(m["mismatch/num_different"] == 0 for m in metrics(done.run_path, "rl")[1:])
