"""The plan `integer` on a GPU: both backends have the bits of the references and of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from linears import gradients
from small_models import FAMILIES, config, make_policy, outcome

from jetrl import Policy
from jetrl.errors import UserError
from jetrl.precision.backend import has_kernels, select_backend, selected_backend
from jetrl.precision.gradients import rows_added
from jetrl.rollout.engine import RolloutEngine
from jetrl.session.parity import locate, measure, random_prompts
from jetrl.session.standard_run import DIGEST, standard_digest
from jetrl.types import SamplingParams

pytestmark = pytest.mark.gpu
# Of a run: rewards that differ, so that RL has gradients, and 1 and 2 updates of each kind.
_TASK = """
from jetrl.tasks import Task
from jetrl.types import Prompt

class Odd(Task):
    alphabet = "0123456789+-="

    def prompts(self, split):
        return [Prompt(id=str(i), text=f"{i}+{i}=", answer=str(2 * i)) for i in range(40)]

    def score(self, prompt, completion):
        return float(len(completion) % 2)

    def demonstration(self, prompt):
        return prompt.answer

    def self_test(self):
        return []
"""


@pytest.fixture(params=["hopper", "triton"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with selected_backend(request.param, defined=True):
        yield request.param


def policy(family: str, device: str = "cuda", **changes: Any) -> Policy:
    return make_policy(config(family, **changes), "integer", device)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers(backend: str, family: str) -> None:
    p = policy(family)
    prompts = random_prompts(p, 12, 80, seed=2)
    prompts += random_prompts(p, 2, 1500, seed=3)
    result = measure(p, prompts=prompts, samples=3, max_tokens=80, temperature=0.8)
    where = locate(p, *result.first_different) if result.first_different else None
    assert (result.different, where) == (0, None)
    assert result.tokens == 14 * 3 * 80


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_and_a_backward_have_the_bits_of_a_cpu(backend: str, family: str) -> None:
    on_gpu, on_cpu = policy(family), policy(family, "cpu")
    assert has_kernels(on_gpu.device)
    g = torch.Generator().manual_seed(5)
    sequences = [torch.randint(0, 1000, (n,), generator=g).tolist() for n in (200, 130, 7, 300)]
    for ours, theirs in zip(on_gpu.logprobs(sequences), on_cpu.logprobs(sequences), strict=True):
        assert torch.equal(ours.detach().cpu(), theirs.detach())
    found, true = gradients(on_gpu), gradients(on_cpu)
    assert found.keys() == true.keys()
    different = {name: int((found[name] != true[name]).sum()) for name in true}
    assert {name: count for name, count in different.items() if count} == {}


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9, "top_k": 50, "min_p": 0.02}, {"temperature": 0.0}]
)
def test_sampling_has_the_bits_of_a_cpu(backend: str, options: dict[str, Any]) -> None:
    found = []
    for device in ("cuda", "cpu"):
        p = policy("qwen2", device)
        params = SamplingParams(max_tokens=24, ignore_eos=True, **options)
        engine = RolloutEngine(p, 8)
        found.append(outcome(engine.generate(random_prompts(p, 10, 90, seed=6), params)))
    assert found[0] == found[1]


def test_embedding_gradients_have_the_bits_of_a_cpu() -> None:
    g = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 700, (20_000,), generator=g) ** 2 % 1000
    values = torch.randn(20_000, 1024, generator=g).bfloat16()
    found = rows_added(None, rows.cuda(), values.cuda(), range(1000)).cpu()
    assert torch.equal(found, rows_added(None, rows, values, range(1000)))


def test_a_plan_on_the_wrong_backend_is_refused() -> None:
    for selected, plan in ((False, "integer"), (True, "int8")):
        with selected_backend(defined=selected), pytest.raises(UserError, match=r"kernels of|only"):
            make_policy(config(), plan)
    select_backend()


def digest(run: Path, task: str, *settings: str) -> str:
    """Train in a process; return the digest of the run's last step."""
    keys = [
        *("recipes/demo.toml", "precision.preset=integer", f"task={task}", "task.workers=0"),
        *("sft.steps=2", "sft.until=1.0", "sft.examples_per_step=8", "loop.steps=2"),
        *("rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_tokens=6"),
        *("eval.every=0", "report.enabled=false", "model.config.num_hidden_layers=2"),
        *("train.schedule=cosine", f"run.name={run.name}", f"run.dir={run.parent}", *settings),
    ]
    command = [sys.executable, "-W", "ignore", "-m", "jetrl", "train", *keys]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("policy/grad_norm") for line in lines), "RL has gradients"
    found: str = lines[-1]["digest"]["run"]
    return found


@pytest.mark.long(125)
def test_a_run_has_one_digest_on_every_backend(tmp_path: Path) -> None:
    file = tmp_path / "odd.py"
    file.write_text(_TASK)
    task = f"{file}:Odd"
    places = {
        "cpu": ["run.device=cpu"],
        "reference": ["run.device=cuda", "run.backend=reference"],
        "hopper": ["run.device=cuda", "run.backend=hopper"],
        "triton": ["run.device=cuda", "run.backend=triton"],
    }
    found = {name: digest(tmp_path / name, task, *keys) for name, keys in places.items()}
    assert len(set(found.values())) == 1, found


def test_the_standard_run_has_its_digest(backend: str) -> None:
    assert standard_digest("cuda", backend) == DIGEST
