"""A harness for the tasksets and environments of verifiers 0.4, by id.

It runs in the harness process, under a Python that has verifiers (`task.options.python`: its openai
is another one than jetrl's tests use), so it imports nothing of jetrl. verifiers plays the episode,
with its own agents, tools and interception server, and scores it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

_KEY = "JETRL_EPISODE_KEY"


class Harness:
    """Plays tasks of an environment; the first `test_size` tasks are the split `test`.

    Args:
        size: At most so many tasks are in the split `train`.
        agent: Program that plays, an id of verifiers' harnesses.
        env: More of verifiers' environment: `id`, and tables such as `taskset`.
    """

    def __init__(
        self,
        name: str,
        size: int = 1000,
        test_size: int = 100,
        agent: str = "null",
        env: dict[str, Any] | None = None,
    ) -> None:
        own = dict(env or {})
        own["taskset"] = {"id": name, **own.get("taskset", {})}
        # Programs run on this machine, as those of other harnesses do.
        seat = {"harness": {"id": agent}, "runtime": {"type": "subprocess"}}
        own.setdefault("agent", seat)
        self._env = load_environment(resolve_env_config(own))
        self._tasks = list(itertools.islice(self._env.taskset, size + test_size))
        self._test_size = min(test_size, len(self._tasks) // 2)
        self._serving = contextlib.AsyncExitStack()
        self._lock = asyncio.Lock()
        self._serves = False

    def rows(self, split: str) -> list[dict[str, Any]]:
        first = self._test_size if split == "train" else 0
        last = len(self._tasks) if split == "train" else self._test_size
        prompts = [(i, self._tasks[i].data.prompt_text) for i in range(first, last)]
        return [{"task": i, "prompt": prompt} for i, prompt in prompts]

    async def play(self, episode: Any) -> dict[str, float]:
        async with self._lock:
            if not self._serves:
                await self._serving.enter_async_context(self._env.serving())
                self._serves = True
        os.environ[_KEY] = episode.api_key
        client = EvalClientConfig(base_url=episode.base_url, api_key_var=_KEY)
        context = ModelContext(model=episode.model, client=client)
        played = await self._env.run_episode(self._tasks[episode.row["task"]], context)
        if not played.ok:
            errors = [*played.errors, *(e for trace in played.traces for e in trace.errors)]
            raise RuntimeError("; ".join(f"{e.type}: {e.message}" for e in errors) or "not ok")
        parts = {
            name: reward.value
            for trace in played.traces
            for name, reward in trace.rewards.items()
            if reward is not None
        }
        return {"reward": sum(trace.reward for trace in played.traces), **parts}
