"""Chat templates are rendered as by transformers, within limits of time and memory."""

from __future__ import annotations

import json

import pytest

from jetrl.errors import UserError
from jetrl.models import chat_template
from jetrl.models.chat import encode_prompt
from jetrl.models.chat_template import render_messages
from jetrl.models.tiny import character_tokenizer
from jetrl.types import Prompt
from jetrl.untrusted import LimitedProcess, LimitError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if not loop.first %}\n{% endif %}<{{ m.role }}>"
    "{{ m['content'] | trim }}{{ loop.length }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": " 1+1?é\ud83d "}, {"role": "assistant", "content": "2"}]


def request(template, messages=MESSAGES):
    fields = {"template": template, "messages": messages, "open_turn": False}
    return json.dumps({**fields, "special_tokens": {}}).encode()


@pytest.fixture(scope="module")
def process():
    process = LimitedProcess("jetrl.models.chat_template:render", 0.5, 128)
    yield process
    process.close()


@pytest.mark.parametrize("open_turn", [False, True])
def test_the_text_is_that_of_transformers(open_turn):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text = render_messages(tokenizer, MESSAGES, open_turn)
    assert text == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=open_turn
    )


BOMBS = [
    pytest.param(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "more than 0.5 s",
        id="nested-loops",
    ),
    pytest.param("{{ 'a' * 2**30 }}", "memory", id="repeated-text"),
    pytest.param("{{ 'a' * 2**40 }}", "memory", id="more-than-there-is"),
    pytest.param("{{ 'a' | center(2**33) }}", "memory", id="filter"),
    pytest.param("{{ 9 ** (9 ** 9) }}", "more than 0.5 s", id="power"),
    pytest.param("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion", id="recursion"),
    pytest.param("{{ 'a' * 2**24 }}", r"a text of 16,777,\d+ bytes, and at most 6", id="long"),
    pytest.param("{{ raise_exception('not for you') }}", "^not for you$", id="its-own-error"),
    pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="sandbox"),
]


@pytest.mark.parametrize("template, message", BOMBS)
def test_a_bomb_is_an_error_and_the_next_template_is_rendered(process, template, message):
    with pytest.raises(LimitError, match=message):
        process.answer(request(template))
    assert process.answer(request("{{ messages[1].content }}")) == "2"


def test_a_text_many_times_the_template_is_rendered(process):
    """The bound is on what is far longer than the messages: it must not cut a long conversation."""
    messages = [{"role": "user", "content": "é\n" * 10**6}] * 2
    text = process.answer(
        request("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", messages)
    )
    assert len(text) > 4 * 10**6


def test_a_long_template_is_not_rendered():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "a" * (2**20 + 1)
    with pytest.raises(LimitError, match="it has 1,048,577 characters, at most"):
        render_messages(tokenizer, MESSAGES, open_turn=False)


def test_a_prompt_names_the_bomb(monkeypatch, process):
    monkeypatch.setattr(chat_template, "_shared", lambda: process)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ 'a' * 2**30 }}"
    prompt = Prompt(id="p7", messages=({"role": "user", "content": "?"},))
    with pytest.raises(UserError, match=r"'p7': the tokenizer's chat template .*memory"):
        encode_prompt(tokenizer, prompt)
