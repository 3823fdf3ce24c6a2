"""On-policy distillation: the KL and its gradient, by autograd, by enumeration, and in chunks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.training.shared import draw, gradients_of_step, make_policy, rescored, settings
from torch import Tensor

from jetrl import load_config
from jetrl.errors import UserError
from jetrl.kernels import reverse_kl as reverse_kl_module
from jetrl.kernels.reverse_kl import reverse_kl
from jetrl.models.packed import pack as packed_tensors
from jetrl.models.policy import Policy
from jetrl.training import distillation
from jetrl.training.distillation import Distillation
from jetrl.training.packing import pack, targets, with_prompts
from jetrl.training.trainer import Trainer
from jetrl.types import PromptInputs, Sample

T = 0.8


def kl_by_autograd(student: Tensor, teacher: Tensor) -> Tensor:
    """The definition in float64; autograd has its gradient."""
    p = (student.double() / T).log_softmax(-1)
    q = (teacher.double() / T).log_softmax(-1)[:, : student.shape[1]]
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize("rows, vocab, wider", [(1, 2, 0), (5, 16, 0), (7, 129, 3), (3, 1000, 24)])
def test_value_and_gradient_are_those_of_the_definition(rows: int, vocab: int, wider: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    student = (4 * torch.randn(rows, vocab, generator=generator)).requires_grad_()
    teacher = 4 * torch.randn(rows, vocab + wider, generator=generator)
    weights = torch.randn(rows, generator=generator)
    expected = kl_by_autograd(student, teacher)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), student)
    found = reverse_kl(student, teacher, T)
    (own,) = torch.autograd.grad((found * weights).sum(), student)
    # Log-probs of up to 40 nats in float32 (2^-24 relative), averaged with weights that add to 1.
    assert found.double().sub(expected).abs().max() < 4 * 40 * 2**-24
    assert own.sub(gradient).abs().max() < 8 * 40 * 2**-24 * weights.abs().max() / T
    assert (found > 0).all()


def test_of_equal_logits_the_kl_is_0_and_extreme_ones_stay_finite() -> None:
    logits = torch.tensor([[0.0, -200.0, 3.0], [300.0, -300.0, 0.0]], requires_grad=True)
    kl = reverse_kl(logits, logits.detach(), T)
    kl.sum().backward()
    assert kl.tolist() == [0.0, 0.0]
    assert logits.grad is not None
    assert not logits.grad.any()
    far = reverse_kl(logits, logits.detach().flip(-1), T)
    assert far.isfinite().all()


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    student, teacher = torch.randn(2, 33, 50, generator=torch.Generator().manual_seed(1))
    whole = reverse_kl(student, teacher, T)
    alone = torch.cat([reverse_kl(student[i : i + 1], teacher[i : i + 1], T) for i in range(33)])
    assert torch.equal(whole, alone)


V = 6


def trainer_of(student: Policy, teacher: Policy, temperature: float = 1.0, **given: Any) -> Trainer:
    run = settings(
        algorithm={"name": "opd", "aggregation": "sequence_sum", "clip": 0.9},
        teacher={"path": "teacher", **given},
        rollout={"temperature": temperature},
        train={"tokens_per_micro_batch": 64, "grad_clip": 1e6},
    )
    distilled = Distillation(teacher, run.teacher, temperature, {})
    return Trainer(student, run, distillation=distilled)


def gradient(student: Policy, teacher: Policy, sample: Sample, **given: Any) -> dict[str, Tensor]:
    """The gradient of one sample's loss; the student does not change."""
    trainer = trainer_of(student, teacher, T, **given)
    trainer.optimizer.apply = lambda norm: None  # type: ignore[method-assign]
    seen, _ = gradients_of_step(trainer, [sample])
    return seen[0]


def tree(student: Policy, sample: Any) -> list[tuple[float, Sample]]:
    """All completions of two tokens after one prompt, with their probabilities."""
    found = []
    for tokens in product(range(V), repeat=2):
        with torch.no_grad():
            (logprobs,) = student.logprobs([[1, 2, *tokens]], T)
        own = logprobs[1:].tolist()
        found.append((float(np.exp(sum(own))), sample(0, [1, 2], list(tokens), 1.0, own)))
    assert sum(p for p, _ in found) == pytest.approx(1.0, abs=1e-5)
    return found


def test_both_estimates_have_the_gradient_of_the_kl_in_expectation(sample: Any) -> None:
    """Over all completions of two tokens, and of the vocabulary also that of its definition."""
    student, teacher = (make_policy("fp32", seed=s, vocab_size=V) for s in (0, 1))
    sums: dict[str, dict[str, Tensor]] = {}
    for kl in ("vocabulary", "token"):
        for p, one in tree(student, sample):
            for name, value in gradient(student, teacher, one, kl=kl).items():
                total = sums.setdefault(kl, {}).setdefault(name, torch.zeros_like(value))
                total += p * value
    # By autograd: the KL after the prompt, and after each first token with its fixed probability.
    sequences = [[1, 2, first] for first in range(V)]
    student_rows, teacher_rows = (logits_of(policy, sequences) for policy in (student, teacher))
    for master in student.master_weights().values():
        master.grad = None
    after = torch.zeros(V)
    for p, one in tree(student, sample):
        after[one.completion.token_ids[0]] += p
    after_prompt = kl_by_autograd(student_rows[0, 1:2], teacher_rows[0, 1:2])
    after_first = kl_by_autograd(student_rows[:, 2], teacher_rows[:, 2])
    (after_prompt.sum() + (after * after_first).sum()).backward()
    for name, master in student.master_weights().items():
        expected = master.grad
        assert expected is not None
        scale = expected.abs().max()
        assert scale > 0, name
        for kl in sums:
            # Sums of 36 float32 gradients, each with about 2^-20 of relative error.
            assert (sums[kl][name] - expected).abs().max() < 2**-14 * scale, (name, kl)


def logits_of(policy: Policy, sequences: list[list[int]]) -> Tensor:
    """Logits after each token, [sequences, tokens, V], differentiable."""
    inputs, cu_seqlens = packed_tensors(sequences, policy.device)
    rows = torch.arange(len(inputs.token_ids))
    hidden = policy.packed_hidden(inputs, cu_seqlens, rows)
    return policy.decoder.logits(hidden, "train").view(len(sequences), -1, V)


def test_chunks_change_nothing_and_hold_no_more_logits(
    sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    student, teacher = (make_policy("int8", seed=s) for s in (0, 1))
    samples = draw(student, sample, seed=0)
    whole, metrics = gradients_of_step(trainer_of(student, teacher), samples)
    shapes: list[torch.Size] = []

    def seen(logits: Tensor, other: Tensor, temperature: float) -> Tensor:
        shapes.append(logits.shape)
        return reverse_kl(logits, other, temperature)

    monkeypatch.setattr(distillation, "reverse_kl", seen)
    monkeypatch.setattr(distillation, "MOST_LOGITS", 3 * 32 + 5)
    student = make_policy("int8", seed=0)
    chunked, again = gradients_of_step(trainer_of(student, teacher), samples)
    assert max(shape[0] for shape in shapes) == 3
    assert again["teacher/kl"] == metrics["teacher/kl"] > 0
    for name, value in whole[0].items():
        # Another order of sums over up to 48 tokens, in the head's gradient.
        assert torch.allclose(value, chunked[0][name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("given", [{}, {"reward": 1.0}])
def test_a_gpu_keeps_the_gradient_of_the_logits(
    given: Any, sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless drawn tokens have a gradient too; here on a CPU, which is told that it is a GPU."""
    student, teacher = (make_policy("int8", seed=s) for s in (0, 1))
    samples = draw(student, sample, seed=0)
    expected, metrics = gradients_of_step(trainer_of(student, teacher, **given), samples)
    calls: list[Tensor] = []

    def seen(logits: Tensor, other: Tensor, temperature: float) -> Tensor:
        calls.append(logits)
        return reverse_kl(logits, other, temperature)

    monkeypatch.setattr(distillation, "reverse_kl", seen)
    for module in (distillation, reverse_kl_module):
        monkeypatch.setattr(module, "has_defined_bits", lambda x: False)
    student = make_policy("int8", seed=0)
    found, again = gradients_of_step(trainer_of(student, teacher, **given), samples)
    assert [logits.requires_grad for logits in calls] == [True] * (2 if given else 1)
    assert again["teacher/kl"] == pytest.approx(metrics["teacher/kl"], rel=1e-5)
    for name, value in expected[0].items():
        # Two roundings to BF16 of each logit's gradient, 2^-9 relative, in sums with both signs.
        assert (found[0][name] - value).abs().max() < 2**-6 * value.abs().max(), name


def test_the_teacher_is_frozen_and_pulls_the_student(sample: Any) -> None:
    student, teacher = (make_policy("int8", seed=s) for s in (0, 1))
    before = {name: w.clone() for name, w in teacher.master_weights().items()}
    samples = draw(student, sample, seed=0)
    found = []
    for _ in range(8):
        found.append(trainer_of(student, teacher).step(samples).metrics["teacher/kl"])
        samples = rescored(student, samples)
    assert found[-1] < 0.7 * found[0]
    assert all(torch.equal(w, before[name]) for name, w in teacher.master_weights().items())
    assert all(w.grad is None for w in teacher.master_weights().values())


def test_rewards_are_mixed_in_by_their_weight(sample: Any) -> None:
    """The loss is linear in the weights, so gradients are too."""
    samples = draw(make_policy("fp32"), sample, seed=0)
    teacher = make_policy("fp32", seed=1)

    def of(**given: Any) -> dict[str, Tensor]:
        return gradients_of_step(trainer_of(make_policy("fp32"), teacher, **given), samples)[0][0]

    only, both, double = of(), of(reward=1.0), of(reward=2.0, weight=2.0)
    for name, value in both.items():
        assert not torch.equal(value, only[name])
        assert torch.allclose(2 * value, double[name], rtol=1e-3, atol=1e-6), name


def test_the_teacher_reads_its_own_prompts(sample: Any) -> None:
    teacher = make_policy("int8", seed=1)
    samples = [
        sample(0, [1, 2], [5, 6, 7, 8], 1.0, [-1.0] * 4),
        sample(0, [3], [9, 4], 0.0, [-1.0] * 2),
    ]
    told = replace(samples[0].completion, environment=((2, 3),))  # of an environment
    samples[0] = replace(samples[0], completion=told)
    own = {(1, 2): (1, 2, 11, 12), (3,): (3, 13, 14)}
    prompts = {PromptInputs(old).key(): PromptInputs(new) for old, new in own.items()}
    (batch,) = pack(samples, 100)
    other = with_prompts(batch, prompts)
    assert len(targets(other)) == len(targets(batch)) == 5
    assert other.token_ids[targets(other)].tolist() == batch.token_ids[targets(batch)].tolist()
    run = settings(algorithm={"name": "opd"}, teacher={"path": "x", "kl": "token"})
    distilled = Distillation(teacher, run.teacher, T, prompts)
    behavior = torch.zeros(5)
    found = distilled(teacher, batch, torch.zeros(5, 128), torch.zeros(5), behavior).kl
    with torch.no_grad():
        first, second = teacher.logprobs([[1, 2, 11, 12, 5, 6, 7, 8], [3, 13, 14, 9, 4]], T)
    expected = torch.cat([first[[3, 4, 6]], second[[2, 3]]])
    assert torch.equal(found, -expected)


def test_opd_without_a_teacher_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs a teacher: set teacher\.path"):
        load_config(None, ["algorithm.name=opd"])
    run = settings(algorithm={"name": "opd"}, teacher={"path": "somewhere"})
    with pytest.raises(UserError, match=r"algorithm\.name = opd needs a teacher"):
        Trainer(make_policy(), run)
