"""Chat templates, rendered in a limited process.

A chat template is a program that comes with a model directory. transformers' sandbox keeps it from
files and attributes, not from loops within loops and texts of gigabytes.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from jetrl.errors import UserError
from jetrl.models.tokenizer import MOST_TEMPLATE
from jetrl.types import Json, Message
from jetrl.untrusted import LimitedProcess, LimitError

LIMIT_S = 5.0
MEMORY_MIB = 512
_CACHED = 2**16  # bytes of a request whose text is kept


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template: messages, tools and arguments of `apply_chat_template`."""

    messages: Sequence[Message]
    tools: Sequence[Json] = ()
    template_args: Json = field(default_factory=dict)


def render_messages(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, open_turn: bool
) -> str:
    """Return a conversation's text by the chat template, as `apply_chat_template` does."""
    template = template_of(tokenizer, conversation)
    if len(template) > MOST_TEMPLATE:
        raise LimitError(f"it has {len(template):,} characters, at most {MOST_TEMPLATE:,}")
    request = {
        "template": template,
        "messages": [
            {k: v for k, v in message.items() if v is not None} for message in conversation.messages
        ],
        "tools": list(conversation.tools) or None,
        "template_args": conversation.template_args,
        "open_turn": open_turn,
        "special_tokens": tokenizer.special_tokens_map,
    }
    line = json.dumps(request, default=str).encode()
    return _rendered(line) if len(line) < _CACHED else str(_shared().answer(line))


def template_of(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> str:
    """Return the chat template that renders a conversation, which may depend on its tools."""
    return tokenizer.get_chat_template(tools=[dict(tool) for tool in conversation.tools] or None)


@functools.lru_cache(maxsize=8)
def names_read(template: str) -> frozenset[str]:
    """Return the words of a template that may name what it reads."""
    return frozenset(re.findall(r"[^\W\d]\w*", template))


def check_template_args(template: str, values: Json, given: Set[str], where: str) -> None:
    """Raise for an argument that a template does not read, or whose name is one of `given`."""
    names = sorted({*re.findall(r"(?<![\w.])[^\W\d]\w*", template)} - given)
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, [] if name in given else names, n=1)
            hint = f"did you mean {near[0]}?" if near else "leave it out"
            what = "is set by jetrl" if name in given else "is not read by the chat template"
            raise UserError(f"{where}: {name!r} {what}; {hint}")


def set_template_args(
    tokenizer: PreTrainedTokenizerBase | None, values: Json, where: str = "model.template_args"
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
    given = {"messages", "add_generation_prompt", *tokenizer.special_tokens_map}
    check_template_args(template, values, given, where)
    lines = ""
    for name, value in values.items():
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


def render(request: Json) -> Any:
    """Render in the limited process."""
    rendered: Any = render_jinja_template(
        conversations=[request["messages"]],
        tools=request.get("tools"),
        chat_template=request["template"],
        add_generation_prompt=request["open_turn"],
        **request["special_tokens"] | request.get("template_args", {}),
    )
    return rendered[0][0]  # the first conversation, without the spans of generated text
