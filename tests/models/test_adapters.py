"""Models with adapters: targets, exactness, the free reference, and PEFT's files in and out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from jetrl.errors import UserError
from jetrl.models.adapter import Adapter, LoRA, adapted_parts
from jetrl.models.families import ModelConfig
from jetrl.models.peft import adapter_of, lora_of, read_adapter
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.tiny import make_tiny, random_weights
from jetrl.parity.measuring import measure
from jetrl.precision import PrecisionPlan
from jetrl.settings.adapter_section import AdapterSettings

CONFIG = ModelConfig.from_hf(
    {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    }
)
SEQUENCES = [[1, 2, 3, 4, 5], [6, 7, 9]]
PRESETS = ["unified", "jet", "mixed", "bf16", "fp32"]


def policy(preset: str = "unified", lora: LoRA | None = None, **changes: Any) -> Policy:
    adapter = Adapter.new(CONFIG, lora or LoRA(4, 16.0), seed=0)
    weights = random_weights(CONFIG, 0) | changes
    return Policy(CONFIG, PrecisionPlan.preset(preset), weights, adapter=adapter)


def moved(model: Any) -> Any:
    """The model after its adapter has become something."""
    g = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for master in model.master_weights().values():
            master.add_(torch.randn(master.shape, generator=g) * 0.05)
    model.requantize()
    return model


@pytest.mark.parametrize("preset", PRESETS)
def test_a_new_adapter_changes_nothing_and_its_base_stays_the_reference(preset: str) -> None:
    whole = Policy(CONFIG, PrecisionPlan.preset(preset), random_weights(CONFIG, 0))
    with torch.no_grad():
        expected = torch.cat(whole.logprobs(SEQUENCES))
        p = policy(preset)
        assert torch.equal(torch.cat(p.logprobs(SEQUENCES)), expected)
        moved(p)
        assert not torch.equal(torch.cat(p.logprobs(SEQUENCES)), expected)
        assert torch.equal(torch.cat(p.base().logprobs(SEQUENCES)), expected)
    torch.cat(p.logprobs(SEQUENCES)).sum().backward()
    names = {name.rpartition(".")[2] for name in p.master_weights()}
    assert names == {"lora_A", "lora_B"}
    assert all(master.grad is not None for master in p.master_weights().values())


@pytest.mark.parametrize("preset", ["unified", "jet"])
@pytest.mark.parametrize("batch", [1, 7])
def test_the_sampler_has_the_bits_of_the_trainer(preset: str, batch: int) -> None:
    p = moved(policy(preset, LoRA(3, 8.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))))
    result = measure(p, num_prompts=4, max_tokens=10, max_batch_size=batch, gradients=True)
    assert (result.different, result.tokens) == (0, 4 * 2 * 10)


def test_targets_are_read_as_peft_reads_them() -> None:
    def count(targets: tuple[str, ...] | str) -> int:
        return sum(map(len, adapted_parts(CONFIG, targets).values()))

    assert count("all-linear") == count(("all-linear",)) == 2 * 7
    assert count(("q_proj", "v_proj")) == 2 * 2
    assert count(("self_attn.o_proj",)) == 2
    assert count(("model.layers.1.mlp.down_proj",)) == 1
    assert count(r".*\.1\..*_proj") == count(r"layers\.1\..*") == 7
    shapes = LoRA(4, 8.0, targets=("v_proj",)).shapes(CONFIG)
    assert shapes["layers.0.qkv"].parts == ((384, 128),)
    for wrong, said in (
        (("q_proj", "wqkv"), "'wqkv' matches no linear layer.*called down_proj, gate_proj"),
        (("lm_head",), "adapter.train_head"),
        ("mixer.*", "'mixer.*' matches no linear layer"),
        ("(", "not a usable regular expression: missing \\)"),
        ((), "empty"),
    ):
        with pytest.raises(UserError, match=said):
            adapted_parts(CONFIG, wrong)


def test_a_draw_depends_on_the_seed_and_the_layers_name_alone() -> None:
    every = Adapter.new(CONFIG, LoRA(4, 8.0), 0).tensors
    values = Adapter.new(CONFIG, LoRA(4, 8.0, targets=("v_proj",)), 0).tensors
    assert torch.equal(values["layers.1.qkv.lora_A"], every["layers.1.qkv.lora_A"][8:])
    other = Adapter.new(CONFIG, LoRA(4, 8.0), 1).tensors
    assert not torch.equal(other["layers.0.o.lora_A"], every["layers.0.o.lora_A"])
    assert every["layers.0.o.lora_A"].abs().max() <= 256**-0.5
    assert not every["layers.0.o.lora_B"].any()


@pytest.mark.parametrize("norms", [False, True])
def test_parameters_are_trained_beside_the_adapter(norms: bool) -> None:
    lora = LoRA(4, 8.0, train_embeddings=True, train_head=True, train_norms=norms)
    p = policy(lora=lora)
    torch.cat(p.logprobs(SEQUENCES)).sum().backward()
    whole = {n for n, m in p.master_weights().items() if "lora" not in n and m.grad is not None}
    assert "embed.weight" in whole
    assert ("norm.weight" in whole) == norms
    assert all("norm" in name or name == "embed.weight" for name in whole)
    with pytest.raises(UserError, match=r"ties its output head.*set both or none"):
        policy(lora=LoRA(4, 8.0, train_head=True))


# PEFT's files


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base") / "model", initializer_range=0.1, seed=3)


def trained(base: Path, preset: str, **options: Any) -> Policy:
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
    lora = LoRA(4, 8.0, **options)
    adapter = Adapter.new(config, lora, 0)
    return moved(Policy.from_pretrained(base, PrecisionPlan.preset(preset), adapter=adapter))


@pytest.mark.parametrize(
    "options",
    [{}, {"targets": r".*1\.self_attn.*", "rslora": True, "train_norms": True}],
    ids=["all", "some"],
)
def test_an_adapter_is_written_and_read_with_the_same_bits(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    p = trained(base, "unified", **options)
    p.save_pretrained(tmp_path / "adapter")
    contents = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (contents["r"], contents["lora_alpha"], contents["peft_type"]) == (4, 8, "LORA")
    assert contents["base_model_name_or_path"] == str(base)
    again = Policy.from_pretrained(
        base, p.plan, adapter=read_adapter(tmp_path / "adapter", p.config, p.lora)
    )
    assert again.master_weights().keys() == p.master_weights().keys()
    for name, master in p.master_weights().items():
        assert torch.equal(again.master_weights()[name], master), name
    with torch.no_grad():
        ours, theirs = (torch.cat(q.logprobs(SEQUENCES)) for q in (p, again))
    assert torch.equal(ours, theirs)


def test_transformers_with_the_adapter_merged_gives_our_logits(base: Path, tmp_path: Path) -> None:
    """By PEFT's formula in float64, from the files that were written: W + alpha / r * B A."""
    p = trained(base, "fp32")
    p.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    modules = dict(model.named_modules())
    names = [n.removesuffix(".lora_A.weight") for n in tensors if n.endswith("lora_A.weight")]
    assert len(names) == 2 * 7
    with torch.no_grad():
        for name in names:
            a, b = (tensors[f"{name}.lora_{kind}.weight"].double() for kind in "AB")
            layer = modules[name.removeprefix("base_model.model.")]
            layer.weight.copy_(layer.weight.double() + 8 / 4 * (b @ a))
        for tokens, ours in zip(SEQUENCES, p.logprobs(SEQUENCES), strict=True):
            logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            theirs = logits.gather(-1, torch.tensor(tokens)[1:, None])[:, 0]
            assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
            in_bf16 = trained(base, "bf16").logprobs([tokens])[0]
            assert (in_bf16 - theirs).abs().max() <= 0.05


def edited(**changes: Any) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def retensored(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        file = path / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return edit


NAME = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (edited(use_dora=True), "use_dora is true, and DoRA"),
    "kind": (edited(peft_type="LOHA"), "peft_type = 'LOHA': only LORA"),
    "rank": (edited(r=4096), "r = 4096: a rank from 1 to 512"),
    "alpha": (edited(lora_alpha=None), "lora_alpha = None"),
    "unknown": (edited(use_wave=7), "use_wave = 7 is not supported"),
    "ranks": (edited(rank_pattern={"q_proj": 8}), "rank_pattern"),
    "bias": (edited(bias="all"), "bias = 'all'"),
    "pissa": (edited(init_lora_weights="pissa"), "may have changed the base"),
    "targets": (
        edited(target_modules=["wq"]),
        "adapter_config.json: target_modules: 'wq' matches no linear layer",
    ),
    "more targets": (edited(target_modules=["q_proj"]), "have no place for tensor .* more"),
    "missing": (retensored(lambda t: t.pop(NAME)), f"tensor {NAME} is missing"),
    "shape": (retensored(lambda t: t.update({NAME: t[NAME][:, :9].clone()})), "another base"),
    "integers": (retensored(lambda t: t.update({NAME: t[NAME].int()})), "a floating dtype"),
    "nan": (retensored(lambda t: t[NAME].fill_(float("nan"))), f"{NAME} has a NaN"),
    "infinity": (retensored(lambda t: t[NAME][0].fill_(float("inf"))), "an infinity"),
    "no file": (lambda path: (path / "adapter_model.safetensors").unlink(), "no such file"),
    "damaged": (lambda path: (path / "adapter_model.safetensors").write_bytes(b"9"), "safetensors"),
    "no adapter": (lambda path: (path / "adapter_config.json").unlink(), "no adapter there"),
}


@pytest.fixture(scope="module")
def written(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "adapter"
    trained(base, "unified").save_pretrained(path)
    return path


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_an_adapter_is_named(
    case: str, base: Path, written: Path, tmp_path: Path
) -> None:
    edit, said = WRONG[case]
    path = tmp_path / "adapter"
    path.mkdir()
    for file in written.glob("adapter_*"):
        (path / file.name).write_bytes(file.read_bytes())
    edit(path)
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
    with pytest.raises(UserError, match=said):
        read_adapter(path, config)


def test_an_adapter_of_another_base_is_refused(base: Path, written: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", initializer_range=0.1, seed=4)
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
    plan = PrecisionPlan.preset("unified")
    with pytest.raises(UserError, match="trained on another base than the one here"):
        Policy.from_pretrained(other, plan, adapter=read_adapter(written, config))
    with pytest.raises(UserError, match="an adapter, not a whole model"):
        Policy.from_pretrained(written, plan)


def test_settings_say_which_adapter(base: Path, written: Path) -> None:
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
    assert lora_of(AdapterSettings(), config) is None
    assert lora_of(AdapterSettings(kind="lora"), config) == LoRA(32, 32.0)
    chosen = AdapterSettings(kind="lora", path=str(written), train_norms=True)
    lora = lora_of(chosen, config)
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.train_norms) == (4, 8.0, True)
    with pytest.raises(UserError, match=r"adapter\.rank = 8, and the adapter in .* has 4"):
        lora_of(chosen.model_copy(update={"rank": 8}), config)
    with pytest.raises(UserError, match="has its own targets"):
        lora_of(chosen.model_copy(update={"targets": ("q_proj",)}), config)
    for wrong in ({"rank": 8}, {"path": "x"}, {"train_head": True}):
        with pytest.raises(ValueError, match=r"set adapter\.kind=lora"):
            AdapterSettings(**wrong)
    with pytest.raises(ValueError, match="less than or equal to 512"):
        AdapterSettings(kind="lora", rank=513)


def test_targets_that_match_nothing_are_named_by_where_they_stand(
    base: Path, written: Path, tmp_path: Path
) -> None:
    """The memory plan, which asks first, gives the same message as reading the adapter's file."""
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text()))
    with pytest.raises(UserError, match=r"^adapter\.targets: 'wq' matches no linear layer"):
        lora_of(AdapterSettings(kind="lora", targets=("wq",)), config)
    path = tmp_path / "adapter"
    shutil.copytree(written, path)
    edited(target_modules=["wq"])(path)
    said = r"adapter_config\.json: target_modules: 'wq' matches no linear layer"
    chosen = AdapterSettings(kind="lora", path=str(path))
    for look in (lora_of, lambda settings, config: adapter_of(settings, config, 0)):
        with pytest.raises(UserError, match=said):
            look(chosen, config)


def test_a_scalar_model_trains_its_head_beside_the_adapter(base: Path, tmp_path: Path) -> None:
    config = ModelConfig.from_hf(json.loads((base / "config.json").read_text())).with_scalar_head()
    adapter = adapter_of(AdapterSettings(kind="lora", rank=2), config, 0)
    plan = PrecisionPlan.preset("unified")
    model = moved(ScalarModel.from_language_model(base, plan, adapter=adapter))
    assert {n for n in model.master_weights() if "lora" not in n} == {"score.weight"}
    model.save_pretrained(tmp_path / "adapter")
    contents = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (contents["task_type"], contents["modules_to_save"]) == ("SEQ_CLS", ["score"])
    read = read_adapter(tmp_path / "adapter", config)
    again = ScalarModel.from_language_model(base, plan, adapter=read)
    assert torch.equal(again.scores(SEQUENCES, 99), model.scores(SEQUENCES, 99))
