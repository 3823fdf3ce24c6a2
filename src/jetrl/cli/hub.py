"""Upload of an exported model to the Hugging Face hub, with a model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from jetrl.cli.opening import find_model
from jetrl.errors import UserError

_ERRORS = (OSError, ValueError, RuntimeError)  # of huggingface_hub, its HTTP library and the disk
CARD = "README.md"
# Settings that a card names, by section.
_SHOWN = {
    "algorithm": ("name", "kl", "aggregation"),
    "train": ("lr", "updates_per_step"),
    "rollout": ("prompts_per_step", "samples_per_prompt", "max_tokens", "temperature"),
    "loop": ("steps",),
}


def check_hub(repo_id: str) -> None:
    """Raise a UserError unless the name can be a repository's and a user is logged in."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"--push-to-hub {repo_id}: {error}") from None
    try:
        HfApi().whoami()
    except _ERRORS as error:
        raise UserError(
            f"--push-to-hub {repo_id}: not logged in to the hub ({_line(error)}); run `hf auth "
            "login`, or set HF_TOKEN"
        ) from None


def push(folder: Path, repo_id: str, private: bool) -> str:
    """Upload a folder to a model repository, which is created if it is missing; return its URL.

    Raises UserError if that fails; the folder is not changed.
    """
    try:
        url = HfApi().create_repo(repo_id, private=private, repo_type="model", exist_ok=True)
        HfApi().upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            repo_type="model",
            commit_message="Upload a model that jetrl exported",
        )
    except _ERRORS as error:
        raise UserError(
            f"{folder} is written, but was not uploaded to {repo_id}: {_line(error)}; run the "
            "command again with --overwrite, or use `hf upload`"
        ) from None
    return str(url)


def write_card(folder: Path, model: str, dtype: str) -> None:
    """Write the model card of an exported model, unless the folder has one.

    It names base model, task and settings of the run that `model` is of, its digest and its last
    eval metrics. No path of this machine is in it.
    """
    card = folder / CARD
    if card.exists():
        return
    run = find_model(Path(model)).run
    facts = {} if run is None else _facts(run)
    base = facts.pop("base model", None)
    data = ModelCardData(
        base_model=base, library_name="transformers", tags=["jetrl", "reinforcement-learning"]
    )
    title = folder.name if run is None else run.name
    lines = ["---", data.to_yaml(), "---", "", f"# {title}", "", "Trained with jetrl."]
    rows = {**({} if base is None else {"base model": base}), **facts, "weights": dtype}
    lines += ["", "| | |", "| --- | --- |", *(f"| {k} | {_cell(v)} |" for k, v in rows.items())]
    card.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _facts(path: Path) -> dict[str, Any]:
    """Return what a card says about a run."""
    from jetrl.runs.digest import last_digest
    from jetrl.runs.directory import RunDirectory

    run = RunDirectory.open(path)
    config, lines = run.config(), run.metrics()
    facts = dict(_named(config))
    facts["precision"] = run.plan().get("name", "")
    last = lines[-1] if lines else {}
    facts["steps"] = last.get("step", 0)
    evaluated = next((line for line in reversed(lines) if _evals(line)), {})
    facts |= {f"{name} after step {evaluated['step']}": v for name, v in _evals(evaluated).items()}
    if digest := last_digest(lines):
        facts["digest of the run"] = digest
    return facts


def _named(config: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that a card names; a path is only its last part."""
    model = config.get("model", {}).get("path")
    if model is not None:
        # A name on the hub stays whole; a folder of this machine is nobody else's.
        yield "base model", Path(model).name if Path(model).exists() else model
    yield "task", Path(str(config.get("task", {}).get("name", ""))).name
    for section, keys in _SHOWN.items():
        own = config.get(section, {})
        yield from ((f"{section}.{key}", own[key]) for key in keys if key in own)


def _evals(line: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in line.items() if k.startswith("eval/") and k.endswith(("mean", "_k"))}


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
