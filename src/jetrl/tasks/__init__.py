"""Tasks: prompts to answer and scores for the answers."""

from jetrl.tasks.base import ScoreError, Task, to_score
from jetrl.tasks.registry import build_task, get_task, read_prompts
from jetrl.tasks.sandbox.scorer import ScoredText, Scorer, StepAnswer

__all__ = ["ScoreError", "ScoredText", "Scorer", "StepAnswer", "Task", "build_task", "get_task"]
__all__ += ["read_prompts", "to_score"]
