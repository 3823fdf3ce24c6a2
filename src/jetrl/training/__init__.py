"""Training: samples in, updated master weights and metrics out.

trainer and sft make training steps of optimizer updates (update); extras has the critic and other
optional parts; checkpoint keeps everything that a run needs to continue. advantages, packing and
mismatch import without torch, so nothing is imported here.
"""
