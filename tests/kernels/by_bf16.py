"""Make `jetrl` multiply INT8 codes by BF16 tensor cores, as on sm_103: import this before it.

As a plugin of pytest (`-p tests.kernels.by_bf16`) it does so for tests on another GPU.
"""

from __future__ import annotations

import torch
from triton.runtime import driver

is_available = torch.cuda.is_available
if is_available():
    driver.active.get_current_target()  # Triton keeps torch's function, and compiles for this GPU
torch.cuda.is_available = lambda: True
torch.cuda.get_device_capability = lambda _=None: (10, 3)
from jetrl.precision.triton import portable_int8  # noqa: E402

torch.cuda.is_available = is_available
assert portable_int8.BY_BF16.value, "jetrl was imported before"
