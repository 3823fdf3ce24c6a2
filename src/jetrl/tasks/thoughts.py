"""Reasoning blocks of models: answers are read after them, never inside."""

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
    """Return the text after the last closed reasoning block; None while one is open."""
    start = 0
    for closed in _CLOSE.finditer(text):
        start = closed.end()
    return None if _OPEN.search(text, start) else text[start:]


def names_thoughts(text: str) -> bool:
    """Return True if a text, such as a pattern, contains a reasoning tag."""
    return bool(_OPEN.search(text) or _CLOSE.search(text))


def begins_in_thought(prompt: Prompt, written: str) -> bool:
    """Return True if the completion continues a reasoning block opened by the prompt.

    `written` is the end of the rendered prompt: many chat templates end with <think>.
    """
    if _OPEN_ENDS.search(written[-_LONGEST_OPENING:]):
        return True
    last = (prompt.messages or ({},))[-1]
    return last.get("role") == "assistant" and answer_part(str(last["content"])) is None


def whole_turn(prompt: Prompt, completion: str) -> str:
    """Return a completion with the opening reasoning tag of its prompt prepended, if any."""
    return f"<think>{completion}" if prompt.in_thought else completion
