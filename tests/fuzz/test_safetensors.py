"""A damaged safetensors file of a model directory is a UserError that names the file.

It is never a crash, and never gives tensors of another shape than the model's.
"""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.models.stored_weights import our_config

from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.families import parameter_shapes
from jetrl.models.tiny import RandomWeights

MODEL = our_config(tied=True, num_hidden_layers=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    hf.save_model(folder, MODEL, dict(RandomWeights(MODEL, 0, "cpu")), hf.Encoding("float32"))
    return folder


@pytest.fixture
def file(directory):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    yield path
    path.write_bytes(whole)


def load(directory):
    weights = dict(hf.open_weights(directory, MODEL))
    assert {name: tuple(w.shape) for name, w in weights.items()} == parameter_shapes(MODEL)
    for weight in weights.values():
        weight.double().sum()  # every byte of it can be read


def split(whole):
    length = struct.unpack("<Q", whole[:8])[0]
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def joined(header, data):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def first_tensor(header):
    return next(entry for name, entry in header.items() if name != "__metadata__")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(data_offsets=[0, 2**40]),
        lambda t: t.update(data_offsets=[-4, 28]),
        lambda t: t.update(data_offsets=[t["data_offsets"][0] + 4, t["data_offsets"][1] + 4]),
        lambda t: t.update(data_offsets=[0]),
        lambda t: t.update(dtype="F99"),
        lambda t: t.update(dtype="F16"),
        lambda t: t.update(shape=[2**62, 2**62]),
        lambda t: t.update(shape=[*t["shape"], 1]),
        lambda t: t.update(shape="all"),
        lambda t: t.pop("dtype"),
    ],
    ids=range(10),
)
def test_entries_that_lie(directory, file, change):
    header, data = split(file.read_bytes())
    change(first_tensor(header))
    file.write_bytes(joined(header, data))
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load(directory)


def test_random_damage(mutate, attempt, directory, file):
    """The damage is mostly to the header, since any of the numbers in the data may be right."""
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    refused = 0
    for seed in range(150):
        file.write_bytes(mutate(whole[:end], seed) + whole[end:])
        _, problem = attempt(load, directory)
        refused += bool(problem)
        assert str(directory) in problem or not problem, seed
    assert refused > 100


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", ""])
def test_an_index_stays_in_its_directory(tmp_path, name):
    save_file({"x": torch.zeros(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(UserError, match=r"index\.json: .* is not the name of a file next to it"):
        load(folder)
