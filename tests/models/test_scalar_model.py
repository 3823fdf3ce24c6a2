"""Decoders with a scalar head, and frozen models, agree with transformers and with FP32.

Their memory is what was planned.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from jetrl.errors import UserError
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel, check_same_tokenizer
from jetrl.models.tiny import character_tokenizer, random_weights
from jetrl.precision import PrecisionPlan
from jetrl.precision.linear import Linear

FAMILIES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}


def config(family="qwen3", score=True, **changes):
    ending = "ForSequenceClassification" if score else "ForCausalLM"
    return {
        "architectures": [FAMILIES[family] + ending],
        "model_type": family,
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        **({"num_labels": 1} if score else {}),
        **changes,
    }


def make(cls, preset, seed=0, frozen=False, **changes):
    model = ModelConfig.from_hf(config(score=cls is ScalarModel, **changes))
    plan = PrecisionPlan.preset(preset)
    return cls(model, plan, random_weights(model, seed), frozen=frozen)


def sequences(count=7):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 64, (3 + 5 * i % 11,), generator=generator).tolist() for i in range(count)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers(family, tmp_path: Path) -> None:
    model = make(ScalarModel, "fp32", family=family)
    model.save_pretrained(tmp_path / "rm", dtype="float32")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm")
    assert theirs.config.num_labels == 1
    ours = model.scores(sequences(), 1000)
    for score, tokens in zip(ours, sequences(), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([tokens])).logits.item()
        # Two float32 evaluations of the same function, sums in another order: a relative error of
        # about sqrt(128) 2^-24 in each of some 20 operations, on scores of about 1; ten times that.
        assert score.item() == pytest.approx(expected, abs=10 * 20 * 128**0.5 * 2**-24)


def test_what_is_saved_is_loaded_back(tmp_path: Path) -> None:
    model = make(ScalarModel, "unified")
    model.save_pretrained(tmp_path / "rm", dtype="float32")
    written = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert written["architectures"] == ["Qwen3ForSequenceClassification"]
    back = ScalarModel.from_pretrained(tmp_path / "rm", model.plan)
    assert torch.equal(back.scores(sequences(), 1000), model.scores(sequences(), 1000))


@pytest.mark.parametrize("preset", ["jet", "unified"])
def test_a_score_does_not_depend_on_the_batch(preset) -> None:
    model = make(ScalarModel, preset)
    together = model.scores(sequences(), 1000)
    assert torch.equal(together, model.scores(sequences(), 1))
    assert torch.equal(together.flip(0), model.scores(sequences()[::-1], 20))


def test_fp8_scores_are_within_the_noise_of_their_roundings() -> None:
    """FP8 against FP32, by how far rounding errors add up.

    Rounding to e4m3 (3 bits of mantissa) is off by at most half an ulp, uniformly: by at most 2^-4
    of the value, and r = 2^-4 / sqrt(3) / 1.5 of it in the mean square (a value is 1.5 times its
    binade's start). A layer rounds 12 operands: X and W of qkv, o, gate, up and down, and K and V;
    each makes its product off by r, in the Euclidean norm. On its way to the end an error passes
    through the rest of the residual stream, x + f(norm(x)): at most twice itself, since no branch
    here is larger than the stream it is added to. Errors of different operands are independent, and
    of any direction: the score w.h is off by sigma = 2 sqrt(12 layers) r |w| |h| / sqrt(D). The
    root mean square of many is below it, and the largest of 200 below 4 of it.
    """
    exact, rounded = make(ScalarModel, "fp32"), make(ScalarModel, "unified")
    generator = torch.Generator().manual_seed(3)
    many = [torch.randint(0, 64, (12,), generator=generator).tolist() for _ in range(200)]
    error = (rounded.scores(many, 4096) - exact.scores(many, 4096)).abs()
    width = exact.config.hidden_size
    r = 2**-4 / 3**0.5 / 1.5
    weight = float(exact.master_weights()["score.weight"].detach().norm())
    hidden = width**0.5  # after the last RMSNorm, whose weights are 1
    sigma = 2 * (12 * exact.config.num_layers) ** 0.5 * r * weight * hidden / width**0.5
    print(f"rms {error.square().mean().sqrt():.4f} max {error.max():.4f} sigma {sigma:.4f}")
    assert error.square().mean().sqrt() <= sigma
    assert error.max() <= 4 * sigma
    assert error.max() > 0


def test_gradients_reach_every_master() -> None:
    model = make(ScalarModel, "unified")
    tokens = torch.tensor(sequences(1)[0])
    values = model.values(tokens, torch.tensor([0, len(tokens)]), torch.arange(len(tokens)))
    values.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.master_weights().values())


def test_a_new_head_says_zero(tmp_path: Path) -> None:
    policy = make(Policy, "unified")
    policy.save_pretrained(tmp_path / "lm", dtype="float32")
    model = ScalarModel.from_language_model(tmp_path / "lm", policy.plan)
    assert not model.scores(sequences(), 1000).any()
    assert set(model.master_weights()) == set(parameter_shapes(model.config))
    with torch.no_grad():
        model.master_weights()["score.weight"].fill_(1.0)
    model.save_pretrained(tmp_path / "rm", dtype="float32")
    again = ScalarModel.from_language_model(tmp_path / "rm", policy.plan)  # has its own head
    assert again.scores(sequences(), 1000).any()


def test_a_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    make(Policy, "bf16").save_pretrained(tmp_path / "lm")
    make(ScalarModel, "bf16").save_pretrained(tmp_path / "rm")
    plan = PrecisionPlan.preset("bf16")
    with pytest.raises(UserError, match="Qwen3ForCausalLM has a head for tokens"):
        ScalarModel.from_pretrained(tmp_path / "lm", plan)
    with pytest.raises(UserError, match="Qwen3ForSequenceClassification has a head for scores"):
        Policy.from_pretrained(tmp_path / "rm", plan)


@pytest.mark.parametrize("labels", [{"num_labels": 3}, {"id2label": {"0": "a", "1": "b"}}, {}])
def test_more_than_one_label_is_refused(labels) -> None:
    contents = config()
    del contents["num_labels"]
    with pytest.raises(UserError, match="labels; a reward model or critic has one"):
        ModelConfig.from_hf(contents | labels)


class TestFrozen:
    def bytes_of(self, model) -> int:
        """Return the bytes of all storages that the model holds, each counted once."""
        storages: dict[int, int] = {}

        def add(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        linears = [m for m in model.decoder.modules() if isinstance(m, Linear)]
        for tensor in (tensor for linear in linears for tensor in linear.quantized.tensors()):
            add(tensor)
        for parameter in model.decoder.parameters():
            add(parameter)
        return sum(storages.values())

    @pytest.mark.parametrize("preset", ["fp32", "bf16", "mixed", "jet", "unified"])
    @pytest.mark.parametrize("tied", [True, False])
    def test_the_same_bits_without_masters(self, preset, tied) -> None:
        policy = make(Policy, preset, tie_word_embeddings=tied)
        frozen = make(Policy, preset, tie_word_embeddings=tied, frozen=True)
        with torch.no_grad():
            expected, seen = policy.logprobs(sequences()), frozen.logprobs(sequences())
        assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))
        assert frozen.master_weights() == {}

    def test_memory_is_a_byte_a_weight_of_the_layers(self) -> None:
        frozen = make(Policy, "unified", frozen=True)
        shapes = parameter_shapes(frozen.config)
        in_layers = sum(
            shape[0] * shape[1]
            for name, shape in shapes.items()
            if len(shape) == 2 and "." in name and name.startswith("layers")
        )
        embedding = 64 * 128
        norms = sum(shape[0] for shape in shapes.values() if len(shape) == 1)
        scales = 4 * in_layers // 128**2
        # FP8 codes, BF16 embedding (which is the head too), FP32 norms; a scalar for each of the
        # masters that are gone.
        expected = in_layers + scales + 2 * embedding + 4 * norms
        assert expected <= self.bytes_of(frozen) <= expected + 4 * 9
        full = sum(4 * p.numel() for p in make(Policy, "unified").master_weights().values())
        assert self.bytes_of(frozen) < 0.3 * full

    def test_moving_keeps_every_bit(self) -> None:
        frozen = make(Policy, "unified", frozen=True)
        with torch.no_grad():
            before = frozen.logprobs(sequences())
            size = self.bytes_of(frozen)
            frozen.move("cpu")  # copies every storage, as a move to another device does
            after = frozen.logprobs(sequences())
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert self.bytes_of(frozen) == size

    def test_a_scalar_model_too(self) -> None:
        expected = make(ScalarModel, "unified").scores(sequences(), 99)
        assert torch.equal(
            make(ScalarModel, "unified", frozen=True).scores(sequences(), 99), expected
        )


class TestTokenizers:
    def test_the_same(self) -> None:
        check_same_tokenizer(character_tokenizer("abc"), character_tokenizer("abc"), "reward model")

    def test_another_is_refused_with_the_token(self) -> None:
        with pytest.raises(UserError, match="reward model m: its tokenizer is not the policy's"):
            check_same_tokenizer(
                character_tokenizer("abc"), character_tokenizer("abd"), "reward model m"
            )

    def test_none_is_refused(self) -> None:
        with pytest.raises(UserError, match="the policy has no tokenizer"):
            check_same_tokenizer(None, character_tokenizer("abc"), "m")
