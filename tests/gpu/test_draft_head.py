"""The draft head on a Hopper GPU: no different bit in the engine or the policy, and it learns."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from small_models import config

from jetrl import Policy, RolloutEngine, SamplingParams
from jetrl.kernels.decode_state import HEAD, DecodeState, DraftText
from jetrl.kernels.draft import propose, remember
from jetrl.models.draft_head import DraftHead
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import random_prompts
from jetrl.settings.loading import Settings
from jetrl.training import Trainer
from jetrl.training.extras.draft_head import DraftHeadTraining
from jetrl.types import Prompt, Sample, Score

pytestmark = pytest.mark.gpu

CONFIG = config(vocab_size=512, max_position_embeddings=2048, eos_token_id=7)
PARAMS = SamplingParams(n=4, max_tokens=90, seed=1, temperature=0.5)


def make_policy(preset: str = "unified", **options: Any) -> Policy:
    plan = PrecisionPlan.preset(preset).replace(**options)
    return Policy.from_config(CONFIG, plan, seed=0, device="cuda")


def trained_head(policy: Policy, tokens: int = 3) -> DraftHead:
    """A head that counts as one that has learned: its drafts are noise."""
    head = DraftHead(policy, tokens, 0)
    head.trained = True
    return head


def outcome(completions: Any) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.finish_reason) for c in completions]


def test_the_longest_n_grams_alone_lead_to_the_drafts_of_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    slots, length = 100, 60
    text = DraftText.empty(slots, length, 4096, 2**14, torch.device("cpu"))
    state = DecodeState.empty(slots, 4, torch.device("cpu"))
    state.active.fill_(1)
    state.position.copy_(torch.randint(10, length, (slots,), generator=generator))
    for slot in range(slots):
        tokens = torch.randint(0, 6, (int(state.position[slot]) + 1,), generator=generator)
        places = slot * text.width + torch.arange(len(tokens))
        remember(text, places, tokens, text.group[slot].expand(len(tokens)), 8)
    rows = torch.randperm(slots, generator=generator)

    def on_gpu(record: Any) -> Any:
        fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
        return type(record)(
            **{n: x.cuda() if isinstance(x, torch.Tensor) else x for n, x in fields.items()}
        )

    found = []
    for longest_only in (False, True):
        cpu = propose(text, state, rows, longest_only)
        gpu = propose(on_gpu(text), on_gpu(state), rows.cuda(), longest_only)
        for name in ("counts", "sources"):
            assert torch.equal(getattr(cpu, name), getattr(gpu, name).cpu()), name
        used = torch.arange(cpu.tokens.shape[1]) < cpu.counts[:, None]
        assert torch.equal(cpu.tokens[used], gpu.tokens.cpu()[used])
        found.append(int((cpu.counts > 0).sum()))
    assert found[0] > found[1] > 5, "two tokens lead to more drafts than three"


@pytest.mark.parametrize(
    ("preset", "options"),
    [("unified", {}), ("unified", {"lm_head": "fp8"}), ("jet", {})],
    ids=["unified", "fp8-head", "jet"],
)
@pytest.mark.parametrize("filtered", [{}, {"top_p": 0.9, "top_k": 40}], ids=["all", "filtered"])
def test_the_engine_draws_the_same(
    preset: str, options: dict[str, Any], filtered: dict[str, Any]
) -> None:
    policy = make_policy(preset, **options)
    prompts = [*random_prompts(policy, 5, 60, seed=3), [5] * 1000]
    params = dataclasses.replace(PARAMS, **filtered)
    expected = outcome(RolloutEngine(policy).generate(prompts, params))
    for mode in ("head", "auto"):
        engine = RolloutEngine(policy, speculation=mode, draft_head=trained_head(policy))
        for _ in range(2):
            assert outcome(engine.generate(prompts, params)) == expected
        drafts = engine.take_speculation()
        assert drafts is not None
        assert drafts.drafted[HEAD] > 0


def test_few_pages_and_a_batch_of_one_draw_the_same() -> None:
    policy = make_policy()
    prompts = random_prompts(policy, 6, 100, seed=3)
    params = SamplingParams(n=3, max_tokens=150, seed=1, temperature=0.4, ignore_eos=True)
    expected = outcome(RolloutEngine(policy).generate(prompts, params))
    head = trained_head(policy)
    for sizes in ({"num_pages": 12}, {"max_batch_size": 1}, {"max_batch_size": 5}):
        engine = RolloutEngine(policy, speculation="head", draft_head=head, **sizes)
        assert outcome(engine.generate(prompts, params)) == expected
        assert "num_pages" not in sizes or engine.stats.preemptions > 0


def drawn_samples(engine: RolloutEngine, prompts: list[list[int]], seed: int) -> list[Sample]:
    params = SamplingParams(n=4, max_tokens=60, seed=seed, temperature=0.3, ignore_eos=True)
    return [
        Sample(
            Prompt(id=str(i // 4), text=""),
            i // 4,
            tuple(prompts[i // 4]),
            completion,
            Score(float(i % 3)),
        )
        for i, completion in enumerate(engine.generate(prompts, params))
    ]


def policy_of_the_last_token() -> Policy:
    """A policy whose layers add nothing, so that the next token follows from the last one alone.

    The hidden state behind a token is the norm of its embedding: what a head learns is the same for
    all tokens. In a policy whose layers are random too, the next token is a hash of all before.
    """
    policy = make_policy()
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith((".o.weight", ".down.weight")):
                master.zero_()
    policy.requantize()
    return policy


def train(with_head: bool, steps: int = 3) -> tuple[Any, ...]:
    """Return the policy's weights, the head's, and accuracy and acceptance by step."""
    policy = policy_of_the_last_token()
    settings = Settings.model_validate(
        {
            "train": {"lr": 1e-5},
            "draft_head": {"share": 1.0, "lr": 2e-3, "tokens_per_update": 64},
            "rollout": {
                "prompts_per_step": 8,
                "samples_per_prompt": 4,
                "max_tokens": 60,
                "temperature": 0.3,  # that of `drawn_samples`
            },
        }
    )
    head = DraftHead(policy, 3, 0) if with_head else None
    training = None if head is None else DraftHeadTraining(head, settings)
    mode = "off" if head is None else "head"
    engine = RolloutEngine(policy, speculation=mode, draft_head=head)
    trainer = Trainer(policy, settings, draft_head=training)
    prompts = random_prompts(policy, 8, 20, seed=5)
    accuracies, accepted = [], []
    for step in range(steps):
        samples = drawn_samples(engine, prompts, step)
        engine.free_cache()  # as a run does; the graphs stay
        metrics = trainer.step(samples, step).metrics
        assert metrics["mismatch/num_different"] == 0
        accuracies.append(metrics.get("draft_head/accuracy", 0.0))
        drafts = engine.take_speculation()
        if drafts is not None:
            accepted.append(drafts.accepted[HEAD] / max(1, drafts.drafted[HEAD]))
    weights = {n: p.detach().clone() for n, p in policy.master_weights().items()}
    own = {} if training is None else {n: t.clone() for n, t in training.state_tensors().items()}
    return weights, own, accuracies, accepted


def test_a_head_learns_leaves_the_policy_alone_and_repeats_itself() -> None:
    plain, _, _, _ = train(False)
    weights, head, accuracies, accepted = train(True)
    again = train(True)
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    assert all(torch.equal(head[name], again[1][name]) for name in head)
    assert (accuracies, accepted) == again[2:]
    print(f"accuracy {accuracies[0]:.3f} to {accuracies[-1]:.3f}, accepted {accepted[-1]:.3f}")
    # Chance is one in 512. On the CPU the third step has an accuracy of 0.97, and accepts 0.72.
    assert accuracies[-1] > max(0.5, accuracies[0])
    assert accepted[0] == 0, "nothing was learned before the first step"
    assert accepted[-1] > 0.25
