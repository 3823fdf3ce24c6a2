"""Kernels compiled side by side when a model is opened, ahead of the launches that need them.

Triton compiles a kernel where it is first launched, one after the other. While the weights are
read, `compiled_ahead` lets a copy of the process go through the launches of the model's run without
a GPU (`launches`, over the tensors of `stand_in_hopper`), and has what they need compiled by as
many processes as there are cores (`worker`), into Triton's own cache on disk. DeepGEMM compiles as
Triton does. Another copy lists the sizes of its products (`products`); a few processes compute them
on the GPU (`products_worker`), and so fill DeepGEMM's cache. The launches then find their kernels
in the caches. Nothing else changes: a kernel that is not there is compiled where it is launched, as
ever.
"""

from jetrl.compiling.ahead import compiled_ahead

__all__ = ["compiled_ahead"]
