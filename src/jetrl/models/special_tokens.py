"""Special tokens in other people's text: `<|im_end|>` as ten characters instead of a control token.

A tokenizer makes a control token of a special token's name wherever the name stands, so a tool's
reply could end the environment's turn and speak as the user or the model. Text is therefore encoded
with the tokenizer's `split_special_tokens`. The text of a chat template needs its own control
tokens: there each name in a message's content is a placeholder while the template is rendered.

Text without such a name is encoded as it always was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from jetrl.models.tokenizer_files import encode

_PLACEHOLDER = "jetrlplaceholder"  # letters and digits, which templates leave as they are


class HiddenNames(NamedTuple):
    """The names of special tokens that stand in messages as placeholders."""

    messages: list[dict[str, str]]
    names: dict[str, str]

    def shown(self, text: str) -> str:
        """Return a text with the names in place of the placeholders."""
        for placeholder, name in self.names.items():
            text = text.replace(placeholder, name)
        return text


def has_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Return whether the name of a special token stands in a text."""
    return any(name in text for name in _names(tokenizer))


def hide_special_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> HiddenNames:
    """Return messages whose values have placeholders in place of special tokens' names.

    Args:
        tokenizer: The tokenizer, whose special tokens are looked for.
    """
    texts = (value for message in messages for value in message.values())
    everything = "".join(text for text in texts if isinstance(text, str))
    present = [name for name in _names(tokenizer) if name in everything]
    if not present:
        return HiddenNames(messages, {})
    placeholder = _PLACEHOLDER
    while placeholder in everything:
        placeholder += "x"
    placeholders = {name: f"{placeholder}{number}end" for number, name in enumerate(present)}
    pattern = _any_of(present)

    def hide(text: str) -> str:
        is_text = isinstance(text, str)  # a task may put anything beside role and content
        return pattern.sub(lambda name: placeholders[name[0]], text) if is_text else text

    hidden = [{key: hide(text) for key, text in message.items()} for message in messages]
    return HiddenNames(hidden, {placeholders[name]: name for name in present})


def encode_hidden(
    tokenizer: PreTrainedTokenizerBase, text: str, names: Mapping[str, str]
) -> list[int]:
    """Return the token ids of a rendered template, with the text of the placeholders' names.

    Args:
        text: The text of the template, whose own special tokens become control tokens.
    """
    token_ids: list[int] = []
    hidden = HiddenNames([], dict(names))
    for number, part in enumerate(_any_of(_names(tokenizer)).split(text)):
        if number % 2:  # a special token between two texts
            control = tokenizer.convert_tokens_to_ids(part)
            assert isinstance(control, int)
            token_ids.append(control)
        elif part:
            part = hidden.shown(part)
            token_ids += encode(tokenizer, part, as_text=True)
    return token_ids


def _names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names of a tokenizer's special tokens, the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    return sorted((name for name in names if name), key=lambda name: (-len(name), name))


def _any_of(names: list[str]) -> re.Pattern[str]:
    """Return a pattern of one group that matches each of the names."""
    return re.compile(f"({'|'.join(map(re.escape, names))})")
