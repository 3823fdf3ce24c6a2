"""Somebody's own harness: the process that runs its episodes, and those that come with jetrl."""
