"""Putting an undamaged checkpoint into a model and its optimizer, on each rank its own rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jetrl.errors import UserError
from jetrl.training.checkpoint_files import as_json, differences, tensor_differences
from jetrl.training.checkpoint_folder import MASTERS, OPTIMIZER
from jetrl.training.optimizer import Optimizer
from jetrl.training.stored_tensors import StoredTensors, whole_layouts

if TYPE_CHECKING:
    from jetrl.models.model import Model


def load_into(
    policy: Model,
    optimizer: Optimizer,
    path: Path,
    state: Mapping[str, Any],
    parts: Mapping[str, Path],
) -> dict[str, StoredTensors]:
    """Put a checkpoint's master weights and optimizer state into a model, not yet requantized.

    Returns:
        The tensors of other parts of the run, by part.

    Raises:
        UserError: The checkpoint's precision plan, model or tensors are not this run's. Nothing was
            changed then.
    """
    masters, shards = policy.master_weights(), policy.weights.shards
    stored = {part: StoredTensors(place) for part, place in parts.items()}
    tensors, moments = stored.pop(MASTERS), stored.pop(OPTIMIZER, None)
    problems = [
        *differences("precision plan", state["plan"], as_json(policy.plan.to_dict())),
        *differences("model", state["model"], model_dict(policy)),
        *tensor_differences(tensors.layouts, whole_layouts(masters, shards)),
    ]
    if problems:
        raise UserError(
            f"checkpoint {path} does not fit this run: {'; '.join(problems)}. Resume with "
            "the settings it was made with"
        )
    if moments is None and state["num_updates"]:
        raise UserError(
            f"checkpoint {path} is damaged: it has made {state['num_updates']} updates, and has no "
            "optimizer state; use another one"
        )
    own = {} if moments is None else moments.own(optimizer.shard_of)
    optimizer.load_state(own, state["num_updates"])
    with torch.no_grad():
        for name, master in masters.items():
            master.copy_(tensors.rows(name, shards.get(name)))
    return stored


def model_dict(policy: Model) -> dict[str, Any]:
    """Return the configuration of a model as a checkpoint keeps it."""
    config = dataclasses.asdict(policy.config)
    config.pop("raw", None)  # the source's config.json; what matters of it is in the other fields
    if not config.get("layers_without_rope"):  # checkpoints of earlier versions have no such key
        config.pop("layers_without_rope", None)
    if policy.lora is not None:
        config["adapter"] = {**dataclasses.asdict(policy.lora), "base": policy.base_digest}
    configuration: dict[str, Any] = as_json(config)
    return configuration
