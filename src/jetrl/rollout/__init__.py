"""Sampling from a policy: `jetrl.rollout.engine.RolloutEngine`, and the parts it is made of.

Nothing is imported here, so that the scheduler, the pages and the sequences stay usable
without torch.
"""
