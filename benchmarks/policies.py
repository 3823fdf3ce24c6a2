"""The policies of benchmarks: a plan given as words, and random weights of a shape."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from benchmarks.harness import begins
from benchmarks.shapes import SHAPES
from torch import Tensor

from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.models.tiny import RandomWeights
from jetrl.models.vision import READERS, tower_shapes
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import backend_for, select_backend
from jetrl.session.compiling import compiled_ahead
from jetrl.settings.loading import load_config
from jetrl.settings.presets import DEFAULT_PRESET
from jetrl.settings.sections import RolloutSettings

ALPHA = 32.0  # of adapters
TARGETS = ".*"  # of adapters: all linear layers, also those of experts
_BACKEND = "backend="


def plan_of(words: str) -> PrecisionPlan:
    """Return the plan given by a preset and options, such as `int8 kv=bf16 grad_output=e4m3`.

    The option `backend` is not one of the plan, but `run.backend`: `integer backend=triton`.
    """
    preset, *options = (word for word in words.split() if not word.startswith(_BACKEND))
    keys = [f"precision.{word}" for word in (f"preset={preset}", *options)]
    keys += ["adapter.kind=lora"] if "base=nvfp4" in options else []  # which needs an adapter
    return PrecisionPlan.from_settings(load_config(None, keys).precision)


def backend_of(words: str) -> str:
    """Return the backend of a plan given by words, "auto" without one."""
    named = [word.removeprefix(_BACKEND) for word in words.split() if word.startswith(_BACKEND)]
    return named[0] if named else "auto"


def options_of(plan: PrecisionPlan) -> dict[str, str]:
    """Return the options of a plan that differ from its preset, as text."""
    preset, given = vars(PrecisionPlan.preset(plan.name)), vars(plan)
    names = (field.name for field in dataclasses.fields(plan))
    return {name: str(given[name]).lower() for name in names if given[name] != preset[name]}


def plan_words(plan: PrecisionPlan) -> str:
    """Return a plan as `plan_of` reads it."""
    return " ".join([plan.name, *(f"{key}={value}" for key, value in options_of(plan).items())])


def plan_facts(policy: Policy) -> dict[str, str]:
    """Return the columns of a row that name a policy's plan, and the backend of its kernels."""
    return {"plan": plan_words(policy.plan), "backend": backend_for(policy.device).name}


def add_plan_argument(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add --plan, which `plans_of` reads.

    Args:
        others: Plans to measure before the default plan if --plan is not given.
    """
    plans = (*others, DEFAULT_PRESET)
    parser.add_argument(
        "--plan",
        action="append",
        help="a preset and options of [precision], as 'int8 kv=bf16', or 'unified base=nvfp4' with "
        f"--adapter-rank; backend=triton chooses run.backend; repeatable; default: "
        f"{', '.join(plans)}",
    )
    parser.set_defaults(plans=plans)


def plans_of(args: argparse.Namespace) -> Sequence[str]:
    """Return the plans of --plan, in the notation of `plan_of`."""
    asked = args.plan or args.plans
    backends = [backend_of(words) for words in asked]
    return [
        plan_words(plan_of(words)) + (f" {_BACKEND}{backend}" if backend != "auto" else "")
        for words, backend in zip(asked, backends, strict=True)
    ]


def random_tower(config: ModelConfig, device: str) -> dict[str, Tensor]:
    """Return random tensors of an image tower, drawn on the device."""
    assert config.vision is not None, "a model with images"
    generator = torch.Generator(device).manual_seed(0)
    shapes = tower_shapes(config.vision, config.hidden_size)
    return {
        name: torch.empty(shape, device=device).normal_(0.0, 0.02, generator=generator)
        for name, shape in shapes.items()
    }


def random_source(
    config: Mapping[str, Any], device: str, adapter: Adapter | None = None
) -> ModelSource:
    """Return random weights for a config.json, drawn on the device.

    Runs of some plans draw them on the CPU, which takes minutes for a model of 8B.
    """
    shape = ModelConfig.from_hf(config)
    weights = RandomWeights(shape, 0, device)
    source = ModelSource(shape, lambda _: weights, adapter=adapter)
    if shape.vision is None:
        return source
    return dataclasses.replace(
        source,
        tower=partial(random_tower, shape, device),
        image_processor=READERS[type(shape.vision)].settings(shape.vision),
    )


def make_policy(
    shape: str,
    plan: str,
    device: str,
    layers: int | None,
    adapter_rank: int = 0,
    speculation: Literal["off", "auto"] = "off",
    trained: bool = True,
) -> Policy:
    """Return a policy with random weights, whose logits have a standard deviation of about 2.

    Args:
        device: "cuda" or "cpu".
        plan: A preset and its options, as of `plan_of`.
        layers: Decoder layers; None: the shape's own.
        adapter_rank: The rank of adapters with random A and B on a frozen base; 0: all parameters
            are trained.
        trained: Keep the master weights of all parameters.
    """
    config = dict(SHAPES[shape])
    if layers is not None:
        config["num_hidden_layers"] = layers
    config["initializer_range"] = float(2.0 / np.sqrt(config["hidden_size"]))
    chosen = plan_of(plan)
    select_backend(backend_of(plan), defined=chosen.defined)
    lora = LoRA(adapter_rank, ALPHA, targets=TARGETS)
    adapter = Adapter.new(ModelConfig.from_hf(config), lora, seed=0) if adapter_rank else None
    source = random_source(config, device, adapter)
    rollout = RolloutSettings(speculation=speculation)
    with compiled_ahead(source, chosen, device, rollout):
        policy = Policy(source, chosen, device, trains=None if trained else lambda _: False)
        begins("the weights are made; waiting for kernels that are compiled beside them")
    if adapter is None:
        return policy
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, master in policy.master_weights().items():
            if name.endswith("lora_B"):
                master.normal_(0.0, 0.02, generator=generator)
    policy.requantize()
    return policy
