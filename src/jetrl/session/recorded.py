"""Recorded samples: rollouts of another run (data.rollouts), and replay (data.replay_steps).

Both read rollouts/step_NNNNNN.jsonl, whose log-probs have the sampler's bits, so ratios are exact
however old a token is. A file is checked against the digest of its step (runs/digest.py).

`RecordedRollouts` takes the place of sampling. As long as this run has the digest of the recorded
one, its weights are those that drew the tokens, and every log-prob is compared with the trainer's.
From the first step that differs, the tokens count as another policy's: they get version 0 and are
not compared.

`ReplayBuffer` holds the last K steps. The run directory is its storage: a resumed run reads them
back, so a checkpoint has nothing of it.

Of images a file has only hashes, so prompts with images are taken from the task (`_KnownPrompts`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.chat import decode
from jetrl.models.policy import Policy
from jetrl.runs import schemas
from jetrl.runs.digest import Digest, Line, digested_lines, fields_of
from jetrl.runs.directory import RunDirectory, path_of_run
from jetrl.runs.storage import read_jsonl
from jetrl.session.sampling import EncodedPrompt, groups_of, numbered
from jetrl.settings.loading import Settings
from jetrl.settings.sections import RolloutSettings
from jetrl.training.micro_batches import trained_filter
from jetrl.training.mismatch import different
from jetrl.types import Completion, Prompt, Sample

_SAMPLED = ("prompts", "tokens", "logprobs", "rewards")  # fields of a digest
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "truncated_logprobs")
ANOTHER_POLICY = 0
"""Version of tokens that no policy of this run drew; steps count from 1."""


class _KnownPrompts:
    """The prompts of a run's task, among which those of recorded samples are found again."""

    def __init__(self, prompts: Sequence[EncodedPrompt]) -> None:
        # Ids may repeat, so prompts are then told apart by their tokens and images.
        self._by_name: dict[tuple[str, str], list[EncodedPrompt]] = {}
        for encoded in prompts:
            key = encoded.prompt.task, encoded.prompt.id
            self._by_name.setdefault(key, []).append(encoded)

    def with_prompt(self, sample: Sample, where: str) -> Sample:
        """Return a sample with the task's own prompt of the same name, tokens and images.

        Raises UserError, with `where` in front, that names the first image or token that differs.
        """
        hashes = _hashes(sample.prompt)
        known = self._by_name.get((sample.prompt.task, sample.prompt.id), [])
        if not known:
            raise UserError(f"{where} is not a training prompt of this run's task")
        theirs = sample.inputs.token_ids
        for encoded in known:
            if encoded.inputs.token_ids == theirs and _hashes(encoded.prompt) == hashes:
                return replace(sample, prompt=encoded.prompt, inputs=encoded.inputs)
        # Images first: another image may have another number of tokens.
        for number, (had, has) in enumerate(
            itertools.zip_longest(hashes, _hashes(known[0].prompt), fillvalue="none")
        ):
            if had != has:
                raise UserError(
                    f"{where}: image number {number} was {had} (the hash of its file; "
                    f"rollouts/images shows it), and is {has} here: restore the image"
                )
        pairs = itertools.zip_longest(theirs, known[0].inputs.token_ids)
        at, (there, here) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        raise UserError(f"{where} {_ENCODED_OTHERWISE}: token {at} is {there} there, {here} here")


_ENCODED_OTHERWISE = (
    "was recorded with another tokenizer, chat template, system prompt or image processor"
)


def _place_of(run: RunDirectory, step: int, sample: Sample) -> str:
    return f"{run.rollouts_file(step)}: prompt {sample.prompt.id!r}"


def _hashes(prompt: Prompt) -> list[str]:
    return [image.digest.hex() for image in prompt.images]


def read_samples(run: RunDirectory, step: int, digest: Digest | None = None) -> list[Sample]:
    """Return the samples that a step of a run trained on, as `schemas.sample_of`.

    Raises UserError if the file is missing, damaged, or (given its digest) not of that step.
    """
    path = run.rollouts_file(step)
    if not path.is_file():
        kept = run.rollout_steps()
        has = f"it has those of {len(kept)} steps" if kept else "it has none"
        raise UserError(f"{path}: no rollouts of step {step}; {has} (rollout.keep_every)")
    # A last line that is cut off is dropped elsewhere; here it would change an update.
    records, note = read_jsonl(path, schemas.ROLLOUT_LINE)
    if note or not records:
        raise UserError(note or f"{path} is empty")
    samples = []
    for number, record in enumerate(records, start=1):
        try:
            samples.append(schemas.sample_of(record))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    # Whole lines may be missing, or changed by hand: the digest of the step tells.
    found = fields_of(samples, {}, ())
    changed = [name for name in _SAMPLED if digest and digest.get(name, found[name]) != found[name]]
    if changed:
        raise UserError(
            f"{path}: its {', '.join(changed)} are not those that step {step} trained on, by the "
            f"digest in {run.metrics_file}: the file was changed or has lost lines"
        )
    return samples


def dated(sample: Sample, version: int, known: bool = True) -> Sample:
    """Return a sample with the policy version of each token; `known` ones are kept."""
    completion = sample.completion
    versions = (known and completion.versions) or (version,) * len(completion.token_ids)
    return replace(sample, completion=replace(completion, versions=versions))


class RecordedRollouts:
    """The rollouts of the run `data.rollouts`, in place of sampling.

    `policy` may have no weights. Raises UserError if the run has not all steps, sampled from
    another distribution, or has a first step that does not fit the policy's tokenizer.
    """

    def __init__(
        self, settings: Settings, policy: Policy, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self._settings = settings
        self._key = f"data.rollouts = {settings.data.rollouts}"
        self._prompts = _KnownPrompts(prompts)
        self.run = RunDirectory.open(self._path())
        read = world().from_first
        self._lines = read("recorded digests", lambda: digested_lines(self.run.metrics()))
        read("the recorded settings", self._check_run)
        self._read(1, policy)

    def _path(self) -> Path:
        """Return the run's directory, given by its path or its name under run.dir."""
        path = Path(str(self._settings.data.rollouts))
        if not path.is_dir() and len(path.parts) == 1:
            path = Path(self._settings.run.dir) / path
        if path.resolve() == path_of_run(self._settings).resolve():
            raise UserError(f"{self._key} is this run itself: choose another run.name")
        return path

    def _check_run(self) -> None:
        """Check that the run has all steps, and log-probs of the same distribution."""
        steps, last = set(self.run.rollout_steps()), self._settings.loop.steps
        missing = next((step for step in range(1, last + 1) if step not in steps), None)
        if missing is not None:
            raise UserError(
                f"{self._key} has no rollouts of step {missing}, and loop.steps = {last}: set "
                f"loop.steps={missing - 1} (a run keeps every step if rollout.keep_every = 1)"
            )
        # Ratios compare probabilities, so both runs must mean the same by one.
        ours, theirs = self._settings.rollout, self.run.config().get("rollout", {})
        for key in _SAMPLING if ours.excludes_tokens else _SAMPLING[:-1]:
            own = getattr(ours, key)
            other = theirs.get(key, RolloutSettings.model_fields[key].default)
            if own != other:
                raise UserError(
                    f"{self._key} sampled with rollout.{key} = {other}, and this run has {own}: "
                    f"its log-probs are of another distribution; set rollout.{key}={other}"
                )

    def samples(
        self, step: int, digest: Digest | None, policy: Policy
    ) -> tuple[list[Sample], bool]:
        """Return the samples of a step, and whether this run's weights drew them.

        `digest` is this run's before the step. Raises UserError if the run has left the recorded
        one under a plan that is not exact, whose ratios would leave out what was recorded.
        """
        samples = self._read(step, policy)
        if self._is_followed(step, digest, policy, samples):
            return samples, True
        if not policy.plan.exact:
            raise UserError(
                f"{self._key}: in step {step} the weights are not those that drew its rollouts, "
                f"and ratios to another policy need an exact plan, unlike {policy.plan.name}: use "
                "precision.preset=int8, or the settings and the model of that run"
            )
        return [dated(sample, ANOTHER_POLICY, known=False) for sample in samples], False

    def _read(self, step: int, policy: Policy) -> list[Sample]:
        """Return the samples of a step, with the task's own prompts."""
        digest = self._lines.get(("rl", step))
        # Rank 0 reads: the run may be on a disk that only its machine has.
        samples = world().from_first("recorded", partial(read_samples, self.run, step, digest))
        return [
            self._checked(sample, policy, _place_of(self.run, step, sample)) for sample in samples
        ]

    def _checked(self, sample: Sample, policy: Policy, where: str) -> Sample:
        """Return a sample with its prompt as the task has it; both must have the same tokens."""
        sample = self._prompts.with_prompt(sample, where)
        # The completion: tokens of this vocabulary, with the recorded text.
        done, size = sample.completion, policy.config.vocab_size
        if not all(0 <= token < size for token in done.token_ids):
            raise UserError(f"{where}: its completion has a token beyond the model's {size}")
        longest = self._settings.rollout.max_tokens
        if len(done.token_ids) > longest and not done.turns:
            count = len(done.token_ids)
            raise UserError(
                f"{where}: a completion has {count} tokens: set rollout.max_tokens={count} or more"
            )
        if policy.tokenizer is not None and not done.turns:
            # A text ends before a stop string, its tokens do not.
            text = decode(policy.tokenizer, done.token_ids)
            if not text.startswith(done.text):
                raise UserError(
                    f"{where} {_ENCODED_OTHERWISE}: its completion reads {text!r:.80} here"
                )
        return sample

    def _is_followed(
        self, step: int, digest: Digest | None, policy: Policy, samples: Sequence[Sample]
    ) -> bool:
        """Return whether this run's weights are those that drew the samples of a step."""
        before = self._before(step)
        if before and digest and len(digest) > 1:
            return before["run"] == digest["run"]
        # Nothing was trained before: the digest does not have the model that a run starts from.
        return not policy.plan.exact or self._has_logprobs_of(policy, samples, step)

    def _before(self, step: int) -> Digest:
        """Return the recorded digest before a step; {} without one."""
        supervised: list[Line] = [line for line in self._lines if line[0] == "sft"]
        line = ("rl", step - 1) if step > 1 else max(supervised, default=("rl", 0))
        return self._lines.get(line, {})

    def _has_logprobs_of(self, policy: Policy, samples: Sequence[Sample], step: int) -> bool:
        """Return whether the first completion with tokens has the policy's log-probs, as bits."""
        for sample in samples:
            done, start = sample.completion, len(sample.inputs) - 1
            drawn = _drawn_by(done, step)
            if not drawn.any():
                continue
            whole = replace(sample.inputs, token_ids=(*sample.inputs, *done.token_ids))
            logprobs = policy.logprobs(
                [whole], self._settings.rollout.temperature, trained_filter(self._settings.rollout)
            )[0][start:]
            recorded = np.array(done.logprobs, dtype=np.float32)
            return not (different(logprobs.detach().cpu().numpy(), recorded) & drawn).any()
        return True


def _drawn_by(completion: Completion, version: int) -> np.ndarray:
    """Return a mask of the tokens that a policy version drew, bool [n]."""
    count = len(completion.token_ids)
    drawn = np.array(completion.versions or (version,) * count) == version
    for start, end in completion.environment:
        drawn[start:end] = False
    return drawn


class ReplayBuffer:
    """The samples of the last `data.replay_steps` steps, which an update trains on again."""

    def __init__(self, settings: Settings) -> None:
        self.num_steps = settings.data.replay_steps
        self._steps: deque[list[Sample]] = deque(maxlen=self.num_steps)

    def add(self, step: int, samples: Sequence[Sample]) -> None:
        """Add the samples of a step; the oldest step leaves."""
        self._steps.append([dated(sample, step) for sample in samples])

    def load(self, run: RunDirectory, step: int, prompts: Sequence[EncodedPrompt]) -> None:
        """Read back the last steps of a run that is resumed after `step`, given its prompts."""
        if not self.num_steps:
            return
        # As for another run's rollouts, a changed file would change the updates in silence.
        read, known = world().from_first, _KnownPrompts(prompts)
        lines = read("replayed digests", lambda: digested_lines(run.metrics()))
        for number in range(max(1, step - self.num_steps + 1), step + 1):
            digest = lines.get(("rl", number))
            samples = read("replay", partial(read_samples, run, number, digest))
            for i, sample in enumerate(samples):
                if sample.prompt.images:  # the task has their files, and the places of their tokens
                    samples[i] = known.with_prompt(sample, _place_of(run, number, sample))
            self.add(number, samples)

    def with_earlier(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples of a step and those of the buffer, in turn by groups.

        So each of a step's updates trains on new and old groups alike.
        """
        if not self._steps:
            return samples
        # The new step first, then from the newest to the oldest.
        groups = [groups_of(part) for part in (samples, *reversed(self._steps))]
        return numbered(
            [group for turn in itertools.zip_longest(*groups) for group in turn if group]
        )
