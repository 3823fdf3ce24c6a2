"""The policy of a run behind an endpoint: for other clients, and for the episodes of a harness.

Requests are answered between two updates only, while a step samples or an evaluation runs, by the
thread of the training (`serve/source.py`). So each request, and each episode, is of one version of
the weights: the number of completed steps. Requests of other clients that come in between wait.

    sample(step) ─▶ answer the requests that wait ─▶ play the step's episodes ─▶ update ─▶ ...
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jetrl.distributed.world import world
from jetrl.errors import UserError
from jetrl.models.policy import Policy
from jetrl.randomness import derive_seed
from jetrl.rollout.engine import ProgressCallback, RolloutEngine
from jetrl.rollout.inputs import text_decoder
from jetrl.rollout.options import Progress
from jetrl.rollout.stopping import Decode
from jetrl.serve.episodes import Episode, EpisodeSource, Segment, segments
from jetrl.serve.source import EPISODES
from jetrl.session.sampling import EncodedPrompt
from jetrl.tasks.base import ScoreError
from jetrl.tasks.endpoint import Endpoint
from jetrl.tasks.harness.process import HarnessDied, HarnessProcess
from jetrl.types import Completion, Sample, SamplingParams, Score

logger = logging.getLogger(__name__)

KEY_VARIABLE = "JETRL_API_KEY"
_GRACE_S = 30.0  # beyond an episode's own limit, before the process counts as hung
_MOST_REQUESTS = 1024  # completions that run or wait at once
_MOST_DEATHS = 3  # of the harness process in a step
_SHOWN_S = 0.5


@dataclass(eq=False)
class _Played:
    """An episode of a step: sample `number` of the prompt `group`."""

    group: int
    number: int
    prompt: EncodedPrompt
    session: str
    episode: Episode
    seed: int
    deadline: float = 0.0
    result: Any = None
    failure: str = ""


@dataclass(frozen=True)
class EpisodeSamples:
    """The own samples of a step's episodes, in the place of a `Scoring`."""

    own: Sequence[Sample]

    def own_samples(self, completions: Sequence[Completion]) -> list[Sample]:
        """Return the own samples, which have the harness's rewards."""
        return list(self.own)

    def gathered(self, own_samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples of all processes, in the order of their prompts."""
        everyone = itertools.chain(*world().gather("samples of the step", list(own_samples)))
        return sorted(everyone, key=lambda sample: sample.group)


class Play(Protocol):
    """Plays `params.n` episodes for each prompt of the own share; returns their samples."""

    def __call__(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        progress: ProgressCallback | None = None,
    ) -> list[Sample]: ...


class ServedPolicy:
    """An endpoint of a run's policy, until `close`.

    Args:
        port: For other clients, at 127.0.0.1; None: only episodes are answered.
        task: Whose harness plays episodes; None without one.
    """

    def __init__(
        self, engine: RolloutEngine, policy: Policy, task: Endpoint | None, port: int | None
    ) -> None:
        from jetrl.serve.app import Limits, make_app
        from jetrl.serve.replies import Served
        from jetrl.serve.server import LOOPBACK, ServerThread, listen

        self._task, self._policy = task, policy
        self.source = EpisodeSource(engine, policy, max_choices=_MOST_REQUESTS)
        # Of several processes, the first answers other clients.
        port = port if world().is_first else None
        listening = listen(LOOPBACK[0], port or 0, f"rollout.serve_port = {port}")
        self.url = f"http://{LOOPBACK[0]}:{listening.getsockname()[1]}"
        key = secrets.token_hex(16) if port is None else os.environ.get(KEY_VARIABLE, "")
        name = "policy" if task is None else task.model
        served = Served(name, policy.tokenizer, f"{name}-{policy.plan.name}")
        app = make_app(self.source, served, Limits(key, hosts=LOOPBACK[:2]), episodes=True)
        self._server = ServerThread(app, listening)
        self._harness: HarnessProcess | None = None

    def close(self) -> None:
        """End the harness and the server; requests that wait are answered with 503."""
        # First the source, whose waiting requests the server then answers.
        self.source.close()
        self._server.close()
        self.end_harness()

    def answer_held(self, version: int) -> None:
        """Answer the requests that wait, with the weights after `version` steps."""
        if not self.source.num_held:
            return
        # Those that come in the meantime wait for the next time, so that the training goes on.
        self.source.version = version
        first = iter([True])
        self.source.answer(lambda: next(first, False))

    def player(self, version: int) -> Play:
        """Return the function that plays episodes with the weights after `version` steps.

        An episode has a sample per segment, each with its reward. One that fails has no reward.
        Requests of other clients are answered next to them.
        """
        task, read = self._task, text_decoder(self._policy)
        assert task is not None, "no harness"
        assert read is not None, "no tokenizer"  # checked when the run is opened

        def play(
            prompts: Sequence[EncodedPrompt],
            params: SamplingParams,
            progress: ProgressCallback | None = None,
        ) -> list[Sample]:
            episodes = _episodes(prompts, params)
            self.source.version = version
            step = _Plays(self, task, episodes, progress)
            # This thread steps the engine; the harness and the server have threads of their own.
            try:
                self.source.answer(step.busy)
            finally:
                step.close()
            return [sample for played in episodes for sample in _samples(task, played, read)]

        return play

    def harness(self) -> HarnessProcess:
        """Return the harness process, started if it does not run."""
        if self._harness is None:
            assert self._task is not None, "no harness"
            self._harness = self._task.start(self.source.wake)
        return self._harness

    def end_harness(self) -> None:
        if self._harness is not None:
            self._harness.close()
            self._harness = None


def _episodes(prompts: Sequence[EncodedPrompt], params: SamplingParams) -> list[_Played]:
    """Return the episodes of the own share of prompts.

    Their random numbers are those of a row and a sample, whatever else the step has.
    """
    # A row may occur twice in a step.
    seen: Counter[str] = Counter()
    keys = []
    for encoded in prompts:
        keys.append([encoded.prompt.task, encoded.prompt.id, seen[encoded.prompt.id]])
        seen[encoded.prompt.id] += 1
    return [
        _Played(
            group=group,
            number=number,
            prompt=prompts[group],
            session=EPISODES + secrets.token_hex(16),
            episode=Episode(json.dumps([*keys[group], number]), params),
            seed=derive_seed(params.seed, json.dumps(keys[group])) % 2**31,
        )
        for group in sorted(world().share(list(range(len(prompts)))))
        for number in range(params.n)
    ]


class _Plays:
    """The episodes of a step: as many run as the harness has slots, and the others wait."""

    def __init__(
        self,
        served: ServedPolicy,
        task: Endpoint,
        episodes: Sequence[_Played],
        progress: ProgressCallback | None,
    ) -> None:
        self._served, self._task, self._episodes = served, task, episodes
        self._progress, self._began = progress, time.monotonic()
        self._shown = 0.0
        self._waiting = deque(range(len(episodes)))
        self._running: dict[int, _Played] = {}
        self._deaths = 0

    def busy(self) -> bool:
        """Take what the harness has answered, and begin episodes; return whether any is left."""
        try:
            # Take all answers first: each makes room for an episode that waits.
            while self._running and (line := self._served.harness().answer()) is not None:
                self._end(line.get("id"), line.get("result"), str(line.get("failure") or ""))
            # The process ends its own episodes in time, unless all of it hangs.
            now = time.monotonic()
            if any(played.deadline < now for played in self._running.values()):
                raise HarnessDied("the harness process does not answer")
            while self._waiting and len(self._running) < self._task.spec.slots:
                self._begin(self._waiting[0])
                self._waiting.popleft()
        except (HarnessDied, UserError) as error:  # a UserError: it does not start again
            self._bury(str(error), for_good=isinstance(error, UserError))
        if self._progress is not None and time.monotonic() - self._shown > _SHOWN_S:
            self._shown = time.monotonic()
            self._progress(self._state())
        return bool(self._waiting or self._running)

    def close(self) -> None:
        """Forget episodes that still run, if the step is given up."""
        if self._running:
            self._bury("given up", for_good=True)

    def _begin(self, number: int) -> None:
        played, served = self._episodes[number], self._served
        # A process that has died is replaced here.
        harness = served.harness()
        served.source.open_episode(played.session, played.episode)
        played.deadline = time.monotonic() + self._task.timeout_s + _GRACE_S
        self._running[number] = played
        # Its own path tells the calls of an episode apart, whatever headers a harness sends.
        words = {
            "row": played.prompt.prompt.metadata["row"],
            "base_url": f"{served.url}{played.session}/v1",
            "api_key": "none",
            "model": self._task.model,
            "seed": played.seed,
            "sample": played.number,
        }
        harness.play(number, words, self._task.timeout_s)

    def _end(self, number: object, result: object, failure: str) -> None:
        played = self._running.pop(number, None) if isinstance(number, int) else None
        # Without one, the answer is of a step that was given up.
        if played is not None:
            self._served.source.close_episode(played.session)
            played.result, played.failure = result, failure

    def _bury(self, failure: str, for_good: bool) -> None:
        """End the harness process, and the episodes that it played; the others get a new one."""
        logger.warning("%s; %d episodes fail", failure, len(self._running))
        self._served.end_harness()
        # Their tokens are kept; those of other episodes are not touched.
        for number in list(self._running):
            self._end(number, None, failure)
        # A harness that dies again and again would take hours to say so.
        self._deaths += 1
        if for_good or self._deaths == _MOST_DEATHS:
            for number in self._waiting:
                self._episodes[number].failure = failure
            self._waiting.clear()

    def _state(self) -> Progress:
        # The server's thread adds calls meanwhile.
        calls = itertools.chain.from_iterable(played.episode.calls for played in self._episodes)
        tokens = sum(len(call.token_ids) for call in list(calls))
        seconds = time.monotonic() - self._began
        return Progress(
            sequences_done=len(self._episodes) - len(self._waiting) - len(self._running),
            sequences_total=len(self._episodes),
            tokens=tokens,
            tokens_per_s=tokens / max(seconds, 1e-9),
            pages_in_use=self._served.source.engine.pages_in_use,
            pages_total=max(1, self._served.source.engine.num_pages),  # no call: none
            seconds=seconds,
            eta_s=None,
        )


def _samples(task: Endpoint, played: _Played, read: Decode) -> list[Sample]:
    """Return an episode's samples, one for each segment; without tokens, one that is a failure."""
    prompt, failure, score = played.prompt, played.failure, Score(None)
    # What was drawn is kept and recorded, also of an episode that failed.
    found = segments(played.episode.calls, read)
    # A failure is the harness's, not the policy's: it has no reward, and not a low one.
    if not failure:
        try:
            score = task.reward(prompt.prompt, played.result)
        except ScoreError as error:
            failure = str(error)
    if not (found or failure):
        failure = "the harness asked the policy for nothing: is its base_url right?"
        # Of a request that is broken off no token is kept.
        if played.episode.num_broken:
            failure = "the harness left each of its requests before the answer had ended"
        score = Score(None)
    # A group keeps its number of episodes: one without tokens has a sample that is not trained on.
    found = found or [Segment(prompt.inputs, Completion((), (), "stop"))]
    return [
        Sample(
            prompt=prompt.prompt,
            group=played.group,
            inputs=segment.inputs,
            completion=segment.completion,
            score=score,
            failure=failure,
            continues=number > 0,
        )
        for number, segment in enumerate(found)
    ]
