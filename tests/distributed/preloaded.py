"""The imports of a rank in a test, made once in the server that ranks are forked from."""

import torch
import torch._dynamo  # which torch's optimizers import
import torch.distributed
import torch.distributed.launcher.api  # noqa: F401
import transformers  # noqa: F401

import jetrl.session.session  # noqa: F401
