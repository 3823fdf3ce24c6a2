"""One torch thread: tiny tensors are slower with two, and test workers share the cores."""

import torch

torch.set_num_threads(1)
