"""Small tokenizers made on the spot: one token a character, and byte-level BPE trained on text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from jetrl.errors import UserError

PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))  # printable ASCII and the newline

_CHARACTER_SPECIAL = ("<pad>", "<eos>")  # the first two tokens of a tokenizer of characters
_BPE_PAD, _BPE_START, _BPE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def character_tokenizer(alphabet: str = PRINTABLE) -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a character: <pad> is 0, <eos> is 1, then the alphabet.

    A character outside the alphabet has no token and is an error, never an unknown token that a
    model would be trained on. Decoding joins characters without spaces.

    Raises:
        UserError: An empty alphabet, one that repeats a character or has half of a character.
    """
    repeated = sorted(character for character, count in Counter(alphabet).items() if count > 1)
    if not alphabet or repeated:
        problem = f"repeats {repeated[:10]}" if repeated else "empty"
        raise UserError(f"alphabet {alphabet!r:.200}: {problem}")
    if any("\ud800" <= character <= "\udfff" for character in alphabet):
        raise UserError(f"alphabet {alphabet!r:.200}: a surrogate is no character")
    vocabulary = {token: index for index, token in enumerate((*_CHARACTER_SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def alphabet_of(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Return the alphabet of a tokenizer that `character_tokenizer` made; None for others."""
    special = list(_CHARACTER_SPECIAL)
    if tokenizer is None or tokenizer.convert_ids_to_tokens([0, 1]) != special:
        return None
    ids = tokenizer.get_vocab()
    characters = sorted(ids, key=ids.__getitem__)[len(special) :]
    return "".join(characters) if {*map(len, characters)} == {1} else None


def train_bpe_tokenizer(text_files: Sequence[str | Path], vocab_size: int) -> Qwen2Tokenizer:
    """Return a tokenizer of Qwen's kind, trained on files: byte-level BPE, each digit one token.

    Any text encodes (all 256 bytes are tokens) and decodes to itself in Unicode's NFC form.
    <|endoftext|> (0) pads, <|im_end|> (2) ends a turn, and the chat template is ChatML.

    Args:
        text_files: `.jsonl` files, of which every string value is read, or plain text.
        vocab_size: The number of tokens at most; fewer if the text has fewer pairs to merge.

    Raises:
        UserError: No files, a file that does not read (with the line), text without content, a
            vocabulary too small for the bytes.
    """
    special = [_BPE_PAD, _BPE_START, _BPE_END]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise UserError(f"vocab_size = {vocab_size}: byte-level BPE needs at least {smallest}")
    if not text_files:
        raise UserError("a BPE tokenizer is trained on text: give at least one text file")
    qwen = Qwen2Tokenizer().backend_tokenizer  # how it splits text; its vocabulary is empty
    trained = Tokenizer(models.BPE())
    trained.normalizer, trained.pre_tokenizer = qwen.normalizer, qwen.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator([text for file in text_files for text in read_texts(file)], trainer)
    model = json.loads(trained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],  # type: ignore[misc]  # its stub says str
        eos_token=_BPE_END,
        pad_token=_BPE_PAD,
        unk_token=_BPE_PAD,
        extra_special_tokens=[_BPE_START],
        clean_up_tokenization_spaces=False,
        chat_template=_CHATML,
    )


def read_texts(file: str | Path) -> list[str]:
    """Return the texts of a file: every string in every record of `.jsonl`, else all as one text.

    Raises:
        UserError: A file that does not open or is not UTF-8, a line that is not JSON, no text at
            all.
    """
    file = Path(file)
    try:
        contents = file.read_text(encoding="utf-8-sig")  # some editors put a mark in front
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason})") from None
    texts = list(_strings_of_lines(file, contents)) if file.suffix == ".jsonl" else [contents]
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UserError(f"{file}: no text in it")
    return texts


def _strings_of_lines(file: Path, contents: str) -> Iterator[str]:
    """Yield the strings of a `.jsonl` file's records."""
    for number, line in enumerate(contents.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: not JSON: {error}") from None
        for text in _strings(record):
            try:
                text.encode()
            except UnicodeEncodeError:
                raise UserError(
                    f"{file}, line {number}: {text!r:.60} holds half of a character; was a string "
                    "cut in two?"
                ) from None
            yield text


def _strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
