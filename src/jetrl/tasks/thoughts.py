"""The thoughts of reasoning models: an answer is read behind them, never in them."""

from __future__ import annotations

import re

from jetrl.types import Prompt

# Qwen3, DeepSeek-R1 and others; Seed-OSS; EXAONE Deep; Magistral; Kimi.
_WORD = r"(?:seed:)?(?:think|thinking|thought|reasoning)"
_OPEN = re.compile(rf"<{_WORD}>|\[THINK\]|\u25c1think\u25b7")
_CLOSE = re.compile(rf"</{_WORD}>|\[/THINK\]|\u25c1/think\u25b7")
_OPEN_ENDS = re.compile(rf"(?:{_OPEN.pattern})\s*$")
_LONGEST_OPENING = 40  # characters


def answer_part(text: str) -> str | None:
    """Return the text behind the last closed thought; None while a thought is open."""
    start = 0
    for closed in _CLOSE.finditer(text):
        start = closed.end()
    return None if _OPEN.search(text, start) else text[start:]


def names_thoughts(text: str) -> bool:
    """Return whether a text, such as a pattern, has the mark of a thought's start or end."""
    return bool(_OPEN.search(text) or _CLOSE.search(text))


def begins_in_thought(prompt: Prompt, written: str) -> bool:
    """Return whether the model continues a thought that the prompt has opened.

    `written` is the end of the prompt as the model reads it: many chat templates end with <think>.
    """
    if _OPEN_ENDS.search(written[-_LONGEST_OPENING:]):
        return True
    last = (prompt.messages or ({},))[-1]
    return last.get("role") == "assistant" and answer_part(str(last["content"])) is None


def whole_turn(prompt: Prompt, completion: str) -> str:
    """Return a completion after the opening of the thought that its prompt has opened, if any."""
    return f"<think>{completion}" if prompt.in_thought else completion
