"""Checkpoints that somebody else wrote: under right checksums, and nothing that jetrl writes."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from jetrl.errors import UserError
from jetrl.settings.loading import Settings
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.checkpoint_files import fingerprint
from jetrl.training.trainer import Trainer

SETTINGS = Settings.model_validate({"train": {"lr": 0.05}})


@pytest.fixture
def made(bigram):
    policy = bigram()
    return policy, Trainer(policy, SETTINGS)


@pytest.fixture
def path(made, tmp_path):
    policy, trainer = made
    return Checkpoints(tmp_path).save(3, policy, trainer.optimizer, {"n": 1})


def forge(path, **files):
    """Replace files of a checkpoint, and write their checksums into its manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    for stem, contents in files.items():
        name = f"{stem}.json" if stem == "state" else f"{stem}.safetensors"
        (path / name).write_bytes(contents)
        manifest[name] = fingerprint(path / name)
    (path / "manifest.json").write_text(json.dumps(manifest))


STATES = [
    pytest.param([], "state.json: \\[\\]", id="list"),
    pytest.param({"step": -1}, "state.json: step = -1", id="negative-step"),
    pytest.param({"step": "3"}, "state.json: step = '3'", id="text"),
    pytest.param({"step": 10**400}, "state.json: step = 1000", id="huge"),
    pytest.param({"step": True}, "state.json: step = True", id="bool"),
    pytest.param({"num_updates": None}, "state.json: num_updates = None", id="null"),
    pytest.param({"num_updates": 1.5}, "state.json: num_updates = 1.5", id="fraction"),
    pytest.param({"plan": "unified"}, "state.json: plan = 'unified'", id="plan"),
    pytest.param({"model": [1]}, "state.json: model = \\[1\\]", id="model"),
    pytest.param({"score": "\x1b]0;title\x07"}, r"state.json: score = '\\x1b\]0;", id="score"),
    pytest.param({"extra": 3}, "state.json: extra = 3", id="extra"),
    pytest.param({"format": [2]}, r"state.json: format = \[2\]", id="format"),
]


@pytest.mark.parametrize("change, message", STATES)
def test_a_state_of_odd_types_names_file_and_field(made, path, change, message):
    state = json.loads((path / "state.json").read_text())
    forge(path, state=json.dumps(state | change if isinstance(change, dict) else change).encode())
    for read in (
        lambda: Checkpoints.check(path),
        lambda: Checkpoints(path.parent).load(path, made[0], made[1].optimizer),
        lambda: Checkpoints(path.parent).latest(),
    ):
        with pytest.raises(UserError, match=message) as caught:
            read()
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["masters", "optimizer"])
def test_tensors_that_are_no_safetensors_are_named(made, path, name):
    forge(path, **{name: b"nothing of that kind"})
    with pytest.raises(UserError, match=rf"{name}\.safetensors: truncated or not a safetensors"):
        Checkpoints(path.parent).load(path, made[0], made[1].optimizer)


def test_a_file_that_the_manifest_does_not_name_is_not_loaded(made, path):
    save_file({"weight": torch.ones(3)}, path / "stray.safetensors")
    assert Checkpoints(path.parent).load(path, made[0], made[1].optimizer).tensors == {}
    (path / "stray.safetensors").write_bytes(b"damaged")
    Checkpoints(path.parent).load(path, made[0], made[1].optimizer)


MANIFESTS = [
    pytest.param({"../outside": {"bytes": 0, "sha256": "0" * 64}}, r"\.\./outside", id="outside"),
    pytest.param({"/etc/passwd": {"bytes": 0, "sha256": "0" * 64}}, "/etc/passwd", id="absolute"),
    pytest.param({"a\x1b[2J": {"bytes": 0, "sha256": "0" * 64}}, r"a\\x1b", id="control"),
    pytest.param({"state.json": {"bytes": -1, "sha256": "0" * 64}}, "state.json.bytes", id="bytes"),
    pytest.param({"state.json": {"bytes": 3, "sha256": 5}}, "state.json.sha256", id="digest"),
    pytest.param({"state.json": {"bytes": 3}}, "has no SHA-256", id="no-digest"),
    pytest.param({"state.json": None}, "state.json = None", id="null"),
]


@pytest.mark.parametrize("entries, message", MANIFESTS)
def test_a_manifest_names_files_beside_it_with_sizes_and_digests(path, entries, message):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | entries))
    with pytest.raises(UserError, match=rf"manifest\.json is not a checkpoint's .*{message}"):
        Checkpoints.check(path)


def test_a_pipe_in_a_manifest_is_not_waited_for(path):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["pipe"] = {"bytes": 0, "sha256": "0" * 64}
    (path / "manifest.json").write_text(json.dumps(manifest))
    os.mkfifo(path / "pipe")
    with pytest.raises(UserError, match="pipe is not a regular file"):
        Checkpoints.check(path)


def test_a_damaged_critic_is_named(made, path):
    from jetrl.training.extras.critic import Critic

    class Model:
        def master_weights(self):
            return {}

    critic = Critic.__new__(Critic)
    critic.model = Model()
    for tensors in ({}, {"updates": torch.tensor(0.5)}, {"updates": torch.tensor([1, 2])}):
        with pytest.raises(UserError, match=r"critic\.safetensors"):
            critic.load_tensors(tensors)
