"""The engine draws what a naive sampler draws.

The naive sampler takes one sequence at a time, a whole forward for each token, and draws in NumPy's
float64 and Python's integers. Cases are random; seeds are fixed.
"""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
import torch
from tests.training.shared import count_different

from jetrl.models.attention import PackedKeyValues
from jetrl.models.draft_head import DraftHead
from jetrl.models.packed import ForwardInputs
from jetrl.rollout.engine import RolloutEngine
from jetrl.rollout.options import EnvironmentReply, GenerateOptions
from jetrl.types import SamplingParams

PLANS = [
    ("unified", {}),
    ("unified", {"kv": "bf16", "scales": "pow2"}),
    ("jet", {}),
    ("jet", {"kv": "fp8", "first_layers_bf16": 1}),
    ("unified", {"kv": "int8"}),
    ("unified", {"kv": "int8+fp8", "scales": "pow2"}),
    ("mixed", {}),
    ("bf16", {}),
    ("fp32", {}),
]
CONTEXT = 128  # of the tiny model
LOW = 2**32 - 1


def philox(seed: int, key: int, position: int) -> int:
    """The first 53 bits of Philox 4x32-10."""
    c, k = [key & LOW, key >> 32, position & LOW, position >> 32], [seed & LOW, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & LOW, (a >> 32) ^ c[3] ^ k[1], a & LOW]
        k = [(k[0] + 0x9E3779B9) & LOW, (k[1] + 0xBB67AE85) & LOW]
    return ((c[0] << 32) | c[1]) >> 11


def key_of(prompt: list[int], occurrence: int, sample: int) -> int:
    tokens = hashlib.blake2b(struct.pack(f"<{len(prompt)}q", *prompt), digest_size=32).digest()
    text = tokens + struct.pack("<qq", occurrence, sample)
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def draw(logits: np.ndarray, bits: int, params: SamplingParams) -> tuple[int, float]:
    """Return a token and its log-prob."""
    scaled = (logits / np.float32(params.temperature or 1)).astype(np.float64)
    logprobs = scaled - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
    if params.temperature == 0:
        return int(logits.argmax()), logprobs[logits.argmax()]
    weights = np.rint(np.exp(scaled - scaled.max()).astype(np.float32) * 2.0**40)
    order = np.lexsort((np.arange(len(weights)), -weights))[: params.top_k or None]
    before = weights[order].cumsum() - weights[order]
    if params.top_p < 1:
        order = order[before < np.float64(np.float32(params.top_p)) * weights[order].sum()]
    order = order[weights[order] >= np.float64(np.float32(params.min_p)) * 2.0**40]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    token = np.searchsorted(kept.cumsum(), np.floor(bits * 2.0**-53 * kept.sum()), side="right")
    if params.truncated_logprobs:
        logprobs -= np.log(np.exp(logprobs[order]).sum())
    return int(token), logprobs[token]


def next_logits(policy, tokens: list[int]) -> np.ndarray:
    kv = PackedKeyValues(torch.tensor([0, len(tokens)]), policy.plan)
    with torch.no_grad():
        inputs = ForwardInputs(torch.tensor(tokens), torch.arange(len(tokens)))
        hidden = policy.decoder(inputs, kv, "rollout")
        return policy.decoder.logits(hidden[-1:], "rollout")[0].numpy()


class Replies:
    """An environment whose answer depends on the sequence and the turn alone.

    When the answer comes depends on chance.
    """

    def __init__(self, max_turns: int, chance: random.Random) -> None:
        self.max_turns, self.chance = max_turns, chance
        self.open: list[tuple[int, int]] = []

    def answer(self, sequence: int, turn: int) -> EnvironmentReply:
        own = random.Random(31 * sequence + turn)
        said = own.choice(["=1", "so it is", "=" * 7])
        return EnvironmentReply(sequence, said if own.random() < 0.8 else None)

    def ask(self, sequence, turns, completion) -> None:
        self.open.append((sequence, len(turns)))

    def answers(self, wait: bool) -> list[EnvironmentReply]:
        self.chance.shuffle(self.open)
        late = self.chance.randint(0, len(self.open))
        late = min(late, len(self.open) - 1) if wait else late
        ready, self.open = self.open[late:], self.open[:late]
        return [self.answer(*asked) for asked in ready]

    def close(self) -> None:
        pass


def naive(policy, prompt, key, params, limit, replies, index):
    """Return token ids, log-probs, finish reason, text and spans of replies."""
    tokenizer = policy.tokenizer
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else {1})
    tokens: list[int] = []
    logprobs: list[float] = []
    spans: list[tuple[int, int]] = []
    start = 0
    while True:
        bits = philox(params.seed, key, len(prompt) + len(tokens))
        token, logprob = draw(next_logits(policy, prompt + tokens), bits, params)
        tokens.append(token)
        logprobs.append(logprob)
        before = tokenizer.decode(tokens[:start], skip_special_tokens=True)
        text = tokenizer.decode(tokens[start:], skip_special_tokens=True)
        cuts = [text.index(stop) for stop in params.stop if stop in text]
        told = before + (text[: min(cuts)] if cuts else text)
        if token not in stops and not cuts:
            if len(tokens) == limit:
                return tokens, logprobs, "length", told, spans
            continue
        reply = None
        if replies is not None and len(spans) + 1 < replies.max_turns:
            reply = replies.answer(index, len(spans)).reply
        if reply is None:
            return tokens, logprobs, "stop", told, spans
        said = tokenizer.encode(reply, add_special_tokens=False)
        if len(tokens) + len(said) >= limit:
            return tokens, logprobs, "length", told, spans
        spans.append((len(tokens), len(tokens) + len(said)))
        tokens += said
        logprobs += [0.0] * len(said)
        start = len(tokens)


@pytest.mark.parametrize("case", range(14))
def test_the_engine_draws_what_a_naive_sampler_draws(make_policy, case: int) -> None:
    chance = random.Random(case)
    choose = chance.choice
    preset, options = PLANS[case % len(PLANS)]
    policy = make_policy(preset, **options)

    def some(count: int) -> list[int]:
        return [chance.randrange(2, 98) for _ in range(count)]

    shared = some(choose([0, 3, 20]))
    prompts = [shared + some(choose([1, 2, 5, 13])) for _ in range(chance.randint(1, 3))]
    prompts += [prompts[0]] * choose([0, 1]) + [some(CONTEXT - 3)] * (case % 4 == 0)
    params = SamplingParams(
        n=choose([1, 2, 3]),
        max_tokens=choose([1, 6, 14]),
        temperature=choose([0, 0.3, 1, 1, 3, 1e-4, 1e4]),
        top_p=choose([1, 1, 0.9, 0.5, 1e-6]),
        top_k=choose([0, 0, 1, 5, 40, 98, 1000]),
        min_p=choose([0, 0, 0.05, 0.5]),
        truncated_logprobs=choose([True, True, False]),
        stop_token_ids=some(choose([0, 3, 10])),
        stop=chance.sample(["a", "ab", "1", "=", "Q", "(", "9"], choose([0, 2, 4])),
        seed=choose([0, 2**63 - 1, chance.randrange(2**40)]),
        ignore_eos=choose([True, False]),
    )
    replies = Replies(choose([1, 3]), chance) if case % 3 == 0 else None
    count = params.n * len(prompts)
    limits = [chance.randint(1, 14) for _ in range(count)] if case % 3 == 1 else None
    ends = [
        min(limits[i] if limits else params.max_tokens, CONTEXT - len(prompts[i // params.n]))
        for i in range(count)
    ]
    page = choose([1, 2, 4, 16, 64])
    longest = max(len(prompts[i // params.n]) + end - 1 for i, end in enumerate(ends))
    batch = choose([1, 2, 8, 256])
    num_pages = choose([None, -(-longest // page), 2 - longest // -page])
    engine = RolloutEngine(
        policy,
        max_batch_size=batch,
        num_pages=num_pages,
        page_size=page,
        max_prefill_tokens=choose([1, 8, 64, 8192]),
    )
    engine._repeats, engine._ahead = choose([(1, 0), (1, 1), (4, 0), (8, 1), (16, 3)])
    out = engine.generate(
        prompts, params, options=GenerateOptions(environment=replies, max_tokens=limits)
    )
    assert engine.pages_in_use == 0
    # Drafts change nothing: of siblings and the sequence itself, then of the call before. (Under
    # fp32 a row's bits depend on the number of rows.)
    head = DraftHead(policy, choose([1, 3, 7]), seed=case)
    head.trained = True
    speculating = RolloutEngine(
        policy,
        batch,
        num_pages,
        page,
        engine.sizes.now.max_prefill_tokens,
        speculation=choose(["text", "head", "auto"]),
        draft_head=head,
    )
    speculating._repeats, speculating._ahead = engine._repeats, engine._ahead
    for _ in range(2):
        again = None if replies is None else Replies(replies.max_turns, chance)
        drafted = GenerateOptions(environment=again, max_tokens=limits)
        assert preset == "fp32" or speculating.generate(prompts, params, options=drafted) == out
    for i, completion in enumerate(out):
        prompt = prompts[i // params.n]
        occurrence = prompts[: i // params.n].count(prompt)
        key = key_of(prompt, occurrence, i % params.n)
        wanted = naive(policy, prompt, key, params, ends[i], replies, i)
        got = list(completion.token_ids), completion.finish_reason, completion.text
        assert got == (wanted[0], wanted[2], wanted[3])
        assert list(completion.environment) == wanted[4]
        # float32's unit at the largest scaled logit, some 60 over the temperature
        unit = 2.0**-23 * max(1.0, 60 / (params.temperature or 1))
        assert np.allclose(completion.logprobs, wanted[1], rtol=0, atol=4 * unit)
        if preset in ("unified", "jet", "bf16"):
            assert count_different(policy, [prompt], [completion], params) == 0
