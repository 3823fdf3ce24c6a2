"""From a prompt to the token ids a model is given.

Text is encoded unchanged, after the beginning-of-sequence token if the tokenizer adds one (Llama 3
does, Qwen does not) and the text does not start with it. An end token that a tokenizer would add is
left out: it would end the sequence before the answer.

Messages go through the tokenizer's chat template, which writes all special tokens itself and opens
an assistant turn at the end. If the last message is the assistant's, its text follows the opening,
and the model continues it.

Special tokens in the environment's text are encoded as text, not as control tokens, and on request
so are those of prompts and worked answers (`models.tokenizer`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models.chat_template import render_messages
from jetrl.models.tokenizer import (
    encode,
    encode_hidden,
    has_special_tokens,
    hide_special_tokens,
    shown,
)
from jetrl.types import Example, PlainText, Prompt, Turn
from jetrl.untrusted import LimitError

_MARK = "jetrl-marks-the-assistant"  # a template's output is cut at this text


class ReplyError(UserError):
    """An error of one environment reply: its text cannot be given to the model."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    system_prompt: str | None = None,
    plain_text: PlainText = "replies",
) -> list[int]:
    """Return the token ids of a prompt, at least one.

    `plain_text="all"` encodes special tokens in the prompt as text.
    """
    where = f"prompt {prompt.id!r}"
    if tokenizer is None:
        what = f"{where}: the model has no tokenizer"
        raise UserError(f"{what}; set model.tokenizer to a directory that has one")
    if prompt.messages is not None:
        token_ids = _encode_messages(tokenizer, prompt.messages, system_prompt, where, plain_text)
    elif system_prompt is not None:
        raise UserError(f"{where} is plain text, which a system prompt cannot be put before")
    else:
        assert prompt.text is not None  # Prompt holds exactly one of text and messages
        token_ids = encode_text(tokenizer, prompt.text, where, as_text=plain_text == "all")
    if not token_ids:
        raise UserError(f"{where}: no tokens; a prompt needs at least one")
    return token_ids


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    where: str = "text",
    begin: bool = True,
    as_text: bool = False,
    names: Mapping[str, str] | None = None,
) -> list[int]:
    """Return a text's token ids, after a beginning-of-sequence token if the tokenizer adds one.

    `begin=False` continues a sequence, without that token. `as_text` encodes special tokens as
    text. `names` has special tokens that are text, by their placeholders.
    """
    try:
        if names:
            return encode_hidden(tokenizer, text, names)
        as_text = as_text and has_special_tokens(tokenizer, text)
        plain = encode(tokenizer, text, as_text=as_text)
        bos = tokenizer.bos_token_id
        if begin and bos is not None and plain[:1] != [bos]:
            opened = encode(tokenizer, text, special=True, as_text=as_text)
            return [bos, *plain] if opened[:1] == [bos] else plain
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # the tokenizers library raises bare Exception
        raise UserError(f"{where}: {_lacking(tokenizer, text) or error}") from error
    return plain


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    reply: str | Mapping[str, str],
    completion: Sequence[int],
    where: str = "reply",
    as_text: bool = True,
) -> list[int]:
    """Return a reply's token ids, from the end of an assistant's turn to the start of the next.

    A text follows the turn unchanged. A message is written by the chat template: after the
    template's end of an assistant message (the part that the model has not written itself), before
    the opening of the next assistant turn. `as_text` encodes special tokens as text, so that a
    reply cannot end its own turn. A ReplyError means that another text would do.
    """
    names: dict[str, str] = {}
    if isinstance(reply, str):
        text = reply
    else:
        messages = [dict(reply)]
        if as_text:
            messages, names = hide_special_tokens(tokenizer, messages)
        try:
            end, after = _reply_text(tokenizer, messages[0], where)
        except UserError as error:
            _reply_text(tokenizer, {**reply, "content": "?"}, where)  # raises if any text does
            raise ReplyError(shown(str(error), names)) from None
        # The model may have drawn the token that ends its turn: the template's is not repeated.
        drawn = tokenizer.decode(list(completion[-1:])) if completion else ""
        assert isinstance(drawn, str)
        text, as_text = end.removeprefix(drawn) + after, False
    try:
        return encode_text(tokenizer, text, where, begin=False, as_text=as_text, names=names)
    except UserError as error:
        raise ReplyError(str(error)) from None


def _reply_text(
    tokenizer: PreTrainedTokenizerBase, reply: Mapping[str, str], where: str
) -> tuple[str, str]:
    """Return a template's end of an assistant message, and its text of the reply after that."""
    own_mark = _MARK
    while any(own_mark in value for value in reply.values() if isinstance(value, str)):
        own_mark += "-x"
    turn: list[Mapping[str, str]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": own_mark},
    ]
    last = _render(tokenizer, turn, where, open_turn=False)
    followed = _render(tokenizer, [*turn, reply], where, open_turn=True)
    # Text before the mark may differ (Qwen3 opens a thinking block in a last message):
    # the sequence has that already.
    _, mark, end = last.rpartition(own_mark)
    _, mark_again, rest = followed.rpartition(own_mark)
    if not mark or not mark_again or not rest.startswith(end):
        raise UserError(
            f"{where}: the tokenizer's chat template does not write an assistant's message the "
            "same when another one follows; use another template, or text prompts"
        )
    after = rest.removeprefix(end)
    _check_written(reply, after, where)
    return end, after


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    turns: Sequence[Turn],
    where: str = "answer",
    plain_text: PlainText = "replies",
) -> Example:
    """Return a worked answer as the sequence that sampling would have produced.

    The last turn, and each turn before a message, ends with the end-of-sequence token if the
    tokenizer has one. A turn before a text does not: the task's stop string is part of the turn.
    `plain_text` selects the special tokens that are encoded as text: those of replies, all or none.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    completion: list[int] = []
    environment = []
    for turn in turns:
        answer = encode_text(
            tokenizer, turn.completion, where, begin=False, as_text=plain_text == "all"
        )
        answer += [] if isinstance(turn.reply, str) else end
        completion += answer
        if turn.reply is not None:
            start = len(completion)
            as_text = plain_text != "none"
            completion += encode_reply(tokenizer, turn.reply, answer, where, as_text)
            environment.append((start, len(completion)))
    return Example(prompt, completion, environment)


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of tokens, without special tokens and with spaces unchanged."""
    kind, ids = type(tokenizer), list(token_ids)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._decode is PreTrainedTokenizerFast._decode
        and kind.decode is PreTrainedTokenizerBase.decode
    ):  # transformers' own wrapper takes ten times as long for a few tokens
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _encode_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    system_prompt: str | None,
    where: str,
    plain_text: PlainText,
) -> list[int]:
    """Return the token ids of messages by the chat template, an assistant's turn opened."""
    _check_messages(messages, where)
    conversation, names = [dict(message) for message in messages], dict[str, str]()
    if plain_text == "all":
        conversation, names = hide_special_tokens(tokenizer, conversation)
    if system_prompt is not None:
        if any(message.get("role") == "system" for message in conversation):
            raise UserError(f"{where} has a system message of its own; unset the system prompt")
        conversation.insert(0, {"role": "system", "content": system_prompt})
    begun = ""
    if conversation[-1:] and conversation[-1]["role"] == "assistant":
        begun = conversation.pop()["content"]
    text = _render(tokenizer, conversation, where, open_turn=True)
    opening = text.split()[-1:]
    if begun and opening and begun.lstrip().startswith(opening[0]):
        raise UserError(
            f"{where}: its last message, the assistant's, begins with {opening[0]!r}, with which "
            "the chat template opens the turn: leave it out"
        )
    text += begun  # as the model would have written it; transformers: continue_final_message
    for message in conversation:
        if message["role"] != "assistant":  # of which templates leave out old thoughts
            _check_written(message, text, where)
    return encode_text(tokenizer, text, where, begin=False, names=names)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, str]],
    where: str,
    open_turn: bool,
) -> str:
    """Return the text of messages by the chat template, an assistant's turn opened if asked."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{where} is made of messages, but the tokenizer has no chat template; use an "
            "instruct model, put chat_template.jinja next to its tokenizer, or use text prompts"
        )
    _check_messages(messages, where)
    try:
        return render_messages(tokenizer, messages, open_turn)
    except LimitError as error:
        raise UserError(f"{where}: the tokenizer's chat template refuses it: {error}") from error


def _check_messages(messages: Sequence[Mapping[str, str]], where: str) -> None:
    """Raise if a message has no role or no content that is text."""
    for message in messages:
        if not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{where}: message {message!r} needs a role and a content, both text")


def _check_written(message: Mapping[str, str], text: str, where: str) -> None:
    """Raise if a template wrote nothing of a message, as some do for unknown roles."""
    content = message["content"].strip()
    if content not in text and json.dumps(content, ensure_ascii=False)[1:-1] not in text:
        raise UserError(
            f"{where}: the tokenizer's chat template leaves out the message of role "
            f"{message['role']!r}: {content!r:.60}; give it a role that the template knows"
        )


def _lacking(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return a message on characters of `text` that have no token, or an empty text."""
    halves = sorted({repr(half) for half in text if "\ud800" <= half <= "\udfff"})
    if halves:
        return f"{' '.join(halves[:10])} is half of a character (a surrogate), which is no text"
    vocabulary = tokenizer.get_vocab()
    characters = sorted({character for character in text if character not in vocabulary})
    lacking = " ".join(repr(character) for character in characters[:10])
    return f"the tokenizer (model.tokenizer) has no token for {lacking}" if lacking else ""
