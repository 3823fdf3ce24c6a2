"""The draft head: what it learns from, that the policy notices nothing, its state, its worth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.training.shared import draw, equal, make_policy, settings, snapshot

from jetrl.errors import UserError
from jetrl.kernels.decode_state import HEAD
from jetrl.models.draft_head import DraftHead
from jetrl.models.packed import ForwardInputs
from jetrl.rollout.engine import RolloutEngine
from jetrl.settings.loading import Settings
from jetrl.training.extras.draft_head import DraftHeadTraining
from jetrl.training.micro_batches import MicroBatch
from jetrl.training.packing import pack
from jetrl.training.sft import SftTrainer
from jetrl.training.trainer import Trainer
from jetrl.types import Example, SamplingParams

VOCABULARY = 32


def make_settings(draft_head=None, **train):
    own = {"share": 1.0, "lr": 5e-3, "tokens_per_update": 64} | (draft_head or {})
    rollout = {"speculation": "head"}
    return settings({"tokens_per_micro_batch": 64} | train, draft_head=own, rollout=rollout)


def make_training(policy, settings=None, tokens=3):
    return DraftHeadTraining(DraftHead(policy, tokens, 1), settings or make_settings())


def micro_batches(samples, budget=64):
    return [MicroBatch(batch) for batch in pack(samples, budget)]


def run(sample, with_head, preset="unified", **train):
    policy, settings = make_policy(preset), make_settings(**train)
    training = make_training(policy, settings) if with_head else None
    trainer = Trainer(policy, settings, extras=[] if training is None else [training])
    metrics = [
        trainer.step(draw(policy, sample, step, longest=14), step).metrics for step in range(3)
    ]
    return policy, trainer, metrics


@pytest.mark.parametrize(
    ("preset", "train"),
    [
        ("unified", {"updates_per_step": 2, "activation_checkpointing": True}),
        ("mixed", {"share_prompts": True, "optimizer_states": "compact"}),
    ],
    ids=["two updates", "mixed and shared prompts"],
)
def test_the_policy_has_the_same_bits_with_a_head_and_without(sample, preset, train):
    plain, trainer, metrics = run(sample, False, preset, **train)
    policy, other, more = run(sample, True, preset, **train)
    assert equal(snapshot(plain), snapshot(policy))
    assert equal(plain.weights.quantized_tensors(), policy.weights.quantized_tensors())
    assert equal(trainer.optimizer.state_tensors(), other.optimizer.state_tensors())
    for before, after in zip(metrics, more, strict=True):
        own = {n for n in after if "draft_head" in n}
        assert {"draft_head/loss", "draft_head/accuracy", "timing/draft_head_s"} == own
        assert {n: v for n, v in after.items() if n not in own} == before
    (extra,) = other.extras
    head = extra.head
    assert extra.optimizer.num_updates >= 3
    fresh = DraftHead(make_policy(preset), 3, 1)
    assert all(not torch.equal(m, fresh.masters[n]) for n, m in head.masters.items())
    assert all(p.grad is None for p in policy.master_weights().values())


def test_what_is_copied_is_the_trainers_own_state_however_it_is_packed(sample):
    policy = make_policy()
    samples = draw(policy, sample, 3, longest=14)
    found = []
    for budget in (200, 24):
        training = make_training(policy)
        batches = micro_batches(samples, budget)
        training.choose(7, batches)
        for micro in batches:
            batch = micro.batch
            copy = training.observer(batch)
            policy.train_logprobs(
                ForwardInputs.of(batch),
                torch.from_numpy(batch.cu_seqlens),
                torch.from_numpy(np.flatnonzero(batch.loss_mask)),
                seen=[copy],
            )
        found.append(training._lessons)
        assert training._lessons.copied.all()
        assert not training._lessons.hidden.requires_grad
    one, other = found
    assert torch.equal(one.hidden, other.hidden)
    assert np.array_equal(one.tokens, other.tokens)
    assert np.array_equal(one.follows, other.follows)
    # By hand: the state before each token but the last, and the three tokens behind that.
    at = 0
    for s in samples:
        tokens = [*s.prompt_token_ids, *s.completion.token_ids]
        start, end = len(s.prompt_token_ids), len(tokens)
        ends = torch.tensor([0, end])
        inputs = ForwardInputs.packed(torch.tensor(tokens), ends)
        states = policy.packed_hidden(inputs, ends, torch.arange(end))
        for place in range(start, end - 1):
            assert torch.equal(one.hidden[at], states[place - 1])
            behind = tokens[place : place + 4]
            assert one.tokens[at][: len(behind)].tolist() == behind
            assert one.follows[at].tolist() == [i + 1 < len(behind) for i in range(3)]
            at += 1
    assert at == len(one.hidden)


def test_the_share_and_the_limit_of_tokens(sample):
    policy = make_policy()
    samples = draw(policy, sample, 0, longest=14, count=20)
    usable = sum(len(s.completion.token_ids) - 1 for s in samples)
    sizes, chosen = {}, []
    for share, most in ((1.0, 10**6), (0.25, 10**6), (1.0, 13)):
        settings = make_settings({"share": share, "most_tokens": most})
        training = make_training(policy, settings)
        for step in (1, 1, 2):
            training.choose(step, micro_batches(samples))
            chosen.append(training._lessons.tokens.tolist())
        sizes[share, most] = len(chosen[-1])
    assert list(sizes.values()) == [usable, -(-usable // 4), 13]
    assert chosen[3] == chosen[4] != chosen[5], "a step chooses its own tokens"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master.fc.weight": torch.zeros(3, 3)}, "of another model, first in fc.weight"),
        ({"counts": torch.zeros(7, dtype=torch.int64)}, "of another model, first in counts"),
        ({"updates": torch.tensor(-1)}, "no count of updates"),
    ],
)
def test_a_state_of_another_head_is_refused(sample, change, message):
    training = make_training(make_policy())
    before = {n: m.detach().clone() for n, m in training.head.masters.items()}
    with pytest.raises(UserError, match=message):
        training.load_tensors(training.state_tensors() | change)
    assert equal({n: m.detach().clone() for n, m in training.head.masters.items()}, before)


def counting(start, length):
    return [(start + 3 * i) % VOCABULARY for i in range(length)]


def test_a_head_on_a_sure_task_is_right_where_chance_is_not(sample):
    """The policy learns to count by threes; the head learns to say what comes then."""
    policy, settings = make_policy("bf16"), make_settings()
    supervised = SftTrainer(
        policy, Settings.model_validate({"sft": {"steps": 40, "lr": 1e-2, "warmup_steps": 5}})
    )
    for step in range(40):
        starts = np.random.default_rng(step).integers(0, VOCABULARY, 8).tolist()
        supervised.step([Example(counting(s, 2), counting(s + 6, 10)) for s in starts])
    head = DraftHead(policy, 3, 1)
    training = DraftHeadTraining(head, settings)
    trainer = Trainer(policy, make_settings(lr=1e-6), extras=[training])
    engine = RolloutEngine(policy, page_size=16, speculation="head", draft_head=head)
    plain = RolloutEngine(policy, page_size=16)
    params = SamplingParams(n=4, max_tokens=12, seed=3, ignore_eos=True, temperature=0.5)
    prompts = [counting(start, 2) for start in range(0, VOCABULARY, 4)]
    metrics = []
    for step in range(3):
        completions = plain.generate(prompts, params)
        samples = [
            sample(i // 4, prompts[i // 4], c.token_ids, float(i % 2), c.logprobs)
            for i, c in enumerate(completions)
        ]
        metrics.append(trainer.step(samples, step).metrics)
    expected = plain.generate(prompts, params)
    found = engine.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    drafts = engine.stats.speculation
    share = drafts.accepted[HEAD] / drafts.drafted[HEAD]
    assert metrics[-1]["draft_head/loss"] < metrics[0]["draft_head/loss"] / 2
    assert share > 0.5, "chance is 1 in 32"
    assert drafts.tokens_per_forward > 2
