"""Scored completions as JSON objects, and back: the lines of `rollouts/step_NNNNNN.jsonl`.

Everything that a replay of the training step needs is there (token ids, log-probs, reward, group);
a prompt's `metadata` is not, since a task may put anything in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetrl.types import Completion, Prompt, Sample, Score, Turn


def record_of(step: int, sample: Sample) -> dict[str, Any]:
    """Return the JSON object of a sample.

    Log-probs keep their bits: JSON writes a float's shortest text that reads back equal.
    """
    prompt, completion = sample.prompt, sample.completion
    messages = None if prompt.messages is None else [dict(message) for message in prompt.messages]
    return {
        "step": step,
        "group": sample.group,
        "prompt_id": prompt.id,
        **({"task": prompt.task} if prompt.task else {}),
        "prompt": prompt.text,
        "messages": messages,
        "answer": prompt.answer,
        "completion": completion.text,
        "reward": float(sample.score.reward),
        "parts": {str(name): float(value) for name, value in sample.score.parts.items()},
        "finish_reason": completion.finish_reason,
        "failure": sample.failure,
        **({"readable": sample.readable} if sample.readable else {}),
        "prompt_token_ids": [int(token) for token in sample.prompt_token_ids],
        "token_ids": [int(token) for token in completion.token_ids],
        "logprobs": [float(value) for value in completion.logprobs],
        **({"versions": list(completion.versions)} if completion.versions else {}),
        **_turns_of(completion),
    }


def sample_of(record: dict[str, Any]) -> Sample:
    """Return the sample that `record_of` wrote, without the prompt's metadata."""
    messages = record["messages"]
    return Sample(
        prompt=Prompt(
            id=record["prompt_id"],
            text=record["prompt"],
            messages=None if messages is None else tuple(messages),
            answer=record["answer"],
            task=record.get("task", ""),
        ),
        group=record["group"],
        prompt_token_ids=tuple(record["prompt_token_ids"]),
        completion=Completion(
            token_ids=tuple(record["token_ids"]),
            logprobs=tuple(record["logprobs"]),
            finish_reason=record["finish_reason"],
            text=record["completion"],
            environment=tuple((start, end) for start, end in record.get("environment", ())),
            turns=tuple(Turn(t["completion"], t["reply"]) for t in record.get("turns", ())),
            versions=tuple(record.get("versions", ())),
        ),
        score=Score(record["reward"], record["parts"]),
        failure=record["failure"],
        readable=record.get("readable", ""),
    )


def _turns_of(completion: Completion) -> dict[str, Any]:
    """Return the turns of a completion, and the token spans that the environment wrote."""
    if not completion.turns:
        return {}
    turns = [
        {
            "completion": turn.completion,
            "reply": dict(turn.reply) if isinstance(turn.reply, Mapping) else turn.reply,
        }
        for turn in completion.turns
    ]
    return {"turns": turns, "environment": [list(span) for span in completion.environment]}


def prompt_text(record: dict[str, Any]) -> str:
    """Return the prompt for people: its text, or its messages one after another."""
    if record.get("messages"):
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" for m in record["messages"])
    return str(record.get("prompt") or "")
