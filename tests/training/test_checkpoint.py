"""Checkpoints: complete or absent, checked when read, exact; nothing forged is trusted."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.training.shared import equal, snapshot

from jetrl.errors import RunStopped, UserError
from jetrl.models.adapter import LoRA
from jetrl.models.families import ModelConfig
from jetrl.settings.loading import Settings
from jetrl.training import checkpoint as module
from jetrl.training import checkpoint_files
from jetrl.training.checkpoint import Background, Checkpoints, model_dict
from jetrl.training.checkpoint_files import check_intact, fingerprint, is_known_by
from jetrl.training.trainer import Trainer

SETTINGS = Settings.model_validate({"train": {"lr": 0.05, "weight_decay": 0.1}})
EXTRA = {"task": {"cursor": 17}, "best": 0.1 + 0.2, "none": None, "names": ["a", "é"]}


@pytest.fixture
def made(bigram):
    """A policy and trainer after two updates."""
    policy = bigram()
    trainer = Trainer(policy, SETTINGS)
    for _ in range(2):
        trainer.step(policy.draw([1.0, 0.0, 0.0, 0.5]))
    return policy, trainer


@pytest.fixture
def path(made, tmp_path):
    return save(Checkpoints(tmp_path), made, 1)


def save(checkpoints, made, *steps, score=None):
    for step in steps:
        path = checkpoints.save(step, made[0], made[1].optimizer, {"n": step}, score)
    return path


def load(path, policy, trainer):
    return Checkpoints(path.parent).load(path, policy, trainer.optimizer)


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_round_trip_is_bitwise(made, bigram, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    path = checkpoints.save(7, policy, trainer.optimizer, EXTRA)
    assert path == tmp_path / "checkpoints" / "step_000007"
    files = ["manifest.json", "masters.safetensors", "optimizer.safetensors", "state.json"]
    assert names(path) == files
    assert names(path.parent) == ["step_000007"]

    fresh = bigram(seed=99)
    other = Trainer(fresh, SETTINGS)
    assert Checkpoints(path.parent).latest() == (path, [])
    loaded = load(path, fresh, other)
    assert (loaded.step, loaded.extra) == (7, EXTRA)
    assert fresh.calls[-1][0] == "requantize"
    assert other.optimizer.num_updates == 2
    # And both go on alike.
    for p, t in ((policy, trainer), (fresh, other)):
        t.step(p.draw([1.0, 0.0, 0.0, 0.5]))
    assert equal(snapshot(policy), snapshot(fresh))
    assert equal(trainer.optimizer.state_tensors(), other.optimizer.state_tensors())


@pytest.mark.parametrize(
    "keep_last, keep_best, scores, kept",
    [
        (2, 0, {9: None, 10: None, 1000000: None, 1000001: None}, [1000000, 1000001]),
        (2, 0, {10: None, 20: None, 12: None}, [10, 12]),  # 12: the run went back before 20
        (1, 2, {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1}, [2, 4, 5]),
        (1, 2, {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1, 6: 0.2}, [2, 4, 6]),
    ],
)
def test_the_last_and_the_best_are_kept(made, tmp_path, keep_last, keep_best, scores, kept):
    checkpoints = Checkpoints(tmp_path, keep_last, keep_best)
    for step, score in scores.items():
        save(checkpoints, made, step, score=score)
    assert checkpoints.steps() == kept
    assert checkpoints.latest().path == checkpoints.path(max(kept))


def truncate(path):
    with open(path, "rb+") as file:
        file.truncate(path.stat().st_size - 1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "file, damage, message",
    [
        ("masters.safetensors", truncate, "bytes instead of"),
        ("masters.safetensors", flip, "does not match its checksum"),
        ("optimizer.safetensors", os.remove, "No such file"),
        ("manifest.json", os.remove, "manifest.json: No such file"),
        ("manifest.json", lambda p: p.write_bytes(b"\xff"), "not a checkpoint's"),
    ],
)
def test_a_damaged_checkpoint_falls_back_to_the_last_good_one(
    made, tmp_path, file, damage, message
):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    last = save(checkpoints, made, 1, 2)
    damage(last / file)
    found = checkpoints.latest()
    assert found.path.name == "step_000001"
    (note,) = found.notes
    assert "step_000002 is damaged" in note
    assert message in note
    with pytest.raises(UserError, match="step_000002 is damaged"):
        load(last, *made)
    damage(tmp_path / "step_000001" / file)
    with pytest.raises(UserError, match=r"no good checkpoint .*step_000002.*step_000001"):
        checkpoints.latest()


def forge(path, **files):
    """Replace files of a checkpoint, and write their checksums into its manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    for stem, contents in files.items():
        name = f"{stem}.json" if stem == "state" else f"{stem}.safetensors"
        (path / name).write_bytes(contents)
        manifest[name] = fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"format": 999}, "step_000002 has format 999.* reads format 2"),
        ({"step": -1}, "no good checkpoint .*state.json: step = -1"),
        ({"score": "\x1b]0;title\x07"}, r"no good checkpoint .*state.json: score = '\\x1b\]0;"),
    ],
)
def test_a_state_that_cannot_be_read_is_refused(made, tmp_path, change, message):
    """No older checkpoint takes the place of one with another format."""
    path = save(Checkpoints(tmp_path), made, 1, 2)
    if "format" not in change:
        shutil.rmtree(tmp_path / "step_000001")
    forge(path, state=json.dumps(json.loads((path / "state.json").read_text()) | change).encode())
    with pytest.raises(UserError, match=message) as caught:
        Checkpoints(tmp_path).latest()
    assert str(caught.value).isprintable()
    with pytest.raises(UserError, match=message.removeprefix("no good checkpoint ")):
        load(path, *made)


def test_only_safetensors_of_the_manifest_are_loaded(made, path):
    save_file({"weight": torch.ones(3)}, path / "stray.safetensors")
    assert load(path, *made).tensors == {}
    forge(path, masters=b"nothing of that kind")
    with pytest.raises(UserError, match=r"masters\.safetensors: truncated or not a safetensors"):
        load(path, *made)


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"../outside": {"bytes": 0, "sha256": "0" * 64}}, r"\.\./outside"),
        ({"/etc/passwd": {"bytes": 0, "sha256": "0" * 64}}, "/etc/passwd"),
        ({"state.json": {"bytes": 3}}, "has no SHA-256"),
        ({"pipe": {"bytes": 0, "sha256": "0" * 64}}, "pipe is not a regular file"),
    ],
)
def test_a_manifest_names_files_beside_it_with_sizes_and_digests(path, entries, message):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | entries))
    os.mkfifo(path / "pipe")
    with pytest.raises(UserError, match=message):
        check_intact(path)


def test_a_copy_is_not_touched_by_later_updates(made, tmp_path):
    policy, trainer = made
    checkpoints = Checkpoints(tmp_path)
    at_once = save(checkpoints, made, 1)
    copy = checkpoints.snapshot(2, policy, trainer.optimizer, {}).copied()
    trainer.step(policy.draw([1.0, 0.0, 0.0, 0.5]))
    later = checkpoints.write(copy)
    for name in ("masters.safetensors", "optimizer.safetensors"):
        assert (at_once / name).read_bytes() == (later / name).read_bytes()


@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_previous_checkpoint(
    made, tmp_path, monkeypatch, call, error
):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    save(checkpoints, made, 1)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    fsync, calls = os.fsync, []

    def full_disk(handle):
        calls.append(handle)
        if len(calls) == call + 1:
            raise error
        fsync(handle)

    monkeypatch.setattr(module.os, "fsync", full_disk)
    with pytest.raises((RunStopped, KeyboardInterrupt)) as caught:
        save(checkpoints, made, 2)
    if isinstance(error, OSError):
        for words in ("step_000001", "step_000002", "No space left", "GiB free"):
            assert words in str(caught.value)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert names(tmp_path) == ["step_000001"]
    save(checkpoints, made, 2)
    assert checkpoints.latest().path == checkpoints.path(2)


def test_failing_second_rename_brings_the_replaced_one_back(made, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    path = save(checkpoints, made, 1)
    rename = os.rename

    def fails(source, target):
        if "writing" in str(source):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", fails)
    with pytest.raises(RunStopped, match="Input/output error"):
        checkpoints.save(1, made[0], made[1].optimizer, {"n": 2})
    assert names(tmp_path) == ["step_000001"]
    assert load(path, *made).extra == {"n": 1}


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
        "long": torch.tensor([2**40, -1]),
        "none": torch.zeros(0, 4),
    }
    checkpoint_files.write_tensors(tmp_path / "ours", tensors)
    found = load_file(tmp_path / "ours")
    assert equal(found, tensors)
    assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())


@pytest.mark.parametrize("size", [0, 100, 1234])
def test_a_large_file_is_known_by_its_pieces_and_by_older_checksums(tmp_path, monkeypatch, size):
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
    assert all(is_known_by(file, known) for known in (now, *older))
    if size:
        flip(file)
        assert not any(is_known_by(file, known) for known in (now, *older))


def test_an_older_checkpoint_is_gone_before_its_files_are(made, tmp_path, monkeypatch):
    checkpoints, removed = Checkpoints(tmp_path, keep_last=1), []
    save(checkpoints, made, 1)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(path.name))
    save(checkpoints, made, 2)
    assert ".writing-step_000001" in removed


def test_what_a_crash_left_is_removed_or_put_back(made, tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, made, 1, 2)
    (tmp_path / ".writing-step_000003").mkdir()
    (tmp_path / ".writing-step_000003" / "masters.safetensors").write_bytes(b"half")
    os.rename(tmp_path / "step_000002", tmp_path / ".replaced-step_000002")
    (tmp_path / ".replaced-step_000001").mkdir()
    again = Checkpoints(tmp_path, keep_last=1)
    assert again.latest().path.name == "step_000002"
    assert ".writing-step_000003" in names(tmp_path)  # it may be another process's, at work
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "prune", lambda *_: None)  # killed before
        save(again, made, 4)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000004"]
    again.tidy(2)  # the fourth was damaged
    assert names(tmp_path) == ["step_000002", "step_000004"]


def test_another_plan_or_model_is_refused_by_name(made, bigram, path):
    def refused(other, message):
        before = snapshot(other)
        fresh = Trainer(other, SETTINGS)
        with pytest.raises(UserError, match=message):
            load(path, other, fresh)
        assert equal(snapshot(other), before)
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
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    rest = {"model_type": "llama", "rms_norm_eps": 1e-6, "max_position_embeddings": 16}

    def description(lora=None, **changes):
        config = ModelConfig.from_hf({**sizes, **heads, **rest, **changes})
        parts = {"lora": lora, "base_digest": "0", "trained_tower": "frozen"}
        return model_dict(SimpleNamespace(config=config, **parts))

    assert list(description()) == [
        *("family", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
        *("num_kv_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling"),
        *("tie_word_embeddings", "qkv_bias", "qk_norm", "max_position_embeddings"),
        *("eos_token_ids", "head"),
    ]
    assert description(model_type="smollm3")["layers_without_rope"] == [3]
    assert list(description(LoRA(8, 16.0))["adapter"]) == [
        *("rank", "alpha", "rslora", "targets"),
        *("train_embeddings", "train_norms", "train_head", "base"),
    ]


def test_the_background_does_one_job_at_a_time_and_loses_no_error():
    background, gate, done = Background(), threading.Event(), []

    def fail():
        raise OSError("disk full")

    background.start(lambda: (gate.wait(), done.append(1)), "first")
    assert not background.has_failed
    assert done == []
    gate.set()
    background.start(fail, "second")
    with pytest.raises(OSError, match="disk full"):
        background.start(lambda: None, "third")
    assert done == [1]
    assert not background.has_failed
    background.wait()
