"""Chat templates, rendered in a limited process.

A chat template is a program that comes with a model directory. transformers' sandbox keeps it from
files and attributes, not from loops within loops and texts of gigabytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

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
