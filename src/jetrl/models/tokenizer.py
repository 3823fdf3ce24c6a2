"""A model's tokenizer: bounds on its files, text to tokens, and special tokens as plain text.

Another library rewrites a text stage by stage, in this process. A stage at most doubles a text,
unless the file brings a text or a list that it writes; so the file bounds the product before the
library reads it. `encode`, which makes all tokens, refuses a long text that the file's own texts
could make much longer, and bounds the result again.

A tokenizer makes a control token of a special token's name anywhere in a text, so a tool's reply
could end the environment's turn and speak as the user or the model. Such text is encoded with
`split_special_tokens`. A chat template's text needs its own control tokens: there each name in a
message's content is a placeholder while the template is rendered.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jetrl.errors import UserError
from jetrl.files import MOST_BYTES, MOST_TEXT, read_json, shown_value
from jetrl.types import Json

MOST_TEMPLATE = 2**20
"""The maximum length of a chat template in characters; real models' have up to 30,000."""
MOST_GROWTH = 4096
"""The maximum factor by which a tokenizer's stages may lengthen a text, by their bound."""
_MUCH = 64  # times as long by the files' own texts; tokenizers in use have up to about 25
_MOST_LENGTHENED = 2**20  # characters of a text that becomes so much longer
_WRITE = ("ByteLevel", "Metaspace", "Precompiled", "Prepend", "Replace", "TemplateProcessing")
_NFKC = 18.0  # characters that one becomes (U+FDFA), also by the charsmap of SentencePiece
_LONGER = "jetrl_longer"  # the attribute of a tokenizer that has what the check returned
_MOST_TOKENS = 64  # per character; one character of Unicode (U+FDFA) becomes 33 bytes under NFKC
_REPLACEMENT = "\ufffd"  # of bytes that are not a whole character
_MOST_TOKEN = 2**14  # characters of one token
_MOST_VOCABULARY = 2**28  # bytes of a file; tokenizer.json of the largest vocabularies has 40 MiB
_ANCHORS = "\na0|~#%"  # to be put before a text, with which most of them make no token
# The library's space, which is Unicode's; Python's has the separators \x1c to \x1f too.
_SPACE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f")
_SMALL = (
    *("added_tokens.json", "chat_template.json", "config.json", "generation_config.json"),
    *("special_tokens_map.json", "tokenizer_config.json"),
)
AnyValue = TypeVar("AnyValue")
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken")


def check_tokenizer_files(directory: Path) -> tuple[float, str]:
    """Check the files of a tokenizer's directory before a library reads them.

    Returns how many times as long their own texts may make a text, and the key that says so.
    """
    for entry in sorted((*directory.iterdir(), *directory.glob("additional_chat_templates/*"))):
        if entry.exists() and not entry.is_file() and not entry.is_dir():
            raise UserError(f"{entry}: not a regular file (a pipe or a device)")
        most = MOST_BYTES if entry.name in _SMALL else _MOST_VOCABULARY
        most = MOST_TEMPLATE if entry.suffix == ".jinja" else most
        if entry.suffix in _READ and entry.is_file() and entry.stat().st_size > most:
            raise UserError(f"{entry}: larger than {most / 2**20:g} MiB, the most that is read")
    file = directory / "tokenizer.json"
    if not file.exists():
        return 1.0, ""
    longer, where = 1.0, ""
    try:
        contents = read_json(file, _MOST_VOCABULARY)
    except UserError as error:
        raise UserError(f"{directory}: the tokenizer does not load: {error}") from None
    if not isinstance(contents, dict):
        raise UserError(f"{file}: a JSON object is expected")
    encoding = ("normalizer", "pre_tokenizer", "post_processor")
    for keys, most in ((encoding, MOST_GROWTH), (("decoder",), _MUCH)):
        growth = 1.0
        for key in keys:
            try:
                stages = [(stage["type"], _growth(stage)) for stage in _stages(contents.get(key))]
            except (TypeError, KeyError, AttributeError, ValueError):
                value = shown_value(contents.get(key))
                raise UserError(f"{file}: {key} = {value}: not a tokenizer's") from None
            # Charsmaps in use make NFKC, which a second one leaves as it is.
            again = [kind for kind, _ in stages].count("Precompiled") - 1
            stages += [("Precompiled", _NFKC)] * again
            growth *= math.prod(factor for _, factor in stages)
            if growth > most:
                raise UserError(
                    f"{file}: {key}: it could make a text more than {most} times as long"
                )
            if key in encoding:
                longer *= math.prod(factor for kind, factor in stages if kind in _WRITE)
                if longer > _MUCH and not where:
                    where = f"{file}: {key}"
    return longer, where


def _growth(stage: Json) -> float:
    """Return an upper bound on the factor by which a stage lengthens a text."""
    if stage["type"] == "Replace":
        content, pattern = stage["content"], stage["pattern"]
        if "String" in pattern:
            return max(1.01, len(content) / max(1, len(pattern["String"])))
        return 1.0 + len(content)  # a pattern may match between any two characters
    if stage["type"] == "TemplateProcessing":  # the text and special tokens, as often as it says
        ids = [len(token["ids"]) for token in stage.get("special_tokens", {}).values()]
        return len(stage["single"]) * max([1.0, *ids])
    if stage["type"] == "Precompiled":  # a trie after its size, then texts that end with NUL
        charsmap = base64.b64decode(stage["precompiled_charsmap"] or "", validate=True)
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
        longest = max(len(text.decode(errors="replace")) for text in texts)
        return 2.0 if longest <= _NFKC else longest
    return max(2.0, 1.0 + len(stage.get("prepend", "")))


def _stages(part: Any) -> Iterator[Json]:
    """Yield the stages of a part in no order, those of nested sequences too."""
    left = [part] if part is not None else []
    while left:
        stage = left.pop()
        if not isinstance(stage.get("type"), str):
            raise TypeError("a stage without a type")
        if stage["type"] == "Sequence":
            left += chain.from_iterable(v for v in stage.values() if isinstance(v, list))
        else:
            yield stage


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, directory: Path, longer: tuple[float, str]
) -> None:
    """Raise a UserError if a token is too long; keep what `check_tokenizer_files` returned."""
    setattr(tokenizer, _LONGER, longer)
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > _MOST_TOKEN:
        raise UserError(f"{directory}: the tokenizer has a token of {longest:,} characters")


def encode(
    tokenizer: PreTrainedTokenizerBase, text: str, special: bool = False, as_text: bool = False
) -> list[int]:
    """Return the token ids of a text: the one call of a tokenizer's own `encode`.

    `special` adds the tokenizer's special tokens, such as one at the beginning; `as_text` encodes
    those in the text as text.
    """
    if len(text) > MOST_TEXT:
        raise UserError(f"a text of {len(text):,} characters, and at most {MOST_TEXT:,} are read")
    longer, where = getattr(tokenizer, _LONGER, (1.0, ""))
    if longer > _MUCH and longer * len(text) > _MOST_LENGTHENED:
        raise UserError(
            f"{where} could make a text of {len(text):,} characters {longer:,.0f} times as long; "
            "shorten the text, or remove the stage that lengthens it from that file"
        )
    split = {"split_special_tokens": True} if as_text else {}
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=special, **split)
    if len(token_ids) > _MOST_TOKENS * (1 + len(text)):
        raise UserError(
            f"the tokenizer makes {len(token_ids):,} tokens of {len(text):,} characters; is its "
            "directory damaged?"
        )
    return token_ids


def encode_after(
    tokenizer: PreTrainedTokenizerBase, text: str, before: Sequence[int], as_text: bool = False
) -> list[int]:
    """Return the token ids of a text that continues other tokens, if there are any.

    SentencePiece's space before a text is left out, unless it follows a special token too. Space
    that the token before takes with it is left out, as by the tokenizers of Phi-3 and Phi-4.
    """
    if before and text[:1].isspace() and _takes_space(tokenizer, before[-1], "rstrip"):
        text = text.lstrip(_SPACE)
    token_ids = encode(tokenizer, text, as_text=as_text)
    if not before or not token_ids:
        return token_ids
    if not str(tokenizer.convert_ids_to_tokens(token_ids[0])).startswith("\u2581"):
        return token_ids
    special = tokenizer.added_tokens_decoder.get(before[-1])
    if special and encode(tokenizer, f"{special}{text[0]}")[1:] == encode(tokenizer, text[0]):
        return token_ids
    # An anchor that makes no token together with the text: its own tokens begin those of both.
    for anchor in ("a" if text[0].isspace() else "\n", *_ANCHORS):
        begun, whole = encode(tokenizer, anchor), encode(tokenizer, anchor + text, as_text=as_text)
        if whole[: len(begun)] == begun:
            return whole[len(begun) :]
    return token_ids


def text_before(tokenizer: PreTrainedTokenizerBase, text: str, token_id: int | None) -> str:
    """Return a text without space at its end that the token after it, if any, takes with it."""
    if token_id is None or not text[-1:].isspace():
        return text
    return text.rstrip(_SPACE) if _takes_space(tokenizer, token_id, "lstrip") else text


def _takes_space(tokenizer: PreTrainedTokenizerBase, token_id: int, side: str) -> bool:
    added = tokenizer.added_tokens_decoder.get(token_id)
    return added is not None and getattr(added, side)


_PLACEHOLDER = "jetrlplaceholder"  # letters and digits, which templates leave as they are


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return the text of a token in the middle of a sequence.

    SentencePiece's decoders leave out a space at the beginning.
    """
    text = str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
    piece = str(tokenizer.convert_ids_to_tokens(token_id)).replace("<0x20>", "\u2581")
    spaces = len(piece) - len(piece.lstrip("\u2581"))
    return " " * spaces + text.lstrip(" ") if spaces else text


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes | None:
    """Return a token as UTF-8, also if it is a part of a character; None if its bytes are unknown.

    Files have such a part as one of GPT-2's 256 characters per byte, or as `<0xE2>`.
    """
    text = token_text(tokenizer, token_id)
    if _REPLACEMENT not in text:
        return text.encode()
    if byte := byte_of(tokenizer, token_id):
        return byte
    piece = str(tokenizer.convert_ids_to_tokens(token_id))
    of_character = {character: byte for byte, character in bytes_to_unicode().items()}
    if of_character.keys() >= set(piece):
        return bytes(of_character[character] for character in piece)
    return text.encode() if _REPLACEMENT in piece else None


def byte_of(tokenizer: PreTrainedTokenizerBase, token_id: int) -> bytes | None:
    """Return the byte of a token such as `<0xE2>`, None of another one."""
    byte = re.fullmatch("<0x([0-9A-F]{2})>", str(tokenizer.convert_ids_to_tokens(token_id)))
    return bytes.fromhex(byte[1]) if byte else None


def has_special_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> bool:
    """Return whether the name of a special token stands in a text."""
    return any(name in text for name in _names(tokenizer))


def hide_special_tokens(
    tokenizer: PreTrainedTokenizerBase, value: AnyValue
) -> tuple[AnyValue, dict[str, str]]:
    """Return messages or another JSON value with placeholders for special tokens' names.

    The names by their placeholders come second.
    """
    placeholder = _PLACEHOLDER
    while placeholder in str(value):
        placeholder += "x"
    names = {f"{placeholder}{number}end": name for number, name in enumerate(_names(tokenizer))}
    placeholders = {name: placeholder for placeholder, name in names.items()}
    pattern = _any_of([*placeholders])

    def hide(part: Any) -> Any:
        if isinstance(part, str):
            return pattern.sub(lambda name: placeholders[name[0]], part)
        if isinstance(part, Mapping):
            return {hide(key): hide(item) for key, item in part.items()}
        return [hide(item) for item in part] if isinstance(part, list | tuple) else part

    hidden = hide(value)
    written = str(hidden)
    return hidden, {key: name for key, name in names.items() if key in written}


def shown(text: str, names: Mapping[str, str]) -> str:
    """Return a text with names in place of their placeholders."""
    for placeholder, name in names.items():
        text = text.replace(placeholder, name)
    return text


def encode_hidden(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    names: Mapping[str, str],
    before: Sequence[int] = (),
) -> list[int]:
    """Return the token ids of a rendered template, with the placeholders' names encoded as text.

    `before` are the token ids that the text continues.
    """
    token_ids: list[int] = []
    parts = _any_of(_names(tokenizer)).split(text)
    # Special tokens between the parts, None after the last.
    controls = [tokenizer.convert_tokens_to_ids(name) for name in parts[1::2]]
    for part, control in zip(parts[::2], [*controls, None], strict=True):
        assert not isinstance(control, list), "a name is one token"
        if part := text_before(tokenizer, part, control):
            written = [*before, *token_ids]
            token_ids += encode_after(tokenizer, shown(part, names), written, as_text=True)
        token_ids += [] if control is None else [control]
    return token_ids


def _names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the names of a tokenizer's special tokens, the longest first."""
    added = tokenizer.added_tokens_decoder.values()
    names = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    return sorted((name for name in names if name), key=lambda name: (-len(name), name))


def _any_of(names: list[str]) -> re.Pattern[str]:
    """Return a pattern of one group that matches each of the names, and nothing without names."""
    return re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
