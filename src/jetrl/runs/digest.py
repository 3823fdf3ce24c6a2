r"""The digest of a run: one SHA-256 per step over everything that two equal runs must share.

Two runs have the same digest after a step if every step so far had the same bits: prompts, sampled
tokens, log-probs, rewards, losses, gradient norms, and weights. It has no times, speeds, memory,
paths, settings, devices or numbers of processes, so runs on different machines can be compared.
It guards against differences by accident, not against forgery.

A step of reinforcement learning ("rl") or a supervised update ("sft") continues the chain:

    digest before the first step = SHA-256("jetrl digest 1\n")
    digest of a step = SHA-256("DIGEST\nPHASE STEP\n" and "FIELD VALUE\n" for each of its fields)

DIGEST is the one before it in 64 hex digits, and all text is UTF-8. VALUE is the first 16 hex
digits of the SHA-256 of these bytes (numbers are little-endian):

    prompts      per sample, in the order of training: the number of tokens, their ids; int32
    tokens       the same for the completion, including an environment's tokens
    logprobs     per sample: the number of tokens (int32), their log-probs (float32)
    rewards      per sample: float64; 0x7ff8000000000000 if no reward function judged it
    losses       "NAME VALUE\n" per metric NAME = PART/loss, sorted by name, with VALUE as text in
                 hexadecimal (C's %a, Python's float.hex); not of the draft head, which changes no
                 bits of a run
    grad_norms   the same for PART/grad_norm
    weights      "NAME SHAPE CHECKSUM\n" per float32 master weight after the step, sorted by name:
                 SHAPE as 128x64, CHECKSUM as 16 hex digits (`distributed.checksum`). Weights of a
                 second trained model, such as a critic, follow under "1/NAME"

The fields come in this order. Supervised updates have the last three. Samples are those that the
step trained on: the lines of rollouts/step_NNNNNN.jsonl. A step's line of metrics.jsonl has it:

    "digest": {"run": DIGEST, "tokens": VALUE, ...}

and `digest/run`, its first 24 bits as a number for trackers. Evaluations are not part of it.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jetrl.errors import UserError
from jetrl.runs.storage import Record
from jetrl.types import Metrics, Sample

Digest = Mapping[str, str]
"""The chain's digest as "run", and the step's fields by name."""
Line = tuple[str, int]
"""Phase and step of a line of metrics.jsonl."""

START: Digest = {"run": hashlib.sha256(b"jetrl digest 1\n").hexdigest()}
"""The digest before the first step; it has no fields."""

_FIELD_DIGITS = 16
_METRIC_BITS = 24  # float32, which some trackers store, holds them exactly
_NO_REWARD = b"\0\0\0\0\0\0\xf8\x7f"
_ORDER = ("sft", "rl")  # phases of a run


def fields_of(
    samples: Sequence[Sample], metrics: Metrics, weights: Iterable[str]
) -> dict[str, str]:
    """Return the fields of a step; without samples, those of a supervised update.

    `weights` are the lines "NAME SHAPE CHECKSUM", sorted by name.
    """
    fields: dict[str, str] = {}
    if samples:
        completions = [sample.completion for sample in samples]
        fields = {
            "prompts": _value(_counted("i", sample.prompt_token_ids) for sample in samples),
            "tokens": _value(_counted("i", completion.token_ids) for completion in completions),
            "logprobs": _value(_counted("f", completion.logprobs) for completion in completions),
            "rewards": _value(_reward(sample.score.reward) for sample in samples),
        }
    return fields | {
        "losses": _value(_metrics_named("loss", metrics)),
        "grad_norms": _value(_metrics_named("grad_norm", metrics)),
        "weights": _value(f"{line}\n".encode() for line in weights),
    }


def next_digest(before: Digest, line: Line, fields: Mapping[str, str]) -> dict[str, str]:
    """Return the digest of a step, given that of the step before it."""
    text = f"{before['run']}\n{line[0]} {line[1]}\n"
    text += "".join(f"{name} {value}\n" for name, value in fields.items())
    return {"run": hashlib.sha256(text.encode()).hexdigest(), **fields}


def as_metric(digest: Digest) -> int:
    """Return the metric `digest/run`: the first 24 bits of a digest."""
    return int(digest["run"], 16) >> (256 - _METRIC_BITS)


def last_digest(records: Iterable[Record]) -> str:
    """Return a run's digest after the last of its lines; "" if it has none."""
    lines = digested_lines(records)
    return lines[max(lines, key=_position)].get("run", "") if lines else ""


def digested_lines(records: Iterable[Record]) -> dict[Line, Digest]:
    """Return the digest of every step by line; {} for a step without one.

    The evaluation before the first step (step 0) is not a step.
    """
    lines = {(record.get("phase", "rl"), int(record["step"])): record for record in records}
    return {line: record.get("digest") or {} for line, record in lines.items() if line != ("rl", 0)}


def check_chain(lines: Mapping[Line, Digest], where: str) -> None:
    """Raise UserError if a step's digest does not follow from the one before it and its fields."""
    before, last = START, None
    for line in sorted(lines, key=_position):
        digest = lines[line]
        fields = {name: value for name, value in digest.items() if name != "run"}
        if before and digest and next_digest(before, line, fields)["run"] != digest["run"]:
            since = "the start of a run" if last is None else f"{words_of(last)} before it"
            raise UserError(
                f"{where}: the digest of {words_of(line)} does not follow from {since} and its own "
                "fields: the file was changed, or has lost lines"
            )
        before, last = digest, line


class DigestMatch(NamedTuple):
    """Comparison of a run with the first one by their digests, up to the first difference.

    Attributes:
        same: True if the run has all steps of the first one, with the same digests; None if one of
            the two has no digest in a step, and all steps before it are the same.
        at: The first step with a difference or without a digest; else the last step of the first.
        fields: The fields that differ in this step, in the order of the definition.
        lacking: The runs ("first", "other") that lack this step, or its digest.
    """

    same: bool | None
    at: Line | None
    fields: tuple[str, ...] = ()
    lacking: tuple[str, ...] = ()


def match_digests(first: Mapping[Line, Digest], other: Mapping[Line, Digest]) -> DigestMatch:
    """Compare the steps of a run with those of the first one, which may end earlier."""
    last = max(first, key=_position, default=None)
    if last is None:
        return DigestMatch(None, None, lacking=("first",))
    for line in sorted({*first, *other}, key=_position):
        if _position(line) > _position(last):
            break
        both = {"first": first.get(line), "other": other.get(line)}
        lacking = tuple(name for name, digest in both.items() if not digest)
        if lacking:
            absent = None in both.values()
            return DigestMatch(False if absent else None, line, lacking=lacking)
        if first[line] != other[line]:
            names = [name for name in {**first[line], **other[line]} if name != "run"]
            fields = (name for name in names if first[line].get(name) != other[line].get(name))
            return DigestMatch(False, line, tuple(fields))
    return DigestMatch(True, last)


def words_of(line: Line) -> str:
    return f"{'supervised ' if line[0] == 'sft' else ''}step {line[1]}"


def _position(line: Line) -> tuple[int, int]:
    return _ORDER.index(line[0]), line[1]


def _value(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:_FIELD_DIGITS]


def _counted(kind: str, values: Sequence[float]) -> bytes:
    return _little(array("i", [len(values)])) + _little(array(kind, values))


def _little(numbers: array[int] | array[float]) -> bytes:
    """Return the bytes of 32-bit numbers, little-endian on every machine."""
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _reward(reward: float | None) -> bytes:
    return _NO_REWARD if reward is None or math.isnan(reward) else struct.pack("<d", reward)


def _metrics_named(last: str, metrics: Metrics) -> Iterable[bytes]:
    for name in sorted(metrics):
        part, _, rest = name.partition("/")
        if rest == last and part != "draft_head":
            yield f"{name} {float(metrics[name]).hex()}\n".encode()
