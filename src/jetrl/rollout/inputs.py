"""Conversion of the arguments of `generate` to sequences, with all checks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from jetrl.errors import UserError
from jetrl.models import chat, hf
from jetrl.models.packed import as_token_ids
from jetrl.models.policy import Policy
from jetrl.rollout.options import GenerateOptions
from jetrl.rollout.sequence import RunningSequence, resumed_key, sequence_keys
from jetrl.rollout.stopping import Decode, StopRules
from jetrl.types import Prompt, PromptInputs, SamplingParams, Unfinished


class PromptTooLong(UserError):  # noqa: N818  (one of the answers of the API)
    """A prompt leaves no room for an answer in the context."""


def encode_prompts(
    policy: Policy,
    prompts: Sequence[Sequence[int] | str | Prompt | PromptInputs],
    max_model_len: int,
    system_prompt: str | None,
) -> list[PromptInputs]:
    """Return the inputs of each prompt; raises UserError without room for another token."""
    if isinstance(prompts, str | Prompt):
        raise UserError("generate takes a list of prompts; put the one prompt into a list")
    if isinstance(prompts, Mapping):  # the output of a tokenizer
        column = next(iter(prompts), "")
        raise UserError(f"generate takes a list of prompts, not a table: give its {column!r}")
    encoded = []
    for index, prompt in enumerate(prompts):
        # Text and messages go through the tokenizer; token ids are used as they are.
        if isinstance(prompt, str):
            prompt = Prompt(id=str(index), text=prompt)
        if isinstance(prompt, Prompt):
            prompt = chat.encode_prompt(
                policy.tokenizer,
                prompt,
                system_prompt=system_prompt,
                plain_text=policy.plain_text,
                tower=policy.tower,
            )
        # Check the tokens, also of prompts that a caller encoded.
        where = f"prompt {index}"
        vocab_size = policy.config.vocab_size
        if isinstance(prompt, PromptInputs):
            as_token_ids(prompt.token_ids, where, vocab_size)
        else:
            prompt = PromptInputs(tuple(as_token_ids(prompt, where, vocab_size)))
            _check_no_places(policy, prompt.token_ids, where)
        if not len(prompt):
            raise UserError(f"prompt {index} is empty; a prompt needs at least one token")
        if len(prompt) >= max_model_len:
            raise PromptTooLong(
                f"prompt {index} has {len(prompt)} tokens: no room for an answer in a context "
                f"of {max_model_len}; shorten or drop it"
            )
        encoded.append(prompt)
    return encoded


def _check_no_places(policy: Policy, token_ids: Sequence[int], where: str) -> None:
    found = policy.config.place_tokens.intersection(token_ids)
    if found:
        raise UserError(
            f"{where}: token {min(found)} is the place of an image, and token ids come without "
            "images; give a Prompt with text and images"
        )


def make_groups(
    policy: Policy,
    prompts: Sequence[PromptInputs],
    params: SamplingParams,
    max_model_len: int,
    options: GenerateOptions | None = None,
    first: int = 0,
) -> list[list[RunningSequence]]:
    """Return the sequences of a call, one group of n per prompt, with indices from `first`.

    max_tokens is reduced so that prompt and completion have at most `max_model_len` tokens.
    """
    options = options or GenerateOptions()
    rules = _stop_rules(policy, params, options.max_turns)
    # Without limits and keys per completion, those of the call apply.
    count = params.n * len(prompts)
    limits = [params.max_tokens] * count if options.max_tokens is None else options.max_tokens
    if len(limits) != count or min(limits, default=1) < 1:
        raise UserError(
            f"max_tokens: {count} numbers of at least 1, one for each completion, not "
            f"{len(limits)} with {min(limits, default=1)} among them"
        )
    keys = sequence_keys(prompts, params.n) if options.keys is None else options.keys
    groups = []
    for number, prompt in enumerate(prompts):
        group = []
        for index, key in enumerate(keys[number], number * params.n):
            limit = min(limits[index], max_model_len - len(prompt))
            own_rules = replace(rules, max_tokens=limit)
            group.append(RunningSequence(first + index, prompt, key, own_rules, params=params))
        groups.append(group)
    return groups


def resumed_groups(
    policy: Policy,
    resume: Sequence[Sequence[Unfinished]],
    params: SamplingParams,
    max_model_len: int,
) -> list[list[RunningSequence]]:
    """Return sequences that continue the completions of an earlier call, in their groups."""
    rules = _stop_rules(policy, params)
    index = itertools.count()
    groups = []
    for members in resume:
        group = []
        for cut in members:
            old = cut.completion
            prompt = cut.inputs
            limit = min(params.max_tokens, max_model_len - len(prompt))
            if len(old.token_ids) >= limit:
                raise UserError(
                    f"a completion of {len(old.token_ids)} tokens cannot continue: raise "
                    f"max_tokens above {limit}"
                )
            # A new key: the old one has been used with another policy.
            key = resumed_key(cut.key, len(old.token_ids))
            own_rules = replace(rules, max_tokens=limit)
            sequence = RunningSequence(next(index), prompt, key, own_rules, params=params)
            sequence.generated = list(old.token_ids)
            sequence.logprobs = list(old.logprobs)
            sequence.versions = old.versions
            group.append(sequence)
        groups.append(group)
    return groups


def _stop_rules(policy: Policy, params: SamplingParams, max_turns: int = 1) -> StopRules:
    """Return the stop rules of a call, with the stop ids of the model unless ignored."""
    as_token_ids(params.stop_token_ids, "stop_token_ids", policy.config.vocab_size)
    ends = hf.eos_token_ids(policy.config, policy.generation_config, policy.tokenizer)
    stops = frozenset([*params.stop_token_ids, *(() if params.ignore_eos else ends)])
    decode = text_decoder(policy)
    if params.stop and decode is None:
        raise UserError(f"stop strings {list(params.stop)} need a tokenizer: set model.tokenizer")
    if max_turns > 1 and decode is None:
        raise UserError(
            "a task with turns reads text, and the model has no tokenizer: set model.tokenizer"
        )
    return StopRules(
        max_tokens=params.max_tokens,
        token_ids=stops,
        strings=params.stop,
        decode=decode,
        max_turns=max_turns,
    )


def text_decoder(policy: Policy) -> Decode | None:
    """Return a function from token ids to text, or None without a tokenizer."""
    return None if policy.tokenizer is None else partial(chat.decode, policy.tokenizer)
