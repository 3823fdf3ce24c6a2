"""Kernel compilation in child processes while a model's weights are loaded.

Triton and DeepGEMM compile a kernel on first launch, one after another. Each child process started
by `compiled_ahead` launches a subset of the run's kernels, with a policy of the same widths but few
layers, a small vocabulary and random weights. The run then finds the results in the libraries' disk
caches and compiles anything missing itself, so children may fail.

A file in Triton's cache, named by a hash of everything that determines the kernels, records that
this was done. It is also a lock: one process per machine starts children, others wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

import torch

from jetrl.distributed.world import world
from jetrl.memory.plan import adapter_bytes, quantized_bytes, trained_parameters
from jetrl.models.adapter import Adapter, LoRA
from jetrl.models.families import ModelConfig, parameter_shapes
from jetrl.models.packed import ForwardInputs
from jetrl.models.policy import Policy
from jetrl.models.source import ModelSource
from jetrl.precision import PrecisionPlan
from jetrl.precision.backend import backend_for, has_kernels, select_backend
from jetrl.precision.linear import Linear
from jetrl.rollout.engine import RolloutEngine
from jetrl.runs.console import announced_if_slow
from jetrl.settings.model_sections import verified_drafts
from jetrl.settings.sections import RolloutSettings
from jetrl.types import SamplingParams

logger = logging.getLogger(__name__)

_LIMIT_S = 120.0  # compiling all kernels of a run takes less, on one core
_MOST_CHILDREN = 8
_CHILD_BYTES = 2**30  # CUDA context, KV pages and activations of a few layers
_VOCABULARY = 8192
_END_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1000, 2048, 4096)
_LENGTHS = (1, 5, 64, 300, 1200)  # lengths of prompts and of trained sequences
_WAITING = (
    "waiting for other processes to compile kernels in parallel; later runs of this model find "
    "them in the caches of Triton and DeepGEMM"
)


@dataclass(frozen=True)
class Work:
    """Everything about a run that determines which kernels are compiled."""

    config: ModelConfig
    plan: PrecisionPlan
    lora: LoRA | None
    max_batch_size: int = 256
    speculation: bool = False
    backend: str = "auto"


@contextlib.contextmanager
def compiled_ahead(
    source: ModelSource,
    plan: PrecisionPlan,
    device: str | torch.device,
    rollout: RolloutSettings | None = None,
) -> Iterator[None]:
    """Compile a run's kernels in the background during the block; wait for them at its end.

    Does nothing on a CPU, if already done, or if the GPU has no memory left for a child. Without
    rollout settings, drafts are off and batches have the default size.
    """
    device = torch.device(device)
    there = device.type == "cuda" and torch.cuda.is_available()
    if not there or not has_kernels(device) or importlib.util.find_spec("triton") is None:
        yield
        return
    config, lora = source.config, None
    if source.adapter is not None:
        config, lora = source.adapter.shape(config), source.adapter.lora
    work = Work(config, plan, lora, backend=backend_for(device).name)
    if rollout is not None:  # decode kernels depend on the batch size and on drafts
        exact, asked = plan.exact, rollout.speculation
        drafts = verified_drafts(asked, exact, device.type, rollout.oversample)
        work = replace(work, max_batch_size=rollout.max_batch_size, speculation=drafts != "off")
    # Children share the GPU with the weights being loaded.
    index = torch.cuda.current_device() if device.index is None else device.index
    free, _ = torch.cuda.mem_get_info(index)
    with _compiled(work, f"cuda:{index}", affordable(work, free, world().size)):
        yield


def affordable(work: Work, free: int, gpus: int) -> int:
    """Return how many children fit in the free GPU memory next to the run's weights."""
    config, plan, lora = work.config, work.plan, work.lora
    weights = 4 * trained_parameters(config, gpus, lora)
    weights += quantized_bytes(config, plan) + adapter_bytes(config, plan, lora)
    # A matrix being loaded is on the GPU twice: as stored (16 bits) and in FP32.
    read = 6 * max(map(math.prod, parameter_shapes(config).values()))
    cores = len(os.sched_getaffinity(0))
    return max(0, min(_MOST_CHILDREN, cores, (free - weights - read) // child_bytes(work)))


def child_bytes(work: Work) -> int:
    """Return the GPU memory of a child: all copies of each weight, and its gradient."""
    return _CHILD_BYTES + 12 * sum(map(math.prod, parameter_shapes(_small(work).config).values()))


@contextlib.contextmanager
def _compiled(work: Work, device: str, most: int) -> Iterator[None]:
    """Compile kernels with at most N children, unless the record says that it was done."""
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        try:
            record = stack.enter_context(_record(work))
        except OSError as error:
            logger.debug("kernels are not compiled ahead: %s", error)
            yield
            return
        stack.callback(_end, children)
        first = _locked(record)
        if first and not record.seek(0, os.SEEK_END):
            children += [_started(work, device, index, most) for index in range(most)]
        yield
        # Wait for our children, or for those of the process that holds the lock.
        until = time.monotonic() + _LIMIT_S
        with announced_if_slow(_WAITING):
            while time.monotonic() < until and (
                any(child.poll() is None for child in children) or not (first or _locked(record))
            ):
                time.sleep(0.1)
        if children:
            codes = [child.poll() for child in children]
            logger.debug("kernels compiled ahead by children, which ended with %s", codes)
            with contextlib.suppress(OSError):  # disk full: the next run compiles again
                record.write(f"{codes}\n")
                record.flush()


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        child.kill()
        child.wait()


def _record(work: Work) -> IO[str]:
    """Open the record file, which is not empty once a run's kernels were compiled."""
    import triton

    settings = sorted((k, v) for k, v in os.environ.items() if k.startswith(("TRITON_", "DG_")))
    # Other sources, versions or settings may need other kernels.
    digest = hashlib.sha256(repr((work, triton.__version__, torch.__version__, settings)).encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return open(folder / f"jetrl-{digest.hexdigest()[:32]}", "a+", encoding="utf-8")


def _locked(record: IO[str]) -> bool:
    """Return True if no other process is compiling; also True on file systems without locks."""
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _started(work: Work, device: str, index: int, count: int) -> subprocess.Popen[bytes]:
    """Start one of N children."""
    # A child is not a rank of the run; it imports from the same paths.
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    library = ctypes.CDLL(None)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "jetrl.session.compiling"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment,
        start_new_session=True,  # so that Ctrl-C reaches only the run
        preexec_fn=lambda: library.prctl(_END_WITH_PARENT, signal.SIGKILL),
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(pickle.dumps((work, device, index, count)))
    return child


def _child() -> None:
    """Launch this child's share of the run's kernels."""
    work, device, index, count = pickle.load(sys.stdin.buffer)
    os.nice(5)
    torch.set_num_threads(1)
    select_backend(work.backend, defined=work.plan.defined)
    if device != "cpu":
        torch.cuda.set_device(device)
        # Limit the child's memory, so that it fails instead of the run.
        share = child_bytes(work) / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    policy = small_policy(work, device)
    failed = 0
    for launch in launches(policy, work)[index::count]:
        try:
            launch()
        except Exception as error:  # the run hits the same error and reports it
            failed += not isinstance(error, torch.OutOfMemoryError)
    sys.exit(min(failed, 1))


def _small(work: Work) -> Work:
    """Return the work with few layers (one per kind) and a small vocabulary."""
    config, plan, count = work.config, work.plan, work.config.num_layers
    kinds = [tuple(plan.linear_formats(layer, count).items()) for layer in range(count)]
    needed = 2 + sum(a != b for a, b in itertools.pairwise(kinds))
    needed = min(count, max(needed, config.layers_of_all_kinds))
    vocabulary = min(config.vocab_size, _VOCABULARY + config.vocab_size % 128)
    small = replace(config.first_layers(needed), vocab_size=vocabulary, head="lm")
    return replace(work, config=small)


def small_policy(work: Work, device: str) -> Policy:
    """Return a policy with the widths of a run's model and random weights."""
    config = _small(work).config
    shapes = parameter_shapes(config)
    weights = {name: 0.02 * torch.randn(shape, device=device) for name, shape in shapes.items()}
    adapter = None if work.lora is None else Adapter.new(config, work.lora, 0)
    return Policy(ModelSource.from_tensors(config, weights, adapter=adapter), work.plan, device)


def launches(policy: Policy, work: Work) -> list[Callable[[], object]]:
    """Return a run's kernel launches in groups that share few kernels, longest first."""

    def sample(batch: int) -> None:
        room = policy.config.max_position_embeddings - 8
        prompts = [[1] * length for length in _LENGTHS if length < room]
        prompts += [[1]] * (batch - len(prompts))
        drafts = "auto" if work.speculation else "off"
        engine = RolloutEngine(policy, batch, num_pages=512, speculation=drafts)
        engine.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))

    def update() -> None:
        lengths = [min(n + 1, policy.config.max_position_embeddings) for n in _LENGTHS]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        for recomputed in (False, True):
            with torch.enable_grad():
                tokens = torch.zeros(int(ends[-1]), dtype=torch.int64)
                inputs = ForwardInputs.packed(tokens, ends)
                targets = torch.arange(int(ends[-2]) + 1, int(ends[-1]))
                policy.train_logprobs(inputs, ends, targets, 1.0, recomputed)[0].sum().backward()
        policy.requantize()

    def linears(rows: int) -> None:
        with torch.no_grad():
            for linear in policy.decoder.layers[: policy.config.layers_of_all_kinds].modules():
                if isinstance(linear, Linear):
                    x = torch.ones(rows, linear.weight.shape[1], device=policy.device).bfloat16()
                    linear(x, "train")
                    linear(x, "rollout")

    batches = sorted({min(64, work.max_batch_size), work.max_batch_size})
    samplings = [lambda batch=batch: sample(batch) for batch in batches]
    products = [lambda rows=rows: linears(rows) for rows in _ROWS]
    return [update, *samplings, *products]


if __name__ == "__main__":
    _child()
