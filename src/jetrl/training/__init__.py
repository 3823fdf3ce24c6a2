"""Training: samples in, updated master weights and metrics out.

advantages, packing and mismatch need numpy only; objectives has pure functions. trainer and sft
make training steps of updates (`trainer.Update`, optimizer), extras has the critic and what else is
rare. checkpoint keeps everything that a run needs to continue, written so that a crash cannot spoil
it. Nothing is imported here, so that the modules without torch import without it.
"""
