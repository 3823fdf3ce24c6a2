"""Training: scored samples in, updated master weights and metrics out.

`trainer` and `sft` run training steps made of optimizer updates (`update`); `extras` holds the
critic and other optional parts; `checkpoint` saves everything needed to resume. `advantages`
and `packing` do not need torch, so this package imports nothing.
"""
