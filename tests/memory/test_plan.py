"""The memory plan counts what a policy really holds, and says what fits."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl.errors import UserError
from jetrl.kernels.attention.layout import KeyValueCodes, QueryTiles
from jetrl.memory.fitting import check_fits, plan_table
from jetrl.memory.pages import CPU_ARCHIVE, GPU_ARCHIVE
from jetrl.memory.plan import MemoryPlan, OtherModels, Workload, memory_plan
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.attention import staged_bytes_per_token
from jetrl.models.draft_head import DraftHead
from jetrl.models.families import SHAPES, ModelConfig
from jetrl.models.layer import RMSNorm
from jetrl.models.model import Model
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import RandomWeights, make_tiny, random_weights
from jetrl.precision import PrecisionPlan
from jetrl.precision.linear import Linear
from jetrl.rollout.speculation import Speculation
from jetrl.settings.loading import load_config

GIB = 2**30
STAGED = 8 * (2 * 128 * 2 + 4 * 4)  # bytes of a token, of 8 heads of 128
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
LARGE = ModelConfig.from_hf(SHAPES["qwen3-8b"])


def row(plan: MemoryPlan, what: str, moment: str = "rollout") -> int:
    [found] = [r for r in plan.rows if r.what.startswith(what)]
    return found.bytes.get(moment, 0)  # type: ignore[call-overload, no-any-return]


def settings(*overrides: str) -> Any:
    return load_config("demo", ["sft.steps=0", "eval.every=0", *overrides])


def quantized_tensors(model: Model) -> list[torch.Tensor]:
    """The tensors that the forwards of a model read, each once."""
    weights = [model.decoder.embedding]
    weights += [m.quantized for m in model.decoder.modules() if isinstance(m, (Linear, RMSNorm))]
    return list({id(t): t for weight in weights for t in weight.tensors()}.values())


@pytest.mark.parametrize("preset", ["bf16", "mixed", "jet", "unified"])
@pytest.mark.parametrize("tied", [True, False])
def test_masters_and_working_copies_are_those_of_a_policy(preset: str, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    policy = Policy.from_config(config, PrecisionPlan.preset(preset))
    plan = memory_plan(settings(f"precision.preset={preset}"), ModelConfig.from_hf(config))
    masters = sum(4 * p.numel() for p in policy.master_weights().values())
    assert row(plan, "master weights") == masters
    copies = policy.decoder.rotary_table.nbytes
    copies += sum(tensor.nbytes for tensor in quantized_tensors(policy))
    assert row(plan, "quantized weights") == copies


@pytest.mark.parametrize("tied", [True, False])
def test_a_base_in_nvfp4_is_counted_as_it_is(tied: bool) -> None:
    config = ModelConfig.from_hf({**CONFIG, "tie_word_embeddings": tied})
    overrides = ("adapter.kind=lora", "precision.base=nvfp4", "precision.first_layers_bf16=1")
    asked = settings(*overrides)
    plan = PrecisionPlan.from_settings(asked.precision)
    policy = Policy(config, plan, random_weights(config, 0), trains=lambda name: False)
    held = policy.decoder.rotary_table.nbytes
    held += sum(tensor.nbytes for tensor in quantized_tensors(policy))
    assert row(memory_plan(asked, config), "quantized weights") == held


def test_a_moment_is_the_sum_of_its_rows_and_the_peak_the_highest() -> None:
    plan = memory_plan(settings(), LARGE, load=Workload(64, 512, 64, 8192))
    for moment in ("rollout", "backward", "optimizer"):
        assert plan.at(moment) == sum(r.bytes.get(moment, 0) for r in plan.rows)
    assert plan.update == max(plan.at("backward"), plan.at("optimizer"))
    assert plan.peak == max(plan.rollout, plan.update)
    assert row(plan, "KV pages", "backward") == 0
    logits = 4 * 64 * LARGE.vocab_size
    graphs = row(plan, "decode's graphs", "backward")
    assert graphs > logits
    assert row(plan, "decode's graphs") == graphs + logits
    on_cpu = memory_plan(settings(), LARGE, load=Workload(64, 512, 64, 8192), device="cpu")
    assert row(on_cpu, "decode's graphs", "optimizer") == 0
    assert row(plan, "gradients", "rollout") == 0


def test_recomputed_layers_keep_their_inputs() -> None:
    wanted = "train.tokens_per_micro_batch=8192"
    load = Workload(256, 512, 256, 8192)
    kept = memory_plan(settings(wanted), LARGE, load=load)
    again = memory_plan(settings(wanted, "train.activation_checkpointing=true"), LARGE, load=load)
    inputs = (2 * 36 - 1) * 2 * 4096 * 8192  # x and what is added to it; the first has x alone
    assert inputs < row(again, "activations", "backward") < inputs + 2 * GIB
    assert row(kept, "activations", "backward") > 4 * row(again, "activations", "backward")


def test_prompts_are_counted_once_for_their_completions() -> None:
    one = settings(
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=16", "train.updates_per_step=1"
    )
    assert Workload.of(one, LARGE, longest_prompt=100) == Workload(
        sequences=64, tokens=100 + one.rollout.max_tokens, trained=64, prompts=400
    )
    held_out = settings("eval.every=1", "eval.prompts=200", "rollout.max_batch_size=50")
    load = Workload.of(held_out, LARGE, 10)
    assert (load.sequences, load.prompts) == (512, 2000)
    assert load.of_a_rank(held_out, 1).sequences == 50


def test_pages_take_what_is_left() -> None:
    load = Workload(256, 9000, 256, 8192)
    whole = memory_plan(settings(), LARGE, load=load)
    part = memory_plan(settings(), LARGE, load=load, free=150 * GIB)
    assert row(whole, "KV pages") == 256 * 141 * 64 * 76032
    held = sum(row(part, what) for what in ("master", "optimizer", "quantized"))
    staged = 64 * 8192 * STAGED
    left = 150 * GIB - held - 4 * GIB - staged
    assert row(part, "KV pages") == pytest.approx(left, abs=64 * 76032)
    # Sequences that lose their pages are prefilled again, behind the prompt that their group has.
    assert row(part, "a forward of 8192 prompt tokens, contexts of 524288") > staged
    # Where lengths are known, no sequence need lose its pages.
    pages = row(part, "KV pages") // (64 * 76032)
    known = replace(load, most_held=64 * (pages - 256))
    short = memory_plan(settings(), LARGE, load=known, free=150 * GIB)
    assert row(short, "KV pages") == row(part, "KV pages")
    assert row(short, "a forward of 8192 prompt tokens") < staged
    known = replace(load, most_held=64 * (pages - 255))
    longer = memory_plan(settings(), LARGE, load=known, free=150 * GIB)
    assert longer.rollout == part.rollout


@pytest.mark.parametrize("kv", ["fp8", "int8", "bf16"])
def test_staged_keys_take_what_is_counted(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = pytest.importorskip("jetrl.kernels.attention.forward", exc_type=ImportError)
    monkeypatch.setattr(stage, "stage_keys_kernel", defaultdict(lambda: lambda *a, **k: None))
    config, plan = ModelConfig.from_hf(CONFIG), PrecisionPlan.preset("unified").replace(kv=kv)
    dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "bf16": torch.bfloat16}[kv]
    codes = torch.zeros(10, 64, 2, 64, dtype=dtype)
    scales = torch.ones(10, 64, 2) if kv != "bf16" else None
    tiles = QueryTiles.paged([3], [640], [list(range(10))], "cpu")
    staged = stage.stage_keys(KeyValueCodes(codes, scales, codes, scales), tiles)
    unused = 0 if kv != "bf16" else staged.factors.nbytes
    counted = 640 * staged_bytes_per_token(config, plan)
    assert staged.kv.nbytes + staged.factors.nbytes - unused == counted


def test_a_micro_batch_takes_the_tokens_that_there_is_room_for() -> None:
    load, others = Workload(256, 512, 256, 8192), OtherModels()
    wanted = settings("train.tokens_per_micro_batch=16384")
    roomy = check_fits(wanted, LARGE, others, load, "cuda", 400 * GIB)
    assert roomy.tokens == 16384
    tight = check_fits(wanted, LARGE, others, load, "cuda", 170 * GIB)
    assert 1024 <= tight.tokens < 16384
    assert tight.tokens % 1024 == 0
    assert tight.plan.peak < 170 * GIB
    more = memory_plan(wanted, LARGE, others, load, 170 * GIB, tight.tokens + 1024)
    assert more.peak > 168 * GIB


def test_what_does_not_fit_is_refused_with_the_plan_and_what_would() -> None:
    load = Workload(256, 4096, 256, 8192)
    with pytest.raises(UserError) as error:
        check_fits(settings(), LARGE, OtherModels(), load, "cuda", 139 * GIB)
    text = str(error.value)
    assert "139.0 GiB are free" in text
    assert "master weights, FP32" in text
    assert "it fits with train.optimizer_states=compact: " in text
    with pytest.raises(
        UserError,
        match=r"fits with train\.optimizer_states=compact train\.activation_checkpointing=true: ",
    ):
        check_fits(settings(), LARGE, OtherModels(), load, "cuda", 105 * GIB)
    with pytest.raises(UserError, match="no setting makes it fit"):
        check_fits(settings(), LARGE, OtherModels(), load, "cuda", 12 * GIB)
    with pytest.raises(UserError, match="does not fit in CPU memory"):
        check_fits(settings(), LARGE, OtherModels(), load, "cpu", 40 * GIB)


def test_a_reference_that_can_wait_elsewhere_is_the_first_thing_to_move() -> None:
    load = Workload(256, 512, 256, 8192)
    with_kl = settings("algorithm.kl=0.1", "train.activation_checkpointing=true")
    without = settings("train.activation_checkpointing=true")
    least = memory_plan(without, LARGE, None, load, tokens=1024).peak + 2 * GIB
    with pytest.raises(UserError, match=r"it fits with reference\.offload=true"):
        check_fits(with_kl, LARGE, OtherModels(), load, "cuda", least)


def test_a_draft_head_counts_with_its_states() -> None:
    config = ModelConfig.from_hf({**CONFIG, "tie_word_embeddings": True})
    policy = Policy(config, PrecisionPlan.preset("unified"), random_weights(config, 0))
    head = DraftHead(policy, 3, 0)
    elements = sum(master.numel() for master in head.masters.values())
    kept = sum(w.nbytes for w in head.weights.values()) + head.rows.nbytes
    states = 100 * config.hidden_size * 2
    for moments, size in (("fp32", 8), ("compact", 3)):
        words = ["rollout.speculation=head", "draft_head.most_tokens=100"]
        plan = memory_plan(settings(*words, f"train.optimizer_states={moments}"), config)
        expected = (4 + size) * elements + kept + states
        # Norms, and the scales of compact states, are as those of any model.
        assert row(plan, "draft head: weights") == pytest.approx(expected, rel=0.05)
    assert not any("draft head" in r.what for r in memory_plan(settings(), config).rows)


def test_drafts_count_with_their_text_and_rows() -> None:
    config = ModelConfig.from_hf({**CONFIG, "tie_word_embeddings": True})
    words = ["rollout.max_batch_size=48", "rollout.speculation=text"]
    load = Workload(48, 64, 48, 64)
    policy = Policy(config, PrecisionPlan.preset("unified"), random_weights(config, 0))
    text = Speculation("text", 48, config.max_position_embeddings, policy.device).text
    kept = text.text.nbytes + text.tables.nbytes + 3 * 4 * (GPU_ARCHIVE - CPU_ARCHIVE)
    plan = memory_plan(settings(*words), config, load=load)
    assert row(plan, "text of drafts") == pytest.approx(kept, rel=1e-3)
    # Unset, drafts are verified on a GPU under a plan that is exact.
    for more, device, there in (
        ([], "cuda", True),
        ([], "cpu", False),
        (["precision.preset=bf16"], "cuda", False),
        (["rollout.speculation=off"], "cuda", False),
        (["rollout.oversample=0.5"], "cuda", False),
    ):
        plan = memory_plan(settings(*more), config, device=device)
        assert any("text of drafts" in r.what for r in plan.rows) == there, (more, device)
    # 48 sequences of 4 tokens are verified together by text, of 8 by auto.
    graphs = {}
    for mode in ("off", "text", "auto"):
        plan = memory_plan(settings(words[0], f"rollout.speculation={mode}"), config, load=load)
        graphs[mode] = row(plan, "decode's graphs") - 4 * 48 * config.vocab_size
    assert graphs["text"] == pytest.approx(256 / 48 * graphs["off"], rel=0.01)
    assert graphs["auto"] == pytest.approx(8 * graphs["off"], rel=0.01)


def test_models_of_other_directories_count_with_their_own_sizes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 3, "head_dim": 64}
    path = make_tiny(tmp_path / "other", **sizes)
    one = settings("algorithm.name=ppo", f"critic.path={path}", f"reference.path={path}")
    others = OtherModels.of(one)
    assert others.critic is not None
    assert others.critic.num_layers == 3
    plan = memory_plan(one, ModelConfig.from_hf({**CONFIG, "tie_word_embeddings": True}), others)
    critic = ScalarModel.from_language_model(path, PrecisionPlan.preset("unified"))
    masters = sum(4 * p.numel() for p in critic.master_weights().values())
    copies = sum(tensor.nbytes for tensor in quantized_tensors(critic))
    table = critic.decoder.rotary_table.nbytes
    assert row(plan, "critic: weights") == 3 * masters + copies + table
    assert row(plan, "critic: gradients", "critic") > 0
    reference = Policy.from_pretrained(path, PrecisionPlan.preset("unified"), frozen=True)
    held = sum(tensor.nbytes for tensor in quantized_tensors(reference))
    assert row(plan, "reference") == held + reference.decoder.rotary_table.nbytes
    with pytest.raises(UserError, match="no such directory"):
        OtherModels.of(settings("algorithm.kl=0.1", "reference.path=/nowhere"))


def test_a_reference_that_waits_elsewhere_is_there_when_it_is_asked(tmp_path: Path) -> None:
    """A reference much larger than the policy makes the reference's forward the highest moment."""
    load, small = Workload(8, 512, 8, 512), ModelConfig.from_hf({**CONFIG, "vocab_size": 151936})
    others = OtherModels(reference=LARGE)
    near, far = (
        memory_plan(
            settings("algorithm.kl=0.1", f"reference.offload={offload}"), small, others, load
        )
        for offload in ("false", "true")
    )
    assert near.at("reference") == 0
    assert row(near, "reference: quantized", "optimizer") > 8 * GIB
    assert row(far, "reference: quantized", "optimizer") == 0
    weights = row(far, "reference: quantized", "reference")
    assert far.at("reference") > weights + 4 * 4096 * 151936, "and its logits"
    assert far.peak == far.update == far.at("reference")


def test_a_reward_models_training_has_a_plan_of_its_own() -> None:
    config = ModelConfig.from_hf(CONFIG).with_scalar_head()
    model = ScalarModel.from_config(
        {**CONFIG, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1},
        PrecisionPlan.preset("unified"),
    )
    assert model.config == config
    one = settings("algorithm.kl=0.1", "sft.examples_per_step=8", "train.tokens_per_micro_batch=32")
    plan = memory_plan(one, config, load=Workload.of_pairs(one, 100))
    masters = sum(master.nbytes for master in model.master_weights().values())
    assert row(plan, "master weights", "backward") == masters
    assert row(plan, "optimizer states", "backward") == 2 * masters
    assert row(plan, "gradients", "optimizer") == masters
    assert plan.micro_batch.tokens == 200, "a pair is not divided"
    assert plan.micro_batch.several
    assert [one.what for one in plan.rows][:2] == ["master weights, FP32", "optimizer states, fp32"]
    assert [cell.strip() for cell in plan_table(plan)[0]] == ["GiB", "backward", "optimizer"]


def test_the_plan_is_within_5_percent_of_what_an_h200_held_at_8b() -> None:
    """`jetrl bench train`, whose load is 24 sequences of 2304 tokens."""
    measured = json.loads((RESULTS / "train_8b.json").read_text())
    assert (
        "--prompts 3 --samples 8 --prompt-length 256 --response-length 2048"
        in (measured["command"])
    )
    for case in measured["rows"]:
        chosen = case["settings"]
        states = f"train.optimizer_states={chosen['optimizer_states']}"
        plan = memory_plan(
            settings(f"precision.preset={case['plan']}", states),
            LARGE,
            load=Workload(24, 2304, 24, 768),
            tokens=chosen["micro_batch_tokens"],
        )
        assert plan.update / GIB == pytest.approx(case["peak_gib"]["update"], rel=0.05)


@pytest.mark.parametrize(
    "shape, sequences, tokens, gib, most",
    [("qwen3-8b", 64, 8192, 80, 72), ("qwen3-32b", 512, 2304, 140.4, 138)],
)
def test_adapters_have_room_on_one_card(
    shape: str, sequences: int, tokens: int, gib: float, most: int
) -> None:
    """The base is counted once, in the form that is multiplied by, and the adapter's states."""
    config = ModelConfig.from_hf(SHAPES[shape])
    large = ("precision.preset=unified", "train.tokens_per_micro_batch=16384")
    chosen = settings("adapter.kind=lora", *large)
    load = Workload(sequences, tokens, sequences, sequences * 32)
    free = int((gib - 1.25) * GIB)
    fitted = check_fits(chosen, config, OtherModels(), load, "cuda", free)
    assert fitted.plan.peak < most * GIB
    assert fitted.plan.micro_batch.tokens >= 8192
    with pytest.raises(UserError, match="the model does not fit on the GPU"):
        check_fits(settings(*large), config, OtherModels(), load, "cuda", free)


@pytest.mark.parametrize("preset", ["unified", "bf16", "mixed", "fp32"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_base_and_its_adapter_are_those_of_a_policy(preset: str, tied: bool) -> None:
    config = ModelConfig.from_hf({**CONFIG, "tie_word_embeddings": tied})
    lora = LoRA(5, 10.0, targets=("q_proj", "v_proj", "down_proj"), train_norms=True)
    plan = PrecisionPlan.preset(preset)
    policy = Policy(config, plan, RandomWeights(config, 0), adapter=Adapter.new(config, lora, 0))
    planned = memory_plan(
        settings(
            f"precision.preset={preset}",
            "adapter.kind=lora",
            "adapter.rank=5",
            'adapter.targets=["q_proj", "v_proj", "down_proj"]',
            "adapter.train_norms=true",
        ),
        config,
    )
    masters = sum(4 * p.numel() for p in policy.master_weights().values())
    assert row(planned, "master weights of the adapter") == masters
    assert row(planned, "gradients", "optimizer") == masters
    assert row(planned, "optimizer states") == 2 * masters
    adapters = [m.adapter for m in policy.decoder.modules() if isinstance(m, Linear) and m.adapter]
    assert len(adapters) == 2 * 2
    read = sum(tensor.nbytes for adapter in adapters for tensor in adapter.tensors())
    base = policy.decoder.rotary_table.nbytes
    base += sum(tensor.nbytes for tensor in quantized_tensors(policy))
    if preset == "fp32":  # which multiplies by the master weights
        assert read == 0
    else:
        assert row(planned, "adapter as forwards read it") == read
        assert row(planned, "quantized weights") == base
