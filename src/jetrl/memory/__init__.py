"""The memory of a run: planned before anything is loaded, measured while the run goes.

Import from the module that has the name: `plan` (bytes of each thing at each moment), `fitting`
(whether a run fits, and settings that would fit), `pages` (room for KV pages), `cpu` and `device`
(what is free and what is held), `out_of_memory` (recognizing that error and trying again).
"""
