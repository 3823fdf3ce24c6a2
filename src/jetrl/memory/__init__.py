"""What a run holds in memory: planned before anything is loaded, measured while it runs.

Import the module that has the name: `plan` (bytes of each thing at each moment), `fitting` (whether
a run fits, and what would make it fit), `pages` (what KV pages may take), `cpu` and `device` (what
there is and what is held), `out_of_memory` (telling that error from others, and trying again).
"""
