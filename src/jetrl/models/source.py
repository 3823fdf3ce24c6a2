"""The source of a model: its configuration, its tokenizer and a function for its weights.

A source is a directory or hub name, a configuration with a seed, or tensors in memory;
`open_source` returns the source of a run's settings. A model calls the function for weights, which
takes the device, after all its checks: unsupported models are refused before weights are
downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jetrl.errors import UserError, named
from jetrl.files import read_json
from jetrl.models import hf
from jetrl.models.adapter import Adapter
from jetrl.models.chat_template import set_template_args
from jetrl.models.coded_weights import CodedWeights, MadeWeights
from jetrl.models.families import Head, ModelConfig
from jetrl.models.nvfp4_files import check_base
from jetrl.models.peft import adapter_of
from jetrl.models.tiny import PRINTABLE, RandomWeights, character_tokenizer, random_tower
from jetrl.models.vision import READERS, trained_shapes
from jetrl.precision.plan import PrecisionPlan
from jetrl.settings.loading import Settings
from jetrl.settings.sections import ModelSettings, TowerPart
from jetrl.types import Json, PlainText

logger = logging.getLogger(__name__)

CHARACTERS = "characters"  # model.tokenizer: one token per character of the task's alphabet


@dataclass(frozen=True)
class ModelSource:
    """The parts of a model.

    Attributes:
        config: The configuration, without the adapter.
        weights: Returns all parameters on a device, by the names in `families.parameter_shapes`; on
            "meta" they have no values.
        generation_config: The contents of generation_config.json; empty without that file.
        adapter: The adapter to train; the weights are frozen then, except for those it names.
        origin: The directory or hub name of the weights; None if they are not in files.
        plain_text: Texts of a task whose special tokens are encoded as text.
        tower: Returns the tensors of the image tower by their names in files, as stored; None
            without images.
        image_processor: The contents of preprocessor_config.json; None without images.
        trained_tower: The part of the image tower that is trained, unless the model is frozen.
    """

    config: ModelConfig
    weights: Callable[[torch.device], CodedWeights]
    tokenizer: PreTrainedTokenizerBase | None = None
    generation_config: Json = field(default_factory=dict)
    adapter: Adapter | None = None
    origin: str | None = None
    plain_text: PlainText = "replies"
    tower: Callable[[], Mapping[str, Tensor]] | None = None
    image_processor: Json | None = None
    trained_tower: TowerPart = "frozen"

    @staticmethod
    def from_path(path: str | Path, adapter: Adapter | None = None) -> ModelSource:
        """Return the source of a Hugging Face directory or hub name, without reading weights."""
        config, processor = hf.model_config(path), None
        if config.vision is not None and (processor := hf.read_image_processor(path)) is None:
            raise UserError(
                f"{path}: no preprocessor_config.json, which says how images become pixels; copy "
                "the model's there"
            )
        return ModelSource(
            config=config,
            weights=lambda device: hf.open_weights(path, config, device),
            tokenizer=hf.load_tokenizer(path) if hf.has_tokenizer(path) else None,
            generation_config=hf.read_generation_config(path),
            adapter=adapter,
            origin=str(path),
            tower=None if config.vision is None else lambda: hf.open_tower(path, config),
            image_processor=processor,
        )

    @staticmethod
    def from_seed(
        config: ModelConfig,
        seed: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: Adapter | None = None,
    ) -> ModelSource:
        """Return a source of random weights, which differ between a CPU and a GPU."""
        vision = config.vision
        return ModelSource(
            config,
            lambda device: RandomWeights(config, seed, device),
            tokenizer,
            adapter=adapter,
            tower=None if vision is None else lambda: random_tower(config, seed),
            image_processor=None if vision is None else READERS[type(vision)].settings(vision),
        )

    @staticmethod
    def from_tensors(
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        tokenizer: PreTrainedTokenizerBase | None = None,
        adapter: Adapter | None = None,
    ) -> ModelSource:
        """Return a source of parameters in memory, by name; they keep their device."""
        weights = MadeWeights(tensors, tensors.__getitem__)
        return ModelSource(config, lambda device: weights, tokenizer, adapter=adapter)

    @property
    def side_files(self) -> dict[str, Json]:
        """The contents of JSON files of the model's directory, except config.json."""
        return {
            "generation_config.json": self.generation_config,
            "preprocessor_config.json": self.image_processor or {},
        }

    def with_tower(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return parameters and the tensors of the image tower, for `hf.save_model`."""
        if self.tower is None:
            return weights
        tower = self.tower()
        names = [*weights, *(name for name in tower if name not in weights)]
        return MadeWeights(names, lambda name: (weights if name in weights else tower)[name])

    def trained_of_tower(self, device: torch.device) -> Mapping[str, Tensor]:
        """Return the trained tensors of the image tower by their names in files, as stored.

        On "meta" they have no values.
        """
        if self.config.vision is None or self.tower is None:
            return {}
        shapes = trained_shapes(self.config.vision, self.config.hidden_size, self.trained_tower)
        if device.type == "meta":
            return MadeWeights(shapes, lambda name: torch.empty(shapes[name], device="meta"))
        return MadeWeights(shapes, self.tower().__getitem__) if shapes else {}

    def with_scalar_head(self) -> ModelSource:
        """Return this source with a scalar head: its own, or a new one with zero weights."""
        if self.config.head == "score":
            return self

        def weights(device: torch.device) -> CodedWeights:
            body = self.weights(device)

            def value(name: str) -> Tensor:
                if name == "score.weight":
                    return torch.zeros(1, self.config.hidden_size, device=device)
                return body[name].detach().to(device, torch.float32, copy=True)

            names = [name for name in body if name != "lm_head.weight"]
            return MadeWeights([*names, "score.weight"], value, body.codes)

        config = self.config.with_scalar_head()
        return replace(self, config=config, weights=weights, generation_config={})


def open_source(
    settings: Settings, alphabet: str | None, device: str, head: Head = "lm"
) -> ModelSource:
    """Return the source of a run's model.

    Args:
        alphabet: The characters of the task, for model.tokenizer=characters; None: printable ASCII.
        device: The model's device; on "meta", no tensor is read or drawn.
        head: "score" adds a scalar head if the model has none.

    Raises:
        UserError: a file that is missing, damaged or not supported.
    """
    config, model, seed = model_config(settings), settings.model, settings.run.seed
    tokenizer: PreTrainedTokenizerBase | None = None  # None: the model's own
    if model.tokenizer == CHARACTERS:
        tokenizer = character_tokenizer(PRINTABLE if alphabet is None else alphabet)
    elif model.tokenizer is not None:
        with named("model.tokenizer"):
            tokenizer = hf.load_tokenizer(model.tokenizer)
    if model.path is None:
        source = ModelSource.from_seed(config, seed, tokenizer)
        if tokenizer is not None and tokenizer.eos_token_id is not None:
            source = replace(source, generation_config={"eos_token_id": tokenizer.eos_token_id})
    else:
        source = ModelSource.from_path(model.path)
        if tokenizer is not None:
            if device != "meta":  # once per run
                _compare_tokenizers(source.tokenizer, tokenizer, model)
            source = replace(source, tokenizer=tokenizer)
    if head == "score":
        source = source.with_scalar_head()
    tokenizer = source.tokenizer
    if model.template_args:
        set_template_args(tokenizer, model.template_args)
    if tokenizer is not None and len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's vocab_size is "
            f"{config.vocab_size}"
        )
    adapter = None
    if settings.adapter.kind is not None:
        adapter = adapter_of(settings.adapter, source.config, seed, device)
    return replace(
        source,
        adapter=adapter,
        plain_text=settings.task.special_tokens_as_text,
        trained_tower=settings.train.tower,
    )


def model_config(settings: Settings) -> ModelConfig:
    """Return the configuration of a run's model, without reading weights.

    Raises UserError if it is not supported, or does not fit the `[precision]` settings.
    """
    path, precision = settings.model.path, settings.precision
    if path is None:
        config = ModelConfig.from_hf(_config_json(settings.model))
    else:
        with named("model.path"):
            config = hf.model_config(path)
    # All commands that read a model call this function, so these checks are here.
    if (part := settings.train.tower) != "frozen":
        if config.vision is None:
            raise UserError(
                f"train.tower = {part}: {config.architecture} reads text only; leave it out"
            )
        if settings.adapter.kind is not None:
            raise UserError(
                f"train.tower = {part}: with adapter.kind = {settings.adapter.kind} the image "
                "tower stays frozen, since PEFT's files have no place for it; leave one of them out"
            )
    for key in ("first_layers_bf16", "last_layers_bf16"):
        if (count := getattr(precision, key) or 0) > (layers := len(config.layers)):
            raise UserError(f"precision.{key} = {count}: the model has {layers} layers")
    if path is not None:
        plan = PrecisionPlan.from_settings(precision)
        check_base(config, plan, path)
        if settings.critic.path == "policy":
            check_base(config, plan.without_base, path)
    return config


def _config_json(settings: ModelSettings) -> Json:
    """Return model.config, read from its file if it is a path."""
    config = settings.config
    if isinstance(config, dict):
        return config
    if config is None:
        raise UserError(
            "no model: set model.path to a Hugging Face directory or hub name, as in "
            "model.path=Qwen/Qwen3-1.7B (`jetrl init` makes a small model), or model.config to the "
            "contents of a config.json"
        )
    try:
        contents = read_json(config)
        if not isinstance(contents, dict):
            raise UserError("not a JSON object")
    except (OSError, UserError) as error:
        raise UserError(f"model.config {config}: {error}") from None
    return contents


def _compare_tokenizers(
    own: PreTrainedTokenizerBase | None, new: PreTrainedTokenizerBase, settings: ModelSettings
) -> None:
    """Log a warning if model.tokenizer has other tokens than the model's own tokenizer."""
    if own is None:
        return
    if differ := len(own.get_vocab().items() ^ new.get_vocab().items()):
        logger.warning(
            "model.tokenizer=%s replaces the tokenizer of %s, and %d tokens differ; "
            "model.tokenizer=none keeps its own",
            settings.tokenizer,
            settings.path,
            differ,
        )
