"""Chat templates are rendered as by transformers, within limits of time and memory."""

from __future__ import annotations

import json

import pytest

from jetrl.errors import UserError
from jetrl.models.chat_template import Conversation, render_messages, set_template_args
from jetrl.models.tiny import character_tokenizer
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
def process(request):
    process = LimitedProcess("jetrl.models.chat_template:render", request.param, 128)
    yield process
    process.close()


@pytest.mark.parametrize("open_turn", [False, True])
def test_the_text_is_that_of_transformers(open_turn):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    text = render_messages(tokenizer, Conversation(MESSAGES), open_turn)
    assert text == tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=open_turn
    )


SLOW = [
    ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
    ("{{ 9 ** (9 ** 9) }}", "more than 1 s"),
]
LARGE_OR_WRONG = [
    ("{{ 'a' * 2**30 }}", "memory"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{{ 'a' * 2**24 }}", r"a text of more than 6\d,\d+ bytes"),
    ("{{ raise_exception('not for you') }}", "^not for you$"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
]


@pytest.mark.parametrize(
    "process, template, message",
    [(1, *row) for row in SLOW] + [(60, *row) for row in LARGE_OR_WRONG],
    indirect=["process"],
)
def test_a_bomb_is_an_error_and_the_next_template_is_rendered(process, template, message):
    with pytest.raises(LimitError, match=message):
        process.answer(request(template))
    assert process.answer(request("{{ messages[1].content }}")) == "2"


THINKS = (
    "  {%- for m in messages %}{{ m.content }}{% endfor %}\n"
    "{{ note }}{% if think %}<think>{% endif %}"
)


@pytest.mark.parametrize(
    "values", [{"think": True}, {"note": "\u00e9\U0001f600 %} '\"\\\n", "think": False}]
)
def test_arguments_are_first_lines_that_a_caller_may_overrule(values):
    plain, given = character_tokenizer(), character_tokenizer()
    plain.chat_template = given.chat_template = THINKS
    set_template_args(given, values)
    text = plain.apply_chat_template(MESSAGES[1:], tokenize=False, **values)
    assert given.apply_chat_template(MESSAGES[1:], tokenize=False) == text
    assert render_messages(given, Conversation(MESSAGES[1:]), open_turn=False) == text
    other = {"think": not values["think"], "note": "x"}
    overruled = [
        t.apply_chat_template(MESSAGES[1:], tokenize=False, **other) for t in (plain, given)
    ]
    assert overruled[0] == overruled[1]


@pytest.mark.parametrize(
    "template, name, message",
    [
        (THINKS, "thinks", r"model.template_args: 'thinks' is not read .*; did you mean think\?"),
        (THINKS, "messages", "'messages' is set by jetrl; leave it out"),
        (THINKS, "x y", "'x y' is not read by the chat template; leave it out"),
        (None, "think", "the tokenizer has no chat template"),
    ],
)
def test_arguments_that_a_template_does_not_read_are_refused(template, name, message):
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        set_template_args(tokenizer, {name: True})
