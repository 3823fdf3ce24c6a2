"""Stop rules: ids, length, and strings that do not respect token borders."""

from __future__ import annotations

import random

import pytest

from jetrl.rollout.sequence import RunningSequence, sequence_keys
from jetrl.rollout.stopping import MAX_WINDOW, StopRules
from jetrl.types import PromptInputs


def decode_pieces(pieces):
    return lambda ids: "".join(pieces[i] for i in ids)


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def run(rules, tokens):
    """Feeds tokens until the sequence ends."""
    sequence = RunningSequence(index=0, prompt=PromptInputs((1,)), key=0, rules=rules)
    for token in tokens:
        sequence.append(token, -1.0)
        if sequence.finished:
            break
    return sequence


@pytest.mark.parametrize(
    "pieces, stop, text, num_tokens",
    [
        (["ab", "cd", "ef"], "c", "ab", 2),
        (["ab", "cd", "ef"], "bcde", "a", 3),
        (["a", "b", "a", "b", "c"], "abc", "ab", 5),
        (["ab", "cd", "ef"], "abcdef", "", 3),
        (["xSTOPy", "z"], "STOP", "x", 1),
    ],
    ids=["inside a token", "across three tokens", "after a false start", "all", "one token"],
)
def test_stop_string_across_tokens(pieces, stop, text, num_tokens):
    rules = StopRules(99, strings=(stop,), decode=decode_pieces(pieces))
    sequence = run(rules, range(len(pieces)))
    assert sequence.text == text
    assert len(sequence.generated) == num_tokens, "tokens that spelt the string stay"
    assert sequence.finish_reason == "stop"


@pytest.mark.parametrize("tokens", [[0, 1, 2, 3], [4, 0, 4, 1, 4, 4, 2, 3]])
def test_context_dependent_decoding(tokens):
    """A decoder like sentencepiece's drops the space at the very start of a text."""
    pieces = [" the", " end", " is", " near", ""]
    rules = StopRules(9, strings=("end is",), decode=lambda ids: decode_pieces(pieces)(ids)[1:])
    sequence = run(rules, tokens)
    assert (sequence.text, sequence.generated) == ("the ", tokens[:-1])


def test_invalid_bytes_do_not_hide_a_stop_string():
    tokens = [0xFF] * (2 * MAX_WINDOW + 3) + list(b"END")
    sequence = run(StopRules(999, strings=("END",), decode=decode_bytes), tokens)
    assert sequence.finish_reason == "stop"
    assert sequence.generated == tokens


def decode_fallback(ids):
    """Decode as a byte-fallback tokenizer: a run of bytes that is not UTF-8 is a mark per byte."""
    run, text = bytearray(), ""
    for token in [*ids, ord("x")]:
        if token >= 0x80:
            run.append(token)
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += "\ufffd" * len(run)
        run, text = bytearray(), text + chr(token)
    return text[:-1]


@pytest.mark.parametrize("bad", [b"\xff", b"\xe6\xbc", b"\xe6"])
def test_text_before_a_stop_string_is_decoded_as_a_whole(bad):
    """A bad byte also changes the text of the whole characters before it."""
    tokens = list("a漢漢".encode() + bad + b"END")
    text = run(StopRules(999, strings=("END",), decode=decode_fallback), tokens).text
    assert text == "a" + "\ufffd" * (6 + len(bad))


@pytest.mark.parametrize("seed", range(3))
def test_incremental_text_is_the_text(seed):
    """Against decoding everything after each token, on random text of 1 to 4 byte characters."""
    rng = random.Random(seed)
    text = "".join(rng.choice("ab é→🙂") for _ in range(60))
    at = rng.randrange(len(text) - 3)
    stop = text[at : at + rng.randint(1, 3)]
    sequence = run(StopRules(999, strings=(stop,), decode=decode_bytes), list(text.encode()))
    assert sequence.text == text[: text.index(stop)]
    assert bytes(sequence.generated).decode() == text[: text.index(stop) + len(stop)]


def test_keys_follow_the_content_and_not_the_call():
    a, b = PromptInputs((1, 2, 3)), PromptInputs((3, 2, 1))
    (first,) = sequence_keys([a], n=3)
    assert sequence_keys([b, a], n=4)[1][:3] == first
    again = sequence_keys([a, b, a], n=3)
    assert again[0] == first
    everything = [key for keys in again for key in keys]
    assert len(set(everything)) == len(everything)
    assert all(0 <= key < 2**63 for key in everything)
    assert first[:2] == [6221666611620612040, 5910287043107986753], "keys are stable"


@pytest.mark.parametrize("seed", range(3))
def test_draws_taken_in_together_end_where_they_end_one_by_one(seed):
    rng = random.Random(seed)
    alphabet = ["a", "b", "\n", "é", "漢", "😀", "END", " "]
    for number in range(150):
        said = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40))).encode()
        if rng.random() < 0.3:  # bytes that are no text
            said = bytes(rng.choice(said + b"\xff\xc3\xf0") for _ in said)
        strings = (("END", "\n\n", "漢é", "ab"), ("a\ufffd",), ())[number % 3]
        ids = frozenset({10}) if rng.random() < 0.3 else frozenset()
        rules = StopRules(rng.randint(1, 60), ids, strings, decode_bytes)
        single = run(rules, said)
        several = RunningSequence(index=0, prompt=PromptInputs((1,)), key=0, rules=rules)
        at = 0
        while at < len(said) and not several.finished:
            count = rng.randint(1, 16)
            draws = list(said[at : at + count])
            before = len(several.generated)
            taken = several.extend(draws, [-1.0] * len(draws))
            assert taken == len(several.generated) - before
            at += count
        for name in ("generated", "logprobs", "text", "finish_reason"):
            assert getattr(several, name) == getattr(single, name), (seed, number, name, said)
