"""Every file that is read back, damaged by Hypothesis: only errors that name the file.

A case takes the JSON (or TOML) that jetrl writes, changes values, keys or bytes, and drives what
reads the file. `make soak` runs 10,000 cases of each (`JETRL_FUZZ_CASES`). A failure is printed as
the smallest case that fails.
"""

from __future__ import annotations

import copy
import io
import json
import os
import resource
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from jetrl.cli.run_checks import run_checks
from jetrl.errors import UserError
from jetrl.models import hf
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.nvfp4_files import check_quantization, left_in_16_bits
from jetrl.models.peft import base_of, read_lora
from jetrl.models.rope import frequencies_of
from jetrl.precision import PrecisionPlan
from jetrl.precision.plan import plan_table
from jetrl.runs.attempts import StatusFile, read_status
from jetrl.runs.directory import RunDirectory
from jetrl.runs.format import visible
from jetrl.runs.overview import compare_runs, comparison_rows, list_runs, runs_table, show_run
from jetrl.runs.report import _pictures, _sample
from jetrl.runs.schemas import record_of
from jetrl.runs.writer import RunWriter
from jetrl.session.checkpoints import check_extra
from jetrl.settings.loading import load_config, to_toml
from jetrl.training.checkpoint import Checkpoints
from jetrl.training.checkpoint_files import check_intact, fingerprint
from jetrl.types import Completion, Prompt, PromptInputs, Sample, Score, StepStats

CASES = int(os.environ.get("JETRL_FUZZ_CASES", "100"))
TRACED = CASES > 100  # every allocation of a case: three times as slow
MOST_S, MOST_MIB = 5.0, 200  # of a case: CPU time, and memory at its peak

fuzzed = settings(
    max_examples=CASES,
    derandomize=CASES <= 100,  # `make test` runs the same cases each time
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

ODD_NUMBERS = st.sampled_from(
    [-1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**18, 10**400, -(10**400), 1e308, -1e308, 5e-324]
) | st.sampled_from([float("nan"), float("inf"), float("-inf"), 0.5, -0.0, True, False])
ODD_TEXTS = st.text(max_size=12) | st.sampled_from(
    [
        *("\x1b]0;title\x07\x1b[2J", "\u202e\u2066reversed", "[red]markup[/red][link=file:x]"),
        *("\ud800", "\0", "../../x", "/dev/stdin", "$\\frac{", "<script>", "running", "x" * 5000),
        *("[/]", "eval/\x1b[2J/mean"),
    ]
)
ODD = st.recursive(
    st.none() | ODD_NUMBERS | ODD_TEXTS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(ODD_TEXTS.filter(bool), inner, max_size=3)
    ),
    max_leaves=6,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return each container of a JSON value with each of its keys."""
    if isinstance(value, dict):
        found = [(value, key) for key in value]
        return found + [place for item in value.values() for place in places(item)]
    if isinstance(value, list):
        found = [(value, index) for index in range(len(value))]
        return found + [place for item in value for place in places(item)]
    return []


@st.composite
def changed(draw: st.DrawFn, whole: Any) -> Any:
    """Return a JSON value with one to three of its values replaced, removed, moved or added."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        found = places(value)
        if not found or draw(st.integers(0, 30)) == 0:
            return draw(ODD)
        container, key = draw(st.sampled_from(found))
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "deepen"]))
        if kind == "replace":
            like = ODD_TEXTS if isinstance(container[key], str) else ODD_NUMBERS
            container[key] = draw(like if draw(st.booleans()) else ODD)
        elif kind == "remove":
            del container[key]
        elif kind == "deepen":
            container[key] = [container[key]]
        elif isinstance(container, dict):
            container[draw(ODD_TEXTS)] = draw(ODD)
        else:
            container.insert(key, draw(ODD))
    return value


@st.composite
def file_of(draw: st.DrawFn, whole: Any) -> bytes:
    """Return the bytes of a JSON file: of a changed value, at times with changed bytes."""
    data = json.dumps(draw(changed(whole))).encode()
    if draw(st.integers(0, 5)) == 0:
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 20)))
        nasty = st.binary(max_size=20) | st.sampled_from(
            [b"[" * 4000, b'{"a":' * 4000, b"9" * 5000, b"\0", b"\xff\xfe", b"1e999", b"\xed\xa0"]
        )
        data = data[:start] + draw(nasty) + data[end:]
    return data


def lines_of(whole: list[Any]) -> st.SearchStrategy[bytes]:
    """Return a strategy for the bytes of a file of JSON lines."""
    lines = st.tuples(*(file_of(line) | st.just(json.dumps(line).encode()) for line in whole))
    return lines.map(lambda parts: b"\n".join(parts) + b"\n")


def peak_kib() -> int:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def survives(path: Path, *reads: Callable[[], Any]) -> None:
    """Call what reads a file: each gives a result, or an error that names the file."""
    if TRACED:
        tracemalloc.start()
    before, began = peak_kib(), time.process_time()
    try:
        for read in reads:
            try:
                read()
            except UserError as error:
                message = str(error)
                assert path.name in message, message
                assert ": " in message
                assert len(message) < 2000
        assert time.process_time() - began < MOST_S
        assert peak_kib() - before < MOST_MIB * 2**10
        assert tracemalloc.get_traced_memory()[1] < MOST_MIB * 2**20
    finally:
        tracemalloc.stop()


CONFIG = {"run": {"name": "damaged"}, "task": {"name": "arithmetic"}, "model": {"path": "x"}}
CONFIG |= {"precision": {"preset": "unified"}, "loop": {"steps": 3}, "checkpoint": {"every": 5}}


def toml_of(value: Any) -> str:
    """Return a table as TOML, inline, where TOML can say its values."""
    if isinstance(value, dict):
        items = (f"{toml_of(str(key))} = {toml_of(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value)
    return "nan" if value is None or value != value else str(value)


def toml_bytes(tree: Any) -> bytes:
    """Return tables as TOML, a line for each."""
    tables = tree if isinstance(tree, dict) else {"run": tree}
    lines = [f"{toml_of(str(key))} = {toml_of(value)}\n" for key, value in tables.items()]
    return "".join(lines).encode(errors="surrogatepass")


METRICS = {"reward/mean": 0.5, "policy/entropy": 1.0, "eval/arithmetic/mean": 0.25}
METRICS |= {"mismatch/num_tokens": 100, "mismatch/num_different": 0, "timing/step_s": 1.5}


SAMPLE = Sample(
    prompt=Prompt(id="p", text="1+1="),
    group=0,
    inputs=PromptInputs((1, 2)),
    completion=Completion((3,), (-0.5,), "stop", "2"),
    score=Score(1.0),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, as jetrl writes it."""
    folder = tmp_path_factory.mktemp("runs")
    chosen = load_config("demo", [f"run.dir={folder}", "run.name=whole"])
    run = RunWriter.create(chosen, PrecisionPlan.preset("unified").to_dict())
    with run, run.attempt(["jetrl", "train"], {"device": "cpu"}):
        status = StatusFile(run.path)
        run.write_rollouts(1, [SAMPLE])
        for step in range(1, 4):
            status.begin("update", step)
            run.write_step(StepStats(step, METRICS))
        status.close()
    (run.path / "config.toml").write_bytes(toml_bytes(CONFIG))  # a short one is read faster
    return run.path


@pytest.fixture(scope="module")
def damaged(whole: Path) -> Path:
    """A copy of the run, whose files a case replaces."""
    return Path(shutil.copytree(whole, whole.parent / "damaged"))


@pytest.fixture(autouse=True)
def put_back(request: pytest.FixtureRequest) -> Any:
    """Make the damaged run whole again after each test."""
    yield
    if "damaged" in request.fixturenames:
        whole, damaged = (request.getfixturevalue(name) for name in ("whole", "damaged"))
        shutil.copytree(whole, damaged, dirs_exist_ok=True)


def shown_is_safe(text: str) -> None:
    """Check that a text cannot drive a terminal."""
    assert visible(text, newlines=True) == text


def readers(whole: Path, path: Path) -> list[Callable[[], Any]]:
    """Return what looks at a run: the commands runs list, runs show, compare and doctor."""

    def list_command() -> None:
        console = Console(file=io.StringIO(), width=200, force_terminal=True)
        with console.capture() as captured:
            rows = list_runs(whole.parent)
            console.print(runs_table(rows))
        assert {row.name for row in rows} == {"whole", "damaged"}
        text = captured.get()
        assert "\x07" not in text
        assert "\x1b]" not in text
        assert "finished" in text  # of the whole run

    def doctor() -> None:
        for finding in run_checks(path):
            shown_is_safe(visible(finding.detail, newlines=True))

    return [
        list_command,
        lambda: shown_is_safe(show_run(path)),
        lambda: comparison_rows(compare_runs([whole, path])),
        lambda: comparison_rows(compare_runs([path, whole])),
        doctor,
        lambda: RunDirectory.open(path).state(),
    ]


METRICS_LINES = [{"step": step, "time": 1.7e9 + step, **METRICS} for step in (1, 2)]
ATTEMPTS = [
    {"event": "start", "time": 1.7e9, "command": "jetrl train", "versions": {"torch": "2"}}
    | {"notes": {"device": "cpu"}, "pid": 1, "host": "h"},
    {"event": "end", "time": 1.7e9 + 9, "state": "finished", "reason": ""},
]
PLAN = PrecisionPlan.preset("unified").to_dict()


STATUS = {"phase": "update", "step": 3, "time": 1.7e9, "pid": 7}
DAMAGED = {
    "metrics.jsonl": lines_of(METRICS_LINES),
    "attempts.jsonl": lines_of(ATTEMPTS),
    "status.json": file_of(STATUS),
    "plan.json": file_of(PLAN),
    "config.toml": changed(CONFIG).map(toml_bytes),
    "rollouts/step_000001.jsonl": st.deferred(lambda: lines_of([record_of(1, SAMPLE)])),
}


@pytest.mark.parametrize("name", DAMAGED)
@fuzzed
@given(data=st.data())
def test_files_of_a_run(whole: Path, damaged: Path, name: str, data: st.DataObject) -> None:
    file = damaged / name
    file.write_bytes(data.draw(DAMAGED[name]))

    def make_plan() -> None:
        plan = PrecisionPlan.from_dict(
            RunDirectory.open(damaged).plan(), str(damaged / "plan.json")
        )
        assert plan_table(plan)

    def show_rollouts() -> None:
        run = RunDirectory.open(damaged)
        for record in run.rollouts(1):
            _sample(record, _pictures(run, record))

    own = {"status.json": lambda: read_status(damaged), "plan.json": make_plan}
    if name.startswith("rollouts"):
        survives(file, show_rollouts)
    else:
        survives(file, own.get(name, str), *readers(whole, damaged))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tensors are a few bytes, which checking does not read as tensors."""
    path = tmp_path_factory.mktemp("checkpoints") / "step_000003"
    path.mkdir()
    for name in ("masters", "optimizer"):
        (path / f"{name}.safetensors").write_bytes(b"\0" * 8)
    (path / "state.json").write_text(json.dumps(STATE))
    (path / "manifest.json").write_text(json.dumps(manifest_of(path)))
    return path


def manifest_of(path: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint's folder."""
    files = sorted(file for file in path.iterdir() if file.name != "manifest.json")
    return {file.name: fingerprint(file) for file in files}


EXTRA = {
    "seed": 3,
    "metrics": {"reward/mean": 0.5},
    "states": {
        "prompts": {"p": [1.5, 2.0]},
        "partial rollouts": [["p", [[7, [1, 2], [-0.5, -1.0], "cancelled", "ab", [1, 1]]]]],
        "micro_batches": {"tokens": 8, "setting": 16},
        "rollout_sizes": {"asked": [8, 16, None], "now": [4, 8, 3]},
        "guard": {"in_a_row": 0},
        "clip": {"steps": 4, "low": 0.8, "high": 1.2},
    },
}
STATE = {
    "format": 2,
    "step": 3,
    "num_updates": 3,
    "plan": PLAN,
    "model": {"vocab_size": 32},
    "score": 0.5,
    "extra": EXTRA,
}


@fuzzed
@given(data=file_of(STATE))
def test_state(checkpoint: Path, data: bytes) -> None:
    """A forged state: its checksum is right."""
    (checkpoint / "state.json").write_bytes(data)
    (checkpoint / "manifest.json").write_text(json.dumps(manifest_of(checkpoint)))
    survives(
        checkpoint,
        lambda: check_intact(checkpoint),
        lambda: Checkpoints(checkpoint.parent, keep_best=1)._score(3),
    )


@fuzzed
@given(extra=changed(EXTRA))
def test_states_of_parts(extra: Any) -> None:
    survives(Path("state.json"), lambda: check_extra(extra, "x/state.json"))


@fuzzed
@given(data=st.data())
def test_manifest(checkpoint: Path, data: st.DataObject) -> None:
    (checkpoint / "state.json").write_text(json.dumps(STATE))
    (checkpoint / "manifest.json").write_bytes(data.draw(file_of(manifest_of(checkpoint))))
    survives(
        checkpoint,
        lambda: check_intact(checkpoint),
        lambda: Checkpoints(checkpoint.parent).latest(),
    )


HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **{"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "max_position_embeddings": 16, "tie_word_embeddings": True},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "mscale": 1.0, "truncate": True},
        **{"original_max_position_embeddings": 4, "mscale_all_dim": 0.5},
    },
    "use_sliding_window": False,
    "layer_types": ["full_attention", "full_attention"],
    **{"hidden_act": "silu", "eos_token_id": [1, 2], "no_rope_layers": [1, 0]},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
LLAMA3 = HF_CONFIG | {
    "architectures": None,
    "model_type": "smollm3",
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8},
}

_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
COMPRESSED = HF_CONFIG | {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["re:.*mlp.*"], "weights": _WEIGHTS}},
        "ignore": ["lm_head", "*v_proj"],
    }
}
MODELOPT = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]},
}


ADAPTER = {
    **{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none"},
    **{"target_modules": ["q_proj", "down_proj"], "use_rslora": False, "use_dora": False},
    **{"init_lora_weights": True, "modules_to_save": None, "rank_pattern": {}},
    "base_model_name_or_path": "models/base",
}


WITHOUT = {key: value for key, value in HF_CONFIG.items() if key != "quantization_config"}
MODEL_FILES = {
    "config.json": file_of(HF_CONFIG) | file_of(LLAMA3) | file_of(COMPRESSED),
    "hf_quant_config.json": file_of(MODELOPT),
    "adapter_config.json": file_of(ADAPTER),
}


@pytest.mark.parametrize("name", MODEL_FILES)
@fuzzed
@given(data=st.data())
def test_files_of_a_model(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / name.partition(".")[0]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(WITHOUT))
    (folder / name).write_bytes(data.draw(MODEL_FILES[name]))

    def read_model() -> None:
        model = hf.model_config(folder)
        assert len(parameter_shapes(model)) < 20_000
        frequencies_of(model.head_dim, model.rope_theta, model.rope_scaling)
        left_in_16_bits(model)
        check_quantization(model.raw.get("quantization_config"))

    def read_adapter() -> None:
        model = ModelConfig.from_hf(HF_CONFIG)
        assert read_lora(folder, model).shapes(model)
        base_of(folder)

    survives(folder / name, read_adapter if name.startswith("adapter") else read_model)


def test_what_jetrl_writes_is_taken(whole: Path, checkpoint: Path, tmp_path: Path) -> None:
    """The cases begin with files that are whole."""
    for read in readers(whole, whole)[1:]:
        read()
    (checkpoint / "state.json").write_text(json.dumps(STATE))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest_of(checkpoint)))
    check_intact(checkpoint)
    for config in (HF_CONFIG, LLAMA3):
        (tmp_path / "config.json").write_text(json.dumps(config))
        hf.model_config(tmp_path)
    assert to_toml(load_config("demo"))
