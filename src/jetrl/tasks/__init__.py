"""Tasks: prompts to answer and scores for the answers."""

from jetrl.tasks.base import ScoreError, Task, to_score
from jetrl.tasks.registry import get_task, read_prompts
from jetrl.tasks.scorer import ScoredText, Scorer

__all__ = ["ScoreError", "ScoredText", "Scorer", "Task", "get_task", "read_prompts", "to_score"]
