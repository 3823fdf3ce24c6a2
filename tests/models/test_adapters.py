"""Models with adapters: targets, exactness, the free reference, and PEFT's files in and out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.stored_weights import our_config
from transformers import AutoModelForCausalLM

from jetrl.cli.main import main as jetrl
from jetrl.errors import UserError
from jetrl.models.adapter import Adapter, LoRA, adapted_parts
from jetrl.models.hf import model_config
from jetrl.models.peft import adapted_config, adapter_of, lora_of, read_adapter
from jetrl.models.policy import Policy
from jetrl.models.scalar_model import ScalarModel
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights, make_tiny
from jetrl.precision import PrecisionPlan
from jetrl.session.parity import measure
from jetrl.settings.model_sections import AdapterSettings

CONFIG = our_config(
    "qwen2",
    tied=True,
    vocab_size=128,
    hidden_size=128,
    intermediate_size=256,
    head_dim=64,
    initializer_range=0.1,
)
SEQUENCES = [[1, 2, 3, 4, 5], [6, 7, 9]]
PRESETS = ["unified", "jet", "int8", "mixed", "bf16", "fp32"]


def policy(preset: str = "unified", lora: LoRA | None = None, **changes: Any) -> Policy:
    adapter = Adapter.new(CONFIG, lora or LoRA(4, 16.0), seed=0)
    weights = dict(RandomWeights(CONFIG, 0)) | changes
    source = ModelSource.from_tensors(CONFIG, weights, adapter=adapter)
    return Policy(source, PrecisionPlan.preset(preset))


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
    whole = Policy(ModelSource.from_seed(CONFIG, 0), PrecisionPlan.preset(preset))
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


@pytest.mark.parametrize("preset, batch", [("unified", 7), ("jet", 1), ("int8", 3)])
def test_the_sampler_has_the_bits_of_the_trainer(preset: str, batch: int) -> None:
    p = moved(policy(preset, LoRA(3, 8.0, targets=("q_proj", "v_proj", "up_proj", "down_proj"))))
    result = measure(p, num_prompts=4, max_tokens=10, max_batch_size=batch, gradients=True)
    assert (result.different, result.tokens) == (0, 4 * 2 * 10)


def test_targets_are_read_as_peft_reads_them() -> None:
    def count(targets: tuple[str, ...] | str) -> int:
        return sum(map(len, adapted_parts(CONFIG, targets).values()))

    assert count("all-linear") == count(("all-linear",)) == 2 * 7
    assert count(("q_proj", "v_proj")) == 2 * 2
    assert count(("model.layers.1.mlp.down_proj",)) == 1
    assert count(r".*\.1\..*_proj") == count(r"layers\.1\..*") == 7
    for wrong, said in (
        (("q_proj", "wqkv"), "'wqkv' matches no linear layer.*called down_proj, gate_proj"),
        ("mixer.*", "'mixer.*' matches no linear layer"),
        ("(", "not usable as regular expressions: missing \\)"),
    ):
        with pytest.raises(UserError, match=said):
            adapted_parts(CONFIG, wrong)


def test_parameters_are_trained_next_to_the_adapter() -> None:
    lora = LoRA(4, 8.0, train_embeddings=True, train_head=True, train_norms=True)
    p = policy(lora=lora)
    torch.cat(p.logprobs(SEQUENCES)).sum().backward()
    whole = {n for n, m in p.master_weights().items() if "lora" not in n and m.grad is not None}
    assert {"embed.weight", "norm.weight"} < whole
    assert all("norm" in name or name == "embed.weight" for name in whole)
    with pytest.raises(UserError, match=r"ties its output head.*set both or none"):
        policy(lora=LoRA(4, 8.0, train_head=True))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("base") / "model", initializer_range=0.1, seed=3)


def trained(base: Path, preset: str, **options: Any) -> Policy:
    config = model_config(base)
    lora = LoRA(4, 8.0, **options)
    adapter = Adapter.new(config, lora, 0)
    return moved(Policy.from_pretrained(base, PrecisionPlan.preset(preset), adapter=adapter))


def test_an_adapter_is_written_and_read_with_the_same_bits(base: Path, tmp_path: Path) -> None:
    options = {"targets": r".*1\.self_attn.*", "rslora": True, "train_norms": True}
    p = trained(base, "unified", **options)
    p.save_pretrained(tmp_path / "adapter")
    contents = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (contents["r"], contents["lora_alpha"], contents["peft_type"]) == (4, 8, "LORA")
    assert contents["base_model_name_or_path"] == str(base)
    read = read_adapter(tmp_path / "adapter", p.config, p.lora)
    again = Policy.from_pretrained(base, p.plan, adapter=read)
    assert again.master_weights().keys() == p.master_weights().keys()
    for name, master in p.master_weights().items():
        assert torch.equal(again.master_weights()[name], master), name
    with torch.no_grad():
        ours, theirs = (torch.cat(q.logprobs(SEQUENCES)) for q in (p, again))
    assert torch.equal(ours, theirs)


def as_peft_reads(base: Path, path: Path) -> torch.Tensor:
    """Log-probs by PEFT's rules in float64: W + alpha / r * B A, and copies of saved modules.

    A module that is stored and not in modules_to_save shares its tensor as in the base.
    """
    contents = json.loads((path / "adapter_config.json").read_text())
    saved = () if contents.get("ensure_weight_tying") else tuple(contents["modules_to_save"] or ())
    tensors = load_file(path / "adapter_model.safetensors")
    tensors = {n.removeprefix("base_model.model."): t.double() for n, t in tensors.items()}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64).eval()
    modules = dict(model.named_modules())
    with torch.no_grad():
        for name in (n.removesuffix(".lora_A.weight") for n in tensors if "lora_A" in n):
            a, b = (tensors[f"{name}.lora_{kind}.weight"] for kind in "AB")
            modules[name].weight.copy_(modules[name].weight + 8 / 4 * (b @ a))
        for name in (n.removesuffix(".weight") for n in tensors if "lora_" not in n):
            if name.endswith(saved):  # every name, or with () none
                modules[name].weight = torch.nn.Parameter(modules[name].weight.clone())
            modules[name].weight.copy_(tensors[f"{name}.weight"])
        out = []
        for tokens in SEQUENCES:
            logits = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
            out.append(logits.gather(-1, torch.tensor(tokens)[1:, None])[:, 0])
    return torch.cat(out)


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


EMBED, HEAD = "base_model.model.model.embed_tokens.weight", "base_model.model.lm_head.weight"
NORM = "base_model.model.model.norm.weight"
# Of a tied base: what is trained whole here, what PEFT has stored beside A and B, and the keys of
# adapter_config.json; whether the head is the embedding, and modules_to_save written again.
PAIR = ["embed_tokens", "lm_head"]
TIE = {"modules_to_save": PAIR[:1], "ensure_weight_tying": True}
BESIDE: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any], bool, Any]] = {
    "nothing": ({}, (), {}, True, None),
    "trained here": ({"train_embeddings": True, "train_head": True}, (), {}, True, PAIR),
    "embedding": ({}, (EMBED,), {"modules_to_save": PAIR[:1]}, False, PAIR[:1]),
    "head": ({}, (HEAD,), {"modules_to_save": PAIR[1:]}, False, PAIR[1:]),
    "both": ({}, (EMBED, HEAD), {"modules_to_save": PAIR}, False, PAIR),
    "kept tied": ({}, (EMBED,), TIE, True, PAIR),
    "not in the list": ({}, (EMBED,), {}, True, PAIR),
    "last norm": ({}, (NORM,), {"modules_to_save": ["model.norm"]}, True, ["model.norm"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_an_adapter_is_the_one_that_peft_reads_also_when_it_is_saved_again_and_merged(
    case: str, base: Path, tmp_path: Path
) -> None:
    options, stored, keys, tied, saved = BESIDE[case]
    path, again, merged = (tmp_path / name for name in ("adapter", "again", "merged"))
    trained(base, "fp32", **options).save_pretrained(path)
    g, weights = torch.Generator().manual_seed(5), load_file(base / "model.safetensors")
    like = {EMBED: "model.embed_tokens.weight", HEAD: "model.embed_tokens.weight"}
    noised = {n: weights[like.get(n, "model.norm.weight")] for n in stored}
    noised = {n: w + 0.1 * torch.randn(w.shape, generator=g) for n, w in noised.items()}
    if stored:
        retensored(lambda tensors: tensors.update(noised))(path)
        edited(**keys)(path)
        (path / "jetrl_adapter.json").unlink()
    config = model_config(base)
    plan = PrecisionPlan.preset("fp32")
    theirs = as_peft_reads(base, path)
    for directory in (path, again):
        adapter = read_adapter(directory, config)
        model = Policy.from_pretrained(base, plan, adapter=adapter)
        assert model.config.tie_word_embeddings is tied
        with torch.no_grad():
            ours = torch.cat(model.logprobs(SEQUENCES))
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
        if directory == path:
            model.save_pretrained(again)
    assert torch.equal(as_peft_reads(base, again), theirs)
    contents = json.loads((again / "adapter_config.json").read_text())
    assert contents["modules_to_save"] == saved
    settings = AdapterSettings(kind="lora", path=str(again))
    assert adapted_config(settings, config).tie_word_embeddings is tied
    assert jetrl(["export", str(again), str(merged), "--merge", "--dtype", "float32"]) == 0
    with torch.no_grad():
        whole = torch.cat(Policy.from_pretrained(merged, plan).logprobs(SEQUENCES))
    assert (whole - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("exclude", [["0.mlp.up_proj", "v_proj", "lm_head"], r"model.*\.1\.mlp.*"])
def test_excluded_modules_have_no_adapter(exclude: Any, base: Path, tmp_path: Path) -> None:
    path, again = tmp_path / "adapter", tmp_path / "again"
    trained(base, "fp32").save_pretrained(path)
    whole = load_file(path / "adapter_model.safetensors")
    out = r"0\.mlp\.up_proj|v_proj" if isinstance(exclude, list) else r"\.1\.mlp"
    kept = {name: tensor for name, tensor in whole.items() if not re.search(out, name)}
    save_file(kept, path / "adapter_model.safetensors")
    edited(exclude_modules=exclude)(path)
    adapter = read_adapter(path, model_config(base))
    Policy.from_pretrained(base, PrecisionPlan.preset("fp32"), adapter=adapter).save_pretrained(
        again
    )
    assert load_file(again / "adapter_model.safetensors").keys() == kept.keys() < whole.keys()
    assert torch.equal(as_peft_reads(base, again), as_peft_reads(base, path))
    assert read_adapter(again, model_config(base)).shapes == adapter.shapes


NAME = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "dora": (edited(use_dora=True), "use_dora = True is not supported"),
    "rank": (edited(r=4096), "r = 4096: should be less than or equal to 512"),
    "alpha": (edited(lora_alpha=None), "lora_alpha = None"),
    "unknown": (edited(use_wave=7), "use_wave = 7 is not supported"),
    "pissa": (edited(init_lora_weights="pissa"), "init_lora_weights = 'pissa'"),
    "targets": (edited(target_modules=["wq"]), r"config\.json: target_modules: 'wq' matches no"),
    "more targets": (edited(target_modules=["q_proj"]), "have no place for tensor .* more"),
    "excluded": (edited(exclude_modules=["up_proj"]), "have no place for tensor .* more"),
    "all excluded": (edited(exclude_modules=".*"), "exclude_modules excludes every layer"),
    "missing": (retensored(lambda t: t.pop(NAME)), f"tensor {NAME} is missing"),
    "integers": (retensored(lambda t: t.update({NAME: t[NAME].int()})), "a floating dtype"),
    "nan": (retensored(lambda t: t[NAME].fill_(float("nan"))), f"{NAME} has a NaN"),
    "no file": (lambda path: (path / "adapter_model.safetensors").unlink(), "no such file"),
    "whole": (edited(modules_to_save=["lm_head"]), f"names lm_head, and .* no tensor {HEAD}"),
    "nowhere": (edited(modules_to_save=["nowhere"]), "nowhere, which the model does not have"),
    "task": (edited(task_type="SEQ_CLS"), "task_type = SEQ_CLS is of a classifier"),
    "no task": (edited(task_type={}), "task_type = "),
    "pair": (
        retensored(lambda t: t.update({EMBED: torch.ones(98, 128), HEAD: torch.zeros(98, 128)})),
        "embed_tokens and lm_head differ, and the adapter ties them",
    ),
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
    if case in ("nowhere", "task", "no task", "all excluded"):  # before any tensor is read
        (path / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=said):
        read_adapter(path, model_config(base))


def test_an_adapter_of_another_base_is_refused(base: Path, written: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", initializer_range=0.1, seed=4)
    config = model_config(base)
    plan = PrecisionPlan.preset("unified")
    with pytest.raises(UserError, match="trained on another base than the one here"):
        Policy.from_pretrained(other, plan, adapter=read_adapter(written, config))
    with pytest.raises(UserError, match="an adapter, not a whole model"):
        Policy.from_pretrained(written, plan)


def test_a_base_is_known_again_under_every_plan(base: Path) -> None:
    assert len({trained(base, preset).base_digest for preset in PRESETS}) == 1


def test_settings_say_which_adapter(base: Path, written: Path) -> None:
    config = model_config(base)
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
    with pytest.raises(ValueError, match=r"adapter\.rank is set"):
        AdapterSettings(rank=8)


def test_a_scalar_model_trains_its_head_beside_the_adapter(base: Path, tmp_path: Path) -> None:
    config = model_config(base).with_scalar_head()
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


@pytest.mark.parametrize(("family", "dropped"), [("qwen3_moe", False), ("qwen2_moe", True)])
def test_an_export_says_that_peft_would_drop_adapters_of_experts(
    family: str, dropped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    sizes = ["--num-experts", "2", "--num-layers", "1", "--tokenizer", "characters"]
    assert jetrl(["init", str(base), "--family", family, *sizes]) == 0
    lora = LoRA(rank=2, alpha=4, targets=("up_proj", "down_proj"))
    plan = PrecisionPlan.preset("fp32")
    new = Adapter.new(model_config(base), lora, seed=0)
    Policy.from_pretrained(base, plan, adapter=new).save_pretrained(adapter)
    assert jetrl(["export", str(adapter), str(out)]) == 0
    assert ("peft 0.21 drops" in capsys.readouterr().out) is dropped
