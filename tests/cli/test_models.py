"""init, sample, eval, parity, export and doctor work on a real tiny model."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.e2e.small import before_call
from tests.models.test_images import model, picture

from jetrl import loop, precision, train
from jetrl.cli import doctor, opening, run_checks
from jetrl.cli.opening import find_model, open_model, open_policy
from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan, backend
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs.directory import RunDirectory
from jetrl.session import parity
from jetrl.session.building import build_policy
from jetrl.settings.loading import load_config, to_toml
from jetrl.tasks import get_task
from jetrl.tasks.questions import SOURCES
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.optimizer import Optimizer
from jetrl.types import IMAGE_MARKS, SamplingParams


def test_init_makes_a_model_of_the_asked_shape(jetrl: Callable, tmp_path: Path) -> None:
    out = tmp_path / "m"
    done = jetrl(
        "init", out, "--family", "llama", "--hidden-size", 128, "--num-layers", 1, "--untied"
    )
    assert (done.code, done.out) == (0, f"wrote {out}\n")
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("llama", 1)
    assert config["tie_word_embeddings"] is False
    done = jetrl("init", out)
    assert (done.code, str(out) in done.err) == (2, True)
    shared = ("--family", "qwen2_moe", "--shared-expert-intermediate-size", 64)
    assert jetrl("init", tmp_path / "shared", *shared).code == 0
    config = json.loads((tmp_path / "shared" / "config.json").read_text())
    assert config["shared_expert_intermediate_size"] == 64
    done = jetrl("init", tmp_path / "n", "--family", "gpt2")
    assert (done.code, "family 'gpt2': one of qwen3, qwen2" in done.err) == (2, True)


def test_sample_prints_completions_or_repeatable_json(
    jetrl: Callable, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = jetrl("sample", tiny_model, "What", "is", "1+1?", "--n", 2, "--max-tokens", 3)
    assert done.code == 0, done.err
    assert done.out.count("[3 tokens, length, log-prob -") == 2, "one prompt, unquoted"
    assert done.out.startswith("What is 1+1?")
    words = ("sample", tiny_model, "--n", 2, "--max-tokens", 3, "--json", "--seed", 7)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n\n2+2=\n"))
    first = jetrl(*words)
    monkeypatch.setattr("sys.stdin", io.StringIO("1+1=\n2+2=\n"))
    assert first.out == jetrl(*words).out
    records = [json.loads(line) for line in first.out.splitlines()]
    assert [record["prompt"] for record in records] == ["1+1=", "1+1=", "2+2=", "2+2="]
    for record in records:
        assert len(record["token_ids"]) == len(record["logprobs"]) == 3
        assert record["logprob"] == math.fsum(record["logprobs"])
    done = jetrl("sample", tiny_model)  # nothing is left on standard input
    assert (done.code, "no prompt" in done.err) == (2, True)


def test_sample_sees_images(jetrl: Callable, tmp_path: Path) -> None:
    eyes, files = model(tmp_path / "model", "qwen2_5_vl"), []
    for seed in (1, 2):
        files.append(tmp_path / f"{seed}.png")
        files[-1].write_bytes(picture(seed, 32, 32).data)
    words = ("sample", eyes, "--json", "--max-tokens", 8, "--image")

    def logprobs(*more: object) -> list[float]:
        done = jetrl(*words, *more)
        assert done.code == 0, done.err
        record = json.loads(done.out)
        assert any(mark in record["prompt"] for mark in IMAGE_MARKS)
        return record["logprobs"]

    for text in ("<image>what?", "<|vision_start|><|image_pad|><|vision_end|>what?"):
        assert logprobs(files[0], "what?") == logprobs(files[0], text)
    assert logprobs(files[0], "what?") != logprobs(files[1], "what?")
    both = [(files[i], "--image", files[1 - i], "<image>or<image>?") for i in range(2)]
    assert logprobs(*both[0]) != logprobs(*both[1])
    (tmp_path / "3.png").write_text("no picture")
    for more, message in (
        ((tmp_path / "4.png", "?"), "4.png: no such file"),
        ((tmp_path / "3.png", "?"), "3.png: not an image file"),
        ((files[0], "<image><image>"), "prompt 0: 2 places of images (<image>) for 1 images"),
    ):
        done = jetrl(*words, *more)
        assert (done.code, message in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "words, message",
    [
        (["sample", "x", "--n", 0], "n must be at least 1"),
        (["sample", "x", "--stop", ""], "stop must be texts, none empty"),
        (["sample", "x", "--system", "be nice"], "--system needs --chat"),
        (["sample", "x", "--chat"], "chat template"),
        (["sample", "x", "--device", "cuda"], "cuda"),
        (["eval"], "add --task NAME"),
        (["eval", "--task", "arithmetik"], "arithmetic"),
        (["eval", "--task", "arithmetic", "--split", "dev"], "no split 'dev'"),
        (["eval", "--task", "arithmetic", "--samples", 2, "--temperature", 0], "same completion"),
        (["eval", "--task", "arithmetic", "--option", "digits"], "KEY=VALUE"),
        (["eval", "--task", "arithmetic", "--option", "digit=1"], "digits"),
        (["eval", "--task", "arithmetic", "--prompts", -1], "0 (all) or more"),
        (["eval", "--task", "math500,math500"], "name each task once"),
        (["eval", "--task", "math500,aime24", "--path", "x"], "--path applies to one task"),
        (["eval", "--task", "math500,arithmetik"], "unknown task 'arithmetik'"),
        (["eval", "--task", "dataset"], "task dataset needs task.path"),
        (["parity", "--temperature", "1e-46"], "not 1e-46"),  # 0 in float32
        (["parity", "--seed", 2**63], "seed must be in"),
        (["parity", "--samples", 0], "--samples 0: must be at least 1"),
    ],
)
def test_bad_input_is_refused(
    words: list[object], message: str, jetrl: Callable, tiny_model: Path
) -> None:
    command, *options = words
    done = jetrl(command, tiny_model, *options)
    assert (done.code, message in done.err) == (2, True), done.err


def test_eval_prints_shares_and_each_task_of_a_mix(jetrl: Callable, tiny_model: Path) -> None:
    words = ("eval", tiny_model, "--task", "arithmetic", "--prompts", 3, "--samples", 2)
    done = jetrl(*words, "--max-tokens", 2, "--workers", 0)
    assert done.code == 0, done.err
    assert re.search(r"prompts +3 of 1000\nmean@2 +0\.\d+ \(95%: 0\.\d+ to [01]\.\d+\)\n", done.out)
    assert "accuracy" not in done.out, "rewards of 0 and 1: their mean is the accuracy"
    assert re.search("pass@1(?s:.*)pass@2", done.out)
    tasks = '[{name = "arithmetic"}, {name = "arithmetic", label = "minus", weight = 2}]'
    words = ("eval", tiny_model, "--task", "mix", "--option", f"tasks={tasks}", "--prompts", 2)
    done = jetrl(*words, "--max-tokens", 2, "--workers", 0)
    assert done.code == 0, done.err
    assert "prompts             4 of 2000\n" in done.out
    assert "arithmetic: mean@1  0." in done.out
    assert "minus: mean@1       0." in done.out
    done = jetrl(*words, "--max-tokens", 2, "--workers", 0, "--json")
    assert set(json.loads(done.out)["tasks"]) == {"arithmetic", "minus"}


def test_eval_says_which_part_of_a_file_it_evaluates(
    jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    words = ("eval", tiny_model, "--task", file, "--option", "format=text", "--workers", 0)
    words += ("--max-tokens", 2, "--json")
    said = f"{file} has no splits: test is 4 of its 40 examples (task.options.test_share = 0.1); "
    done = jetrl(*words)
    assert f"{said}--split all evaluates all of them" in done.err
    assert (len(json.loads(done.out)["samples"]), json.loads(done.out)["split"]) == (4, "test")
    for split, count in (("all", 40), ("test", 4)):
        done = jetrl(*words, "--split", split)
        answer = json.loads(done.out)
        assert "has no splits" not in done.err
        assert (len(answer["samples"]), answer["prompts_of_split"]) == (count, count)
    one = json.loads(jetrl(*words, "--prompts", 1).out)
    assert (one["margin"], one["interval"], one["prompts_of_split"]) == (None, None, 4)
    asked = jetrl(*words, "--prompts", 5).err
    assert asked.count("--prompts 5: task questions has only 4 in split test, and all are ") == 1
    assert "--prompts" not in jetrl(*words, "--prompts", 4).err


def test_eval_counts_completions_without_a_reward(
    jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    file, judge = tmp_path / "questions.jsonl", tmp_path / "judge.py"
    file.write_text("".join(f'{{"prompt": "{i}+1=", "answer": "1"}}\n' for i in range(4)))
    judge.write_text(
        "def judge(prompts, **_):\n"
        "    return [{'0': None, '1': 1.0, '2': 0.0, '3': 1.0}[prompt[0]] for prompt in prompts]\n"
    )
    words = ("eval", tiny_model, "--task", file, "--split", "all", "--max-tokens", 2)
    words += ("--option", "format=text", "--option", f"checker={judge}:judge", "--workers", 0)
    done = jetrl(*words)
    assert done.code == 0, done.err
    assert re.search(r"mean@1 +0\.6667 ", done.out)
    assert re.search(r"left out +1 of 4 completions \(reward None\)\n", done.out)
    assert "accuracy" not in done.out


def test_eval_of_a_run_says_which_of_its_training_prompts_are_asked(
    jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    """With another seed than the run's, other prompts are held out: most were trained on."""
    file = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    file.write_text("\n".join(map(json.dumps, rows)))
    run = fake_run(tmp_path / "run", tiny_model, "fp32")
    config = load_config(None, [f"task={file}", "task.options.format=text"])
    (run / "config.toml").write_text(to_toml(config))
    words = ("eval", run, "--workers", 0, "--max-tokens", 2, "--device", "cpu")
    done = jetrl(*words)
    assert (done.code, "trained on" in done.err, "has no splits" in done.err) == (0, False, False)
    own = ("--option", "format=text")
    assert "trained on" not in jetrl(*words, "--task", file, *own).err
    first = jetrl(*words, "--task", file, *own, "--split", "all", "--prompts", 12).err
    assert re.search(r"warning: (9|1\d) of 12 evaluation prompts are also trained on", first)
    for other in (("--option", "seed=3"), ("--task", file, *own, "--split", "all")):
        err = jetrl(*words, *other).err
        assert re.search(r"warning: (4|3|36) of (4|40) evaluation prompts are also trained on", err)
    assert "trained on" not in jetrl(*words, "--task", "arithmetic", "--prompts", 2).err


def test_parity_is_exact_under_unified_and_not_under_mixed(
    jetrl: Callable, tiny_model: Path
) -> None:
    words = ("parity", tiny_model, "--prompts", 2, "--max-tokens", 6, "--json", "--locate")
    unified = json.loads(jetrl(*words, "--plan", "unified").out)
    assert (unified["tokens"], unified["different"], unified["max_abs"]) == (24, 0, 0.0)
    assert unified["located"] == "nothing differs"
    done = jetrl(*words, "--plan", "mixed")
    mixed = json.loads(done.out)
    assert done.code == 0  # `mixed` is not exact
    assert min(mixed["different"], mixed["mean_abs"]) > 0
    assert "layers.0.qkv" in mixed["located"]


def test_parity_prints_a_table_and_fails_when_an_exact_plan_is_not_exact(
    jetrl: Callable, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("parity", tiny_model, "--prompts", 1, "--samples", 1, "--max-tokens", 2)
    done = jetrl(*words)
    lines = dict(line.split("  ", 1) for line in done.out.splitlines())
    assert (done.code, lines["plan"].strip()) == (0, "int8 (exact)")
    assert lines["tokens different"].strip() == "0"
    sizes = {"num_prompts": 1, "samples": 1, "max_tokens": 2}
    result = parity.measure(open_policy(tiny_model, None, "cpu"), **sizes)
    spoilt = dataclasses.replace(result, different=1)
    monkeypatch.setattr(parity, "measure", lambda *_, **__: spoilt)
    assert jetrl(*words, "--plan", "unified").code == 1
    assert jetrl(*words, "--plan", "bf16").code == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "fp8"])
def test_export_writes_a_directory_that_loads(
    dtype: str, jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = jetrl("export", tiny_model, out, "--dtype", dtype)
    assert (done.code, done.out) == (0, f"wrote {out} ({dtype})\n")
    config = json.loads((out / "config.json").read_text())
    assert ("quantization_config" in config) == (dtype == "fp8")
    assert open_policy(out, "unified", "cpu").config.hidden_size == 128
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1  # others may read weights too
    assert jetrl("export", tiny_model, out).code == 2
    assert jetrl("export", tiny_model, out, "--overwrite").code == 0


def test_export_names_what_others_would_sample_with(
    jetrl: Callable, tiny_model: Path, tmp_path: Path
) -> None:
    """Else a served policy has a penalty, also in greedy answers, that it was not trained with."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    file = model / "generation_config.json"
    own = json.loads(file.read_text()) if file.exists() else {}
    others = {"do_sample": True, "repetition_penalty": 1.1, "top_k": 20, "top_p": 1.0}
    file.write_text(json.dumps(own | others))
    done = jetrl("export", model, tmp_path / "out")
    _, line = done.out.splitlines()
    assert "sample with top_k 20, repetition_penalty 1.1 unless" in line
    assert str(tmp_path / "out" / "generation_config.json") in line


def fake_run(path: Path, model: Path | None, preset: str) -> Path:
    path.mkdir(parents=True)
    settings = load_config("demo")
    (path / "config.toml").write_text(to_toml(settings))
    (path / "plan.json").write_text(json.dumps(PrecisionPlan.preset(preset).to_dict()))
    if model is not None:
        (path / "model").symlink_to(model)
    return path


DIGITS = """
from jetrl.tasks import Task
from jetrl.types import Prompt
class Digits(Task):
    alphabet = "0123456789+="
    def prompts(self, split): return [Prompt(id=str(i), text=f"{i}+1=") for i in range(4)]
    def score(self, prompt, completion): return 1.0 if "3" in completion else len(completion) / 100
"""


@pytest.mark.parametrize("plan", ["unified", "fp32"])
def test_eval_of_a_run_is_the_runs_own_evaluation(
    plan: str, jetrl: Callable, tmp_path: Path
) -> None:
    """The same draws of the same FP32 weights, ended by the run's stop strings, in its limits."""
    (tmp_path / "digits.py").write_text(DIGITS)
    words = [
        *("sft.steps=0", "loop.steps=1", "run.seed=6", f"run.dir={tmp_path}", "run.name=own"),
        *("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2"),
        *(f"task={tmp_path / 'digits.py'}:Digits", "task.workers=0", 'rollout.stop=["1", "4"]'),
        *("eval.samples=2", "eval.temperature=1.0", "eval.top_p=0.9"),
        *(f"precision.preset={plan}", "report.enabled=false"),
    ]
    run = train(load_config("demo", words)).run_path
    own = RunDirectory.open(run).metrics("rl")[-1]
    (run / "model" / "config.json").touch()  # the newest file; its weights are rounded, to BF16
    answer = jetrl("eval", run, "--trust-task", "--json")
    done = json.loads(answer.out)
    assert "rounded" not in answer.err
    for name in ("mean", "response_length", "clip_ratio"):
        assert done[name] == own[f"eval/Digits/{name}"]
    rewards = [sample["reward"] for sample in done["samples"]]
    means = [sum(pair) / 2 for pair in zip(rewards[::2], rewards[1::2], strict=True)]
    half = 3.182446305 * statistics.stdev(means) / len(means) ** 0.5  # t of 3 degrees of freedom
    assert done["margin"] == pytest.approx(half)
    assert done["interval"] == pytest.approx([done["mean"] - half, done["mean"] + half])
    assert done["accuracy"] == sum(reward >= 1 for reward in rewards) / len(rewards)
    assert "warning: 4 of 4 evaluation prompts are also trained on" in answer.err
    shutil.rmtree(run / "checkpoints")
    says = jetrl("eval", run, "--trust-task", "--prompts", 1).err
    assert ("is rounded to BF16" in says) == (plan != "fp32")


@pytest.mark.parametrize("plan", ["int8", "integer", "bf16", "mixed", "fp32"])
def test_a_model_to_be_read_has_no_master_weights_and_the_same_bits(
    tiny_model: Path, plan: str
) -> None:
    read, whole = open_policy(tiny_model, plan, "cpu"), open_model(tiny_model, plan, "cpu")
    assert isinstance(whole, Policy)
    assert not read.master_weights()
    params = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5]]
    drawn, expected = (RolloutEngine(model).generate(prompts, params) for model in (read, whole))
    assert [(c.token_ids, c.logprobs) for c in drawn] == [
        (c.token_ids, c.logprobs) for c in expected
    ]
    sequences = [[1, 2, 3, 4, 5, 6]]
    assert torch.equal(read.logprobs(sequences)[0], whole.logprobs(sequences)[0])


def test_a_supervised_run_keeps_what_it_trained_in_model_out_and_checkpoint(tmp_path: Path) -> None:
    words = ["sft.steps=1", "sft.until=none", "eval.prompts=4", f"run.dir={tmp_path}"]
    words += ["precision.preset=fp32", "report.enabled=false", "sft.examples_per_step=2"]
    run = loop.sft(load_config("demo", words), out=tmp_path / "out").run_path
    ours = open_model(run / "model", "fp32", "cpu").master_weights()
    copied = open_model(tmp_path / "out", "fp32", "cpu").master_weights()
    assert all(torch.equal(master, copied[name]) for name, master in ours.items())
    rounded = [torch.equal(master, master.bfloat16().float()) for master in ours.values()]
    assert not all(rounded), "not one weight has more digits than BF16 has"
    assert find_model(run) == (run / "checkpoints" / "step_000000", run)
    (run / "metrics.jsonl").write_text("damaged\ndamaged\n")
    (run / "model" / "config.json").touch()
    assert find_model(run) == (run / "model", run), "which was written later"


def test_a_run_directory_stands_for_its_exported_model(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, message in (
        (tmp_path / "nothing", "no such model"),
        (tmp_path, "neither model, adapter, run nor"),
        (fake_run(tmp_path / "run", None, "jet"), "no model and no checkpoint yet"),
    ):
        with pytest.raises(UserError, match=message):
            find_model(place)
    run = fake_run(tmp_path / "runs" / "mine", tiny_model, "jet")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mine: no such model; did you mean runs/mine"):
        find_model(Path("mine"))
    with pytest.raises(UserError, match=r"config.json: no such file; did you mean .*mine/model\?"):
        Policy.from_pretrained(run, PrecisionPlan.preset("fp32"))
    assert find_model(run) == (run / "model", run)
    assert find_model(run / "model") == (run / "model", run)
    assert find_model(tiny_model) == (tiny_model, None)
    assert open_policy(run, None, "auto").plan.name == "jet"  # the run's own plan
    assert open_policy(run, "bf16", "auto").plan.name == "bf16"
    assert open_policy(tiny_model, None, "auto").plan.name == "int8"


def test_a_run_that_was_cut_stands_for_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_run(tmp_path / "runs" / "cut", None, "unified")
    alphabet = get_task("arithmetic").alphabet
    settings = load_config("demo", ["run.seed=5"])
    policy = build_policy(settings, PrecisionPlan.preset("jet"), alphabet)
    optimizer = Optimizer(policy.master_weights(), load_config("demo").train, 1)
    checkpoint = Checkpoints(run / "checkpoints", 2).save(3, policy, optimizer, {})
    for place in (run, checkpoint):
        opened = open_policy(place, None, "auto")
        assert opened.plan.name == "unified"
        for name, master in opened.master_weights().items():  # not run.seed 0 of the settings
            assert torch.equal(master, policy.master_weights()[name])

    def newer() -> None:  # the run is at work
        shutil.rmtree(checkpoint)
        Checkpoints(run / "checkpoints").save(4, policy, optimizer, {})

    before_call(opening, "check_intact", 1, newer, monkeypatch.setattr)
    assert open_policy(run, None, "auto").plan.name == "unified"
    (run / "checkpoints" / "step_000004" / "masters.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="damaged"):
        open_policy(run, None, "auto")


def test_a_finished_run_stands_for_the_checkpoint_of_its_last_step(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Whichever of model and checkpoint was written last; the model is rounded to BF16."""
    run = fake_run(tmp_path / "runs" / "finished", tiny_model, "jet")
    masters = {}
    for step in (2, 3):
        masters[step] = run / "checkpoints" / f"step_{step:06d}" / "masters.safetensors"
        masters[step].parent.mkdir(parents=True)
        masters[step].touch()
    lines = [{"step": step, "phase": "rl", "reward/mean": 0.5} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    exported = (run / "model" / "config.json").stat().st_mtime

    def newest(step: int, after: float) -> Path:
        os.utime(masters[step], (exported + after,) * 2)
        return find_model(run).path

    assert newest(3, -0.05) == newest(3, 0.05) == masters[3].parent
    # The checkpoint of an earlier step is older than the model, and the time decides.
    shutil.rmtree(masters[3].parent)
    assert newest(2, -1) == run / "model"
    assert newest(2, 1) == masters[2].parent


def test_doctor_reports_every_check_with_a_next_step(
    jetrl: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> list[doctor.Finding]:
        raise UserError("no toolkit: set CUDA_HOME")

    monkeypatch.setattr(doctor, "_check_exactness", refuse)
    monkeypatch.setattr(doctor, "_check_answers", lambda: 1 / 0)
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": "nothing"})
    done = jetrl("doctor")
    assert done.code == 1  # a check that breaks is a FAIL, and the others still run
    missing = r"-- +no-such-package +not installed \(optional; for nothing\)"
    for line in ("OK +python ", missing, "\nnext steps:\n"):
        assert re.search(line, done.out)
    assert re.search("FAIL  math-verify .*ZeroDivisionError", done.out)
    assert re.search("FAIL  exactness .*no toolkit: set CUDA_HOME\n", done.out)
    assert done.out.count("please report this") == 1, "not of what says itself what to do"
    found = json.loads(jetrl("doctor", "--json").out)
    assert {"status", "name", "detail", "next_step"} == set(found[0])


def test_checks_pass_here_and_a_gpu_proves_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = (doctor._check_fp8_cast, doctor._check_exactness, doctor._check_answers)
    assert {finding.status for check in checks for finding in check()} == {"OK"}
    dequantize = precision.dequantize
    monkeypatch.setattr(precision, "dequantize", lambda q: dequantize(q) * 1.0625)
    assert doctor._check_fp8_cast()[0].status == "FAIL"
    monkeypatch.setattr(backend, "accelerator", lambda: backend.HOPPER)
    monkeypatch.setattr(parity, "backend_for", lambda device: backend.HOPPER)
    monkeypatch.setattr(parity, "self_check", lambda device="cpu": [])
    monkeypatch.setattr(Policy, "from_config", lambda shape, plan, seed, device: plan)
    monkeypatch.setattr(parity, "check_policy", lambda plan: [parity.Check(plan.name, True, "")])
    assert doctor._check_exactness()[0].name == "int8 at qwen3-0.6b's shapes: int8"


def test_low_disk_and_missing_packages_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = doctor._check_package("no-such-package")
    assert (missing.status, missing.next_step) == ("FAIL", "pip install no-such-package")
    monkeypatch.setattr(run_checks, "LOW_DISK_GIB", 1e9)
    assert run_checks.check_disk(tmp_path).status == "WARN"
    for version, status in (("3.9.1", "OK"), ("3.10.0", "WARN"), (None, "--")):
        monkeypatch.setattr(doctor, "installed", lambda _, found=version: found)
        assert doctor._check_triton().status == status
    for there, status in (("sgl-deep-gemm vllm", "WARN"), ("sgl-deep-gemm", "OK"), ("vllm", "--")):
        monkeypatch.setattr(doctor, "installed", dict.fromkeys(there.split(), "1.0").get)
        assert doctor._check_package("sgl-deep-gemm", "speed").status == status


def test_a_tokenizer_setting_replaces_no_models_own_in_silence(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tiny_model.parent / "other"
    make_tiny(other, alphabet="ab", vocab_size=97, hidden_size=32)
    plan = PrecisionPlan.preset("fp32")
    for tokenizer, said in ((tiny_model, False), (other, True)):
        words = [f"model.path={tiny_model}", f"model.tokenizer={tokenizer}"]
        build_policy(load_config(None, words), plan, None)
        assert ("replaces the tokenizer of" in caplog.text) == said


def test_eval_on_several_sets_is_one_table(
    jetrl: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [json.dumps({"problem": f"{i} + 1 =", "answer": str(i + 1)}) for i in range(3)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    model = make_tiny(
        tmp_path / "model", tokenizer="bpe", text_files=[tmp_path / "test.jsonl"], vocab_size=300
    )
    for name in ("math500", "aime24"):
        source = dataclasses.replace(SOURCES[name], path=str(tmp_path), split="test")
        monkeypatch.setitem(SOURCES, name, source)
    words = ["eval", model, "--task", "math500,aime24", "--samples", 2, "--max-tokens", 2]
    words += ["--workers", 0]
    done = jetrl(*words)
    assert done.code == 0, done.err
    about, head, *lines = done.out.splitlines()
    assert about == f"{model}: task math500 (test), aime24 (test), plan int8 on cpu"
    assert head.split() == ["math500", "aime24", "mean"]
    assert [line.split()[0] for line in lines[:4]] == ["prompts", "mean@2", "pass@1", "pass@2"]
    sets = json.loads(jetrl(*words, "--json").out)["sets"]
    assert [len(sets[name]["samples"]) for name in ("math500", "aime24")] == [6, 6]
