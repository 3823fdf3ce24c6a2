"""Prompts become token ids: text unchanged, messages by the template, every refusal by name."""

from __future__ import annotations

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models.chat import decode, encode_prompt, encode_reply, encode_text, encode_turns
from jetrl.models.tiny import character_tokenizer
from jetrl.types import Prompt, Turn

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '[' + m['role'] + ':' + m['content'] + ']' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant:' }}{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture
def chat(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def wrapping(tokenizer: PreTrainedTokenizerFast, single: str) -> PreTrainedTokenizerFast:
    """The tokenizer with `<pad>` in the part of a BOS token, adding special tokens as `single`."""
    special = [("<pad>", 0), ("<eos>", 1)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=special
    )
    tokenizer.bos_token = "<pad>"
    return tokenizer


def says(*turns: tuple[str, str]) -> Prompt:
    return Prompt("p1", messages=tuple({"role": role, "content": text} for role, text in turns))


def test_text_is_given_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    text = "  12 + 7 = \n"
    token_ids = encode_prompt(tokenizer, Prompt("p1", text=text))
    assert token_ids == [tokenizer.get_vocab()[character] for character in text]
    assert decode(tokenizer, token_ids) == text


@pytest.mark.parametrize(
    "single, begins",
    [("<pad> $A", True), ("<pad> $A <eos>", True), ("$A <eos>", False), ("$A", False)],
)
def test_only_the_beginning_token_is_added(
    tokenizer: PreTrainedTokenizerFast, single: str, begins: bool
) -> None:
    plain = tokenizer.encode("12", add_special_tokens=False)
    wrapping(tokenizer, single)
    begun = [0, *plain] if begins else plain
    assert encode_prompt(tokenizer, Prompt("p1", text="12")) == begun
    assert encode_prompt(tokenizer, Prompt("p1", text="<pad>12")) == [0, *plain]
    assert encode_text(tokenizer, "12", begin=False) == plain


def test_messages_go_through_the_template_which_writes_all_special_tokens(
    chat: PreTrainedTokenizerFast,
) -> None:
    wrapping(chat, "<pad> $A <eos>")
    token_ids = encode_prompt(chat, says(("user", "2+2?")))
    assert chat.decode(token_ids) == "[user:2+2?][assistant:"


def test_system_prompt_comes_first(chat: PreTrainedTokenizerFast) -> None:
    token_ids = encode_prompt(chat, says(("user", "2+2?")), system_prompt="Be brief.")
    assert decode(chat, token_ids) == "[system:Be brief.][user:2+2?][assistant:"


def test_the_prompt_is_not_changed(chat: PreTrainedTokenizerFast) -> None:
    prompt = says(("user", "hi"))
    encode_prompt(chat, prompt, system_prompt="x")
    assert prompt == says(("user", "hi"))


def test_decode_leaves_special_tokens_out(tokenizer: PreTrainedTokenizerFast) -> None:
    assert decode(tokenizer, [*tokenizer.encode("1 ,2"), 1, 0]) == "1 ,2"


def test_no_tokenizer() -> None:
    with pytest.raises(UserError, match=r"'p1': the model has no tokenizer.*model\.tokenizer"):
        encode_prompt(None, Prompt("p1", text="1"))


def test_no_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match=r"'p1'.*no chat template; use an instruct model"):
        encode_prompt(tokenizer, says(("user", "hi")))


@pytest.mark.parametrize(
    "template, message",
    [(TEMPLATE, "no tools"), ("{% if %}", "Expected"), ("{{ 1 / 0 }}", "division")],
    ids=["raises", "syntax", "crashes"],
)
def test_failing_template(chat: PreTrainedTokenizerFast, template: str, message: str) -> None:
    chat.chat_template = template
    with pytest.raises(UserError, match=f"'p1': the tokenizer's chat template.*{message}"):
        encode_prompt(chat, says(("tool", "x")))


KNOWN_ROLES = (
    "{% for m in messages %}"
    "{% if m['role'] in ('user', 'tool') %}{{ '[' + m['content']|trim + ']' }}"
    "{% elif m['role'] == 'assistant' %}{{ '(' + m['content'].split('>')[-1] + ')' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '(' }}{% endif %}"
)


def test_a_message_that_the_template_leaves_out_is_named(chat: PreTrainedTokenizerFast) -> None:
    """Qwen's template writes nothing for a role that it does not know."""
    chat.chat_template = KNOWN_ROLES
    for role in ("human", "system"):
        with pytest.raises(UserError, match=f"'p1': .*leaves out the message of role '{role}'"):
            encode_prompt(chat, says((role, "2+2?"), ("user", "3+3?")))
    whole = says(("user", " 2+2? "), ("assistant", "<4=2+2>4"), ("user", " "), ("tool", "5"))
    assert decode(chat, encode_prompt(chat, whole)) == "[2+2?](4)[][5]("
    with pytest.raises(UserError, match=r"reply: .*leaves out the message of role 'environment'"):
        encode_reply(chat, {"role": "environment", "content": "5"}, [7])
    chat.chat_template = KNOWN_ROLES.replace("m['content']|trim", "m['content']|tojson")
    assert '["a\\nb"]' in decode(chat, encode_reply(chat, {"role": "tool", "content": "a\nb"}, [7]))


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": 3}])
def test_malformed_message(chat: PreTrainedTokenizerFast, message: dict[str, str]) -> None:
    with pytest.raises(UserError, match="needs a role and a content"):
        encode_prompt(chat, Prompt("p1", messages=(message,)))


def test_system_prompt_that_cannot_be_put(chat: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="plain text, which a system prompt"):
        encode_prompt(chat, Prompt("p1", text="1"), system_prompt="x")
    with pytest.raises(UserError, match="system message of its own"):
        encode_prompt(chat, says(("system", "a"), ("user", "b")), system_prompt="x")


def test_characters_without_a_token_are_named(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="'p1': the tokenizer has no token for 'é' '日'"):
        encode_prompt(tokenizer, Prompt("p1", text="日 1 é 2 é"))


def test_empty_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(UserError, match="'p1': no tokens"):
        encode_prompt(tokenizer, Prompt("p1", text=""))


QWEN = (
    "{% for m in messages %}{{ '<im>' + m['role'] + '|' + m['content'] + '<eos>.' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<im>assistant|' }}{% endif %}"
)


def test_a_text_reply_is_what_follows(tokenizer: PreTrainedTokenizerFast) -> None:
    assert decode(tokenizer, encode_reply(tokenizer, "=72", completion=[5, 1])) == "=72"


def test_a_message_continues_the_conversation_as_the_template_writes_it(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = QWEN
    prompt = encode_prompt(tokenizer, says(("user", "2+3?")))
    said = [*encode_text(tokenizer, "call(2+3)", begin=False), tokenizer.eos_token_id]
    reply = encode_reply(tokenizer, {"role": "tool", "content": "5"}, said)
    whole = says(("user", "2+3?"), ("assistant", "call(2+3)"), ("tool", "5"))
    assert prompt + said + reply == encode_prompt(tokenizer, whole)
    cut = said[:-1]  # a stop string ended the turn: the template's end token is not there yet
    longer = encode_reply(tokenizer, {"role": "tool", "content": "5"}, cut)
    assert prompt + cut + longer == encode_prompt(tokenizer, whole)


def test_a_template_may_write_an_assistant_otherwise_once_it_is_answered(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """The template of Qwen3 opens a block of thought in the last message alone.

    What stands before the assistant's words is in the sequence already; what follows them is what
    matters.
    """
    thinks = "{{ '(think)' if loop.last and m['role'] == 'assistant' else '' }}"
    tokenizer.chat_template = QWEN.replace("+ m['content']", "}}" + thinks + "{{ m['content']")
    prompt = encode_prompt(tokenizer, says(("user", "2+3?")))
    said = [*encode_text(tokenizer, "call(2+3)", begin=False), tokenizer.eos_token_id]
    reply = encode_reply(tokenizer, {"role": "tool", "content": "5"}, said)
    whole = says(("user", "2+3?"), ("assistant", "call(2+3)"), ("tool", "5"))
    assert prompt + said + reply == encode_prompt(tokenizer, whole)


def test_a_worked_answer_of_turns_is_the_sequence_that_sampling_gives(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    eos = tokenizer.eos_token_id
    plain = encode_turns(tokenizer, [7], [Turn("<<2+3>>", "=5"), Turn("5")])
    assert plain.environment == [(7, 9)]
    assert plain.completion[-1] == eos
    assert decode(tokenizer, plain.completion) == "<<2+3>>=55"
    assert eos not in plain.completion[:-1]
    tokenizer.chat_template = QWEN
    turns = [Turn("call(2+3)", {"role": "tool", "content": "5"}), Turn("it is 5")]
    prompt = encode_prompt(tokenizer, says(("user", "2+3?")))
    example = encode_turns(tokenizer, prompt, turns)
    whole = says(("user", "2+3?"), ("assistant", "call(2+3)"), ("tool", "5"))
    wanted = encode_prompt(tokenizer, whole) + encode_text(tokenizer, "it is 5", begin=False)
    assert [*example.prompt, *example.completion] == [*wanted, eos]
    ((start, end),) = example.environment
    assert example.completion[start - 1] == eos
    assert decode(tokenizer, example.completion[end:]) == "it is 5"


@pytest.mark.parametrize(
    "template, message",
    [
        (None, "the tool's answer is made of messages, but the tokenizer has no chat template"),
        (TEMPLATE, "the tool's answer: the tokenizer's chat template refuses it: no tools"),
        ("{{ messages[1].content }}{{ 3 - messages|length }}", "does not write an assistant's"),
        ("{{ messages[-1].content }}", "does not write an assistant's message"),
        ("{{ messages|length }}{{ messages[1].content }}", "leaves out the message of role 'tool'"),
    ],
)
def test_replies_that_cannot_be_written(
    tokenizer: PreTrainedTokenizerFast, template: str | None, message: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=message):
        encode_reply(tokenizer, {"role": "tool", "content": "5"}, [7], "the tool's answer")
