"""Scoring in worker processes that can be killed, whatever a task's score does to them."""
