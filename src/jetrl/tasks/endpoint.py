"""The task `endpoint`: somebody's own harness plays episodes through a base URL, and rewards them.

task = "endpoint"
task.path = "rows.jsonl"
task.options.harness = "play.py:play"           # or module:function, or a class with `play`
task.options.command = ["node", "agent.js"]     # or a command per episode
task.options.harness = "reasoning_gym:chain_sum"    # or one that comes with jetrl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jetrl.errors import UserError, nearest
from jetrl.settings.section import NonNegative, PositiveFloat
from jetrl.tasks.base import HeldOutShare, ScoreError, Task, to_score
from jetrl.tasks.harness.process import HarnessProcess, HarnessSpec
from jetrl.tasks.rows import Row, check_path, read_rows, splits_of
from jetrl.tasks.splits import content_key, held_out_keys
from jetrl.types import Json, Prompt, Score

BUILT_IN = ("reasoning_gym", "verifiers")
"""Harnesses that come with jetrl, as NAME:ARGUMENT; each is a file in tasks/harness."""


class Endpoint(Task):
    """Episodes of a harness, over OpenAI's API; docs/agents.md says what a harness is.

    Args:
        harness: `file.py:name` or `module:name` of a function that plays an episode and returns its
            reward, or of a class with such a method `play`; or `reasoning_gym:NAME`,
            `verifiers:NAME`.
        arguments: Keyword arguments of the function or class.
        command: In place of a harness, a command that is run for each episode.
        path: Rows, a file or folder; each episode gets one. Default: the harness's own `rows`.
        python: Interpreter that has the harness's packages. Default: the one that runs jetrl.
        model: Name of the model in the harness's requests.
        concurrency: How many episodes the harness plays at once.
        timeout_s: Maximum seconds of an episode.
        test_share: Fraction of the rows in the split `test`, if they have no splits; chosen by
            `seed`.
    """

    name = "endpoint"
    max_turns = 2  # conversations continue, as the memory plan has to know
    partial_credit = True

    def __init__(
        self,
        harness: str = "",
        arguments: Json | None = None,
        command: list[str] | None = None,
        path: str | None = None,
        python: str | None = None,
        model: str = "policy",
        concurrency: Annotated[int, Field(ge=1, le=4096)] = 64,
        timeout_s: PositiveFloat = 600.0,
        test_share: HeldOutShare = 0.1,
        seed: NonNegative = 0,
    ) -> None:
        if bool(harness) == bool(command):
            raise UserError("task endpoint: give one of task.options.harness and .command")
        target, given = _target(harness)
        self.spec = HarnessSpec(
            target=target,
            arguments={**given, **(arguments or {})},
            command=tuple(command or ()),
            python=python or sys.executable,
            slots=concurrency,
        )
        self.path, self.model, self.timeout_s = path, model, timeout_s
        self._test_share, self._seed = test_share, seed
        self._own = bool(given) and python is None  # nothing that a recipe names is run
        if path is not None:
            check_path(path)
            if own := splits_of(path):
                self.splits = tuple(own)

    @property
    def label(self) -> str:
        return self.name

    def start(self, wake: Any = lambda: None) -> HarnessProcess:
        """Return a harness process that has started; raise UserError if it does not."""
        if not self._own:
            self.spec.check_trusted()
        return HarnessProcess(self.spec, wake)

    def prompts(self, split: str) -> Iterable[Prompt]:
        """Return a prompt per row. Its text is only for people: the harness writes its own."""
        process = self.start()  # a harness that does not start is an error of the settings
        try:
            if self.path is None:
                rows = [
                    (row, f"row {n} of the harness") for n, row in enumerate(process.rows(split))
                ]
            else:
                rows = self._read(self.path, split)
        finally:
            process.close()
        prompts = [self._prompt(f"{split}-{n}", row, where) for n, (row, where) in enumerate(rows)]
        if not prompts:
            raise UserError(f"task endpoint: no rows in split {split!r}")
        return prompts

    def _read(self, path: str, split: str) -> list[tuple[Row, str]]:
        """Return the rows of a split; without splits of its own, some of a file are for testing."""
        if splits_of(path) != []:
            self.check_split(split)
        rows = [*read_rows(path, split)]
        if splits_of(path) is not None:
            return rows
        keys = [content_key(row) for row, _ in rows]
        if len(set(keys)) < 2:
            raise UserError(f"{path}: fewer than two different rows, so none can be held out")
        held_out = held_out_keys(keys, self._test_share, self._seed)
        pairs = zip(rows, keys, strict=True)
        return [row for row, key in pairs if (key in held_out) == (split == "test")]

    def _prompt(self, prompt_id: str, row: object, where: str) -> Prompt:
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: an object is needed, not {row!r:.60}")
        try:
            plain = json.loads(json.dumps(row))
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: a harness gets JSON, and {error}") from None
        return Prompt(
            id=str(row.get("id", prompt_id)),
            text=json.dumps(plain, ensure_ascii=False),
            metadata={"row": plain},
        )

    def reward(self, prompt: Prompt, result: object) -> Score:
        """Return the score of an episode; raise ScoreError if the harness gave none."""
        if result is None:
            raise ScoreError(
                f"the harness returned no reward for row {prompt.id!r}: return a number, or an "
                "object with `reward` and parts"
            )
        if isinstance(result, Mapping):
            if result.get("reward") is None:
                raise ScoreError(f"the harness returned an object without `reward`: {result!r:.80}")
            parts = {key: part for key, part in result.items() if key != "reward"}
            result = Score(result["reward"], parts)
        return to_score(result, self.name, prompt.id)

    def self_test(self) -> Sequence[tuple[Prompt, str, float | None]]:
        return ()  # rewards come from episodes


def _target(harness: str) -> tuple[str, Json]:
    """Return the target of a harness, and the arguments of one that comes with jetrl."""
    name, colon, argument = harness.partition(":")
    if name in BUILT_IN:
        return f"{Path(__file__).parent / 'harness' / f'{name}_harness.py'}:Harness", {
            "name": argument
        }
    if harness and not (colon and argument):
        known = [f"{name}:NAME" for name in BUILT_IN]
        raise UserError(
            f"task.options.harness = {harness!r}{nearest(harness, known)}: give file.py:function, "
            f"module:function, or one of {', '.join(known)}"
        )
    return harness, {}
