"""Sampling from a policy; imports nothing, so that the scheduler stays usable without torch."""
