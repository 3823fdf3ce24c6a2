"""Checkpoints: complete or absent, checked when read, and exact."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from jetrl.errors import RunStopped, UserError
from jetrl.models.adapter import LoRA
from jetrl.models.families import ModelConfig
from jetrl.settings.loading import Settings
from jetrl.training import checkpoint as module
from jetrl.training import checkpoint_files
from jetrl.training.checkpoint import Checkpoints, model_dict
from jetrl.training.checkpoint_files import fingerprint, is_known_by
from jetrl.training.trainer import Trainer

SETTINGS = Settings.model_validate({"train": {"lr": 0.05, "weight_decay": 0.1}})
EXTRA = {"task": {"cursor": 17}, "best": 0.1 + 0.2, "none": None, "names": ["a", "é"]}
FILES = ["manifest.json", "masters.safetensors", "optimizer.safetensors", "state.json"]


@pytest.fixture
def made(bigram):
    """A policy and trainer after two updates."""
    policy = bigram()
    trainer = Trainer(policy, SETTINGS)
    for _ in range(2):
        trainer.step(policy.draw([1.0, 0.0, 0.0, 0.5]))
    return policy, trainer


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_round_trip_is_bitwise(made, bigram, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    path = checkpoints.save(7, policy, trainer.optimizer, EXTRA)
    assert path == tmp_path / "checkpoints" / "step_000007"
    assert names(path) == FILES
    assert names(path.parent) == ["step_000007"]

    fresh = bigram(seed=99)
    other = Trainer(fresh, SETTINGS)
    found = Checkpoints(path.parent).latest()
    assert found.path == path
    assert found.notes == []
    loaded = Checkpoints(path.parent).load(path, fresh, other.optimizer)
    assert loaded.step == 7
    assert loaded.extra == EXTRA
    assert fresh.calls[-1][0] == "requantize"
    assert other.optimizer.num_updates == 2
    # And both go on alike.
    for p, t in ((policy, trainer), (fresh, other)):
        t.step(p.draw([1.0, 0.0, 0.0, 0.5]))
    for name, master in policy.master_weights().items():
        assert torch.equal(master, fresh.master_weights()[name])
    state = other.optimizer.state_tensors()
    for name, tensor in trainer.optimizer.state_tensors().items():
        assert torch.equal(tensor, state[name])


def test_keep_last_and_order(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (9, 10, 1000000, 1000001):
        checkpoints.save(step, policy, trainer.optimizer, {})
    assert checkpoints.steps() == [1000000, 1000001]
    assert checkpoints.latest().path.name == "step_1000001"


def test_a_save_after_going_back_removes_the_left_future(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    checkpoints.save(10, policy, trainer.optimizer, {})
    checkpoints.save(20, policy, trainer.optimizer, {})
    checkpoints.save(12, policy, trainer.optimizer, {})
    assert checkpoints.steps() == [10, 12]


def truncate(path):
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def reformat(path):
    """A whole checkpoint of a later format: the sums fit, this version cannot read it."""
    folder = path.parent
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"format": 999}))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["state.json"] = fingerprint(path)
    (folder / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = [
    pytest.param("masters.safetensors", truncate, "bytes instead of", id="truncated"),
    pytest.param("masters.safetensors", flip, "does not match its checksum", id="bit-flip"),
    pytest.param("optimizer.safetensors", os.remove, "No such file", id="missing-file"),
    pytest.param("manifest.json", os.remove, "manifest.json: No such file", id="no-manifest"),
    pytest.param("manifest.json", lambda p: p.write_text("{"), "not a checkpoint's", id="bad-json"),
    pytest.param("manifest.json", lambda p: p.write_text("[]"), "not a checkpoint's", id="no-dict"),
    pytest.param("manifest.json", lambda p: p.write_bytes(b"\xff"), "not a", id="not-text"),
    pytest.param("state.json", truncate, "bytes instead of", id="state-truncated"),
]


@pytest.mark.parametrize("file, damage, message", DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_last_good_one(
    made, tmp_path, file, damage, message
):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        checkpoints.save(step, policy, trainer.optimizer, {})
    damage(tmp_path / "step_000003" / file)
    found = checkpoints.latest()
    assert found.path.name == "step_000002"
    (note,) = found.notes
    assert "step_000003 is damaged" in note
    assert message in note
    with pytest.raises(UserError, match="step_000003 is damaged"):
        checkpoints.load(tmp_path / "step_000003", policy, trainer.optimizer)
    damage(tmp_path / "step_000002" / file)
    damage(tmp_path / "step_000001" / file)
    with pytest.raises(
        UserError, match=r"no good checkpoint .*step_000003.*step_000002.*step_000001"
    ):
        checkpoints.latest()


def test_another_format_is_refused_and_no_older_one_taken(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, policy, trainer.optimizer, {})
    reformat(tmp_path / "step_000002" / "state.json")
    for read in (checkpoints.latest, lambda: checkpoints.check(tmp_path / "step_000002")):
        with pytest.raises(UserError, match=r"step_000002 has format 999.* reads format 2"):
            read()


def test_the_best_are_kept_beside_the_last(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=2)
    scores = {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.2}
    kept = []
    for step, score in scores.items():
        checkpoints.save(step, policy, trainer.optimizer, {}, score)
        kept.append(checkpoints.steps())
    assert kept == [[1], [1, 2], [1, 2, 3], [2, 4], [2, 4, 5], [2, 4, 6]]


def test_what_a_crash_kept_from_going_goes_when_the_run_is_resumed(made, tmp_path, monkeypatch):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_prune", lambda *_: None)  # killed before
        for step in (1, 2, 3):
            checkpoints.save(step, policy, trainer.optimizer, {})
    (tmp_path / ".writing-step_000004").mkdir()
    checkpoints.tidy(2)  # the third was damaged
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_tensors_of_other_parts_come_back(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)
    critic = {"critic": {"head.weight": torch.randn(3, 5), "step": torch.tensor(2.0)}}
    path = checkpoints.write(
        checkpoints.snapshot(1, policy, trainer.optimizer, {}, others=critic).copied()
    )
    tensors = checkpoints.load(path, policy, trainer.optimizer).tensors
    assert tensors.keys() == critic.keys()
    assert torch.equal(tensors["critic"]["head.weight"], critic["critic"]["head.weight"])
    flip(path / "critic.safetensors")
    with pytest.raises(UserError, match=r"critic.safetensors does not match its checksum"):
        checkpoints.check(path)


def test_a_copy_is_not_touched_by_later_updates(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)
    at_once = checkpoints.save(1, policy, trainer.optimizer, {})
    snapshot = checkpoints.snapshot(2, policy, trainer.optimizer, {}).copied()
    trainer.step(policy.draw([1.0, 0.0, 0.0, 0.5]))
    later = checkpoints.write(snapshot)
    for name in ("masters.safetensors", "optimizer.safetensors"):
        assert (at_once / name).read_bytes() == (later / name).read_bytes()


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UserError, match="no checkpoint in"):
        Checkpoints(tmp_path / "none").latest()
    assert Checkpoints(tmp_path / "none").steps() == []
    assert names(tmp_path) == []


def check_disk_full(checkpoints, policy, optimizer, reason):
    before = {
        path: path.read_bytes() for path in checkpoints.directory.rglob("*") if path.is_file()
    }
    with pytest.raises(RunStopped) as caught:
        checkpoints.save(2, policy, optimizer, {})
    message = str(caught.value)
    assert str(checkpoints.path(2)) in message
    assert reason in message
    assert "GiB free" in message
    assert str(checkpoints.path(1)) in message
    after = {path: path.read_bytes() for path in checkpoints.directory.rglob("*") if path.is_file()}
    assert after == before
    assert names(checkpoints.directory) == ["step_000001"]
    assert checkpoints.latest().path == checkpoints.path(1)
    checkpoints.save(2, policy, optimizer, {})


@pytest.mark.parametrize("call", range(4))
def test_disk_full_at_any_file_leaves_the_previous_one(made, tmp_path, monkeypatch, call):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, policy, trainer.optimizer, {})
    fsync, calls = os.fsync, []

    def full_disk(handle):
        calls.append(handle)
        if len(calls) == call + 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(module.os, "fsync", full_disk)
    check_disk_full(checkpoints, policy, trainer.optimizer, "No space left on device")


def test_failing_second_rename_brings_the_replaced_one_back(made, tmp_path, monkeypatch):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, policy, trainer.optimizer, {"n": 1})
    rename = os.rename

    def fails(source, target):
        if "writing" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", fails)
    with pytest.raises(RunStopped, match="Input/output error"):
        checkpoints.save(1, policy, trainer.optimizer, {"n": 2})
    assert names(tmp_path) == ["step_000001"]
    assert checkpoints.load(tmp_path / "step_000001", policy, trainer.optimizer).extra == {"n": 1}


def test_files_are_those_of_the_library_through_a_small_buffer(tmp_path, monkeypatch):
    """All types, odd sizes, scalars and empty tensors, strided ones too."""
    monkeypatch.setattr(checkpoint_files, "_BUFFER", 64)
    monkeypatch.setattr(checkpoint_files, "_FLUSHED", 100)
    g = torch.Generator().manual_seed(0)
    tensors = {
        "odd": torch.randint(0, 255, (7, 3), dtype=torch.uint8, generator=g),
        "float": torch.randn(33, 5, generator=g),
        "step": torch.tensor(3.0),
        "turned": torch.randn(4, 6, generator=g).t(),
        "half": torch.randn(9, generator=g).bfloat16(),
        "short": torch.arange(-5, 6, dtype=torch.int16),
        "long": torch.tensor([2**40, -1]),
        "none": torch.zeros(0, 4),
    }
    checkpoint_files.write_tensors(tmp_path / "ours", tensors)
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("size", [0, 99, 100, 101, 1000, 1234])
def test_a_large_files_fingerprint_is_that_of_its_pieces(tmp_path, monkeypatch, size):
    data = torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().tobytes()
    file = tmp_path / "file"
    file.write_bytes(data)
    whole = {"bytes": size, "sha256": hashlib.sha256(data).hexdigest()}
    assert fingerprint(file) == whole
    monkeypatch.setattr(checkpoint_files, "_PIECE", 100)
    monkeypatch.setattr(checkpoint_files, "_READ", 30)
    pieces = [hashlib.sha256(data[i : i + 100]).digest() for i in range(0, size, 100)]
    of_pieces = hashlib.sha256(b"".join(pieces)).hexdigest()
    now = {"bytes": size, "sha256_of_gib_pieces": of_pieces} if size > 100 else whole
    assert fingerprint(file) == now
    older = [whole, {"bytes": size, "sha256": of_pieces}] if size > 100 else [whole]
    for known in (now, *older):
        assert is_known_by(file, known)
    if size:
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for known in (now, *older):
            assert not is_known_by(file, known)
    with pytest.raises(KeyError):
        is_known_by(file, {"bytes": size, "md5": ""})


def test_a_checkpoint_whose_large_files_have_an_older_checksum_is_whole(
    made, tmp_path, monkeypatch
):
    policy, trainer = made
    path = Checkpoints(tmp_path).save(1, policy, trainer.optimizer, {})
    monkeypatch.setattr(checkpoint_files, "_PIECE", 100)
    Checkpoints.check(path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["masters.safetensors"] = fingerprint(path / "masters.safetensors")
    assert "sha256_of_gib_pieces" in manifest["masters.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    Checkpoints.check(path)
    manifest["masters.safetensors"]["sha256_of_gib_pieces"] = "0" * 64
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"masters\.safetensors does not match its checksum"):
        Checkpoints.check(path)


def test_an_interrupt_while_writing_leaves_nothing(made, tmp_path, monkeypatch):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)

    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(1, policy, trainer.optimizer, {})
    assert names(tmp_path) == []


def test_what_a_crash_left_is_removed_or_put_back(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, policy, trainer.optimizer, {})
    (tmp_path / ".writing-step_000003").mkdir()
    (tmp_path / ".writing-step_000003" / "masters.safetensors").write_bytes(b"half")
    os.rename(tmp_path / "step_000002", tmp_path / ".replaced-step_000002")
    (tmp_path / ".replaced-step_000001").mkdir()
    again = Checkpoints(tmp_path)
    assert again.latest().path.name == "step_000002"
    assert ".writing-step_000003" in names(tmp_path)  # it may be another process's, at work
    again.save(4, policy, trainer.optimizer, {})
    assert names(tmp_path) == ["step_000002", "step_000004"]


def test_another_plan_or_model_is_refused_by_name(made, bigram, tmp_path):
    policy, trainer = made
    path = Checkpoints(tmp_path).save(1, policy, trainer.optimizer, {})

    def refused(other, message):
        before = {name: p.detach().clone() for name, p in other.master_weights().items()}
        fresh = Trainer(other, SETTINGS)
        with pytest.raises(UserError, match=message):
            Checkpoints(tmp_path).load(path, other, fresh.optimizer)
        assert all(torch.equal(p, before[n]) for n, p in other.master_weights().items())
        assert fresh.optimizer.num_updates == 0

    other_plan = bigram()
    other_plan.plan = SimpleNamespace(
        exact=True, name="jet", to_dict=lambda: {"name": "jet", "kv": "fp8"}
    )
    refused(other_plan, "precision plan kv is 'bf16' in the checkpoint and 'fp8' here")
    refused(
        bigram(vocab_size=12),
        r"model vocab_size is 11 .* and 12 here; .*table\.weight is .*\(11, 11\)",
    )
    more = bigram()
    more.masters["extra.weight"] = torch.nn.Parameter(torch.ones(2))
    refused(more, r"lacks extra\.weight")


def test_the_models_description_has_the_keys_of_earlier_checkpoints():
    """A run resumes where the checkpoint describes the same model, in the same keys."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4}
    config = {
        "model_type": "llama",
        **sizes,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
    }
    config["max_position_embeddings"] = 16
    description = model_dict(SimpleNamespace(config=ModelConfig.from_hf(config), lora=None))
    assert list(description) == [
        *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
        *("num_kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"),
        *("tie_word_embeddings", "qkv_bias", "qk_norm", "max_position_embeddings"),
        *("eos_token_ids", "head"),
    ]
    config["model_type"] = "smollm3"
    description = model_dict(SimpleNamespace(config=ModelConfig.from_hf(config), lora=None))
    assert description["layers_without_rope"] == [3]
    lora = LoRA(8, 16.0)
    model = SimpleNamespace(config=ModelConfig.from_hf(config), lora=lora, base_digest="0")
    assert list(model_dict(model)["adapter"]) == [
        *("rank", "alpha", "rslora", "targets"),
        *("train_embeddings", "train_norms", "train_head", "base"),
    ]
