"""From the arguments of `generate` to sequences, checked before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from jetrl.errors import UserError
from jetrl.models import chat, hf
from jetrl.models.policy import Policy
from jetrl.rollout.sequence import RunningSequence, resumed_key, sequence_keys
from jetrl.rollout.stopping import Decode, StopRules
from jetrl.types import Prompt, SamplingParams, Unfinished


def encode_prompts(
    policy: Policy,
    prompts: Sequence[Sequence[int] | str | Prompt],
    max_model_len: int,
    system_prompt: str | None,
) -> list[list[int]]:
    """Return the token ids of each prompt, with room for at least one more token.

    Raises:
        UserError: A prompt cannot be used; the message names it by its number in the call.
    """
    if isinstance(prompts, str | Prompt):
        raise UserError("generate takes a list of prompts; put the one prompt into a list")
    encoded = []
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            prompt = Prompt(id=str(index), text=prompt)
        if isinstance(prompt, Prompt):
            token_ids = chat.encode_prompt(
                policy.tokenizer, prompt, system_prompt, policy.plain_text
            )
        else:
            token_ids = _integers(prompt, index)
        _check_ids(token_ids, policy.config.vocab_size, f"prompt {index}")
        if not token_ids:
            raise UserError(f"prompt {index} is empty; a prompt needs at least one token")
        if len(token_ids) >= max_model_len:
            raise UserError(
                f"prompt {index} has {len(token_ids)} tokens, which leaves no room for an answer "
                f"in a context of {max_model_len}; shorten or drop it"
            )
        encoded.append(token_ids)
    return encoded


def make_groups(
    policy: Policy,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    max_model_len: int,
    max_turns: int = 1,
    max_tokens: Sequence[int] | None = None,
    first: int = 0,
    keys: Sequence[Sequence[int]] | None = None,
) -> list[list[RunningSequence]]:
    """Return the sequences of a call, a group of n per prompt.

    Args:
        max_model_len: Tokens of prompt and completion; max_tokens is limited to what is left.
        max_tokens: A limit per sequence; None: params.max_tokens.
        first: The index of the first sequence.
        keys: The random keys of each prompt's sequences; None: those of `sequence_keys`.

    Raises:
        UserError: max_tokens are not one limit of at least 1 per sequence, a stop id is outside the
            vocabulary, or stop strings or turns have no tokenizer.
    """
    _check_ids(params.stop_token_ids, policy.config.vocab_size, "stop_token_ids")
    stops = _stop_ids(policy, params)
    decode = text_decoder(policy)
    if params.stop and decode is None:
        raise UserError(
            f"stop strings {list(params.stop)} need a tokenizer, and the model has none; set "
            "model.tokenizer, or use stop_token_ids"
        )
    if max_turns > 1 and decode is None:
        raise UserError(
            "a task with turns reads what the model writes, and the model has no tokenizer; set "
            "model.tokenizer"
        )
    # Without limits of their own all completions have that of the call.
    if max_tokens is None:
        max_tokens = [params.max_tokens] * (params.n * len(prompts))
    if len(max_tokens) != params.n * len(prompts) or min(max_tokens, default=1) < 1:
        raise UserError(
            f"max_tokens: {params.n * len(prompts)} numbers of at least 1, one for each "
            f"completion, not {len(max_tokens)} with {min(max_tokens, default=1)} among them"
        )
    groups: list[list[RunningSequence]] = []
    if keys is None:
        keys = sequence_keys(prompts, params.n)
    for number, prompt in enumerate(prompts):
        group = []
        for sample, key in enumerate(keys[number]):
            index = number * params.n + sample
            limit = min(max_tokens[index], max_model_len - len(prompt))
            rules = StopRules(limit, stops, params.stop, decode, max_turns)
            group.append(RunningSequence(first + index, tuple(prompt), key, rules, params=params))
        groups.append(group)
    return groups


def resumed_groups(
    policy: Policy,
    resume: Sequence[Sequence[Unfinished]],
    params: SamplingParams,
    max_model_len: int,
) -> list[list[RunningSequence]]:
    """Return sequences that continue the completions of an earlier call, in their groups.

    Raises:
        UserError: A completion has no room for another token.
    """
    groups: list[list[RunningSequence]] = []
    index = 0
    decode, stops = text_decoder(policy), _stop_ids(policy, params)
    for members in resume:
        group = []
        for cut in members:
            completion = cut.completion
            limit = min(params.max_tokens, max_model_len - len(cut.prompt_token_ids))
            if len(completion.token_ids) >= limit:
                raise UserError(
                    f"a completion to go on with has {len(completion.token_ids)} tokens, and this "
                    f"call allows {limit}: raise max_tokens"
                )
            sequence = RunningSequence(
                index,
                cut.prompt_token_ids,
                resumed_key(cut.key, len(completion.token_ids)),
                StopRules(limit, stops, params.stop, decode),
                generated=list(completion.token_ids),
                logprobs=list(completion.logprobs),
                versions=completion.versions,
                params=params,
            )
            group.append(sequence)
            index += 1
        groups.append(group)
    return groups


def _stop_ids(policy: Policy, params: SamplingParams) -> frozenset[int]:
    """Return the ids that end a completion: the call's, and the model's unless ignored."""
    stop_ids = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends = hf.eos_token_ids(policy.config, policy.generation_config, policy.tokenizer)
        stop_ids |= set(ends)
    return frozenset(stop_ids)


def text_decoder(policy: Policy) -> Decode | None:
    """Return a function from token ids to text, or None without a tokenizer."""
    return None if policy.tokenizer is None else chat.decoder(policy.tokenizer)


def _integers(token_ids: Iterable[int], index: int) -> list[int]:
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError:
        raise UserError(
            f"prompt {index}: {token_ids!r:.80} is not a list of token ids, a text or a Prompt"
        ) from None


def _check_ids(token_ids: Sequence[int], vocab_size: int, where: str) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise UserError(
                f"{where}: token id {token} is outside the model's vocabulary [0, {vocab_size})"
            )
