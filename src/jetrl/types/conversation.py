"""Chat messages, tools and template arguments as rows and tasks give them, in one checked form.

A message has a role and a content, both text; `<image>` in it is the place of an image. A message
of the assistant may have `tool_calls` (its content may then be None) and `reasoning_content`.
Nothing is dropped without a word: `models.chat` refuses a key that the model's chat template does
not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jetrl.errors import UserError
from jetrl.types import IMAGE_MARK, Json, Message, Turn

LABELS = ("id", "name", "tool_call_id")
"""Keys that only label a message: a template may ignore them."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's thoughts. A template that reads one of them gets them by that name."""
_MEDIA = re.compile(r"(image|picture|video|audio)s?(_\d+)?|multi_modal_(data|inputs)")
_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{(?=.*['"]role['"]\s*:)(?=.*['"]content['"]\s*:)""", re.S)
_NOT_READ = "only text, and images in columns `image` or `images`, are read"


def are_messages(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, Mapping) and "role" in item and {"content", "tool_calls"} & item.keys()
        for item in value or [None]
    )


def as_messages(value: Any, field: str, where: str) -> Any:
    """Parse a text that is the JSON of a list of messages; return other values unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    parsed = _parsed(value)
    if are_messages(parsed):
        return parsed
    if _LIKE_MESSAGES.match(value):
        raise UserError(
            f"{where}: field {field!r} is the text {value!r:.60}, which looks like messages and "
            "is not the JSON of a list of them, each with role and content; store a list"
        )
    return value


def as_turns(messages: Sequence[Message]) -> list[Turn] | None:
    """Return a completion's messages as turns; None unless the assistant has every other one."""
    roles = [message["role"] == "assistant" for message in messages]
    if not roles or roles != [number % 2 == 0 for number in range(len(roles))] or not roles[-1]:
        return None
    replies = [*messages[1::2], None]
    return [
        Turn(message if message.keys() & {"tool_calls", *REASONING} else message["content"], reply)
        for message, reply in zip(messages[::2], replies, strict=True)
    ]


def as_message(item: object, where: str, images: bool = False) -> Json:
    """Return a message without keys that have no value, tool calls with arguments as objects.

    OpenAI's arguments are JSON text, which a template would escape once more. `images`: whether the
    content may have places of images. An error begins with `where`.
    """
    if not isinstance(item, Mapping) or not isinstance(item.get("role"), str):
        raise UserError(f"{where}: message {item!r:.60} needs a role and a content, both text")
    message = {str(key): value for key, value in item.items() if value is not None}
    content = _text_of(item.get("content"), where, images)
    calls = message.pop("tool_calls", None) or ()
    if content is None and not calls:
        raise UserError(f"{where}: message {item!r:.60} needs a role and a content, both text")
    if wrong := [key for key in REASONING if not isinstance(message.get(key, ""), str)]:
        raise UserError(f"{where}: {wrong[0]} is {message[wrong[0]]!r:.60}, not a text")
    message["content"] = content
    if calls:
        calls = calls if isinstance(calls, list | tuple) else [calls]
        message["tool_calls"] = [_tool_call(call, where) for call in calls]
    return message


def _text_of(content: object, where: str, images: bool) -> str | None:
    """Return a message's content as text; refuse sounds and videos, and images unless `images`."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
    if other := [kind for kind in kinds if kind not in (None, "text", "image")]:
        raise UserError(f"{where}: a message has a part of type {other[0]!r}: {_NOT_READ}")
    if "image" in kinds and not images:
        raise UserError(
            f"{where}: a message has a part of type 'image', and no image comes with it"
        )
    if "image" in kinds and None not in kinds:
        return "".join(_part_text(part, where) for part in parts)
    if len(parts) == 1 and kinds[0] == "text" and isinstance(parts[0].get("text"), str):
        return str(parts[0]["text"])
    raise UserError(f"{where}: a message's content is {content!r:.60}; write it as one text")


def _part_text(part: Mapping[str, Any], where: str) -> str:
    """Return the text of a part of a message, of an image its place."""
    own = {key: value for key, value in part.items() if value is not None and key != "type"}
    if part["type"] == "image" and not own.keys() - {"index"}:
        return IMAGE_MARK
    text = own.get("text")
    if part["type"] == "text" and isinstance(text, str):
        return text
    raise UserError(
        f"{where}: a message has the part {part!r:.60}; give {{'type': 'image'}}, with the image "
        "itself in Prompt.images"
    )


def as_parts(message: Message) -> list[Json]:
    """Return a message's content as parts, for chat templates of models with images."""
    text, *rest = str(message["content"] or "").split(IMAGE_MARK)
    parts: list[Json] = [{"type": "text", "text": text}]
    for text in rest:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return [part for part in parts if part.get("text", IMAGE_MARK)]


def _tool_call(call: object, where: str) -> Json:
    """Return a tool call with its arguments as an object."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: tool_calls has {call!r:.80}; a call needs a function's name")
    assert isinstance(call, Mapping)
    if function.get("arguments") is None:
        return dict(call)
    arguments = _parsed(function["arguments"] or {})  # some models write "" for none
    if not isinstance(arguments, Mapping):
        raise UserError(
            f"{where}: the arguments of tool_calls, {function['name']!r}, are {arguments!r:.60}; "
            "give an object, or its JSON"
        )
    function = {**function, "arguments": dict(arguments)}
    return {**call, "function": function} if "function" in call else function


def as_tools(value: object, where: str) -> tuple[Json, ...]:
    """Return the tools of a prompt, given as a list of JSON schemas or as its JSON."""
    tools = _parsed(value or ())
    if isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools):
        return tuple(tools)
    raise UserError(
        f"{where}: {value!r:.60} is not a list of JSON schemas "
        "(transformers.utils.get_json_schema makes one of a function)"
    )


def as_template_args(value: object, where: str) -> Json:
    """Return a prompt's own arguments of the chat template, given as an object or as its JSON."""
    arguments = _parsed(value or {})
    if isinstance(arguments, Mapping):
        return {str(name): item for name, item in arguments.items() if item is not None}
    raise UserError(f"{where}: {value!r:.60} is not an object of chat-template arguments")


def _parsed(value: Any) -> Any:
    """Return the value of a text that is JSON, and other values unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def refuse_media(row: Message, where: str) -> None:
    """Raise if a row has a column of sounds or videos, or of images under another name."""
    for column, value in row.items():
        if (
            column in ("image", "images")
            or value is None
            or (isinstance(value, str | list | tuple | Mapping) and not value)
        ):
            continue
        first = value[0] if isinstance(value, list | tuple) else value
        # `datasets` stores a picture so, and decodes it with PIL.
        stored = isinstance(first, Mapping) and first.keys() == {"bytes", "path"}
        if stored or type(first).__module__.startswith("PIL.") or _MEDIA.fullmatch(column):
            raise UserError(
                f"{where}: column {column!r} has pictures, sounds or videos, and {_NOT_READ}: "
                "drop the column, or such rows"
            )


def shown_message(message: Message) -> str:
    """Return a message as one text for people: its role, its content and its tool calls."""
    calls = message.get("tool_calls")
    called = f" {json.dumps(calls, ensure_ascii=False, default=str)}" if calls else ""
    return f"{message.get('role', '')}: {message.get('content') or ''}{called}"


def without_nulls(value: Any) -> Any:
    """Return nested values without keys that are null: Arrow gives each object the keys of all."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
