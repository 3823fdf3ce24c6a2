"""Processes of a run: shared decisions, work sharing, and sharded weights."""
