"""Chat templates, rendered in a limited process.

A chat template is a program that comes with a model directory. transformers' sandbox keeps it from
files and attributes, not from loops within loops and texts of gigabytes.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from jetrl.errors import UserError
from jetrl.models.tokenizer import MOST_TEMPLATE
from jetrl.untrusted import LimitedProcess, LimitError

LIMIT_S = 5.0
MEMORY_MIB = 512
_CACHED = 2**16  # bytes of a request whose text is kept


def render_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], open_turn: bool
) -> str:
    """Return the text of messages by a tokenizer's chat template, as `apply_chat_template` does."""
    template = tokenizer.get_chat_template()
    if len(template) > MOST_TEMPLATE:
        raise LimitError(f"it has {len(template):,} characters, at most {MOST_TEMPLATE:,}")
    request = {
        "template": template,
        "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
        "open_turn": open_turn,
        "special_tokens": tokenizer.special_tokens_map,
    }
    line = json.dumps(request, default=str).encode()
    return _rendered(line) if len(line) < _CACHED else str(_shared().answer(line))


def set_template_args(
    tokenizer: PreTrainedTokenizerBase | None,
    values: Mapping[str, Any],
    where: str = "model.template_args",
) -> None:
    """Give names that a tokenizer's chat template reads a value, such as enable_thinking = false.

    The values become the first lines of the template. So they hold for all prompts and are part of
    an exported model; what a caller of `apply_chat_template` passes comes before them.
    """
    if not values:
        return
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError(f"{where}: the tokenizer has no chat template; leave it out")
    template = tokenizer.get_chat_template()
    lines, given = "", {"messages", "add_generation_prompt", *tokenizer.special_tokens_map}
    names = sorted({*re.findall(r"(?<![\w.])[^\W\d]\w*", template)} - given)
    for name, value in values.items():
        if name not in names:
            near = difflib.get_close_matches(name, [] if name in given else names, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            what = "is set by jetrl" if name in given else "is not read by the chat template"
            raise UserError(f"{where}: {name!r} {what}; {hint}")
        text = json.dumps(value, ensure_ascii=False)
        lines += f"{{% if {name} is not defined or {name} is none %}}"
        lines += f"{{% set {name} = {text} %}}{{% endif %}}\n"  # the line end is not rendered
    tokenizer.chat_template = lines + template


@functools.cache
def _shared() -> LimitedProcess:
    return LimitedProcess("jetrl.models.chat_template:render", LIMIT_S, MEMORY_MIB)


@functools.lru_cache(maxsize=256)  # a conversation's fixed parts are rendered for each reply
def _rendered(request: bytes) -> str:
    return str(_shared().answer(request))


def render(request: dict[str, Any]) -> Any:
    """Render in the limited process."""
    rendered: Any = render_jinja_template(
        conversations=[request["messages"]],
        chat_template=request["template"],
        add_generation_prompt=request["open_turn"],
        **request["special_tokens"],
    )
    return rendered[0][0]  # the first conversation, without the spans of generated text
