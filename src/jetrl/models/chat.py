"""Encode prompts, environment replies and demonstrations as token ids.

Text is encoded unchanged. The beginning-of-sequence token is prepended if the tokenizer adds one
(Llama 3 does, Qwen does not) and the text does not start with it. An end-of-sequence token is not
appended, since the model continues the sequence.

Messages are rendered by the tokenizer's chat template, which writes all special tokens and opens an
assistant turn at the end. If the last message is from the assistant, its text follows the opening,
and the model continues it. A demonstration with tool calls or reasoning is also rendered by the
template. A tag that the template opens (`<think>`) is not repeated.

Special tokens in environment replies are encoded as text, not as control tokens. Settings extend
this to prompts and demonstrations, or switch it off (`models.tokenizer`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jetrl.errors import UserError
from jetrl.models.chat_template import (
    Conversation,
    check_template_args,
    names_read,
    render_messages,
    template_of,
)
from jetrl.models.tokenizer import (
    encode,
    encode_after,
    encode_hidden,
    has_special_tokens,
    hide_special_tokens,
    shown,
    text_before,
)
from jetrl.models.vision import ImageTower
from jetrl.types import IMAGE_MARK, Example, Json, Message, PlainText, Prompt, PromptInputs, Turn
from jetrl.types.conversation import (
    LABELS,
    REASONING,
    as_message,
    as_parts,
    as_template_args,
    as_tools,
)
from jetrl.untrusted import LimitError

_MARK = "jetrl-marks-the-assistant"  # a placeholder, at which a rendered text is split
_ASKED = Conversation([{"role": "user", "content": "?"}])  # used if only a prompt's ids are known
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_READS_PARTS = re.compile(r"""['"]image['"]""")  # in a template: contents are lists of parts
_THOUGHT = re.compile(r"<([\w:]*(?:think|thought|reason)\w*)>")


class ReplyError(UserError):
    """An environment reply whose text cannot be encoded; other replies can."""


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase | None,
    prompt: Prompt,
    system_prompt: str | None = None,
    plain_text: PlainText = "replies",
    tower: ImageTower | None = None,
) -> PromptInputs:
    """Return the token ids of a prompt, at least one, with its images.

    `plain_text="all"` encodes special tokens in the prompt as text. `tower` is the model's; None:
    it reads text only. Raises UserError, with the prompt's id, if the model, the tokenizer or its
    chat template does not support the prompt.
    """
    where = f"prompt {prompt.id!r}"
    if prompt.images and tower is None:
        raise UserError(f"{where} has images, and the model reads text only: see docs/images.md")
    if prompt.images and plain_text == "all":
        raise UserError(f"{where} has images: not supported by task.special_tokens_as_text = all")
    if tokenizer is None:
        raise UserError(
            f"{where}: the model has no tokenizer; set model.tokenizer to a directory that has one"
        )
    if prompt.messages is not None:
        text, names = render_prompt(tokenizer, prompt, system_prompt, plain_text)
        if tower is not None:
            text = tower.expanded(text, prompt.images, where)
        token_ids = encode_text(tokenizer, text, where, begin=False, names=names)
    elif system_prompt is not None:
        raise UserError(f"{where} is plain text, which a system prompt cannot be put before")
    else:
        assert prompt.text is not None  # a Prompt has either text or messages
        text = prompt.text if tower is None else tower.expanded(prompt.text, prompt.images, where)
        token_ids = encode_text(tokenizer, text, where, as_text=plain_text == "all")
    if not token_ids:
        raise UserError(f"{where}: no tokens; a prompt needs at least one")
    images = () if tower is None else tower.spans(token_ids, prompt.images, where)
    return PromptInputs(tuple(token_ids), images)


def encode_text(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    where: str = "text",
    begin: bool = True,
    as_text: bool = False,
    names: Mapping[str, str] | None = None,
    before: Sequence[int] = (),
) -> list[int]:
    """Return the token ids of `text`, with a beginning-of-sequence token if the tokenizer adds one.

    Args:
        where: Name of the text in error messages.
        begin: False if the text continues a sequence: no beginning-of-sequence token.
        as_text: Encode special tokens as text.
        names: Special tokens to encode as text, keyed by placeholder in `text`.
        before: Token ids that the text continues, with `begin` False: SentencePiece's space before
            a text is left out, unless it follows a special token too.

    Raises:
        UserError: a character has no token.
    """
    try:
        if names:
            return encode_hidden(tokenizer, text, names, before=before)
        as_text = as_text and has_special_tokens(tokenizer, text)
        plain = encode_after(tokenizer, text, before, as_text=as_text)
        bos = tokenizer.bos_token_id
        if begin and bos is not None and plain[:1] != [bos]:
            opened = encode(tokenizer, text, special=True, as_text=as_text)
            return [bos, *plain] if opened[:1] == [bos] else plain
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{where}: {_lacking(tokenizer, text) or error}") from error
    return plain


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    reply: str | Mapping[str, str],
    completion: Sequence[int],
    where: str = "reply",
    as_text: bool = True,
) -> list[int]:
    """Return the token ids between two assistant turns: the end of a turn, a reply, an opening.

    A text is encoded unchanged, without an end or an opening. A message is rendered by the chat
    template. If the model has sampled the token that ends its turn, the end is not repeated.

    Args:
        reply: A text, or a message with a role.
        completion: The token ids of the assistant turn.
        where: Words for the reply in error messages.
        as_text: Encode special tokens as text, so that a reply cannot end its own turn.

    Raises:
        ReplyError: this text cannot be encoded, but others can.
        UserError: the chat template supports no reply of this role.
    """
    names: dict[str, str] = {}
    if isinstance(reply, str):
        text = reply
    else:
        message = as_message(reply, where)
        if as_text:
            message, names = hide_special_tokens(tokenizer, message)
        try:
            end, after = _reply_text(tokenizer, message, where)
        except UserError as error:
            _reply_text(tokenizer, {**message, "content": "?"}, where)  # raises if no text works
            raise ReplyError(shown(str(error), names)) from None
        # The model may have sampled the token that ends its turn. Llama 2 writes a space before it.
        drawn = tokenizer.decode(list(completion[-1:])) if completion else ""
        assert isinstance(drawn, str)
        space, found, rest = end.partition(drawn or _MARK)
        text = (rest if found and not space.strip() else end) + after
        as_text = False
    try:
        return encode_text(
            tokenizer, text, where, begin=False, as_text=as_text, names=names, before=completion
        )
    except UserError as error:
        raise ReplyError(str(error)) from None


def _reply_text(tokenizer: PreTrainedTokenizerBase, reply: Message, where: str) -> tuple[str, str]:
    """Return the rendered end of an assistant message, and the rendered reply after it."""
    own_mark = _MARK
    while any(own_mark in value for value in reply.values() if isinstance(value, str)):
        own_mark += "-x"
    end = _end_of_turn(tokenizer, _ASKED, where, own_mark)
    turn = (*_ASKED.messages, {"role": "assistant", "content": own_mark})
    followed = _render(tokenizer, Conversation([*turn, reply]), where, open_turn=True)
    _, mark, rest = followed.rpartition(own_mark)
    if end is None or not mark or not rest.startswith(end):
        raise UserError(
            f"{where}: the tokenizer's chat template does not write an assistant's message the "
            "same when another one follows; use another template, or text prompts"
        )
    after = rest.removeprefix(end)
    _check_written(reply, after, where)
    return end, after


def _end_of_turn(
    tokenizer: PreTrainedTokenizerBase, asked: Conversation, where: str, mark: str = _MARK
) -> str | None:
    """Return the rendered text after an assistant message; None if the message is left out."""
    turn = [*asked.messages, {"role": "assistant", "content": mark}]
    last = _render(tokenizer, replace(asked, messages=turn), where, open_turn=False)
    # The text before the mark may differ: Qwen3 opens a thinking block in the last message.
    _, found, end = last.rpartition(mark)
    return end if found else None


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    turns: Sequence[Turn],
    where: str = "answer",
    plain_text: PlainText = "replies",
    asked: Prompt | None = None,
) -> Example:
    """Return a demonstration as the token ids that sampling would have produced.

    A turn ends with the end-of-sequence token if the tokenizer has one, except before a text reply:
    there the turn ends with the task's stop string.

    Args:
        prompt: The token ids of the prompt.
        turns: Assistant turns with the replies of the environment.
        where: Words for the demonstration in error messages.
        plain_text: The special tokens to encode as text: those of replies, all or none.
        asked: The prompt before encoding, for the chat template of turns that are messages.

    Raises:
        UserError: the tokenizer or its chat template does not support a turn.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # If the prompt's messages are unknown, the template gets a short question instead.
    said = _ASKED if asked is None or asked.messages is None else _conversation(asked, where)
    completion: list[int] = []
    environment = []
    is_text = asked is not None and asked.messages is None
    for turn in turns:
        answer, before = turn.completion, [*prompt, *completion]
        if isinstance(answer, str) and not is_text:
            answer = _after_opening(tokenizer, answer, before, said, where)
        if isinstance(answer, str):
            own_end = [] if isinstance(turn.reply, str) else end
            text = text_before(tokenizer, answer, own_end[0] if own_end else None)
            token_ids = encode_text(
                tokenizer, text, where, begin=False, as_text=plain_text == "all", before=before
            )
            token_ids += own_end
        else:
            if is_text:
                raise UserError(
                    f"{where}: the prompt is a plain text, and the answer a message; make both "
                    "messages or both texts"
                )
            message = as_message(answer, where)
            token_ids = _encode_answer(
                tokenizer, message, said, where=where, plain_text=plain_text, tokens_before=before
            )
        completion += token_ids
        messages = [*said.messages, {"role": "assistant", "content": turn.text}]
        if turn.reply is not None:
            start = len(completion)
            as_text = plain_text != "none"
            completion += encode_reply(tokenizer, turn.reply, token_ids, where, as_text)
            environment.append((start, len(completion)))
            if isinstance(turn.reply, Mapping):
                messages.append(as_message(turn.reply, where))
        said = replace(said, messages=messages)
    return Example(prompt, completion, environment)


def _after_opening(
    tokenizer: PreTrainedTokenizerBase,
    answer: str,
    before: Sequence[int],
    said: Conversation,
    where: str,
) -> str | Message:
    """Return an answer without text that the template has already written, such as <think>.

    A space that it writes before answers is put first. If the template opens a block of reasoning
    and the answer does not close it, return a message, so that the template closes the block.
    """
    opening, space_before = _opening(tokenizer, said, where)
    if said.messages[-1]["role"] != "assistant":
        answer = space_before + answer.removeprefix(space_before)
    if not opening:
        return answer
    tail = tokenizer.decode(list(before[-2 * len(opening) :]), clean_up_tokenization_spaces=False)
    assert isinstance(tail, str)
    if not tail.endswith(opening):
        return answer
    begun = answer.lstrip()
    for tag in _TAG.finditer(opening):
        written = opening[tag.start() :]
        if begun.startswith(written.rstrip()):
            space = written[len(written.rstrip()) :]
            answer = begun.removeprefix(written.rstrip()).removeprefix(space)
            break
        if begun.startswith(tag[0]) and _THOUGHT.fullmatch(tag[0]):
            raise UserError(
                f"{where}: the chat template opens the turn with {written!r:.60}, and the answer "
                f"begins with another {tag[0]}; set model.template_args so that it opens none "
                "(such as enable_thinking=true), or take the thought out"
            )
    thought = _THOUGHT.search(opening.rstrip()[-40:])
    is_open = thought is not None and opening.rstrip().endswith(thought[0])
    if thought is None or not is_open or f"</{thought[1]}>" in answer:
        return answer
    return {"role": "assistant", "content": answer}


def _opening(tokenizer: PreTrainedTokenizerBase, said: Conversation, where: str) -> tuple[str, str]:
    """Return what a chat template opens an assistant turn with, and the spaces before an answer."""
    asked = replace(_ASKED, template_args=said.template_args)
    answered = replace(asked, messages=[*asked.messages, {"role": "assistant", "content": _MARK}])
    try:
        closed = _render(tokenizer, asked, where, open_turn=False)
        opened = _render(tokenizer, asked, where, open_turn=True)
        text = _render(tokenizer, answered, where, open_turn=False)
    except UserError:  # no template, or one without the role `user`
        return "", ""
    opening = opened.removeprefix(closed) if opened.startswith(closed) else ""
    between = text.removeprefix(opened).partition(_MARK)[0] if text.startswith(opened) else ""
    return opening, between if between.isspace() else ""


def _encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    message: Message,
    said: Conversation,
    where: str,
    plain_text: PlainText,
    tokens_before: Sequence[int],
) -> list[int]:
    """Return the token ids of a rendered assistant message, with its end.

    The end is the end-of-sequence token, unless the template writes another special token
    (<|eom_id|> in Llama 3).
    """
    if message["role"] != "assistant" or said.messages[-1]["role"] == "assistant":
        problem = "follows another one" if message["role"] == "assistant" else "is not one"
        raise UserError(f"{where}: a message of the assistant is expected, and this {problem}")
    names: dict[str, str] = {}
    whole = replace(said, messages=[*said.messages, message])
    if plain_text == "all":
        parts = (whole.messages, whole.tools)
        (messages, tools), names = hide_special_tokens(tokenizer, parts)
        whole = replace(whole, messages=messages, tools=tools)
    asked = replace(whole, messages=whole.messages[:-1])
    before = _render(tokenizer, asked, where, open_turn=True)
    text = _render(tokenizer, whole, where, open_turn=False)
    if not text.startswith(before):
        raise UserError(
            f"{where}: the tokenizer's chat template does not write this answer after the opening "
            f"that the model answers to, {before[-40:]!r}: begin it with the thought opened there "
            "(<think>...</think>), change model.template_args, or use another template"
        )
    text = text.removeprefix(before)
    _check_written(whole.messages[-1], text, where, is_answer=True)
    end = _end_of_turn(tokenizer, asked, where) or ""
    is_usual = bool(end) and text.endswith(end)
    text = text.removesuffix(end) if is_usual else text.rstrip()
    text = text_before(tokenizer, text, tokenizer.eos_token_id)
    token_ids = encode_text(tokenizer, text, where, begin=False, names=names, before=tokens_before)
    if tokenizer.eos_token_id is not None:
        has_end = not is_usual and token_ids[-1:] and token_ids[-1] in tokenizer.all_special_ids
        token_ids += [] if has_end else [tokenizer.eos_token_id]
    return token_ids


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Return the text of token ids, without special tokens; spaces are not cleaned up."""
    kind, ids = type(tokenizer), list(token_ids)
    if (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._decode is PreTrainedTokenizerFast._decode
        and kind.decode is PreTrainedTokenizerBase.decode
    ):  # transformers' wrapper takes ten times as long for a few tokens
        return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _conversation(prompt: Prompt, where: str) -> Conversation:
    """Return the messages, tools and template arguments of a prompt, after checking them."""
    return Conversation(
        [as_message(each, where, bool(prompt.images)) for each in prompt.messages or ()],
        as_tools(prompt.tools, f"{where}: tools"),
        as_template_args(prompt.template_args, f"{where}: template_args"),
    )


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    system_prompt: str | None = None,
    plain_text: PlainText = "replies",
) -> tuple[str, dict[str, str]]:
    """Return a chat prompt's text up to the opening of an assistant turn, for `encode_text`.

    Second are the names of the special tokens that are to be encoded as text, by the placeholders
    in the text. Raises the errors of `encode_prompt`.
    """
    where = f"prompt {prompt.id!r}"
    chat, names = _conversation(prompt, where), dict[str, str]()
    messages, tools = [*chat.messages], chat.tools
    if plain_text == "all":
        (messages, tools), names = hide_special_tokens(tokenizer, (messages, tools))
    if system_prompt is not None:
        if any(message["role"] == "system" for message in messages):
            raise UserError(f"{where} has a system message of its own; unset the system prompt")
        messages.insert(0, {"role": "system", "content": system_prompt})
    begun = ""
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        if more := sorted(last.keys() - {"role", "content", *LABELS}):
            raise UserError(
                f"{where}: its last message, the assistant's, has {more[0]!r}, and the model can "
                "only continue a text: end the prompt before it (task.options.demonstration names "
                "messages to imitate)"
            )
        begun = last["content"]
    text = _render(tokenizer, replace(chat, messages=messages, tools=tools), where, open_turn=True)
    # The last word may be several tags, such as DeepSeek's <|Assistant|><think>.
    end = "".join(text.split()[-1:])
    opening = [end, *(tag for tag in _TAG.findall(end)[-1:] if end.endswith(tag))]
    if twice := [word for word in opening if begun.lstrip().startswith(word)]:
        raise UserError(
            f"{where}: its last message, the assistant's, begins with {twice[0]!r}, with which "
            "the chat template opens the turn: leave it out"
        )
    if begun:  # as continue_final_message in transformers
        space = _opening(tokenizer, chat, where)[1]
        text += space + begun.removeprefix(space)
    for message in messages:
        _check_written(message, text, where)
    return text, names


def _render(
    tokenizer: PreTrainedTokenizerBase, chat: Conversation, where: str, open_turn: bool
) -> str:
    """Return a conversation rendered by the chat template; `open_turn` adds an opening."""
    if not tokenizer.chat_template:
        raise UserError(
            f"{where} is made of messages, but the tokenizer has no chat template; use an "
            "instruct model, put chat_template.jinja next to its tokenizer, or use text prompts"
        )
    chat = _as_read(tokenizer, chat, where)
    if _READS_PARTS.search(template_of(tokenizer, chat)):
        messages = [{**message, "content": as_parts(message)} for message in chat.messages]
        chat = replace(chat, messages=messages)
    arguments = [function["arguments"] for function in _functions(chat.messages)]
    # Most templates write arguments as JSON. Some concatenate them as text and need JSON text.
    forms = [chat, replace(chat, messages=_arguments_as_text(chat.messages))]
    refusal: LimitError | None = None
    for form in forms if any(arguments) else forms[:1]:
        try:
            text = render_messages(tokenizer, form, open_turn)
        except LimitError as error:
            refusal = refusal or error
            continue
        if form is forms[1] or not any(str(a) in text and a for a in arguments):  # a dict's repr
            return text
    raise UserError(f"{where}: the tokenizer's chat template refuses it: {refusal}") from refusal


def _functions(messages: Sequence[Message]) -> Iterator[Json]:
    """Yield the name and arguments of each tool call."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield {"arguments": {}, **call.get("function", call)}


def _arguments_as_text(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the arguments of tool calls as JSON text."""
    written = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls", ()):
            (function,) = _functions([{"tool_calls": [call]}])
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": text}
            calls.append({**call, "function": function} if "function" in call else function)
        written.append({**message, "tool_calls": calls} if calls else message)
    return written


def _as_read(tokenizer: PreTrainedTokenizerBase, chat: Conversation, where: str) -> Conversation:
    """Return a conversation whose reasoning has all key names that templates read.

    Raises UserError for tools, template arguments or keys of messages that the template ignores.
    """
    template = template_of(tokenizer, chat)
    read = names_read(template)
    if chat.tools and "tools" not in read:
        raise UserError(
            f"{where} has tools, which the tokenizer's chat template does not read; use another "
            'template, or leave them out (task.options.tools = "")'
        )
    # An empty argument is allowed even if the template does not read it.
    args = {k: v for k, v in chat.template_args.items() if k in read or v not in ("", [], {})}
    given = {"messages", "tools", "add_generation_prompt", *tokenizer.special_tokens_map}
    check_template_args(template, args, given, f"{where}: its template_args")
    messages = []
    for message in chat.messages:
        thoughts = next((message[key] for key in REASONING if message.get(key)), None)
        for key in message.keys() - {"role", "content", *LABELS}:
            known = read & {*REASONING} if key in REASONING else key in read
            if not known and message[key] not in ("", [], {}):
                raise UserError(
                    f"{where}: the message of role {message['role']!r} has {key!r}, which the "
                    "tokenizer's chat template does not read; use another template, or take it out"
                )
        # As in transformers: gpt-oss's template reads `thinking`, Qwen3's `reasoning_content`.
        named = {"thinking": thoughts, **message, "reasoning_content": thoughts}
        messages.append(named if thoughts else message)
    return replace(chat, messages=messages, template_args=args)


def _check_written(message: Message, text: str, where: str, is_answer: bool = False) -> None:
    """Raise a UserError if a rendered text lacks a message; some templates omit unknown roles.

    The reasoning in earlier assistant messages may be omitted.
    """
    role = f"message of role {message['role']!r}"
    said = [(f"tool_calls of the {role}", call["name"]) for call in _functions([message])]
    content = message["content"] or ""
    if is_answer:  # a template may have its own tags for reasoning
        said += [(f"the {role}", part) for part in re.split(r"</?\w+>", content)]
        said += [(f"{key} of the {role}", message.get(key) or "") for key in REASONING]
    elif message["role"] != "assistant":
        said += [(f"the {role}", part) for part in content.split(IMAGE_MARK)]
    for what, value in said:
        part = value.strip()
        if part not in text and json.dumps(part, ensure_ascii=False)[1:-1] not in text:
            raise UserError(
                f"{where}: the tokenizer's chat template leaves out {what}: {part!r:.60}; give it "
                "a role that the template knows, or use another template"
            )


def _lacking(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return an error message that names characters without a token; "" if there are none."""
    halves = sorted({repr(half) for half in text if "\ud800" <= half <= "\udfff"})
    if halves:
        return f"{' '.join(halves[:10])} is half of a character (a surrogate), which is no text"
    vocabulary = tokenizer.get_vocab()
    characters = sorted({character for character in text if character not in vocabulary})
    lacking = " ".join(repr(character) for character in characters[:10])
    return f"the tokenizer (model.tokenizer) has no token for {lacking}" if lacking else ""
