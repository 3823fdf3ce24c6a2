"""The memory plan counts what a policy really holds, and says what fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.shapes import SHAPES
from tests.models.test_images import picture
from tests.training.shared import config

from jetrl.errors import UserError
from jetrl.memory import activations
from jetrl.memory.activations import PlannedMicroBatch, image_bytes, layer_backward_bytes
from jetrl.memory.fitting import DoesNotFitError, check_fits
from jetrl.memory.pages import CPU_ARCHIVE, GPU_ARCHIVE
from jetrl.memory.plan import MemoryPlan, OtherModels, PlannedRun, Workload, shown
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.draft_head import DraftHead
from jetrl.models.families import ModelConfig
from jetrl.models.layer import RMSNorm
from jetrl.models.model import Model
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.models.tiny import make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import selected_backend
from jetrl.precision.linear import Linear
from jetrl.rollout.speculation import Speculation
from jetrl.session.open import Machine
from jetrl.settings.loading import load_config
from jetrl.types import ImageGrid, ImageSpan

GIB = 2**30
STAGED = 8 * (2 * 128 * 2 + 4 * 4)  # bytes of a token, of 8 heads of 128
WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
CONFIG = config(**WIDTHS, vocab_size=512, num_hidden_layers=2, num_key_value_heads=2)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
SMALL, LARGE = ModelConfig.from_hf(CONFIG), ModelConfig.from_hf(SHAPES["qwen3-8b"])


def row(plan: MemoryPlan, what: str, moment: str = "rollout") -> int:
    [found] = [r for r in plan.rows if r.what.startswith(what)]
    return found.bytes.get(moment, 0)  # type: ignore[call-overload, no-any-return]


def settings(*overrides: str) -> Any:
    return load_config("demo", ["sft.steps=0", "eval.every=0", *overrides])


def planned(
    asked: Any,
    config: ModelConfig,
    others: OtherModels | None = None,
    load: Workload | None = None,
    free: int | None = None,
    tokens: int | None = None,
    device: str = "cuda",
    hopper: bool = True,
) -> MemoryPlan:
    load = load or Workload.of(asked, config)
    run = PlannedRun(asked, config, others or OtherModels(), load, device=device, hopper=hopper)
    return MemoryPlan(run, free, run.tokens if tokens is None else tokens)


def held(model: Model) -> int:
    """The bytes that the forwards of a model read, each tensor once."""
    weights = [model.decoder.embedding]
    weights += [m.quantized for m in model.decoder.modules() if isinstance(m, (Linear, RMSNorm))]
    sizes = {id(t): t.nbytes for weight in weights for t in weight.tensors()}
    return sum(sizes.values()) + model.decoder.rotary_table.nbytes


@pytest.mark.parametrize("preset, tied", [("bf16", True), ("mixed", False), ("unified", True)])
def test_masters_and_working_copies_are_those_of_a_policy(preset: str, tied: bool) -> None:
    config = {**CONFIG, "tie_word_embeddings": tied}
    policy = Policy.from_config(config, PrecisionPlan.preset(preset))
    plan = planned(settings(f"precision.preset={preset}"), ModelConfig.from_hf(config))
    masters = sum(4 * p.numel() for p in policy.master_weights().values())
    assert row(plan, "master weights") == masters
    assert row(plan, "quantized weights") == held(policy)


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("preset", ["fp32", "int8"])
def test_the_tower_of_a_model_with_images_is_counted(
    family: str, preset: str, tmp_path: Path
) -> None:
    policy = Policy.from_pretrained(make_tiny(tmp_path / "model", family), preset)
    assert policy.tower is not None
    assert policy.tower._modules is not None
    plan = planned(settings(f"precision.preset={preset}"), policy.config)
    assert row(plan, "image tower") == sum(p.nbytes for p in policy.tower._modules.parameters())


@pytest.mark.parametrize("family", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_features_of_images_are_counted(family: str, tmp_path: Path) -> None:
    policy = Policy.from_pretrained(make_tiny(tmp_path / "model", family), "int8")
    assert policy.tower is not None
    image = picture(1, 32, 32)
    count = policy.tower.num_features(image)
    grid = ImageGrid(0, 4, 4) if policy.tower.shape.axes else None
    rows = policy.tower.rows([ImageSpan(image, 0, count, grid=grid)])
    size = rows.features.nbytes
    if rows.turns is not None:
        inputs = ForwardInputs(torch.zeros(count, dtype=torch.int64), torch.arange(count), rows)
        table = inputs.turned(policy.decoder.rotary_table)[1]
        size += rows.turns.nbytes + 3 * table.nbytes
    assert image_bytes(policy.config, policy.plan, count) == size
    assert image_bytes(SMALL, policy.plan, count) == 0
    plan = planned(settings(), policy.config)
    assert row(plan, "features of images") > 0


def test_a_base_in_nvfp4_is_counted_as_it_is() -> None:
    asked = settings("adapter.kind=lora", "precision.base=nvfp4", "precision.first_layers_bf16=1")
    plan = PrecisionPlan.from_settings(asked.precision)
    policy = Policy(ModelSource.from_seed(SMALL, 0), plan, trains=lambda name: False)
    assert row(planned(asked, SMALL), "quantized weights") == held(policy)


def test_prompts_are_counted_once_for_their_completions() -> None:
    one = settings(
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=16", "train.updates_per_step=1"
    )
    assert Workload.of(one, LARGE, longest_prompt=100) == Workload(
        sequences=64, tokens=100 + one.rollout.max_tokens, trained=64, prompts=400, prompt=100
    )
    held_out = settings("eval.every=1", "eval.prompts=200", "rollout.max_batch_size=50")
    load = Workload.of(held_out, LARGE, 10)
    assert (load.sequences, load.prompts) == (512, 2000)
    assert load.of_a_rank(held_out, 1).sequences == 50


def test_pages_take_what_is_left() -> None:
    load = Workload(256, 9000, 256, 8192)
    whole = planned(settings(), LARGE, load=load)
    part = planned(settings(), LARGE, load=load, free=150 * GIB)
    assert row(whole, "KV pages") == 256 * 141 * 64 * 76032
    kept = sum(row(part, what) for what in ("master", "optimizer", "quantized"))
    staged = 64 * 8192 * STAGED
    left = 150 * GIB - kept - 4 * GIB - staged
    assert row(part, "KV pages") == pytest.approx(left, abs=64 * 76032)
    # Sequences that lose their pages are prefilled again, behind the prompt that their group has.
    assert row(part, "a forward of 8192 prompt tokens, contexts of 524288") > staged


def test_a_micro_batch_takes_the_tokens_that_there_is_room_for() -> None:
    load, others = Workload(256, 512, 256, 8192), OtherModels()
    wanted = settings("train.tokens_per_micro_batch=16384")
    roomy = check_fits(PlannedRun(wanted, LARGE, others, load), 400 * GIB)
    assert roomy.tokens == 16384
    tight = check_fits(PlannedRun(wanted, LARGE, others, load), 170 * GIB)
    assert 1024 <= tight.tokens < 16384
    assert tight.tokens % 1024 == 0
    assert tight.plan.peak < 170 * GIB
    more = planned(wanted, LARGE, others, load, 170 * GIB, tight.tokens + 1024)
    assert more.peak > 168 * GIB


def test_what_does_not_fit_is_refused_with_the_plan_and_what_would() -> None:
    load = Workload(256, 4096, 256, 8192)

    def refused(free: int, *overrides: str, device: str = "cuda") -> str:
        run = PlannedRun(settings(*overrides), LARGE, OtherModels(), load, device=device)
        with pytest.raises(UserError) as error:
            check_fits(run, free)
        return str(error.value)

    text = refused(139 * GIB)
    assert "139.0 GiB are free" in text
    assert "master weights, FP32" in text
    assert "it fits with train.optimizer_states=compact: " in text
    [needed] = (line for line in text.splitlines() if line.strip().startswith("needed"))
    said = re.search(r"it needs ([0-9.]+) GiB", text)
    assert said is not None
    assert round(max(map(float, needed.split()[1:])), 1) == float(said[1]), "the table adds up"
    both = "fits with train.optimizer_states=compact train.activation_checkpointing=true: "
    assert both in refused(105 * GIB)
    assert "no setting makes it fit" in refused(12 * GIB)
    assert "does not fit in CPU memory" in refused(40 * GIB, device="cpu")
    assert "it fits with adapter.kind=lora: " in refused(60 * GIB)
    # A reference that can wait elsewhere is the first thing to move.
    load = Workload(256, 512, 256, 8192)
    assert "it fits with precision.base=nvfp4: 2" in refused(22 * GIB, "adapter.kind=lora")
    both = "it fits with adapter.kind=lora precision.base=nvfp4: 2"
    assert both in refused(22 * GIB)
    recomputed, load = "train.activation_checkpointing=true", Workload(256, 512, 256, 8192)
    least = planned(settings(recomputed), LARGE, None, load, tokens=1024).peak + 2 * GIB
    assert "it fits with reference.offload=true" in refused(least, "algorithm.kl=0.1", recomputed)


def test_saved_codes_are_proposed_if_the_plan_and_the_layers_have_them() -> None:
    """They are the cheapest change; what refuses them keeps its other ways, by more GPUs too."""
    codes = {"precision.saved": "int8"}
    load, compact = Workload(256, 4096, 256, 8192), "train.optimizer_states=compact"
    coded = settings(compact, "precision.saved=int8")
    least = planned(coded, LARGE, load=load, free=GIB, tokens=1024)

    def ways(config: ModelConfig, free: int, *words: str) -> list[dict[str, object]]:
        run = PlannedRun(settings(*words), config, OtherModels(), load)
        with pytest.raises(DoesNotFitError) as error:
            check_fits(run, free)
        return [way.changes for way in error.value.ways if "adapter.kind" not in way.changes]

    assert ways(LARGE, least.needed, compact)[0] == codes
    experts = ModelConfig.from_hf(SHAPES["qwen3-30b-a3b"])
    gpus = [*ways(LARGE, 60 * GIB, "precision.preset=bf16"), *ways(experts, 300 * GIB)]
    gpus += ways(LARGE, 60 * GIB, "precision.preset=integer")
    assert len(gpus) >= 3
    assert all("precision.saved" not in changes for changes in gpus)
    assert codes not in ways(LARGE, 60 * GIB, compact, "precision.saved=int8")


GRAPHS = "graphs of updates"


@pytest.mark.parametrize("graphs", ["auto", "on"])
def test_eager_updates_are_proposed_if_graphs_take_too_much(graphs: str) -> None:
    """Whatever else is proposed can be combined with the graphs, or switches them off."""
    small = ModelConfig.from_hf(SHAPES["qwen2.5-0.5b"])
    captured, load = settings(f"train.graphs={graphs}"), Workload(512, 2048, 512, 16384)
    eager = planned(settings("train.graphs=off"), small, load=load, free=GIB, tokens=1024)
    assert row(planned(captured, small, load=load), GRAPHS) > GIB
    with pytest.raises(DoesNotFitError) as error:
        check_fits(PlannedRun(captured, small, OtherModels(), load), eager.needed)
    assert {"train.graphs": "off"} in [way.changes for way in error.value.ways]
    with pytest.raises(DoesNotFitError) as error:
        check_fits(PlannedRun(captured, small, OtherModels(), load), 10 * GIB)
    assert error.value.ways


def test_training_on_pairs_counts_no_graphs() -> None:
    small, asked = ModelConfig.from_hf(SHAPES["qwen2.5-0.5b"]), settings()
    plan = planned(asked, small, load=Workload.of_pairs(asked, 1024, reference=True))
    assert GRAPHS not in [r.what for r in plan.rows]


def test_only_hopper_counts_graphs() -> None:
    small = ModelConfig.from_hf(SHAPES["qwen2.5-0.5b"])
    there, other = (planned(settings(), small, hopper=hopper) for hopper in (True, False))
    assert {r.what for r in there.rows} - {r.what for r in other.rows} == {GRAPHS}
    assert there.at("backward") > other.at("backward")
    for name, hopper in (("auto", True), ("triton", False), ("reference", False)):
        with selected_backend(name):
            machine = Machine("cuda", None, elsewhere=True)
            assert machine.is_hopper(PrecisionPlan.preset("int8")) is hopper


def test_shorter_answers_are_proposed_if_one_sequence_is_too_long() -> None:
    long = replace(LARGE, max_position_embeddings=40960)
    words = ["model.config.max_position_embeddings=40960", "adapter.kind=lora", "eval.every=1"]
    asked = settings("rollout.max_tokens=32768", *words)
    load = Workload.of(asked, long, 1000)
    with pytest.raises(DoesNotFitError) as error:
        check_fits(PlannedRun(asked, long, OtherModels(), load), 50 * GIB)
    shorter = [way for way in error.value.ways if "rollout.max_tokens" in way.changes]
    assert [way.changes for way in shorter] == [{"rollout.max_tokens": 8192}]
    assert shorter[0].fitted.plan.needed <= 50 * GIB
    changed = settings("rollout.max_tokens=8192", *words)
    load = Workload.of(changed, long, 1000)
    again = check_fits(PlannedRun(changed, long, OtherModels(), load), 50 * GIB)
    assert again.plan.needed == shorter[0].fitted.plan.needed


def test_the_draft_head_and_texts_of_drafts_count() -> None:
    policy = Policy(ModelSource.from_seed(SMALL, 0), PrecisionPlan.preset("unified"))
    head = DraftHead(policy, 3, 0)
    elements = sum(master.numel() for master in head.masters.values())
    kept = sum(w.nbytes for w in head.weights.values()) + head.rows.nbytes
    plan = planned(settings("rollout.speculation=head", "draft_head.most_tokens=100"), SMALL)
    expected = (4 + 8) * elements + kept + 100 * SMALL.hidden_size * 2
    assert row(plan, "draft head: weights") == pytest.approx(expected, rel=0.05)  # norms apart
    words = ["rollout.max_batch_size=48", "rollout.speculation=text"]
    text = Speculation("text", 48, SMALL.max_position_embeddings, policy.device).text
    kept = text.text.nbytes + text.tables.nbytes + 3 * 4 * (GPU_ARCHIVE - CPU_ARCHIVE)
    plan = planned(settings(*words), SMALL, load=Workload(48, 64, 48, 64))
    assert row(plan, "text of drafts") == pytest.approx(kept, rel=1e-3)


def test_models_of_other_directories_count_with_their_own_sizes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 3, "head_dim": 64}
    path = make_tiny(tmp_path / "other", **sizes)
    one = settings("algorithm.name=ppo", f"critic.path={path}", f"reference.path={path}")
    plan = planned(one, SMALL, OtherModels.of(one))
    critic = ScalarModel.from_language_model(path, PrecisionPlan.preset("unified"))
    masters = sum(4 * p.numel() for p in critic.master_weights().values())
    assert row(plan, "critic: weights") == 3 * masters + held(critic)
    assert row(plan, "critic: gradients", "critic") > 0
    reference = Policy.from_pretrained(path, PrecisionPlan.preset("unified"), frozen=True)
    assert row(plan, "reference") == held(reference)
    with pytest.raises(UserError, match=r"reference\.path: /nowhere: no such directory"):
        OtherModels.of(settings("algorithm.kl=0.1", "reference.path=/nowhere"))


def test_a_reference_that_waits_elsewhere_is_there_when_it_is_asked() -> None:
    """A reference much larger than the policy makes the reference's forward the highest moment."""
    load, small = Workload(8, 512, 8, 512), ModelConfig.from_hf({**CONFIG, "vocab_size": 151936})
    one = settings("algorithm.kl=0.1", "reference.offload=true")
    plan = planned(one, small, OtherModels(reference=LARGE), load)
    assert row(plan, "reference: quantized", "optimizer") == 0
    weights = row(plan, "reference: quantized", "reference")
    assert plan.at("reference") > weights + 4 * 4096 * 151936, "and its logits"
    assert plan.peak == plan.update == plan.at("reference")


def test_a_teacher_counts_its_weights_a_forward_and_a_chunk_of_logits() -> None:
    load, small = Workload(8, 512, 8, 512), ModelConfig.from_hf({**CONFIG, "vocab_size": 151936})
    words = ["algorithm.name=opd", "algorithm.aggregation=none", "teacher.path=somewhere"]
    plan = planned(settings(*words), small, OtherModels(teacher=LARGE), load)
    reference = planned(settings(), small, OtherModels(reference=LARGE), load)
    assert not any(row.what.startswith("teacher") for row in reference.rows)
    weights = row(plan, "teacher: quantized", "rollout")
    assert weights == row(plan, "teacher: quantized", "optimizer") > 7e9
    assert row(plan, "teacher: a forward", "backward") >= 4 * 7 * 2**26
    token = planned(settings(*words, "teacher.kl=token"), small, OtherModels(teacher=LARGE), load)
    assert 0 < row(token, "teacher: a forward", "backward") < 4 * 7 * 2**26


def test_a_reward_models_training_has_a_plan_of_its_own() -> None:
    config = ModelConfig.from_hf(CONFIG).with_scalar_head()
    hf = {**CONFIG, "architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    model = ScalarModel.from_config(hf, PrecisionPlan.preset("unified"))
    one = settings("algorithm.kl=0.1", "sft.examples_per_step=8", "train.tokens_per_micro_batch=32")
    plan = planned(one, config, load=Workload.of_pairs(one, 100))
    masters = sum(master.nbytes for master in model.master_weights().values())
    assert row(plan, "master weights", "backward") == masters
    assert row(plan, "optimizer states", "backward") == 2 * masters
    assert row(plan, "gradients", "optimizer") == masters
    assert plan.micro_batch.tokens == 200, "a pair is not divided"
    assert shown(plan).splitlines()[0].split() == ["GiB", "backward", "optimizer"]


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
        plan = planned(
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
    fitted = check_fits(PlannedRun(chosen, config, OtherModels(), load), free)
    assert fitted.plan.peak < most * GIB
    assert fitted.plan.micro_batch.tokens >= 8192
    with pytest.raises(UserError, match="the model does not fit on the GPU"):
        check_fits(PlannedRun(settings(*large), config, OtherModels(), load), free)


@pytest.mark.parametrize("preset", ["unified", "fp32"])
def test_a_base_and_its_adapter_are_those_of_a_policy(preset: str) -> None:
    lora = LoRA(5, 10.0, targets=("q_proj", "v_proj", "down_proj"), train_norms=True)
    plan = PrecisionPlan.preset(preset)
    source = ModelSource.from_seed(SMALL, 0, adapter=Adapter.new(SMALL, lora, 0))
    policy = Policy(source, plan)
    words = [f"precision.preset={preset}", "adapter.kind=lora", "adapter.rank=5"]
    words += ['adapter.targets=["q_proj", "v_proj", "down_proj"]', "adapter.train_norms=true"]
    plan = planned(settings(*words), SMALL)
    masters = sum(4 * p.numel() for p in policy.master_weights().values())
    assert row(plan, "master weights of the adapter") == masters
    assert row(plan, "gradients", "optimizer") == masters
    assert row(plan, "optimizer states") == 2 * masters
    adapters = [m.adapter for m in policy.decoder.modules() if isinstance(m, Linear) and m.adapter]
    read = sum(tensor.nbytes for adapter in adapters for tensor in adapter.tensors())
    if preset == "fp32":  # which multiplies by the master weights
        assert read == 0
    else:
        assert row(plan, "adapter as forwards read it") == read
        assert row(plan, "quantized weights") == held(policy)


@pytest.mark.parametrize("adapted", [False, True])
def test_an_fp8_backward_behind_an_int8_forward_takes_that_of_fp8(adapted: bool) -> None:
    """Both run the same kernels; peaks of 10.54 and 10.56 GiB (SmolLM2-135M, one H200)."""
    shape, batch = ModelConfig.from_hf(SHAPES["qwen3-8b"]), PlannedMicroBatch(16384, 4096, True)
    unified, int8 = (
        layer_backward_bytes(shape, PrecisionPlan.preset(name), batch, adapted)
        for name in ("unified", "int8")
    )
    assert int8 == unified


def test_a_recomputed_layer_is_not_next_to_the_head() -> None:
    """In `integer`, the head's backward ends before the last layer is made again."""
    plan, batch = PrecisionPlan.preset("integer"), PlannedMicroBatch(4096, 4096, several=True)
    model = replace(SMALL, vocab_size=50_000)
    one_more = replace(model, layers=(*model.layers, model.layers[-1]))
    kept, more = (activations.kept_bytes(config, plan, 4096) for config in (model, one_more))
    wgrad = activations.wgrad_bytes(model, plan, batch, 1, None)
    head = activations._planes_head_bytes(model, 4096, wgrad.in_head, keeps=False)
    made = activations.on_top_bytes(model, plan, batch, True, wgrad, None)
    assert made == head - (more - kept)
