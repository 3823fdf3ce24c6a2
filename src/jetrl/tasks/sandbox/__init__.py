"""Scoring in worker processes that can be killed."""
