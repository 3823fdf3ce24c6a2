"""The schemas of a checkpoint's JSON files, manifest.json and state.json."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, model_validator

from jetrl.files import Count, Step, Stored

MOST_STATE_BYTES = 2**30  # of state.json: partial rollouts keep a token in some 40 bytes

_PLAIN = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
FileName = Annotated[str, Field(pattern=rf"^({_PLAIN}/)?{_PLAIN}$", max_length=255)]
"""The name of a file beside the manifest, or in a folder beside it, none of them hidden."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Fingerprint(Stored):
    """The fingerprint of a file (`checkpoint_files.fingerprint`).

    Attributes:
        sha256: The SHA-256 of the contents.
        sha256_of_gib_pieces: The SHA-256 of those of the pieces of 1 GiB, of a larger file.
    """

    bytes: Count
    sha256: Digest | None = None
    sha256_of_gib_pieces: Digest | None = None

    @model_validator(mode="after")
    def _check_digest(self) -> Self:
        if self.sha256 is None and self.sha256_of_gib_pieces is None:
            raise ValueError("has no SHA-256")
        return self


class State(Stored):
    """The contents of state.json.

    Attributes:
        score: The score of the step; None without one.
        extra: JSON values of the run (`session.stored_states`).
        alphabet: The characters of a tokenizer of single characters; None for other tokenizers, and
            of checkpoints that were written before it was stored.
    """

    format: Count
    step: Step
    num_updates: Count
    plan: dict[str, Any]
    model: dict[str, Any]
    score: float | None
    extra: dict[str, Any]
    alphabet: str | None = None
    ranks: Annotated[int, Field(ge=1, lt=2**31)] = 1


MANIFEST = TypeAdapter(dict[FileName, Fingerprint])
STATE = TypeAdapter(State)
